"""Paths of requests to a model, which a router forwards to a worker that serves the body's `model`."""

from __future__ import annotations

from baton_api import anthropic

RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
SCORE_PATHS = ("/v1/score", "/score")
"""By the names of Cohere, Jina and vLLM."""

PROXIED_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        *anthropic.PATHS,
        *RERANK_PATHS,
        *SCORE_PATHS,
        "/v1/tokenize",
        "/v1/detokenize",
        "/generate",
        "/tokenize",
        "/detokenize",
    }
)
"""All of them, for POST."""
