"""Learning while serving: the online learner of one adapter, and its interface to the serving side.

The engine makes the versions of the adapter, and this module publishes them without a folder. Only servers that learn
import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from msgspec import structs

from mlx_tandem.errors import Conflict, InvalidRequest, NotFound, TandemError, renamed
from mlx_tandem.generation.adapters.model_names import Models
from mlx_tandem.generation.answers import Answer
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.prompt_text import said
from mlx_tandem.generation.prompted import CLIENT, Prompted
from mlx_tandem.generation.reward_models import RewardModels
from mlx_tandem.log import log
from mlx_tandem.training.atropos.client import Client
from mlx_tandem.training.atropos.feed import Feed
from mlx_tandem.training.atropos.hub import Hub, OwnTrainer
from mlx_tandem.training.external import Prompt
from mlx_tandem.training.live.jobs import Jobs
from mlx_tandem.training.live.reporting import Reporting
from mlx_tandem.training.live.tasks import Tasks
from mlx_tandem.training.online.online import OnlineLearner
from mlx_tandem.training.online.serving import Outcome, Sampled, UpdateReport
from mlx_tandem.training.own_settings import Own
from mlx_tandem.training.store import manifests
from mlx_tandem.training.store.checkpoints import (
    AUTOMATIC,
    BEST,
    GUARDS,
    LATEST,
    CheckpointInfo,
    Checkpoints,
)
from mlx_tandem.training.store.shared import SharedDatabase
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.training.verifiers.environment import Environment
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, EngineStats, SamplingParams

PACE_SECONDS = 300.0
"""Length in seconds of the window in which updates per second are measured."""


class Serving(ABC):
    """The serving side as the learner of one adapter uses it, on the front's event loop.

    `swaps` counts how often the trained adapter's name has come to stand for another version since the start.
    """

    def __init__(self, front: Front, own: Own):
        """Begin without checkpoints: `read_checkpoints` and `list_checkpoints` find them."""
        self._front = front
        self.config = own.config
        """The settings of a server that trains this adapter alone."""
        self.name = self._name = own.name
        self._prefix = own.prefix
        self._folder = os.path.abspath(own.config.checkpointing.checkpoint_dir)
        self._checkpoints: set[str] = set()  # names of the checkpoints that are served
        self._named: set[str] = set()  # names of all checkpoints, in lower case
        self._naming: set[str] = set()  # names, in lower case, of checkpoints that are being saved
        self._listing = asyncio.Lock()
        self._numbers: dict[str, int] = {}  # version numbers of the checkpoints' contents, by digest
        self._named_versions: dict[str, int] = {}  # the same of the checkpoints that are served, by name
        self._switched: tuple[AdapterRef, str] | None = None
        self.swaps = 0
        self.published = asyncio.Event()
        """Set whenever the trained adapter's name has come to stand for another version."""

    # -- versions -----------------------------------------------------------------------------------------------

    def publish(self, info: AdapterInfo, source: AdapterSource | None, number: int = 0) -> AdapterRef:
        """Make this content the current version of the trained adapter, and return the version.

        `source` is a folder with the same content, if there is one. `number` is the version's number if it had one
        before a restart, else 0.
        """
        before = self.current()
        ref = self._front.models.made(self._name, source, info, number)
        if ref != before:
            self.swaps += 1
            self.published.set()
            log("adapter published", adapter=ref.label, digest=ref.digest)
        return ref

    def reserve(self, info: AdapterInfo, number: int = 0) -> AdapterRef:
        """Return a new version for this content, without making it the current one."""
        return self._front.models.reserve(self._name, info, number)

    def expect(self, numbers: Sequence[int]) -> None:
        """Answer requests for these versions with EngineUnavailable until `recovered`: they are being made again."""
        self._front.models.expect(self._name, numbers)

    async def recovered(self) -> None:
        """Forget the versions that have not been made again."""
        await self._front.models.drop_lost(self._name)

    def count_from(self, number: int) -> None:
        """Give new versions numbers above `number`, the last one that an earlier server gave."""
        self._front.models.registry.count_from(self._name, number)

    def current(self) -> AdapterRef | None:
        """Return the current version of the trained adapter; None if it has no version yet."""
        registry = self._front.models.registry
        return registry.entry(self._name).ref if registry.is_read(self._name) else None

    def switched(self, ref: AdapterRef, to: str) -> None:
        """Record that a client has made the trained adapter's name stand for `ref`, which it called `to`."""
        self._switched = (ref, to) if to in self._named_versions else None

    def current_name(self) -> str:
        """Return what the trained adapter's name stands for: a version, or the checkpoint that was switched to."""
        current = self.current()
        if self._switched is not None and self._switched[0] == current:
            return self._switched[1]
        return "" if current is None else current.label

    def number_of(self, version: int | str) -> int:
        """Return the number of a version that is named by its number, as NAME@NUMBER or by its checkpoint.

        Raises NotFound.
        """
        if isinstance(version, int):
            return version
        plain = version.removeprefix(f"{self._name}@")
        if plain.isascii() and plain.isdigit() and len(plain) < 12:
            return int(plain)
        if version not in self._named_versions:
            raise NotFound(f"there is no version or checkpoint {version[:64]!a}", code="version_not_found")
        return self._named_versions[version]

    async def retire(self, ref: AdapterRef) -> None:
        """Forget a version, so that new requests cannot name it. Requests that run under it finish."""
        await self._front.models.retire(ref)

    def version_of(self, ref: AdapterRef | None) -> int | None:
        """Return the number of the trained adapter's version with this content; 0 for the base, None for others."""
        if ref is None:
            return 0
        if ref.name == self._name:
            return ref.version
        same = (e.ref.version for e in self._front.models.registry.holders(ref.digest) if e.name == self._name)
        return max(same, default=self._numbers.get(ref.digest))

    # -- checkpoints --------------------------------------------------------------------------------------------

    def is_checkpoint(self, name: str) -> bool:
        """Return whether a checkpoint is served by this name, or is being saved to be, or may be automatically.

        Upper and lower case are not told apart, because many disks do not tell them apart in folder names.
        """
        if not name.casefold().startswith(self._prefix.casefold()):
            return False
        folded = name.casefold()[len(self._prefix) :]
        return folded in self._named or folded in self._naming or AUTOMATIC.fullmatch(folded) is not None

    def check_checkpoint_name(self, name: str, param: str) -> None:
        """Raise InvalidRequest naming `param` unless a new checkpoint may be saved and served as `name`."""
        if name in (BEST, LATEST, "journal") or ".corrupt" in name or name.isdigit():  # A number would name a version.
            raise InvalidRequest(f"{param} may not be {name[:64]!r}", param=param)
        if name.casefold() in self._named | self._naming:
            raise Conflict(f"there is a checkpoint {name[:64]!r}", param=param, code="checkpoint_exists")
        with renamed(name=param):
            self._front.models.rules.check_free(f"{self._prefix}{name}")

    @contextlib.contextmanager
    def naming(self, name: str | None, param: str) -> Iterator[None]:
        """Reserve `name` for the checkpoint that the block saves. None reserves nothing.

        Raises InvalidRequest naming `param` when no checkpoint may have this name.
        """
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
        """Record that this content has been saved in the checkpoint `name`, and serve the checkpoint by its name."""
        names = {name: AdapterSource(folder)}
        with contextlib.suppress(TandemError):  # There may be no best checkpoint yet.
            best = self._source(BEST)
            if manifests.read(Path(best.path)).digest == info.digest:
                names[BEST] = best
        for each, source in names.items():
            self._named.add(each.casefold())
            if GUARDS.fullmatch(each):
                continue
            self._named_versions[each] = self.version_of(AdapterRef(each, 0, info.digest)) or 0
            if self._takes(each):
                self._front.models.saved(self._name, f"{self._prefix}{each}", source, info)

    async def read_checkpoints(self) -> Sequence[CheckpointInfo]:
        """Return the checkpoints in the folder, and reserve their names."""
        known: set[str] | None = None
        while known != self._named:  # What was saved meanwhile may be missing from what was read.
            known = set(self._named)
            found = await asyncio.to_thread(Checkpoints(Path(self._folder), 1).list)
        self._named = {info.name.casefold() for info in found}
        return found

    async def list_checkpoints(self) -> None:
        """Serve each checkpoint in the folder under its name, and no others."""
        async with self._listing:  # Listings run one after the other, so that the newest one decides.
            await self._list_checkpoints()

    async def _list_checkpoints(self) -> None:
        """Bring the served checkpoints in line with the folder. The caller holds the lock."""
        models, before = self._front.models, frozenset(self._checkpoints)
        listed = await self.read_checkpoints()
        found = [info for info in listed if not info.guards]
        names = {info.name for info in found}
        self._numbers = {info.digest: info.version for info in listed if info.version}
        self._named_versions = {info.name: info.version for info in found}
        models.shelve(self._name, {i.version: self._source(i.name) for i in listed if i.version})
        for info in found:
            source, served = self._source(info.name), f"{self._prefix}{info.name}"
            if info.name not in self._checkpoints:
                if self._takes(info.name):
                    models.registry.announce(served, source)
            elif models.registry.is_read(served) and models.registry.entry(served).ref.digest != info.digest:
                # The name now stands for other content, as "best" does after a better update.
                models.saved(self._name, served, source, await self._front.client.load_adapter(source))
            await _drop_replaced(models, served)
        for name in before - names:
            self._checkpoints.discard(name)
            await models.unsaved(f"{self._prefix}{name}", self._source(name))

    def _takes(self, name: str) -> bool:
        """Return whether the checkpoint is served under its name, and record the name if it is."""
        try:
            if name not in self._checkpoints:
                self._front.models.rules.check_free(f"{self._prefix}{name}")
        except InvalidRequest as e:
            log("checkpoint not served", checkpoint=name, reason=e.message)
            return False
        self._checkpoints.add(name)
        return True

    def _source(self, name: str) -> AdapterSource:
        return AdapterSource(os.path.join(self._folder, name))

    @abstractmethod
    def updated(self, report: UpdateReport, trajectories: Sequence[Trajectory]) -> None:
        """Report an update that has ended."""

    @abstractmethod
    def relist(self) -> None:
        """Start to bring the served checkpoints in line with the folder."""

    # -- prompts and samples ------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a text, or of a conversation with the beginning of the answer.

        Only threads other than the loop's may call this.
        """
        if isinstance(prompt, str):
            return tuple(self._front.tokens_of(prompt, "prompt"))
        with renamed(messages="prompt"):
            return tuple(self._front.from_thread(self._front.prompts.chat(prompt)))

    async def sample(
        self, prompts: Sequence[tuple[int, ...]], n: int, params: SamplingParams, adapter: AdapterRef | None
    ) -> list[list[Sampled]]:
        """Return `n` completions of each prompt, which are generated in learning's share of the device."""
        prompted = Prompted(
            prompts,
            [adapter] * len(prompts),
            structs.replace(params, logprobs=0),
            n,
            version=self.version_of(adapter) or 0,
            background=True,
        )
        token = CLIENT.set(hash((self._name, "learning")))  # Learners take turns as clients do.
        try:
            answers = await self._front.answers(prompted)
        finally:
            CLIENT.reset(token)
        done = [_sampled(answer) for answer in answers.choices]
        return [done[k * n : (k + 1) * n] for k in range(len(prompts))]


async def _drop_replaced(models: Models, name: str) -> None:
    """Forget the versions of a checkpoint's name but the current one, whose content its folder has now."""
    for entry in models.registry.versions(name) if models.registry.is_read(name) else ():
        if entry is not models.registry.entry(name):
            await models.retire(entry.ref)


def _sampled(answer: Answer) -> Sampled:
    """Return a completion in the learner's form. Raises EngineError for a choice that has not ended."""
    assert answer.reason
    return Sampled(
        tokens=tuple(answer.tokens),
        logprobs=tuple(lp.sampled for lp in answer.logprobs),
        model_logprobs=tuple(lp.model for lp in answer.logprobs),
        versions=tuple(answer.versions),
        text=answer.text,
        finish_reason=answer.reason,
    )


class Learning(Serving, Tasks):
    """The learner of one adapter, with its jobs and its tasks in the background, on the front's event loop."""

    def __init__(self, front: Front, own: Own, shared: SharedDatabase, clock: Callable[[], float] = time.time):
        """Create the learner, which `bring_up` starts. `clock` returns the time in Unix seconds."""
        Serving.__init__(self, front, own)
        Tasks.__init__(self)
        config = own.config
        self.clock = clock
        self.reporting = Reporting(config, front.tokenizer.decode, partial(said, front.tokenizer))
        self.learner = OnlineLearner(config, front.client, self, clock=clock, shared=shared, models=RewardModels(front))
        self.jobs = Jobs(clock)
        training, trains = config.rl_training, config.engine.duty.mode != "inference_only"
        self.hub = Hub() if training.atropos_api and trains else None
        """Atropos' trajectory API, if this server is it."""
        self.feed: Feed | None = None
        """The task that takes batches from Atropos' API, if there is one here or elsewhere."""
        if trains and (self.hub is not None or training.atropos_url):
            source = Client(training.atropos_url) if self.hub is None else OwnTrainer(self.hub)
            self.feed = Feed(config, front.client, self.learner, source, clock)
        self.environment: Environment | None = None
        """The environment of verifiers that is played, if the settings name one."""
        if training.verifiers and trains:
            self.environment = Environment(config, front.client, self.learner, self.current, clock)
        self._feeding: list[asyncio.Task[None]] = []
        self.outcomes: Counter[str] = Counter(dict.fromkeys(get_args(Outcome), 0))
        """The numbers of this server's updates, by their outcomes."""
        self._pace: deque[tuple[float, int]] = deque()  # (time, number of updates until then)
        self._was_up = False
        self._closed = False

    def updated(self, report: UpdateReport, trajectories: Sequence[Trajectory]) -> None:
        """Count and report an update that has ended."""
        self.outcomes[report.outcome] += 1
        self.reporting.updated(report, trajectories)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens without control tokens."""
        return self._front.tokenizer.decode(tokens)

    async def bring_up(self) -> None:
        """Bring the trainer of a new engine to the learner's state, and serve the checkpoints.

        The trainer begins with the newest checkpoint, which is served, and repeats the later updates while requests
        run. Until a version that only the last engine had has been made again, requests for it get EngineUnavailable.
        Errors are raised at the first start only. Later, serving continues, and the learner tries again at its next
        use.
        """
        try:
            await self.learner.bring_up()
            await self.list_checkpoints()
        except TandemError as e:
            if not self._front.client.has_engine:
                raise  # The engine has ended, and its client starts another one.
            if not self._was_up:
                raise TandemError(e.message, param=e.param, code=e.code) from e
            log("learning could not go on", error=e.message)
        if not self._was_up:
            self._was_up = True
            self._pace.append((self.clock(), self.learner.status().updates))
            self.learner.start()
            if self.feed is not None:
                self._feeding.append(asyncio.create_task(self.feed.run()))

    def play(self, url: str) -> None:
        """Start to play the environment, if there is one, against this server, which answers at `url`."""
        if self.environment is not None:
            self._feeding.append(asyncio.create_task(self.environment.run(url)))

    def saved(self, info: AdapterInfo, folder: str, name: str) -> None:
        """Record a new checkpoint, then serve those in the folder."""
        super().saved(info, folder, name)
        self.relist()

    def relist(self) -> None:
        """Start to bring the served checkpoints in line with the folder, in the background."""
        self.spawn(self.list_checkpoints())

    async def close(self) -> None:
        """Cancel all jobs and tasks and end the learner. The next start continues from the database."""
        if self._closed:
            return
        self._closed = True
        await self.jobs.close()
        for task in self._feeding:
            task.cancel()
        await asyncio.gather(*self._feeding, return_exceptions=True)
        await self.cancel()
        await self.learner.close()
        await asyncio.to_thread(self.reporting.close)

    @property
    def stats(self) -> EngineStats:
        """The counters and gauges of the engine's last report."""
        return self._front.client.stats

    def updates_per_second(self) -> float:
        """Return the updates per second over the last PACE_SECONDS, or since the start if that is later."""
        now = (self.clock(), self.learner.status().updates)
        while len(self._pace) > 1 and now[0] - self._pace[1][0] >= PACE_SECONDS:
            self._pace.popleft()
        self._pace.append(now)
        seconds, updates = now[0] - self._pace[0][0], now[1] - self._pace[0][1]
        return max(updates, 0) / seconds if seconds > 0 else 0.0

    def check_up(self) -> OnlineLearner:
        """Return the learner. Raises EngineUnavailable while the engine is not ready."""
        self._front.client.check_ready()
        return self.learner
