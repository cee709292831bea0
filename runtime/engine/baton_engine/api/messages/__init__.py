"""
`/v1/messages`: chat in the format of Anthropic's Messages API.

A request is translated to a chat request, which the chat endpoint validates and renders. This package
contains the translation in both directions and the stream of typed events.
"""
