"""Learning beside serving: the online learner of one server, and what it needs of the serving half.

What is trained is one adapter; its versions are made by the engine and published here without a folder. Imported on
servers that learn only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from msgspec import structs

from mlx_tandem.errors import Conflict, InvalidRequest, TandemError, renamed
from mlx_tandem.generation.answers import Answer
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.log import log, log_exception
from mlx_tandem.training.external import Prompt
from mlx_tandem.training.live.jobs import Jobs
from mlx_tandem.training.online.online import OnlineLearner
from mlx_tandem.training.online.serving import Outcome, Sampled, UpdateReport
from mlx_tandem.training.store import manifests
from mlx_tandem.training.store.checkpoints import AUTOMATIC, BEST, CheckpointInfo, Checkpoints
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, EngineStats, SamplingParams

PACE_SECONDS = 300.0

MOST_TASKS = 256
"""From so many on that wait for their scores in the background, requests wait for their own."""


class Serving:
    """The serving half as the learner sees it."""

    def __init__(self, front: Front):
        self._front = front
        self._name = front.config.rl_training.adapter
        self._folder = os.path.abspath(front.config.checkpointing.checkpoint_dir)
        self._checkpoints: set[str] = set()  # names that are served because there is a checkpoint of that name
        self._named: set[str] = set()  # names of all checkpoints, in lower case
        self._naming: set[str] = set()  # names, in lower case, that checkpoints get as soon as they are saved
        self._listing = asyncio.Lock()
        self._numbers: dict[str, int] = {}  # versions of the checkpoints' contents, by digest
        self.swaps = 0  # how often the trained adapter's name has come to stand for a version, since the start

    # -- versions -----------------------------------------------------------------------------------------------

    def publish(self, info: AdapterInfo, source: AdapterSource | None, number: int = 0) -> AdapterRef:
        """Let the trained adapter's name stand for this content from the next request on."""
        before = self.current()
        ref = self._front.models.made(self._name, source, info, number)
        if ref != before:
            self.swaps += 1
            log("adapter published", adapter=ref.label, digest=ref.digest)
        return ref

    def reserve(self, info: AdapterInfo, number: int = 0) -> AdapterRef:
        """Return a version of its own for content that is not current yet."""
        return self._front.models.reserve(self._name, info, number)

    def expect(self, numbers: Sequence[int]) -> None:
        """Note that these versions are being made again."""
        self._front.models.expect(f"{self._name}@{number}" for number in numbers)

    async def recovered(self) -> None:
        """Forget what was not made again by now."""
        await self._front.models.drop_lost()

    def count_from(self, number: int) -> None:
        """Note that versions up to this one were given by an earlier server."""
        self._front.models.registry.count_from(self._name, number)

    def current(self) -> AdapterRef | None:
        registry = self._front.models.registry
        return registry.entry(self._name).ref if registry.is_read(self._name) else None

    async def retire(self, ref: AdapterRef) -> None:
        """Forget a version, so that nobody may ask for it; running requests end under it."""
        await self._front.models.retire(ref)

    def version_of(self, ref: AdapterRef | None) -> int | None:
        """Return the number of this content among the trained adapter's versions, 0 for the base, None for others."""
        if ref is None:
            return 0
        if ref.name == self._name:
            return ref.version
        same = (e.ref.version for e in self._front.models.registry.holders(ref.digest) if e.name == self._name)
        return max(same, default=self._numbers.get(ref.digest))

    # -- checkpoints --------------------------------------------------------------------------------------------

    def is_checkpoint(self, name: str) -> bool:
        """Return whether a checkpoint has this name, is getting it now, or may get it by itself at any time. Names that
        differ in case only would be one folder on many disks."""
        folded = name.casefold()
        return folded in self._named or folded in self._naming or AUTOMATIC.fullmatch(folded) is not None

    def check_checkpoint_name(self, name: str, param: str) -> None:
        """Raise InvalidRequest naming `param` unless a new checkpoint may be called and served as `name`."""
        if name in (BEST, "journal") or ".corrupt" in name or name.isdigit():  # a number is a version's
            raise InvalidRequest(f"{param} may not be {name[:64]!r}", param=param)
        if name.casefold() in self._named | self._naming:
            raise Conflict(f"there is a checkpoint {name[:64]!r}", param=param, code="checkpoint_exists")
        with renamed(name=param):
            self._front.models.rules.check_free(name)

    @contextlib.contextmanager
    def naming(self, name: str | None, param: str) -> Iterator[None]:
        """Keep `name` for a checkpoint that is saved meanwhile, so that nothing else gets it; None: it gets a name by
        itself. Raises InvalidRequest naming `param` when it may not be called so."""
        if name is None:
            yield
            return
        self.check_checkpoint_name(name, param)
        self._naming.add(name.casefold())
        try:
            yield
        finally:
            self._naming.discard(name.casefold())

    def saved(self, info: AdapterInfo, folder: str, name: str) -> None:
        """Note that this content is now in a checkpoint, too, which may be asked for by its name."""
        names = {name: AdapterSource(folder)}
        with contextlib.suppress(TandemError):  # there may be none yet
            best = self._source(BEST)
            if manifests.read(Path(best.path)).digest == info.digest:
                names[BEST] = best
        for each, source in names.items():
            self._named.add(each.casefold())
            if self._takes(each):
                self._front.models.saved(each, source, info)

    async def read_checkpoints(self) -> Sequence[CheckpointInfo]:
        """Return the checkpoints that lie in the folder now; from here on nothing else gets a name of theirs."""
        found = await asyncio.to_thread(Checkpoints(Path(self._folder), 1).list)
        self._named = {info.name.casefold() for info in found}
        return found

    async def list_checkpoints(self) -> None:
        """Serve the checkpoints that lie in the folder now, each under its name, and no others."""
        async with self._listing:  # one after the other, so that the last one has the last word
            await self._list_checkpoints()

    async def _list_checkpoints(self) -> None:
        models, before = self._front.models, frozenset(self._checkpoints)
        found = await self.read_checkpoints()
        names = {info.name for info in found}
        self._numbers = {info.digest: info.version for info in found if info.version}
        models.shelve({f"{self._name}@{i.version}": self._source(i.name) for i in found if i.version})
        for info in found:
            source = self._source(info.name)
            if info.name not in self._checkpoints:
                if self._takes(info.name):
                    models.registry.announce(info.name, source)
            elif models.registry.is_read(info.name) and models.registry.entry(info.name).ref.digest != info.digest:
                models.saved(info.name, source, await self._front.client.load_adapter(source))  # another is the best
        for name in before - names:
            self._checkpoints.discard(name)
            await models.unsaved(name, self._source(name))

    def _takes(self, name: str) -> bool:
        """Return whether the checkpoint of this name can be asked for by it."""
        try:
            if name not in self._checkpoints:
                self._front.models.rules.check_free(name)
        except InvalidRequest as e:
            log("checkpoint not served", checkpoint=name, reason=e.message)
            return False
        self._checkpoints.add(name)
        return True

    def _source(self, name: str) -> AdapterSource:
        return AdapterSource(os.path.join(self._folder, name))

    def relist(self) -> None:
        """Serve what lies in the folder of checkpoints now."""
        raise NotImplementedError

    # -- prompts and samples ------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a text, or of a conversation up to where the assistant speaks. For threads that are
        not the loop's."""
        if isinstance(prompt, str):
            return tuple(self._front.tokens_of(prompt, "prompt"))
        with renamed(messages="prompt"):
            return tuple(self._front.from_thread(self._front.prompts.chat(prompt)))

    async def sample(
        self, prompts: Sequence[tuple[int, ...]], n: int, params: SamplingParams, adapter: AdapterRef | None
    ) -> list[list[Sampled]]:
        """Return `n` completions of each prompt, generated in learning's share of the device."""
        prompted = Prompted(
            prompts,
            [adapter] * len(prompts),
            structs.replace(params, logprobs=0),
            n,
            version=self.version_of(adapter) or 0,
            background=True,
        )
        answers = await self._front.answers(prompted)
        done = [_sampled(answer) for answer in answers.choices]
        return [done[k * n : (k + 1) * n] for k in range(len(prompts))]


def _sampled(answer: Answer) -> Sampled:
    """Return a completion as the learner takes it. Raises EngineError for one that has not ended."""
    assert answer.reason
    return Sampled(
        tokens=tuple(answer.tokens),
        logprobs=tuple(lp.sampled for lp in answer.logprobs),
        model_logprobs=tuple(lp.model for lp in answer.logprobs),
        versions=tuple(answer.versions),
        text=answer.text,
    )


class Learning(Serving):
    """The learner of a server, with the work under way for it."""

    def __init__(self, front: Front, clock: Callable[[], float] = time.time):
        super().__init__(front)
        self.clock = clock
        self.learner = OnlineLearner(front.config, front.client, self, clock=clock)
        self.jobs = Jobs(clock)
        front.models.rules.is_checkpoint = self.is_checkpoint
        self._outcomes: Counter[str] = Counter(dict.fromkeys(get_args(Outcome), 0))
        self._counted: UpdateReport | None = None  # the last of those
        self._pace: deque[tuple[float, int]] = deque()  # (time, updates so far)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._was_up = False
        self._closed = False

    async def bring_up(self) -> None:
        """An engine is ready: its trainer begins with the newest checkpoint, which is served, and catches up beside
        requests with where the last one was. At the first start this raises what is wrong; later, serving goes on, the
        learner tries again when something is asked of it, and versions that only the last engine had answer with
        EngineUnavailable until they are made again."""
        try:
            await self.learner.bring_up()
            await self.list_checkpoints()
        except TandemError as e:
            if self._front.client.info is None:
                raise  # the engine is gone; the supervisor sees to it
            if not self._was_up:
                raise TandemError(e.message, param=e.param, code=e.code) from e
            log("learning could not go on", error=e.message)
        if not self._was_up:
            self._was_up = True
            self.learner.start()

    def saved(self, info: AdapterInfo, folder: str, name: str) -> None:
        super().saved(info, folder, name)
        self.relist()

    def relist(self) -> None:
        self.spawn(self.list_checkpoints())

    async def close(self) -> None:
        """End what is under way. The next start goes on with what is in the journal."""
        if self._closed:
            return
        self._closed = True
        await self.jobs.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.learner.close()

    async def settled(self) -> None:
        """Wait until nothing is left to be scored in the background."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` in the background; where much is being done there already, wait until it is done."""
        task = self.spawn(work)
        if len(self._tasks) > MOST_TASKS:
            await asyncio.wait({task})

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` without anybody waiting for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log_exception("work in the background failed", error)

    @property
    def stats(self) -> EngineStats:
        return self._front.client.stats

    def outcomes(self) -> Counter[str]:
        """Return the updates of this server, counted by what came of them."""
        new = list(itertools.takewhile(lambda report: report is not self._counted, reversed(self.learner.history)))
        self._outcomes.update(report.outcome for report in new)
        self._counted = new[0] if new else self._counted
        return self._outcomes

    def updates_per_second(self) -> float:
        """Return the pace over the last PACE_SECONDS, or since the first time of asking."""
        now = (self.clock(), self.learner.status().updates)
        while len(self._pace) > 1 and now[0] - self._pace[1][0] >= PACE_SECONDS:
            self._pace.popleft()
        self._pace.append(now)
        seconds, updates = now[0] - self._pace[0][0], now[1] - self._pace[0][1]
        return max(updates, 0) / seconds if seconds > 0 else 0.0

    def check_up(self) -> OnlineLearner:
        """Return the learner, when it can do something. Raises EngineUnavailable while there is no engine."""
        self._front.client.check_ready()
        return self.learner
