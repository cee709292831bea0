"""
`baton top`: live metrics of a service by worker, in the terminal.

A snapshot contains the metrics of the router and its workers at one moment. Rates and percentiles are
computed from two snapshots.
"""
