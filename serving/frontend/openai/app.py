"""OpenAI's API over HTTP: the application and its routes."""

import base64
import hashlib
import re
import time
from copy import copy
from typing import TYPE_CHECKING, Any, NoReturn

import orjson
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from serving.errors import NotFound
from serving.frontend.metrics_http import scraping
from serving.frontend.openai import answers, tokens
from serving.frontend.openai.call import Answer
from serving.frontend.openai.chats import ChatEndpoint
from serving.frontend.openai.door import DOCS_PATH, OPENAPI_PATH, Door, caller_of
from serving.frontend.openai.endpoints import CompletionEndpoint
from serving.frontend.openai.responses import ResponseCall, ResponsesEndpoint
from serving.frontend.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from serving.frontend.page import shield
from serving.frontend.web import Listener
from serving.request import number_of
from serving.telemetry.version import jmoe_version

if TYPE_CHECKING:
    from serving.frontend.server import Server

FIRST_PORT = 8000  # as vLLM's
_COMPLETIONS, _CHATS, _RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
_TOKENIZE, _DETOKENIZE = "/tokenize", "/detokenize"  # as vLLM's
BODIES = {
    _COMPLETIONS: CompletionRequest,
    _CHATS: ChatRequest,
    _RESPONSES: ResponsesRequest,
    _TOKENIZE: TokenizeRequest,
    _DETOKENIZE: DetokenizeRequest,
}
"""The bodies of all POST routes, by path."""
_QUESTION = "Question: what is the capital of Ladrodro? Answer:"
_EXAMPLES = {
    _COMPLETIONS: {"prompt": _QUESTION, "max_tokens": 16, "temperature": 0},
    _CHATS: {
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": 16,
        "temperature": 0,
    },
    _RESPONSES: {"input": _QUESTION, "max_output_tokens": 16, "temperature": 0},
    _TOKENIZE: {"prompt": _QUESTION},
    _DETOKENIZE: {"tokens": [72, 105]},
}
"""Bodies that the bundled model has an answer to."""
_REF = "#/components/schemas/{model}"
_PATH_PARAMETER = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_KEY_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key, on a server that has some (`keys_file`).",
}
_KEYED: dict[int | str, Any] = {code: answers.ERRORS[code] for code in (401, 403)}
_NO_KEY = {"security": []}


class _App(FastAPI):
    """The FastAPI application. Routes read their request bodies themselves: see `call.Answer`."""

    def openapi(self) -> dict[str, Any]:
        """Builds the OpenAPI description, including keys and the schemas of request bodies.

        Anybody may read it, so it is the same on every server.
        """
        if self.openapi_schema is None:
            routes = [copy(route) for route in self.routes]
            for route in routes:
                if isinstance(route, APIRoute):
                    route.methods = {*(route.methods or ())} - {"HEAD"}  # as GET
            found = get_openapi(title=self.title, version=self.version, routes=routes)
            found["security"] = [{"key": []}, {}]  # the latter: a server without keys
            found["components"]["securitySchemes"] = {"key": _KEY_SCHEME}
            schemas = found["components"]["schemas"]
            for path, model in BODIES.items():
                schema = model.model_json_schema(ref_template=_REF)
                schemas |= schema.pop("$defs", {})
                schemas[model.__name__] = schema
                body = {
                    "schema": {"$ref": _REF.format(model=model.__name__)},
                    "example": {"model": "bundled", **_EXAMPLES[path]},
                }
                content = {"application/json": body}
                found["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
            self.openapi_schema = found
        return self.openapi_schema


class _Assets(StaticFiles):
    """Swagger UI's files, from the package that brings them."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Returns a file with the headers that protect the live page's files, too."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(shield.HEADERS)
        return response


def front_end(server: "Server") -> Listener | None:
    """Offers the API on `http_port`."""
    config = server.config
    if config.http_port < 0:
        return None
    return Listener(
        *(server, "http", make_app(server), config.host, config.http_port, config.max_connections),
        first=FIRST_PORT,
    )


def make_app(server: "Server") -> FastAPI:
    """Makes the application; each request asks `server` for its engine."""
    app = _App(
        title="jmoe",
        version="1",  # of the API: `/version` has jmoe's, for who has a key
        openapi_url=OPENAPI_PATH,
        docs_url=None,  # FastAPI's pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _leave_to_the_door},
    )
    app.add_middleware(Door, server=server)
    if server.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.config.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", "retry-after-ms", "x-should-retry"),
        )
    _add_endpoints(app, server)
    _add_facts(app, server, created=int(time.time()))
    _add_docs(app)
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")
    return app


def _add_docs(app: FastAPI) -> None:
    """Adds Swagger UI. Its links are relative, so that a proxy may serve it below another path."""
    of_page = get_swagger_ui_html(
        openapi_url=OPENAPI_PATH[1:],
        title="jmoe",
        swagger_js_url=f"{DOCS_PATH[1:]}/swagger-ui-bundle.js",
        swagger_css_url=f"{DOCS_PATH[1:]}/swagger-ui.css",
        swagger_favicon_url=f"{DOCS_PATH[1:]}/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None, "tryItOutEnabled": True},
    )
    page = bytes(of_page.body)
    (script,) = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    sha256 = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = shield.POLICY.replace("script-src 'self'", f"script-src 'self' 'sha256-{sha256}'")
    policy = policy.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
    headers = shield.HEADERS | {"content-security-policy": policy, "cache-control": "no-cache"}

    @app.get(DOCS_PATH, include_in_schema=False)
    async def docs() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    app.mount(DOCS_PATH, _Assets(packages=[("fastapi_swagger", "resources")]))


def _add_endpoints(app: FastAPI, server: "Server") -> None:
    events, errors = {"content": {"text/event-stream": {}}}, answers.ERRORS
    parsers = server.config.tool_call_parser, server.config.reasoning_parser
    chats, items = ChatEndpoint(*parsers), ResponsesEndpoint(*parsers)

    @app.post(_COMPLETIONS, responses={200: {"model": answers.Completion, **events}, **errors})
    async def completions(request: Request) -> Response:
        """Goes on from one prompt or several."""
        return Answer(server, CompletionEndpoint())

    @app.post(_CHATS, responses={200: {"model": answers.ChatCompletion, **events}, **errors})
    async def chat_completions(request: Request) -> Response:
        """Answers a chat, whose text the model's chat template makes."""
        return Answer(server, chats)

    @app.post(_RESPONSES, responses={200: {"model": answers.Response, **events}, **errors})
    async def responses(request: Request) -> Response:
        """Answers as chats do, in items. Nothing is stored."""
        return Answer(server, items, ResponseCall)

    @app.post(_TOKENIZE, responses={200: {"model": answers.Tokenized}, **errors})
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a chat as the model's chat template writes it."""
        return await tokens.answer(server, request, TokenizeRequest, tokens.tokenize)

    @app.post(_DETOKENIZE, responses={200: {"model": answers.Detokenized}, **errors})
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await tokens.answer(server, request, DetokenizeRequest, tokens.detokenize)


def _add_facts(app: FastAPI, server: "Server", created: int) -> None:
    def model(name: str) -> dict[str, Any]:
        settings = server.config.engine if server.engine is None else server.engine.config
        told = {"id": name, "object": "model", "created": created, "owned_by": "jmoe"}
        return {**told, "max_model_len": settings.max_model_len or None}  # not known yet

    @app.get("/v1/models", responses={200: {"model": answers.Models}, **_KEYED})
    async def models() -> Response:
        """The names that requests may give, also while they are loaded."""
        return _json({"object": "list", "data": [model(name) for name in server.model_names]})

    @app.get(
        "/v1/models/{id:path}",
        responses={200: {"model": answers.Model}, **_KEYED, 404: answers.ERRORS[404]},
        openapi_extra={"parameters": [_PATH_PARAMETER]},
    )
    async def one_model(request: Request) -> Response:
        """One of them."""
        name = request.path_params["id"]
        if not name:
            raise NotFound("the path names no model; ask /v1/models/NAME, or /v1/models for all")
        number_of(name, server.model_names)
        return _json(model(name))

    @app.get(
        "/health",
        responses={200: {"model": answers.Health}, 503: {"model": answers.Health}},
        openapi_extra=_NO_KEY,
    )
    async def health() -> Response:
        """200 while requests are served, else 503. Needs no key."""
        ready, word = server.readiness()
        return _json({"status": word}, 200 if ready else 503)

    scraped = scraping(server)

    @app.get("/metrics", response_class=PlainTextResponse, responses=_KEYED)
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus, to an admin key or one made for metrics; as on `metrics_port`."""
        caller_of(request.scope).require_metrics()
        return await scraped(request)

    @app.get("/version", responses={200: {"model": answers.Version}, **_KEYED})
    async def version() -> Response:
        """Which jmoe this is."""
        return _json({"version": jmoe_version()})


def _json(value: dict[str, Any], code: int = 200) -> Response:
    return Response(orjson.dumps(value), code, media_type="application/json")


async def _leave_to_the_door(request: Request, error: Exception) -> NoReturn:
    raise error
