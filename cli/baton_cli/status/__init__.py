"""
`baton status`: the health of a service, its parts, and solutions for its problems.

The status of a local service comes from its router, that of a service in a cluster from its
InferenceService. Pure functions turn both into a `ServiceStatus`.
"""
