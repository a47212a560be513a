"""OpenAI's API over HTTP: the application and its routes."""

import time
from typing import TYPE_CHECKING, Any, NoReturn

import orjson
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serving.errors import NotFound
from serving.frontend.openai import answers
from serving.frontend.openai.call import Answer
from serving.frontend.openai.chat import ChatEndpoint
from serving.frontend.openai.completions import CompletionEndpoint
from serving.frontend.openai.door import Door
from serving.frontend.openai.schemas import ChatRequest, CompletionRequest
from serving.request import number_of
from serving.version import jmoe_version

if TYPE_CHECKING:
    from serving.frontend.server import Server

_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_BODIES = {_COMPLETIONS: CompletionRequest, _CHATS: ChatRequest}
_REF = "#/components/schemas/{model}"
_PATH_PARAMETER = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


class _App(FastAPI):
    """The FastAPI application. Routes read their request bodies themselves: see `call.Answer`."""

    def openapi(self) -> dict[str, Any]:
        """Builds the OpenAPI description, including the schemas of request bodies."""
        if self.openapi_schema is None:
            found = get_openapi(title=self.title, version=self.version, routes=self.routes)
            schemas = found["components"]["schemas"]
            for path, model in _BODIES.items():
                schema = model.model_json_schema(ref_template=_REF)
                schemas |= schema.pop("$defs", {})
                schemas[model.__name__] = schema
                content = {
                    "application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}
                }
                found["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
            self.openapi_schema = found
        return self.openapi_schema


def make_app(server: "Server") -> FastAPI:
    """Makes the application; each request asks `server` for its engine."""
    app = _App(
        title="jmoe",
        version=jmoe_version(),
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _leave_to_the_door},
    )
    app.add_middleware(Door, server=server)
    _add_endpoints(app, server)
    _add_facts(app, server, created=int(time.time()))
    return app


def _add_endpoints(app: FastAPI, server: "Server") -> None:
    events = {"content": {"text/event-stream": {}}}

    @app.post(
        _COMPLETIONS, responses={200: {"model": answers.Completion, **events}, **answers.ERRORS}
    )
    async def completions(request: Request) -> Response:
        """Goes on from one prompt or several."""
        return Answer(server, CompletionEndpoint(), request.state.caller)

    @app.post(
        _CHATS, responses={200: {"model": answers.ChatCompletion, **events}, **answers.ERRORS}
    )
    async def chat_completions(request: Request) -> Response:
        """Answers a chat, whose text the model's chat template makes."""
        return Answer(server, ChatEndpoint(), request.state.caller)


def _add_facts(app: FastAPI, server: "Server", created: int) -> None:
    def model(name: str) -> dict[str, Any]:
        settings = server.config.engine if server.engine is None else server.engine.config
        told = {"id": name, "object": "model", "created": created, "owned_by": "jmoe"}
        return {**told, "max_model_len": settings.max_model_len}

    @app.get("/v1/models", responses={200: {"model": answers.Models}})
    async def models() -> Response:
        """The names that requests may give, also while they are loaded."""
        return _json({"object": "list", "data": [model(name) for name in server.model_names]})

    @app.get(
        "/v1/models/{id:path}",
        responses={200: {"model": answers.Model}, 404: answers.ERRORS[404]},
        openapi_extra={"parameters": [_PATH_PARAMETER]},
    )
    async def one_model(request: Request) -> Response:
        """One of them."""
        name = request.path_params["id"]
        if not name:
            raise NotFound("the path names no model; ask /v1/models/NAME, or /v1/models for all")
        number_of(name, server.model_names)
        return _json(model(name))

    @app.get("/health", responses={200: {"model": answers.Health}, 503: {"model": answers.Health}})
    async def health() -> Response:
        """200 while requests are served, else 503. Needs no key."""
        ready, word = server.readiness()
        return _json({"status": word}, 200 if ready else 503)

    @app.get("/version", responses={200: {"model": answers.Version}})
    async def version() -> Response:
        """Which jmoe this is."""
        return _json({"version": jmoe_version()})


def _json(value: dict[str, Any], code: int = 200) -> Response:
    return Response(orjson.dumps(value), code, media_type="application/json")


async def _leave_to_the_door(request: Request, error: Exception) -> NoReturn:
    raise error
