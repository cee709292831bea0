"""
The routes of one worker.

    GET  /v1/models[/{id}]       served models
    POST /v1/chat/completions    chat completions
    POST /v1/completions         text completions
    POST /v1/embeddings          embeddings
    POST /v1/rerank, /v1/score   scores of pairs of texts; also under other names
    POST /v1/messages            chat in Anthropic's format; POST /v1/messages/count_tokens
    POST /v1/responses           responses, stored for later turns; GET and DELETE /v1/responses/{id}
    POST /tokenize, /detokenize  conversion between text and token ids; also under /v1
    POST /generate               completions in SGLang's format

`baton_engine.api.operations` adds the operational routes.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from baton_api import anthropic, exposure
from baton_api.errors import ModelNotFound
from baton_engine.api import completions, embeddings, operations, scoring, sglang_generate, tokens
from baton_engine.api.bodies import JsonEndpoint
from baton_engine.api.chat import endpoint
from baton_engine.api.edge import Edge
from baton_engine.api.generate import Generate
from baton_engine.api.messages import endpoint as messages
from baton_engine.api.operations import as_json, model_card
from baton_engine.api.pooling import PoolingEndpoint
from baton_engine.api.responses import endpoint as responses
from baton_engine.api.served import Served

__all__ = ["Served", "create_app"]


def generating(served: Served) -> list[Route]:
    """The routes of the endpoints that generate text, but for `/v1/responses`."""
    return [
        Route("/v1/chat/completions", Generate(served, endpoint.prepare), methods=["POST"]),
        Route("/v1/completions", Generate(served, completions.prepare), methods=["POST"]),
        Route(anthropic.MESSAGES, Generate(served, messages.prepare), methods=["POST"]),
        Route("/generate", Generate(served, sglang_generate.prepare, model_required=False), methods=["POST"]),
    ]


def create_generating(served: Served) -> ASGIApp:
    """Create the ASGI app of a frontend: `generating`, and responses whose conversation a router keeps."""
    router = Router([*generating(served), responses.route_for_routers(served)], redirect_slashes=False)
    return _at_the_edge(served, router)


def create_app(served: Served) -> ASGIApp:
    """Create the ASGI app with the API of `served`."""

    async def models(request: Request) -> Response:
        return as_json({"object": "list", "data": [model_card(served, name) for name in served.models]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in served.models:
            raise ModelNotFound(name, served.models)
        return as_json(model_card(served, name))

    tokenizing, detokenizing = JsonEndpoint(served, tokens.tokenize), JsonEndpoint(served, tokens.detokenize)
    rerank, score = PoolingEndpoint(served, scoring.rerank), PoolingEndpoint(served, scoring.score)
    router = Router(
        [
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            *generating(served),
            Route("/v1/embeddings", PoolingEndpoint(served, embeddings.prepare), methods=["POST"]),
            Route(anthropic.COUNT_TOKENS, JsonEndpoint(served, messages.count_tokens), methods=["POST"]),
            *(Route(path, rerank, methods=["POST"]) for path in scoring.RERANK_PATHS),
            *(Route(path, score, methods=["POST"]) for path in scoring.SCORE_PATHS),
            *responses.routes(served),
            Route("/tokenize", tokenizing, methods=["POST"]),
            Route("/v1/tokenize", tokenizing, methods=["POST"]),
            Route("/detokenize", detokenizing, methods=["POST"]),
            Route("/v1/detokenize", detokenizing, methods=["POST"]),
            *operations.routes(served),
        ],
        redirect_slashes=False,
    )
    return _at_the_edge(served, router)


def _at_the_edge(served: Served, router: ASGIApp) -> ASGIApp:
    allowed = exposure.allowed_origins(served.settings.allowed_origins, served.keys.required)
    return exposure.with_cors(Edge(router, served.keys, served.admin_keys), allowed)
