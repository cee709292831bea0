"""Paths of the endpoints that score pairs of texts, by the names of Cohere, Jina and vLLM."""

RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
SCORE_PATHS = ("/v1/score", "/score")
