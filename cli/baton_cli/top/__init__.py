"""
`baton top`: what a service does now, worker by worker, in the terminal.

A look is what the router and its workers say of themselves at one moment; what is shown are two looks, for
rates and percentiles are differences. Reading, reckoning and drawing are apart.
"""
