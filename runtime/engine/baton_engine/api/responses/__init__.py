"""
`/v1/responses`: chat by another name, with items in place of messages and a memory.

A request is written as one for chat and checked and rendered by chat; what is here is the translation
both ways, the stream of typed events, and what is kept for later requests. In a cluster it is the router
that keeps it.
"""
