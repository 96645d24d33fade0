"""The handlers of the routes that describe the server, and of those that list and change sessions, runs and
checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.tinker import bodies as b
from mlx_tandem.dialects.tinker.handlers import check_metadata, check_ttl
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.prompted import OWNER
from mlx_tandem.training.tinker.checkpoints import Checkpoint, Run

T = TypeVar("T")

CHUNK_BYTES = 5_000_000
"""Bytes of data from which the SDK cuts a pass into several requests."""

REFRESH_SECONDS = 300
"""Seconds after which a client asks again for the settings that may change."""


# -- the server ---------------------------------------------------------------------------------------------------


def client_config(front: ServerFront, body: b.Empty) -> dict[str, Any]:
    """Return the settings of the SDK for this server."""
    front.check_tinker()
    server = front.config.server
    capacity = front.client.check_ready().max_num_seqs + server.max_queue_size
    return {
        "pjwt_auth_enabled": False,
        "proto_compress_fwdbwd": True,
        "parallel_fwdbwd_chunks": True,
        "fwdbwd_max_chunk_len": 1024,
        "fwdbwd_max_chunk_bytes_count": CHUNK_BYTES,
        "sample_max_concurrent_requests": max(capacity // 2, 1),
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": False,
        "custom_loss_server_side": False,
        "use_pyqwest_transport": True,
    }


def dynamic_config(front: ServerFront, body: b.Empty) -> dict[str, Any]:
    """Return those settings of the SDK that may change while it runs."""
    front.check_tinker()
    return {"refresh_interval_sec": REFRESH_SECONDS, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


def telemetry(front: ServerFront, body: b.Empty) -> dict[str, str]:
    """Take what the SDK says of its own course, which is not kept."""
    front.check_tinker()
    return {"status": "accepted"}


def healthz(front: ServerFront) -> dict[str, str]:
    """Return that the server takes requests. Raises EngineUnavailable while it takes none."""
    front.check_tinker()
    front.client.check_ready()
    return {"status": "ok"}


def capabilities(front: ServerFront) -> dict[str, Any]:
    """Return the base model under each of its names."""
    front.check_tinker()
    info = front.client.check_ready()
    return {
        "supported_models": [
            {"model_name": name, "max_context_length": info.max_model_len, "trainable": True, "sampleable": True}
            for name in dict.fromkeys((front.models.id, *front.models.served_names))
        ]
    }


# -- sessions -----------------------------------------------------------------------------------------------------


async def create_session(front: ServerFront, body: b.SessionBody) -> dict[str, Any]:
    """Begin a session."""
    metadata = check_metadata(body.user_metadata)
    session = await front.check_tinker().create_session(OWNER.get())
    session.name, session.metadata = body.display_name, metadata
    return {"type": "create_session", "session_id": session.id}


def heartbeat(front: ServerFront, body: b.HeartbeatBody) -> dict[str, str]:
    """Take a sign of life, which renews a session's lease."""
    front.check_tinker().session(body.session_id, OWNER.get())
    return {"type": "session_heartbeat"}


async def finish_session(front: ServerFront, id: str, body: b.FinishBody) -> dict[str, str]:
    """End a session, and free what it has."""
    tinker = front.check_tinker()
    await tinker.end(tinker.session(id, OWNER.get()))
    return {"type": "finish_session"}


def get_session(front: ServerFront, id: str) -> dict[str, Any]:
    """Return what a session has."""
    session = front.check_tinker().session(id, OWNER.get())
    return {
        "training_run_ids": [f"{session.id}:train:{number}" for number in session.begun],
        "sampler_ids": [sampler.id for sampler in session.samplers.values()],
        "user_metadata": session.metadata or None,
        "display_name": session.name,
    }


def list_sessions(front: ServerFront, query: b.PageQuery) -> dict[str, Any]:
    """Return the ids of the sessions that have not ended, the newest first."""
    found = front.check_tinker().sessions(OWNER.get())
    return {"sessions": [session.id for session in _page(found, query)]}


# -- runs and checkpoints -----------------------------------------------------------------------------------------


def list_runs(front: ServerFront, query: b.PageQuery) -> dict[str, Any]:
    """Return the runs that are trained now or have a checkpoint, the newest first."""
    tinker, owner = front.check_tinker(), OWNER.get()
    runs = {run.id: run for run in tinker.checkpoints.runs(owner)} | {m.id: m.run for m in tinker.live(owner)}
    found = sorted(runs.values(), key=lambda run: -run.created)
    return {"training_runs": [_run(front, run) for run in _page(found, query)], "cursor": _cursor(found, query)}


def get_run(front: ServerFront, id: str) -> dict[str, Any]:
    """Return one run."""
    return _run(front, _find_run(front, id))


def list_run_checkpoints(front: ServerFront, id: str) -> dict[str, Any]:
    """Return the checkpoints of a run, the newest first."""
    run = _find_run(front, id)
    return {"checkpoints": [_checkpoint(own) for own in front.check_tinker().checkpoints.of_run(run.id)]}


def list_checkpoints(front: ServerFront, query: b.PageQuery) -> dict[str, Any]:
    """Return all checkpoints of the client, the newest first."""
    found = front.check_tinker().checkpoints.of_owner(OWNER.get())
    return {"checkpoints": [_checkpoint(own) for own in _page(found, query)], "cursor": _cursor(found, query)}


async def delete_checkpoint(front: ServerFront, id: str, kind: str, name: str) -> dict[str, Any]:
    """Remove a checkpoint."""
    await front.check_tinker().delete(_find(front, id, kind, name))
    return {}


async def set_ttl(front: ServerFront, id: str, kind: str, name: str, body: b.ExpiryBody) -> dict[str, Any]:
    """Change when a checkpoint expires."""
    seconds = check_ttl(body.ttl_seconds)
    expires = None if seconds is None else time.time() + seconds
    await front.check_tinker().checkpoints.set_expiry(_find(front, id, kind, name), expires)
    return {}


def publish(front: ServerFront, id: str, kind: str, name: str) -> dict[str, Any]:
    """Refuse to show a checkpoint to others."""
    _find(front, id, kind, name)
    raise InvalidRequest("checkpoints are for the key that made them, and are not shown to others here")


def weights_info(front: ServerFront, body: b.PathBody) -> dict[str, Any]:
    """Return the shape of a checkpoint, which older versions of the SDK ask for before they resume."""
    if body.weights_access_token is not None:
        raise InvalidRequest("there are no other accounts here", param="weights_access_token")
    checkpoints, owner = front.check_tinker().checkpoints, OWNER.get()
    found = checkpoints.get(body.tinker_path, owner, "tinker_path")
    return {
        "base_model": checkpoints.run(found.run, owner).base_model,
        "is_lora": True,
        "lora_rank": found.rank,
        "train_unembed": "head" in found.parts,
        "train_mlp": "mlp" in found.parts,
        "train_attn": "attention" in found.parts,
    }


def _find_run(front: ServerFront, id: str) -> Run:
    """Return a run of the client that is trained now or has a checkpoint. Raises NotFound."""
    tinker, owner = front.check_tinker(), OWNER.get()
    live = {model.id: model.run for model in tinker.live(owner)}
    return live.get(id) or tinker.checkpoints.run(id, owner)


def _find(front: ServerFront, id: str, kind: str, name: str) -> Checkpoint:
    return front.check_tinker().checkpoints.get(f"tinker://{id}/{kind}/{name}", OWNER.get(), "checkpoint_id")


def _run(front: ServerFront, run: Run) -> dict[str, Any]:
    tinker = front.check_tinker()
    own = tinker.checkpoints.of_run(run.id)
    live = {model.id: model.asked for model in tinker.live(run.owner)}
    newest = {kind: next((c for c in own if c.kind == kind), None) for kind in ("weights", "sampler_weights")}
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": "local",
        "is_lora": True,
        "corrupted": False,
        "lora_rank": run.rank,
        "last_request_time": _time(live.get(run.id) or max([run.created, *(c.created for c in own)])),
        "last_checkpoint": _checkpoint(newest["weights"]),
        "last_sampler_checkpoint": _checkpoint(newest["sampler_weights"]),
        "user_metadata": run.metadata or None,
    }


def _checkpoint(own: Checkpoint | None) -> dict[str, Any] | None:
    if own is None:
        return None
    return {
        "checkpoint_id": own.id,
        "checkpoint_type": "training" if own.kind == "weights" else "sampler",
        "time": _time(own.created),
        "tinker_path": own.path,
        "size_bytes": own.nbytes,
        "public": False,
        "user_metadata": own.metadata or None,
        "expires_at": None if own.expires is None else _time(own.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(found: Sequence[T], query: b.PageQuery) -> Sequence[T]:
    return found[query.offset : query.offset + query.limit]


def _cursor(found: Sequence[Any], query: b.PageQuery) -> dict[str, int]:
    return {"offset": query.offset, "limit": query.limit, "total_count": len(found)}
