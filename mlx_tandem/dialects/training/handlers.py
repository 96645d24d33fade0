"""Updates by hand, how learning goes, and steering it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from mlx_tandem import limits
from mlx_tandem.dialects.training.bodies import CheckpointBody, NoBody, RollbackBody, SwitchBody, UpdateBody
from mlx_tandem.errors import NotFound
from mlx_tandem.training.external import check_external
from mlx_tandem.training.live.front import ServerFront
from mlx_tandem.training.trajectories import Trajectory

if TYPE_CHECKING:
    from mlx_tandem.training.online.serving import UpdateReport

WHAT = "this route"


async def update(front: ServerFront, body: UpdateBody) -> tuple[int, dict[str, Any]]:
    """Start an update; return the HTTP status and the job: 202 and queued, or with `wait` 200 and done."""
    learning = front.check_learning(WHAT)
    learner = learning.check_up()
    if body.checkpoint_name is not None:
        learning.check_checkpoint_name(body.checkpoint_name, "checkpoint_name")
    info = front.client.check_ready()
    trajectories: tuple[Trajectory, ...] = ()
    if body.trajectories:
        trajectories = await asyncio.to_thread(
            check_external,
            body.trajectories,
            vocab_size=info.vocab_size,
            max_tokens=front.room(info),
            newest_version=learner.newest_version,
            encode_prompt=learning.encode,
            encode_completion=lambda text: front.tokens_of(text, "completion", begins=False),
        )

    async def work() -> UpdateReport:
        with learning.naming(body.checkpoint_name, "checkpoint_name"):
            return await learner.update(
                trajectories, publish=body.update_inference, checkpoint_name=body.checkpoint_name
            )

    job = learning.jobs.start(work)
    if not body.wait:
        return 202, job.describe()
    await learning.jobs.wait(job)
    return 200, job.describe()


def job(front: ServerFront, id: str) -> dict[str, Any]:
    """Return what became of an update."""
    return front.check_learning(WHAT).jobs.get(id).describe()


def status(front: ServerFront) -> dict[str, Any]:
    """Return how learning goes; on a server that does not learn, just that."""
    if front.learning is None:
        return {
            "training_enabled": False,
            "current_lora": None,
            "trajectories_collected": 0,
            "last_update": None,
            "loss": None,
            "available_checkpoints": [],
        }
    found: dict[str, Any] = msgspec.to_builtins(front.learning.learner.status())
    return found


def start(front: ServerFront, body: NoBody) -> dict[str, Any]:
    """Let the loop go on."""
    front.check_learning(WHAT).check_up().start()
    return status(front)


def stop(front: ServerFront, body: NoBody) -> dict[str, Any]:
    """Let the loop pause."""
    front.check_learning(WHAT).check_up().stop()
    return status(front)


async def checkpoint(front: ServerFront, body: CheckpointBody) -> dict[str, Any]:
    """Save a checkpoint."""
    learning = front.check_learning(WHAT)
    learner = learning.check_up()
    with learning.naming(body.name, "name"):
        return {"status": "saved", "checkpoint": await learner.checkpoint(body.name)}


async def rollback(front: ServerFront, body: RollbackBody) -> dict[str, Any]:
    """Take what is served and what is trained back to an earlier version."""
    learner = front.check_learning(WHAT).check_up()
    with _naming("to"):
        ref = await learner.rollback(None if body.to is None else _selector(front, body.to, "to"))
    return {"status": "rolled_back", "current_lora": ref.label, "version": ref.version}


async def switch(front: ServerFront, body: SwitchBody) -> dict[str, Any]:
    """Let the trained adapter's name stand for another version; what is trained goes on as it is."""
    learner = front.check_learning(WHAT).check_up()
    with _naming("version"):
        ref = await learner.switch(_selector(front, body.version, "version"))
    return {"status": "switched", "current_lora": ref.label, "version": ref.version}


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Raise NotFound under the name of the field that has asked for what is not there."""
    try:
        yield
    except NotFound as e:
        e.param = param
        raise


def _selector(front: ServerFront, given: str | int, param: str) -> str:
    """Return a version's number or a checkpoint's name; numbers may be written as the trained adapter's NAME@NUMBER."""
    if isinstance(given, int):
        return str(limits.check("version", given, param))
    return limits.check_name(given.removeprefix(f"{front.config.rl_training.adapter}@"), param)


def debug(front: ServerFront) -> dict[str, Any]:
    """Return everything about learning: status, the last updates, why rewards failed, and the settings."""
    config = front.config
    found: dict[str, Any] = {"status": status(front)}
    if front.learning is not None:
        found["history"] = msgspec.to_builtins(list(front.learning.learner.history))
        found["reward_failures"] = dict(front.learning.learner.rewards.failures)
    settings = {"rl_training": config.rl_training, "checkpointing": config.checkpointing, "duty": config.engine.duty}
    return found | {"config": msgspec.to_builtins(settings)}
