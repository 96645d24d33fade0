"""The HTTP application: routes, and errors as OpenAI's error object everywhere."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_tandem import __version__
from mlx_tandem.adapters.registry import Entry
from mlx_tandem.errors import InvalidRequest, NotFound, TandemError
from mlx_tandem.server.body import read_json
from mlx_tandem.server.dialects import adapters
from mlx_tandem.server.dialects.openai import (
    ChatBody,
    CompletionBody,
    chat_logprobs,
    chat_messages,
    completion_logprobs,
    completion_prompts,
    refuse_items,
    streaming,
    template_options,
)
from mlx_tandem.server.dialects.shapes import CHAT, TEXT, dumps
from mlx_tandem.server.front import Front
from mlx_tandem.server.health import engine_metrics, health
from mlx_tandem.server.log import log_exception
from mlx_tandem.server.replies import ErrorReply, Plan, Reply, StreamReply, WholeReply
from mlx_tandem.server.sampling import choices, sampling_params, stop_strings


class Asgi(Response):
    """Hands a response of ours to the framework, which asks for this class and then only calls it."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def json_response(body: Any, status: int = 200) -> Response:
    return Response(dumps(body), status, media_type="application/json")


def create_app(front: Front) -> FastAPI:
    """Routes over `front`, which has been started by the caller."""

    app = FastAPI(title="mlx-tandem", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    limit = front.config.server.max_request_bytes

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        front.check_open()
        return Asgi(_reply(front, await _plan_chat(front, await read_json(request, ChatBody, limit))))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        front.check_open()
        return Asgi(_reply(front, await _plan_completion(front, await read_json(request, CompletionBody, limit))))

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": _models(front)})

    @app.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        return json_response(_model(front, await front.select(model)))

    @app.get("/v1/adapters")
    async def list_adapters() -> Response:
        return json_response(adapters.listing(front))

    @app.post("/v1/adapters")
    async def load_adapter(request: Request) -> Response:
        front.client.check_ready()
        return json_response(await adapters.load(front, await read_json(request, adapters.AdapterBody, limit)))

    @app.delete("/v1/adapters/{name}")
    async def unload_adapter(name: str) -> Response:
        return json_response(await adapters.unload(front, name))

    @app.get("/v1/engine/metrics")
    async def get_engine_metrics() -> Response:
        return json_response(engine_metrics(front))

    @app.get("/health")
    async def get_health() -> Response:
        status, body = health(front)
        return json_response(body, status)

    @app.get("/readyz")
    async def get_ready() -> Response:
        status, body = health(front)
        return json_response({"status": body["status"]}, status)

    @app.get("/livez")
    async def get_live() -> Response:
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(front.metrics.render(front), media_type="text/plain; version=0.0.4; charset=utf-8")

    _handle_errors(app, front)
    return app


def _reply(front: Front, plan: Plan) -> Reply:
    return StreamReply(front, plan) if plan.stream else WholeReply(front, plan)


async def _plan_chat(front: Front, body: ChatBody) -> Plan:
    adapter = await front.select(body.model, body.user)
    stream, with_usage = streaming(body)
    n, stops, logprobs = choices(front, body), stop_strings(body.stop), chat_logprobs(body)
    refuse_items(body.tools, "tools")
    prompt = await front.chat_prompt(chat_messages(body.messages), template_options(body))
    longest = ("max_completion_tokens", body.max_completion_tokens) if body.max_completion_tokens is not None else None
    params = sampling_params(front, body, len(prompt), "messages", logprobs=logprobs, max_tokens=longest)
    return Plan(CHAT, adapter, [prompt], params, n, stops, stream, with_usage)


async def _plan_completion(front: Front, body: CompletionBody) -> Plan:
    adapter = await front.select(body.model, body.user)
    stream, with_usage = streaming(body)
    n, stops, logprobs = choices(front, body), stop_strings(body.stop), completion_logprobs(body)
    prompts = await completion_prompts(front, body)
    params = sampling_params(front, body, max(map(len, prompts)), "prompt", logprobs=logprobs)
    return Plan(TEXT, adapter, prompts, params, n, stops, stream, with_usage)


def _models(front: Front) -> list[dict[str, Any]]:
    return [_model(front, None), *(_model(front, entry) for entry in front.registry.entries())]


def _model(front: Front, entry: Entry | None) -> dict[str, Any]:
    info = front.client.info
    longest = info.max_model_len if info is not None else None
    if entry is None:
        own: dict[str, Any] = {"id": front.model_id, "created": int(front.started), "root": front.model_id}
        own["parent"] = None
    else:
        own = {"id": entry.name, "created": int(entry.created), "root": entry.ref.label, "parent": front.model_id}
    return own | {"object": "model", "owned_by": "mlx-tandem", "max_model_len": longest}


def _handle_errors(app: FastAPI, front: Front) -> None:
    async def on_tandem_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, TandemError)
        front.metrics.errors[str(error.code)] += 1
        extra = [(b"x-request-id", _request_id())]
        if error.status in (413, 415) or front.client.state == "draining":
            extra.append((b"connection", b"close"))  # the rest of the body is not read
        return Asgi(ErrorReply(error, extra))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            wrapped: TandemError = NotFound(f"there is no {request.method} {request.url.path[:100]!a}")
        else:
            wrapped = InvalidRequest(str(error.detail), code="method_not_allowed")
            wrapped.status = error.status_code
        extra = [(k.encode(), v.encode()) for k, v in (error.headers or {}).items()]
        front.metrics.errors[str(wrapped.code)] += 1
        return Asgi(ErrorReply(wrapped, [(b"x-request-id", _request_id()), *extra]))

    app.add_exception_handler(TandemError, on_tandem_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_middleware(Guard, on_error=lambda: front.metrics.errors.update(["internal_error"]))


class Guard:
    """The last line: what nobody expected becomes a 500 with a fixed text and one log line that quotes nothing."""

    def __init__(self, app: ASGIApp, on_error: Callable[[], None]):
        self._app = app
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as e:
            request = _request_id()
            log_exception("request failed", e, request=request.decode(), method=scope["method"])
            self._on_error()
            if not started:
                error = TandemError(f"internal error; the log has more under {request.decode()}")
                await ErrorReply(error, [(b"x-request-id", request)])(scope, receive, send)


def _request_id() -> bytes:
    return b"req-" + secrets.token_hex(12).encode()
