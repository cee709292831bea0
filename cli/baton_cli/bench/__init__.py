"""
`baton bench`: throughput and latency of a service, as its clients see them.

It measures any OpenAI-compatible server. Requests are generated before a load begins, and responses are
parsed after its end, so the client costs little CPU time. That cost is measured too.
"""
