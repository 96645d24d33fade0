"""The handlers of the routes for learning: updates by hand, its status, and controlling it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from mlx_tandem import limits
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.training.bodies import (
    AdapterQuery,
    CheckpointBody,
    NoBody,
    RewardBody,
    RollbackBody,
    SwitchBody,
    UpdateBody,
)
from mlx_tandem.errors import NotFound
from mlx_tandem.training.external import Sent, check_external
from mlx_tandem.training.store.checkpoints import GUARDS

if TYPE_CHECKING:
    from mlx_tandem.training.live.learning import Learning
    from mlx_tandem.training.online.serving import UpdateReport

HISTORY = 200
"""Updates in the history that is sent."""

SUMMARY = (
    "running", "busy", "recovering", "reason", "current_lora", "version", "step", "updates", "buffered", "loss",
    "mean_reward", "rollbacks", "last_update",
)  # fmt: skip
"""Fields of a status that the list of all adapters has."""

WHAT = "this route"
"""The subject of the error on a server that does not learn."""


async def update(front: ServerFront, query: AdapterQuery, body: UpdateBody) -> tuple[int, dict[str, Any]]:
    """Start an update; return the HTTP status and the job. The status is 202, or 200 after waiting with `wait`."""
    learning = front.check_learning(WHAT).of(query.adapter)
    learner = learning.check_up()
    if body.checkpoint_name is not None:
        learning.check_checkpoint_name(body.checkpoint_name, "checkpoint_name")
    info = front.client.check_ready()
    sent = Sent((), ())
    if body.trajectories:
        sent = await asyncio.to_thread(
            check_external,
            body.trajectories,
            vocab_size=info.vocab_size,
            max_tokens=front.room(info),
            newest_version=learner.newest_version,
            number_of=learning.number_of,
            waits=learner.waits,
            encode_prompt=learning.encode,
            encode_completion=lambda text: front.tokens_of(text, "completion", begins=False),
        )

    async def work() -> UpdateReport:
        with learning.naming(body.checkpoint_name, "checkpoint_name"):
            return await learner.update(
                sent.made, ids=sent.ids, publish=body.update_inference, checkpoint_name=body.checkpoint_name
            )

    job = learning.jobs.start(work)
    if not body.wait:
        return 202, job.describe()
    await learning.jobs.wait(job)
    return 200, job.describe()


async def reward(front: ServerFront, id: str, body: RewardBody) -> dict[str, Any]:
    """Give a trajectory its reward, with which it is learned from; return whether it was too old for that."""
    learner = front.check_learning(WHAT).keeping(id).check_up()
    fresh = await learner.later.reward(id, body.reward, body.turn_rewards)
    return {"trajectory_id": id} | ({"status": "collected"} if fresh else {"status": "dropped", "dropped": "stale"})


def trajectory(front: ServerFront, id: str) -> dict[str, Any]:
    """Return what is known of a trajectory whose reward is still missing."""
    learning = front.check_learning(WHAT).keeping(id)
    found = learning.check_up().later.get(id)
    exchanges = found.exchanges
    return {
        "id": id,
        "object": "trajectory",
        "answers": len(exchanges),
        "tokens": sum(len(e.given) + len(e.tokens) for e in exchanges),
        "trained_tokens": sum(len(e.tokens) for e in exchanges),
        "versions": sorted({v for e in exchanges for v in e.versions}),
        "metadata": found.begun.metadata,
        "last_answer": int(found.touched),
        "expires": int(found.touched + learning.config.rl_training.open_trajectory_s),
    }


async def forget(front: ServerFront, id: str) -> dict[str, Any]:
    """Give up a trajectory that will have no reward; its siblings wait for it no longer."""
    await front.check_learning(WHAT).keeping(id).check_up().later.forget(id)
    return {"id": id, "object": "trajectory", "deleted": True}


def job(front: ServerFront, id: str) -> dict[str, Any]:
    """Return the state of an update's job. Raises NotFound for an unknown id."""
    return front.check_learning(WHAT).job(id).describe()


async def status(front: ServerFront, query: AdapterQuery) -> dict[str, Any]:
    """Return the status of learning, or, on a server that does not learn, the fact that it is disabled.

    Where several adapters are trained and none is named, the status of the default one has a list of all.
    """
    if front.learning is None:
        return {
            "training_enabled": False,
            "current_lora": None,
            "trajectories_collected": 0,
            "last_update": None,
            "loss": None,
            "available_checkpoints": [],
        }
    learning = front.learning.of(query.adapter)
    await front.client.refresh()
    found = _status(learning)
    teacher = front.teacher if learning.name == front.config.feedback.learn else None
    found["feedback"] = None if teacher is None else teacher.describe()
    if len(front.learning) > 1:
        found["adapter"] = learning.name
        if query.adapter is None:
            found["adapters"] = [_summary(each) for each in front.learning]
    return found


def _status(learning: Learning) -> dict[str, Any]:
    """Return the status of one adapter's learning."""
    found: dict[str, Any] = msgspec.to_builtins(learning.learner.status())
    found["atropos"] = None if learning.feed is None else learning.feed.describe()
    found["environment"] = None if learning.environment is None else learning.environment.describe()
    found["current_lora"] = learning.current_name()
    found["available_checkpoints"] = [n for n in found["available_checkpoints"] if not GUARDS.fullmatch(n)]
    return found


def _summary(learning: Learning) -> dict[str, Any]:
    """Return the most important parts of the status of one adapter's learning."""
    whole = _status(learning)
    return {"adapter": learning.name} | {field: whole[field] for field in SUMMARY}


def history(front: ServerFront, query: AdapterQuery) -> dict[str, Any]:
    """Return the last updates of an adapter, oldest first, and answers that they learned from."""
    learning = front.check_learning(WHAT).of(query.adapter)
    updates = list(learning.learner.history)[-HISTORY:]
    return {"updates": msgspec.to_builtins(updates), "samples": msgspec.to_builtins(list(learning.reporting.samples))}


async def start(front: ServerFront, query: AdapterQuery, body: NoBody) -> dict[str, Any]:
    """Start the learning loop of an adapter or let it continue; return the status."""
    front.check_learning(WHAT).of(query.adapter).check_up().start()
    return await status(front, query)


async def stop(front: ServerFront, query: AdapterQuery, body: NoBody) -> dict[str, Any]:
    """Pause the learning loop of an adapter; return the status."""
    front.check_learning(WHAT).of(query.adapter).check_up().stop()
    return await status(front, query)


async def checkpoint(front: ServerFront, query: AdapterQuery, body: CheckpointBody) -> dict[str, Any]:
    """Save a checkpoint and return its name."""
    learning = front.check_learning(WHAT).of(query.adapter)
    learner = learning.check_up()
    with learning.naming(body.name, "name"):
        return {"status": "saved", "checkpoint": await learner.checkpoint(body.name)}


async def rollback(front: ServerFront, query: AdapterQuery, body: RollbackBody) -> dict[str, Any]:
    """Return serving and training to an earlier version."""
    learning = front.check_learning(WHAT).of(query.adapter)
    learner = learning.check_up()
    with _naming("to"):
        ref = await learner.rollback(None if body.to is None else _model_id(learning, body.to, "to"))
    learning.switched(ref, ref.label)
    return {"status": "rolled_back", "current_lora": ref.label, "version": ref.version}


async def switch(front: ServerFront, query: AdapterQuery, body: SwitchBody) -> dict[str, Any]:
    """Serve another version under a trained adapter's name. Training continues unchanged."""
    learning = front.check_learning(WHAT).of(query.adapter)
    learner = learning.check_up()
    to = _model_id(learning, body.version, "version")
    with _naming("version"):
        ref = await learner.switch(to)
    learning.switched(ref, to)
    return {"status": "switched", "current_lora": learning.current_name(), "version": ref.version}


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Set `param`, the field of the request, in a NotFound error that the block raises."""
    try:
        yield
    except NotFound as e:
        e.param = param
        raise


def _model_id(learning: Learning, given: str | int, param: str) -> str:
    """Return a version's number or a checkpoint's name as text. A number may be given as NAME@NUMBER.

    NAME is then the trained adapter. Raises InvalidRequest naming `param`.
    """
    if isinstance(given, int):
        return str(limits.check("version", given, param))
    return limits.check_name(given.removeprefix(f"{learning.name}@"), param)


async def debug(front: ServerFront, query: AdapterQuery) -> dict[str, Any]:
    """Return all details of an adapter's learning: status, last updates, failures of rewards, and settings."""
    config = front.config
    found: dict[str, Any] = {"status": await status(front, query)}
    if front.learning is not None:
        learning = front.learning.of(query.adapter)
        config = learning.config
        found["history"] = msgspec.to_builtins(list(learning.learner.history))
        found["reward_failures"] = dict(learning.learner.rewards.failures)
    settings = {"rl_training": config.rl_training, "checkpointing": config.checkpointing, "duty": config.engine.duty}
    return found | {"config": msgspec.to_builtins(settings)}
