"""
`baton bench`: how much a service serves, and how soon, measured as its clients see it.

Any OpenAI-compatible server can be measured. What is asked and when is decided before the first request; what
came back is noted with its times and read when all is over, so that the measuring itself costs little. How
much it costs is measured too.
"""
