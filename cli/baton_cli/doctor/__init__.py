"""
`baton doctor`: what on this machine would keep Baton from running well, and what to do about it.

What there is to know is gathered first, into one `Machine`; what follows from it are pure functions. So every
check is tested on machines that nobody has.
"""
