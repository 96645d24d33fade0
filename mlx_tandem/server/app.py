"""The HTTP application: its routes over one front."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mlx_tandem import __version__
from mlx_tandem.dialects import adapters, models, training
from mlx_tandem.dialects.accept import selection
from mlx_tandem.dialects.openai import ChatBody, CompletionBody
from mlx_tandem.dialects.perplexity import PerplexityBody, PerplexityReply, plan_perplexity
from mlx_tandem.dialects.plans import plan_chat, plan_completion
from mlx_tandem.dialects.shapes import dumps
from mlx_tandem.dialects.tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize, tokenizer_info
from mlx_tandem.server.auth import Gate
from mlx_tandem.server.body import BodyLimit, T, read_json
from mlx_tandem.server.guard import Guard, error_handlers
from mlx_tandem.server.health import cache_stats, debug_metrics, engine_metrics, health
from mlx_tandem.server.keys import read_key
from mlx_tandem.server.openapi import document
from mlx_tandem.server.origins import Origins
from mlx_tandem.server.prometheus import render
from mlx_tandem.server.replies import Plan, Reply
from mlx_tandem.server.root_path import RootPath
from mlx_tandem.server.stream_reply import StreamReply
from mlx_tandem.server.text_reply import TextReply
from mlx_tandem.server.whole_reply import WholeReply
from mlx_tandem.training.live.front import ServerFront

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def create_app(front: ServerFront) -> Starlette:
    """Routes over `front`, which is started by the caller. Every answer is an ASGI application of its own."""
    server = front.config.server
    app = Starlette(routes=_routes(front), exception_handlers=error_handlers(front))
    app.router.redirect_slashes = False
    app.add_middleware(Gate, key=read_key(server.api_key, server.api_key_file), server=server, metrics=front.metrics)
    if server.root_path:
        app.add_middleware(RootPath, prefix=server.root_path)
    if server.allowed_origins:
        app.add_middleware(Origins, origins=server.allowed_origins)
    app.add_middleware(Guard, metrics=front.metrics)
    return app


def _json(body: Any, status: int = 200) -> Response:
    return Response(dumps(body), status, media_type="application/json")


def _text(body: str) -> Response:
    return Response(body, media_type="text/plain")


def _reply(front: ServerFront, plan: Plan) -> Reply:
    return StreamReply(front, plan) if plan.stream else WholeReply(front, plan)


def _routes(front: ServerFront) -> list[Route]:
    limit = BodyLimit(front.config.server.max_request_bytes, front.config.server.receive_timeout_s)
    of_chats, of_completions = selection("chat"), selection("completions")
    info = tokenizer_info(front)

    async def body(request: Request, kind: type[T]) -> T:
        """The body, once it is known that somebody can do something with it."""
        front.client.check_ready()
        return await read_json(request, kind, limit)

    async def steering(request: Request, kind: type[T]) -> T:
        """The body of a route that the documents of MLX ParaLLM call without a content type, or which has none."""
        front.client.check_ready()
        return await read_json(request, kind, limit, plain=True)

    async def chat_completions(request: Request) -> ASGIApp:
        front.check_open()
        return _reply(front, await plan_chat(front, await read_json(request, ChatBody, limit, select=of_chats)))

    async def completions(request: Request) -> ASGIApp:
        front.check_open()
        given = await read_json(request, CompletionBody, limit, select=of_completions)
        return _reply(front, await plan_completion(front, given))

    async def perplexity(request: Request) -> ASGIApp:
        front.check_open()
        return PerplexityReply(front, await plan_perplexity(front, await read_json(request, PerplexityBody, limit)))

    async def post_tokenize(request: Request) -> ASGIApp:
        return TextReply(front, request, TokenizeBody, limit, tokenize)

    async def post_detokenize(request: Request) -> ASGIApp:
        return TextReply(front, request, DetokenizeBody, limit, detokenize)

    async def get_tokenizer_info(request: Request) -> ASGIApp:
        return Response(info, media_type="application/json")

    async def list_models(request: Request) -> ASGIApp:
        return _json(models.listing(front))

    async def get_model(request: Request) -> ASGIApp:
        return _json(models.one(front, request.path_params["model"]))

    async def list_adapters(request: Request) -> ASGIApp:
        return _json(adapters.listing(front))

    async def load_adapter(request: Request) -> ASGIApp:
        return _json(await adapters.load(front, await body(request, adapters.AdapterBody)))

    async def get_adapter(request: Request) -> ASGIApp:
        return _json(adapters.one(front, request.path_params["name"]))

    async def unload_adapter(request: Request) -> ASGIApp:
        return _json(await adapters.unload(front, request.path_params["name"]))

    async def load_lora_adapter(request: Request) -> ASGIApp:
        return _text(await adapters.vllm_load(front, await body(request, adapters.VllmLoadBody)))

    async def unload_lora_adapter(request: Request) -> ASGIApp:
        return _text(await adapters.vllm_unload(front, await body(request, adapters.VllmUnloadBody)))

    async def list_aliases(request: Request) -> ASGIApp:
        return _json(adapters.aliases(front))

    async def get_alias(request: Request) -> ASGIApp:
        return _json(adapters.one_alias(front, request.path_params["name"]))

    async def put_alias(request: Request) -> ASGIApp:
        given = await body(request, adapters.AliasBody)
        return _json(await adapters.put_alias(front, request.path_params["name"], given))

    async def remove_alias(request: Request) -> ASGIApp:
        return _json(adapters.remove_alias(front, request.path_params["name"]))

    async def post_training_update(request: Request) -> ASGIApp:
        status, answer = await training.update(front, await body(request, training.UpdateBody))
        return _json(answer, status)

    async def get_training_job(request: Request) -> ASGIApp:
        return _json(training.job(front, request.path_params["id"]))

    async def get_training_status(request: Request) -> ASGIApp:
        return _json(training.status(front))

    async def start_training(request: Request) -> ASGIApp:
        await steering(request, training.NoBody)
        return _json(training.start(front))

    async def stop_training(request: Request) -> ASGIApp:
        await steering(request, training.NoBody)
        return _json(training.stop(front))

    async def save_checkpoint(request: Request) -> ASGIApp:
        return _json(await training.checkpoint(front, await steering(request, training.CheckpointBody)))

    async def roll_back(request: Request) -> ASGIApp:
        return _json(await training.rollback(front, await steering(request, training.RollbackBody)))

    async def switch_lora(request: Request) -> ASGIApp:
        return _json(await training.switch(front, await steering(request, training.SwitchBody)))

    async def debug_training(request: Request) -> ASGIApp:
        return _json(training.debug(front))

    async def get_engine_metrics(request: Request) -> ASGIApp:
        return _json(engine_metrics(front))

    async def get_debug_metrics(request: Request) -> ASGIApp:
        return _json(debug_metrics(front))

    async def get_cache_stats(request: Request) -> ASGIApp:
        return _json(cache_stats(front))

    async def get_health(request: Request) -> ASGIApp:
        status, full = health(front)
        return _json(full if request.scope["key_shown"] else {"status": full["status"]}, status)

    async def get_ready(request: Request) -> ASGIApp:
        status, full = health(front)
        return _json({"status": full["status"]}, status)

    async def get_live(request: Request) -> ASGIApp:
        return _json({"status": "ok"})

    async def get_version(request: Request) -> ASGIApp:
        return _json({"version": __version__})

    async def get_openapi(request: Request) -> ASGIApp:
        return Response(described, media_type="application/json")

    async def get_metrics(request: Request) -> ASGIApp:
        return Response(render(front), media_type="text/plain; version=0.0.4; charset=utf-8")

    table: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/chat/completions", chat_completions),
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/perplexity", perplexity),
        ("POST", "/tokenize", post_tokenize),
        ("POST", "/detokenize", post_detokenize),
        ("GET", "/tokenizer_info", get_tokenizer_info),
        ("GET", "/v1/models", list_models),
        ("GET", "/v1/models/{model:path}", get_model),
        ("GET", "/v1/adapters", list_adapters),
        ("POST", "/v1/adapters", load_adapter),
        ("GET", "/v1/adapters/{name}", get_adapter),
        ("DELETE", "/v1/adapters/{name}", unload_adapter),
        ("POST", "/v1/load_lora_adapter", load_lora_adapter),
        ("POST", "/v1/unload_lora_adapter", unload_lora_adapter),
        ("GET", "/v1/aliases", list_aliases),
        ("GET", "/v1/aliases/{name}", get_alias),
        ("PUT", "/v1/aliases/{name}", put_alias),
        ("DELETE", "/v1/aliases/{name}", remove_alias),
        ("POST", "/v1/training/update", post_training_update),
        ("GET", "/v1/training/jobs/{id}", get_training_job),
        ("GET", "/v1/training/status", get_training_status),
        ("POST", "/v1/training/start", start_training),
        ("POST", "/v1/training/stop", stop_training),
        ("POST", "/v1/training/checkpoint", save_checkpoint),
        ("POST", "/v1/training/rollback", roll_back),
        ("POST", "/training/checkpoint", save_checkpoint),
        ("POST", "/model/switch-lora", switch_lora),
        ("GET", "/debug/training", debug_training),
        ("GET", "/v1/engine/metrics", get_engine_metrics),
        ("GET", "/debug/metrics", get_debug_metrics),
        ("GET", "/v1/cache/stats", get_cache_stats),
        ("GET", "/health", get_health),
        ("GET", "/readyz", get_ready),
        ("GET", "/livez", get_live),
        ("GET", "/metrics", get_metrics),
        ("GET", "/version", get_version),
        ("GET", "/openapi.json", get_openapi),
        # For clients whose base URL has no /v1.
        ("POST", "/chat/completions", chat_completions),
        ("POST", "/completions", completions),
        ("GET", "/models", list_models),
        ("GET", "/models/{model:path}", get_model),
    ]
    needs_key = bool(front.config.server.api_key or front.config.server.api_key_file)
    described = dumps(document(((method, path) for method, path, _ in table), needs_key=needs_key))
    return [Route(path, endpoint, methods=[method]) for method, path, endpoint in table]
