"""
`baton status`: whether a service answers, what of it is there, and what to do where something is not.

A service on this machine is asked at its router; one in a cluster is read from its InferenceService. Both
become a `ServiceStatus`, by pure functions.
"""
