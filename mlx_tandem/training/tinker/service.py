"""Tinker's API without HTTP: its sessions, models, samplers and checkpoints, over the engine that serves everybody."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.engine.learning import Part
from mlx_tandem.errors import InvalidRequest, NotFound, Overloaded, TandemError
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.log import log, log_exception
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.tinker.checkpoints import Checkpoint, Checkpoints, Run
from mlx_tandem.training.tinker.models import Kept, TrainedModel
from mlx_tandem.training.tinker.order import Order, Work, outcome_of
from mlx_tandem.training.tinker.promises import Gone, Promise, Promises, Result
from mlx_tandem.training.tinker.samplers import (
    Inflight,
    Memory,
    Sampler,
    Saved,
    Snapshot,
    Source,
    no_sampler,
)
from mlx_tandem.training.tinker.sessions import Session
from mlx_tandem.training.tinker.versions import Versions
from mlx_tandem.types import AdapterRef

SILENT_SECONDS = 30.0
"""Seconds of silence after which a session ends early when its trainers are wanted by another: clients give three signs
of life in this time."""

PERIOD_SECONDS = 5.0
"""Longest time between two looks at leases and at checkpoints that expire."""

ENDED = 4096
"""Number of ended sessions that are remembered."""

Make = Callable[[AdapterRef | None, bool], Sequence[Prompted]]
"""Makes the submissions of a request, given the version that it runs under and whether it follows newer ones."""


class Holdings(Struct, frozen=True):
    """What all clients hold at one time."""

    sessions: int
    models: int
    samplers: int
    waiting: int  # requests whose results are not there
    results: int  # results that are kept for clients to fetch
    result_bytes: int  # of these results
    checkpoints: int
    silent_seconds: float  # time since the last sign of life of the client that is silent the longest


class Tinker:
    """The sessions of all clients. An `owner` stands for whoever has one API key; nobody sees what others own."""

    def __init__(self, front: Front, clock: Callable[[], float] = time.monotonic):
        """Take the folder of checkpoints. Raises StorageError. `clock` returns seconds that only grow."""
        self._front = front
        self._config = front.config.tinker
        self._clock = clock
        self.promises = Promises()
        self.checkpoints = Checkpoints(Path(self._config.dir))
        self.decoding = asyncio.Lock()
        """Held while a large body is decoded, so that one at a time takes memory."""
        self.lost = 0  # number of sessions that ended because nothing was heard of their clients
        self._versions = Versions(front.client, front.models)
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, TrainedModel] = {}
        self._samplers: dict[str, Session] = {}  # the session of each sampler, by the sampler's id
        self._memory = Memory()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()  # requests to samplers that run
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch the leases, unless they are watched."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watched())

    async def close(self) -> None:
        """End all sessions, and let go of the folder."""
        if self._watch is not None:
            self._watch.cancel()
        for session in list(self._sessions.values()):
            await self.end(session)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.checkpoints.close()

    def holdings(self) -> Holdings:
        """Return what all clients hold now."""
        return Holdings(
            len(self._sessions),
            len(self._models),
            len(self._samplers),
            self.promises.waiting,
            self.promises.kept,
            self.promises.nbytes,
            len(self.checkpoints),
            max((session.silent for session in self._sessions.values()), default=0.0),
        )

    @property
    def is_used(self) -> bool:
        """Whether clients hold anything that only the engine has, or wait for it."""
        return bool(self._sessions or self._tasks)

    # -- sessions -----------------------------------------------------------------------------------------------

    async def create_session(self, owner: str) -> Session:
        """Begin a session. Raises Overloaded when there are too many; before that, the most silent one ends."""
        if len(self._sessions) >= limits.MAX_TINKER_SESSIONS:
            most = max(self._sessions.values(), key=lambda session: session.silent)
            if most.silent > SILENT_SECONDS:
                await self.end(most)
        if len(self._sessions) >= limits.MAX_TINKER_SESSIONS:
            raise Overloaded("the server has as many sessions as it takes", retry_after=self._config.lease_s)
        session = Session(owner, self._versions, self._clock)
        self._sessions[session.id] = session
        log("session began", session=session.id)
        return session

    def session(self, id: str, owner: str) -> Session:
        """Return an owner's session, and renew its lease. Raises NotFound, or Gone for one that has ended."""
        session = self._sessions.get(id)
        if session is None and id in self._ended:
            raise Gone("this session has ended", param="session_id")
        if session is None or session.owner != owner:
            raise NotFound(f"there is no session {id[:64]!r}", param="session_id")
        session.touch()
        return session

    def sessions(self, owner: str) -> list[Session]:
        """Return the sessions of an owner, the newest first."""
        return sorted((s for s in self._sessions.values() if s.owner == owner), key=lambda s: -s.created)

    async def end(self, session: Session) -> None:
        """End a session: what waits is not done, its trainers are closed and its snapshots released."""
        if self._sessions.pop(session.id, None) is None:
            return
        self._ended[session.id] = None
        while len(self._ended) > ENDED:
            self._ended.popitem(last=False)
        self.promises.end(session.id)
        for sampler in session.samplers.values():
            self._forget(sampler.id)
        models = [model for model in session.models.values() if self._models.pop(model.id, None) is not None]
        for model in models:  # Nobody finds them any more.
            await model.close()
        await session.snapshots.close()
        log("session ended", session=session.id, models=len(models))

    async def _watched(self) -> None:
        """End sessions whose lease is over, and remove checkpoints that expire, for ever."""
        while True:
            await asyncio.sleep(min(self._config.lease_s / 4, PERIOD_SECONDS))
            try:
                await self.look()
            except Exception as e:
                log_exception("leases were not looked at", e)

    async def look(self) -> None:
        """End sessions whose lease is over, and remove checkpoints whose time is over.

        No lease ends while the engine is not ready, since clients cannot show signs of life then.
        """
        if self._front.client.state not in ("ready", "idle"):
            for session in self._sessions.values():
                session.touch()
        for session in [s for s in self._sessions.values() if s.silent > self._config.lease_s]:
            log("session lost", session=session.id)
            self.lost += 1
            await self.end(session)
        await self.checkpoints.expire()

    # -- models -------------------------------------------------------------------------------------------------

    async def new_model(
        self,
        session: Session,
        number: int,
        base_model: str,
        rank: int,
        parts: tuple[Part, ...],
        metadata: Mapping[str, str],
    ) -> TrainedModel:
        """Return a new model of a session, for which the caller begins its opening.

        Raises InvalidRequest when its rank is too high, when its number was used, or when as many models are trained as
        there is memory for. Before that, sessions that have been silent for a while end.
        """
        if rank > self._config.rank:
            raise InvalidRequest(
                f"rank is {rank}; models have at most {self._config.rank} here (--tinker-rank)",
                param="lora_config.rank",
            )
        if len(self._models) >= self._config.trainers:
            for late in [s for s in self._sessions.values() if s.models and s.silent > SILENT_SECONDS]:
                await self.end(late)
        # From here on nothing is waited for: of two requests with one number the second finds the first.
        if number in session.begun or number in session.models:
            raise InvalidRequest(f"model_seq_id {number} was used in this session", param="model_seq_id")
        if len(session.begun) >= limits.MAX_TINKER_MODELS:
            raise InvalidRequest(
                f"a session has at most {limits.MAX_TINKER_MODELS} models, one after another: begin another session",
                param="session_id",
            )
        if len(self._models) >= self._config.trainers:
            raise InvalidRequest(
                f"{len(self._models)} models are being trained, which is the most (--tinker-trainers): unload one, or "
                f"end its session. Sessions that have been silent for {SILENT_SECONDS:g} seconds end by themselves",
                param="model_seq_id",
            )
        run = Run(f"{session.id}:train:{number}", session.owner, base_model, rank, parts, time.time(), dict(metadata))
        order = Order(self.promises, session.owner, session.id)
        model = TrainedModel(self._front.client, self.checkpoints, self._versions, run, order)
        session.models[number] = self._models[model.id] = model
        return model

    def begin(self, model: TrainedModel, opening: Callable[[], Any], reply: Callable[[], bytes]) -> Promise:
        """Begin to open a model with `opening`, and promise the `reply`. A model that cannot be opened is gone."""

        async def work() -> Result:
            try:
                await opening()
            except BaseException:
                self._remove(model)
                raise
            return Result(reply())

        return model.order.begin(work)

    def model(self, id: str, owner: str) -> TrainedModel:
        """Return an owner's model, and renew its session's lease. Raises NotFound."""
        model = self._models.get(id)
        if model is None or model.run.owner != owner:
            raise NotFound(f"there is no model {id[:80]!r}", param="model_id", code="model_not_found")
        self._sessions[id.partition(":")[0]].touch()
        model.asked = time.time()
        return model

    def live(self, owner: str) -> list[TrainedModel]:
        """Return the models that an owner trains."""
        return [model for model in self._models.values() if model.run.owner == owner]

    async def unload(self, model: TrainedModel) -> Result:
        """Free a model, as the last of its requests."""
        self._remove(model)
        await model.close()
        return Result(dumps({"model_id": model.id, "type": "unload_model"}))

    def _remove(self, model: TrainedModel) -> None:
        """Let nobody find a model any more."""
        self._models.pop(model.id, None)
        session, _, number = model.id.partition(":train:")
        if session in self._sessions:
            self._sessions[session].models.pop(int(number), None)

    # -- samplers -----------------------------------------------------------------------------------------------

    def add_sampler(
        self, session: Session, number: int, base_model: str, source: Source, content: bytes = b""
    ) -> Sampler:
        """Add a sampler to a session. Raises InvalidRequest for a number that was used, and when there are too many."""
        if number in session.samplers:
            raise InvalidRequest(
                f"sampling_session_seq_id {number} was used in this session", param="sampling_session_seq_id"
            )
        if len(session.samplers) >= limits.MAX_TINKER_SAMPLERS:
            raise InvalidRequest(f"a session has at most {limits.MAX_TINKER_SAMPLERS} samplers", param="session_id")
        if len(self._samplers) >= limits.MAX_TINKER_SAMPLERS_IN_ALL:
            raise Overloaded("the server has as many samplers as it takes", retry_after=self._config.lease_s)
        sampler = Sampler(f"{session.id}:sample:{number}", base_model, source, content)
        session.samplers[number] = sampler
        self._samplers[sampler.id] = session
        return sampler

    async def saved(self, path: str, owner: str) -> Saved:
        """Return the source that is a checkpoint, after the engine has read it. Raises NotFound and ModelError."""
        checkpoint = self.checkpoints.get(path, owner, "model_path")
        source = self.checkpoints.source(checkpoint)
        await self._versions.read(source, checkpoint.run)
        return Saved(path, source, checkpoint.run)

    async def sampler_of(self, model: TrainedModel, session: Session, number: int, *, inflight: bool) -> Result:
        """Make a sampler of a model's present weights: a snapshot, or one that later ones of its kind move."""
        if inflight:
            await model.publish_inflight()
            sampler = self.add_sampler(session, number, model.run.base_model, Inflight(model))
        else:
            ref = await model.publish()
            try:
                sampler = self.add_sampler(session, number, model.run.base_model, Snapshot())
            except TandemError:
                await self._versions.release(ref)
                raise
            for id in await session.snapshots.add(sampler.id, ref):
                session.samplers.pop(_number(id), None)
                self._forget(id)
        return Result(dumps({"path": None, "sampling_session_id": sampler.id, "type": "save_weights_for_sampler"}))

    def sampler(self, id: str, owner: str) -> tuple[Session, Sampler]:
        """Return an owner's sampler and its session, whose lease is renewed. Raises NotFound."""
        session = self._samplers.get(id)
        if session is None or session.owner != owner:
            raise no_sampler(id)
        session.touch()
        return session, session.samplers[_number(id)]

    def _forget(self, sampler: str) -> None:
        """Let nobody find a sampler any more."""
        self._samplers.pop(sampler, None)
        self._memory.drop(sampler)

    async def sample(
        self, sampler: Sampler, session: Session, number: int, content: bytes, choices: int, make: Make,
        write: Callable[[Sequence[Answers]], Result],
    ) -> Promise:  # fmt: skip
        """Begin a request to a sampler and return the promise of what `write` makes of its answers.

        Raises Overloaded when the server is full, and NotFound for weights that are gone.
        """
        known = sampler.repeated(number, content)
        if known is not None:
            return known
        ref = await sampler.ref(self._versions, session.snapshots)
        if (known := sampler.repeated(number, content)) is not None:  # It has come again in the meantime.
            return known
        submissions = make(ref, isinstance(sampler.source, Inflight))
        with contextlib.ExitStack() as admitted:
            try:
                admitted.enter_context(self._front.request_admission.admitted(choices))
            except Overloaded as e:
                # The SDK slows down after a 429 only.
                raise Overloaded(e.message, retry_after=e.retry_after or 1.0) from e
            promise = self.promises.new(session.owner, session.id)
            self._memory.note(sampler, number, content, promise)
            held = admitted.pop_all()

        async def work() -> Result:
            answers = await asyncio.gather(*map(self._front.answers, submissions))
            _count(self._front, submissions, answers, ref)
            return await asyncio.to_thread(write, answers)

        def done(task: asyncio.Task[Result | TandemError]) -> None:
            self._tasks.discard(task)
            held.close()
            outcome = InvalidRequest("the request was cancelled") if task.cancelled() else task.result()
            self.promises.settle(promise, outcome)
            sampler.done(number, promise)

        promise.task = asyncio.create_task(outcome_of(work))
        self._tasks.add(promise.task)
        promise.task.add_done_callback(done)
        return promise

    def cancel(self, promise: Promise) -> None:
        """End a request to a sampler. One that is done is left as it is. Raises InvalidRequest for other requests."""
        if promise.outcome is not None:
            return
        if promise.task is None:
            raise InvalidRequest("only requests to samplers can be cancelled", param="request_id")
        promise.task.cancel()

    # -- checkpoints --------------------------------------------------------------------------------------------

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint. Requests that run under it finish."""
        await self._versions.forget(self.checkpoints.source(checkpoint))
        await self.checkpoints.delete(checkpoint)


def _count(front: Front, submissions: Sequence[Prompted], answers: Sequence[Answers], ref: AdapterRef | None) -> None:
    """Count the tokens and the ends of answers among those of all requests."""
    metrics, name = front.metrics, front.models.id if ref is None else "tinker"
    metrics.prompt_tokens[name] += sum(each.prompt_tokens for each in submissions)
    for choice in (choice for each in answers for choice in each.choices):
        metrics.generation_tokens[name] += len(choice.tokens)
        metrics.finished[name, choice.reason] += 1


def _number(sampler: str) -> int:
    """Return the number that a sampler has in its session."""
    return int(sampler.rpartition(":")[2])


def saving(model: TrainedModel, kept: Kept, *, sampler: bool) -> Work:
    """Return the work of saving a checkpoint."""
    return partial(model.save, "sampler_weights" if sampler else "weights", kept)
