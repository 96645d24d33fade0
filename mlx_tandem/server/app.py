"""The HTTP application, which has the routes of the dialects and the server's own over one front."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Match, compile_path
from starlette.routing import Route as HttpRoute
from starlette.types import ASGIApp, Scope

from mlx_tandem import __version__
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.plan import Plan
from mlx_tandem.dialects.route import FORM, Reply, Route
from mlx_tandem.dialects.routes import ROUTES
from mlx_tandem.errors import UnsupportedMedia
from mlx_tandem.explain import explain
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.limits import MAX_PROGRAM_BODY, MAX_RECEIVED_BYTES
from mlx_tandem.server.auth import Gate
from mlx_tandem.server.body import BodyLimit, read_bytes, read_json
from mlx_tandem.server.error_reply import ERRORS
from mlx_tandem.server.guard import Guard, error_handlers
from mlx_tandem.server.health import cache_stats, debug_metrics, engine_metrics, health, speculation_stats
from mlx_tandem.server.inward import Inward
from mlx_tandem.server.keyring import Keyring
from mlx_tandem.server.keys import read_key
from mlx_tandem.server.openapi import document
from mlx_tandem.server.origins import Origins
from mlx_tandem.server.overview import overview
from mlx_tandem.server.page import Page
from mlx_tandem.server.prometheus import render
from mlx_tandem.server.receiving import Receiving
from mlx_tandem.server.root_path import RootPath
from mlx_tandem.server.skipping import WithSkippedHeader
from mlx_tandem.server.stream_reply import StreamReply
from mlx_tandem.server.text_reply import TextReply
from mlx_tandem.server.whole_reply import WholeReply
from mlx_tandem.strict_json import dumps

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def create_app(front: ServerFront, routes: Sequence[Route] = ROUTES) -> Starlette:
    """Return the application over `front`, which the caller starts. `routes` are those of the dialects.

    Each reply is itself an ASGI application.
    """
    server = front.config.server
    larger = max(server.max_request_bytes, server.max_image_request_bytes)
    bodies = Receiving(max(MAX_RECEIVED_BYTES, larger), front.request_admission.refused)
    limit = BodyLimit(server.max_request_bytes, server.receive_timeout_s, bodies)
    with_images = BodyLimit(larger, server.receive_timeout_s, bodies)
    described = b""

    async def get_openapi(request: Request) -> ASGIApp:
        return Response(described, media_type="application/json")

    keyring = Keyring(read_key(server.api_key, server.api_key_file), server.keys_file)
    own = [*_own_routes(front, keyring), Route("GET", "/openapi.json", get_openapi, scope="any")]
    described = dumps(document([*routes, *own], needs_key=not keyring.is_open))
    served = [DialectRoute(r, _endpoint(front, r, limit, with_images)) for r in routes]
    served += [DialectRoute(r, _scoped(r, r.handler)) for r in own]
    app = Starlette(routes=served, exception_handlers=error_handlers(front))
    app.router.redirect_slashes = False
    front.batches.post = Inward(app, keyring)
    # Each middleware is put around those added before it. A request passes the guard first, which replies to what the
    # others raise, then the origins and the root path, then the page, which is public, and the gate last. These two see
    # paths without the root path.
    errors = {r.errors.prefix or r.path: r.errors.write for r in routes if r.errors is not None and r.header is None}
    public = [compile_path(route.path)[0] for route in (*routes, *own) if route.scope == "public"]
    app.add_middleware(Gate, keyring=keyring, server=server, metrics=front.metrics, errors=errors, public=public)
    app.add_middleware(Page)
    if server.root_path:
        app.add_middleware(RootPath, prefix=server.root_path)
    if server.allowed_origins:
        app.add_middleware(Origins, origins=server.allowed_origins)
    app.add_middleware(Guard, metrics=front.metrics)
    return app


class DialectRoute(HttpRoute):
    """A route. If it is for requests with a header, it matches no others."""

    def __init__(self, route: Route, endpoint: Endpoint):
        super().__init__(route.path, endpoint, methods=[route.method])
        self._header = None if route.header is None else route.header.encode()
        self.needs_body = route.needs_body
        self.key_scope = route.scope

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return how well the route matches a request, and what the path says."""
        if self._header is not None and self._header not in dict(scope.get("headers", ())):
            return Match.NONE, {}
        return super().matches(scope)


def _scoped(route: Route, endpoint: Endpoint) -> Endpoint:
    """Return `endpoint` behind a check that the key has the scope of the route."""
    scope, what = route.scope, f"{route.method} {route.path}"
    if scope is None or scope == "any" or scope == "public":
        return endpoint

    async def checked(request: Request) -> ASGIApp:
        if route.errors is not None:
            request.scope[ERRORS] = route.errors.write
        CALLER.get().check_scope(scope, what)
        return await endpoint(request)

    return checked


def _json(body: Any, status: int = 200) -> Response:
    """Return a reply with `body` as JSON."""
    return Response(dumps(body), status, media_type="application/json")


def _endpoint(front: ServerFront, route: Route, usual: BodyLimit, with_images: BodyLimit) -> Endpoint:
    """Return the endpoint of a dialect's route. The limit `with_images` is for bodies that may hold images."""
    parameters, body = route.parameters, route.body
    of_programs = replace(usual, size=max(MAX_PROGRAM_BODY, usual.size))

    async def endpoint(request: Request) -> ASGIApp:
        limit = with_images if route.images and front.reads_images else usual
        if route.errors is not None:
            request.scope[ERRORS] = route.errors.write
        if route.reads == "texts":
            assert body is not None
            return TextReply(front, request, body, limit, route.handler)
        values: list[Any] = [request.path_params[name] for name in parameters]
        if route.query is not None:
            values.append(_query(request, route.query))
        if body is None and route.reads != "bytes":
            return await _handled(front, route, values)
        # A request that cannot be admitted now is refused before its body is read.
        if route.reads == "prompts":
            front.check_open()
            await front.request_admission.turn()
        else:
            front.client.check_ready()
        wakes = route.wakes and route.reads != "prompts"  # the reply to a prompt waits for the engine by itself
        async with front.client.in_use(wakes=wakes):
            if route.reads == "bytes":
                with of_programs.receiving.body() as incoming:
                    received = await read_bytes(request, of_programs, incoming)
                    if received.media == FORM and "origin" in request.headers:
                        raise UnsupportedMedia("files are not taken from web pages")
                    named = received.media in route.media or not (received.media or "origin" in request.headers)
                    if route.media and not named:  # a page of another site may send other types without asking
                        raise UnsupportedMedia(f"Content-Type must be {' or '.join(route.media)}")
                    return await _handled(front, route, [*values, received])
            assert body is not None
            optional = route.reads == "steering"
            with limit.receiving.body() as incoming:
                value = await read_json(
                    request, body, limit, incoming, others=route.media, optional=optional, prepare=route.prepare
                )
                return await _handled(front, route, [*values, value])

    return _scoped(route, endpoint)


def _query(request: Request, kind: type[Struct]) -> Struct:
    """Return the query of a request as `kind`. Raises InvalidRequest naming the parameter.

    A parameter that has several values may end in [], and its last value counts.
    """
    given = {name.removesuffix("[]"): value for name, value in sorted(request.query_params.items())}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as e:
        raise explain(e, kind) from None


async def _handled(front: ServerFront, route: Route, values: Sequence[Any]) -> ASGIApp:
    """Return the reply of a route's handler."""
    found = route.handler(front, *values)
    return _answer(front, await found if inspect.isawaitable(found) else found)


def _answer(front: ServerFront, found: Any) -> ASGIApp:
    """Return the reply for what a handler has returned."""
    match found:
        case Plan():
            reply = StreamReply(front, found) if found.stream else WholeReply(front, found)
            return WithSkippedHeader(reply, found.skipped) if found.skipped else reply
        case Reply(path=Path() as path):
            return FileResponse(path, found.status, media_type=found.media)
        case Reply():
            return Response(found.content, found.status, media_type=found.media)
        case bytes():
            return Response(found, media_type="application/json")
        case Iterator():
            return StreamingResponse(found, media_type="text/event-stream")
        case str():
            return Response(found, media_type="text/plain")
        case (int() as status, value):
            return _json(value, status)
        case _:
            return _json(found)


def _own_routes(front: ServerFront, keyring: Keyring) -> list[Route]:
    """Return the server's own routes, whose handlers are endpoints. All of them are for GET.

    Endpoints with counters ask the engine for them first, so that the counters include every answer that has ended. The
    health endpoints do not ask it, since a client should not have to wait for a busy engine.
    """

    def counters(describe: Callable[[ServerFront], Any]) -> Endpoint:
        async def get(request: Request) -> ASGIApp:
            await front.client.refresh()
            return _json(describe(front))

        return get

    async def get_health(request: Request) -> ASGIApp:
        lost = "" if front.learning is None else await front.learning.lost()
        status, full = health(front, lost)
        is_told = request.scope["key_shown"] and "metrics" in CALLER.get().scopes
        return _json(full if is_told else {"status": full["status"]}, status)

    async def get_ready(request: Request) -> ASGIApp:
        status, full = health(front)
        return _json({"status": full["status"]}, status)

    async def get_live(request: Request) -> ASGIApp:
        return _json({"status": "ok"})

    async def get_version(request: Request) -> ASGIApp:
        return _json({"version": __version__})

    async def get_metrics(request: Request) -> ASGIApp:
        await front.client.refresh()
        return Response(render(front, keyring.callers), media_type="text/plain; version=0.0.4; charset=utf-8")

    return [
        Route("GET", "/v1/overview", counters(overview), scope="metrics"),
        Route("GET", "/v1/engine/metrics", counters(engine_metrics), scope="metrics"),
        Route("GET", "/debug/metrics", counters(debug_metrics), scope="metrics"),
        Route("GET", "/v1/cache/stats", counters(cache_stats), scope="metrics"),
        Route("GET", "/v1/spec_decode/metrics", counters(speculation_stats), scope="metrics"),
        Route("GET", "/health", get_health, scope="public"),
        Route("GET", "/health/", get_health, scope="public"),  # as TRL's client asks
        Route("GET", "/readyz", get_ready, scope="public"),
        Route("GET", "/livez", get_live, scope="public"),
        Route("GET", "/liveness", get_live, scope="public"),  # as prime-rl asks
        Route("GET", "/metrics", get_metrics, scope="metrics"),
        Route("GET", "/version", get_version, scope="any"),
    ]
