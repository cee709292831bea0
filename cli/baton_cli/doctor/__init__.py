"""
`baton doctor`: find problems of this machine or a cluster, with their solutions.

Probes and self-tests fill a `Machine` first. Checks are pure functions of it, so tests can check machines
with any problem.
"""
