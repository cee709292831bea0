"""
`/v1/responses`: chat with items instead of messages, and with stored conversations.

A request is translated to a chat request, which the chat endpoint validates and renders. This package
contains the translation in both directions, the stream of typed events, and the storage of responses. Behind
a router, the router stores responses.
"""
