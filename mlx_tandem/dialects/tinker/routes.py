"""Tinker's routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from mlx_tandem.dialects.route import Route
from mlx_tandem.dialects.tinker import bodies as b
from mlx_tandem.dialects.tinker import catalog, handlers
from mlx_tandem.dialects.tinker.errors import ERRORS, PREFIX

_RUN = "/training_runs/{id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"


def _post(path: str, handler: Callable[..., Any], body: type[Struct], method: str = "POST") -> Route:
    """Return a route that takes a JSON body."""
    return Route(method, f"{PREFIX}{path}", handler, body, prepare=b.known(body), errors=ERRORS, scope="training")


def _get(path: str, handler: Callable[..., Any], *, pages: bool = False, method: str = "GET") -> Route:
    """Return a route without a body. With `pages` its query says which entries of a list are wanted."""
    return Route(
        method, f"{PREFIX}{path}", handler, query=b.PageQuery if pages else None, errors=ERRORS, scope="training"
    )


ROUTES = (
    _post("/client/config", catalog.client_config, b.Empty),
    _post("/client/dynamic_config", catalog.dynamic_config, b.Empty),
    _post("/telemetry", catalog.telemetry, b.Empty),
    _get("/healthz", catalog.healthz),
    _get("/get_server_capabilities", catalog.capabilities),
    _post("/create_session", catalog.create_session, b.SessionBody),
    _post("/session_heartbeat", catalog.heartbeat, b.HeartbeatBody),
    _post("/sessions/{id}/finish", catalog.finish_session, b.FinishBody),
    _get("/sessions/{id}", catalog.get_session),
    _get("/sessions", catalog.list_sessions, pages=True),
    _post("/create_model", handlers.create_model, b.ModelBody),
    _post("/load_weights", handlers.load_weights, b.LoadBody),
    _post("/get_info", handlers.get_info, b.ModelIdBody),
    _post("/unload_model", handlers.unload_model, b.ModelIdBody),
    Route(
        "POST", f"{PREFIX}/forward_backward", handlers.forward_backward, reads="bytes", errors=ERRORS, scope="training"
    ),
    _post("/optim_step", handlers.optim_step, b.StepBody),
    _post("/save_weights", handlers.save_weights, b.SaveBody),
    _post("/save_weights_for_sampler", handlers.save_weights_for_sampler, b.SaveSamplerBody),
    _post("/create_sampling_session", handlers.create_sampling_session, b.SamplerBody),
    _get("/samplers/{id}", handlers.get_sampler),
    _post("/join_sampling_session", handlers.join_sampling_session, b.JoinBody),
    _post("/asample", handlers.asample, b.SampleBody),
    _post("/retrieve_future", handlers.retrieve_future, b.RetrieveBody),
    _post("/retrieve_futures", handlers.retrieve_futures, b.RetrieveManyBody),
    _post("/cancel_future", handlers.cancel_future, b.CancelBody),
    _post("/weights_info", catalog.weights_info, b.PathBody),
    _get("/training_runs", catalog.list_runs, pages=True),
    _get(_RUN, catalog.get_run),
    _get(f"{_RUN}/checkpoints", catalog.list_run_checkpoints),
    _get(_CHECKPOINT, catalog.delete_checkpoint, method="DELETE"),
    _post(f"{_CHECKPOINT}/ttl", catalog.set_ttl, b.ExpiryBody, method="PUT"),
    _get(f"{_CHECKPOINT}/publish", catalog.publish, method="POST"),
    _get(f"{_CHECKPOINT}/publish", catalog.publish, method="DELETE"),
    _get("/checkpoints", catalog.list_checkpoints, pages=True),
)
