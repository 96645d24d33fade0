"""Both sides of the online loop in pure Python: an engine that learns exactly the same each time, and a server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_tandem.adapters.registry import Registry
from mlx_tandem.config import CheckpointingConfig, Config, DutyConfig, EngineConfig, ModelConfig, RLTrainingConfig
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.errors import EngineDied, EngineUnavailable, NotFound
from mlx_tandem.training.online.serving import Sampled, UpdateReport
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, EngineStats, SamplingParams


class Killed(BaseException):
    """The process is gone."""


class Points:
    """Places where something can end, counted. At the one that is `at` (from 1 on; 0: none) it does: `error` is raised
    there, and at every later one until it is repaired."""

    def __init__(self, at: int = 0, error: Callable[[], BaseException] = Killed) -> None:
        self.count, self.at, self.error = 0, at, error
        self.broken = False

    def __call__(self) -> None:
        self.count += 1
        self.broken = self.broken or self.count == self.at
        if self.broken:
            raise self.error()


def info(digest: str) -> AdapterInfo:
    return AdapterInfo(digest, 4, 2.0, "peft", ("q_proj",), 100, 100)


class Trainer:
    """`shift` is what it has learned: every token is `shift` / 10 less likely than e^-1. `trained` says from what."""

    def __init__(self) -> None:
        self.step, self.shift, self.trained = 0, 0.0, ()
        self.gradients: tuple[Any, ...] = ()
        self.before: tuple[Any, ...] | None = None
        self.more = False

    @property
    def state(self) -> tuple[Any, ...]:
        return self.step, self.shift, self.trained

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.state[1:]).encode()).hexdigest()

    @property
    def logprob(self) -> float:
        return -1.0 - self.shift / 10


class Client:
    """EngineClient's learning half. `restart` is a new engine, which knows nothing."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.epoch, self.state = 0, "ready"
        self.stats = EngineStats(serving_ms=7.0, training_ms=3.0)
        self.info = SimpleNamespace(max_model_len=100, micro_batch_tokens=64)
        self.trainers: dict[str, Trainer] = {}
        self.memory: dict[str, tuple[Any, ...]] = {}  # adapters
        self.pinned: set[str] = set()  # digests of those that stay there
        self.followed: list[AdapterRef] = []
        self.passes: list[Batch] = []
        self.rates: list[float] = []
        self.sampler_offset = 0.0  # how far the sampler's logprobs are off
        self.broken_gradients = False

    def check_ready(self) -> Any:
        return self.info

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        yield

    def wake(self) -> None:
        pass

    def restart(self) -> None:
        self.epoch += 1
        self.points.broken = False
        self.trainers, self.memory, self.pinned = {}, {}, set()

    async def _call(self) -> None:
        self.points()
        await asyncio.sleep(0)

    def _get(self, name: str) -> Trainer:
        if name not in self.trainers:
            raise NotFound("there is no trainer")
        return self.trainers[name]

    async def open_trainer(self, spec: TrainerSpec, *, folder: str = "", digest: str = "") -> TrainerInfo:
        await self._call()
        trainer = Trainer()
        if folder:
            said = json.loads((Path(folder) / "trainer.json").read_text())
            trainer.step, trainer.shift, trainer.trained = said["step"], said["shift"], tuple(said["trained"])
        elif digest:
            _, trainer.shift, trainer.trained = self.memory[digest]
        self.trainers[spec.name] = trainer
        self.points()
        return TrainerInfo(spec.name, spec.rank, spec.alpha, (), 1, trainer.step)

    async def run_pass(
        self, batches: Sequence[Batch], *, forward_only: bool = False, micro_batch_tokens: int = 0
    ) -> tuple[BatchResult, ...]:
        await self._call()
        results = []
        for batch in batches:
            trainer = self._get(batch.trainer)
            own = tuple((trainer.logprob,) * len(d.weights) for d in batch.data)
            if not forward_only:
                self.passes.append(batch)
                trainer.gradients += tuple(d.tokens[-1] for d in batch.data)
            results.append(BatchResult(batch.trainer, 0.5, sum(len(o) for o in own), own, own))
        self.points()
        return tuple(results)

    async def step_trainer(self, trainer: str, adam: AdamParams, *, more: bool = False) -> StepDone:
        await self._call()
        own = self._get(trainer)
        gradients, own.gradients = own.gradients, ()
        if self.broken_gradients:
            return StepDone(trainer, own.step, math.nan, False)
        own.before = own.before if own.more and own.before is not None else own.state
        own.more = more
        own.step, own.shift, own.trained = own.step + 1, own.shift + adam.learning_rate, own.trained + gradients
        self.rates.append(adam.learning_rate)
        self.points()
        return StepDone(trainer, own.step, 1.0, True)

    async def settle_trainer(self, trainer: str, *, keep: bool) -> None:
        await self._call()
        own = self._get(trainer)
        if not keep:
            own.gradients = ()
            if own.before is not None:
                own.step, own.shift, own.trained = own.before
        own.before, own.more = None, False
        self.points()

    async def publish_trainer(self, trainer: str) -> AdapterInfo:
        await self._call()
        own = self._get(trainer)
        self.memory[own.digest] = own.state
        self.points()
        return info(own.digest)

    async def save_trainer(self, trainer: str, folder: str) -> None:
        await self._call()
        own = self._get(trainer)
        said = {"step": own.step, "shift": own.shift, "trained": own.trained}
        (Path(folder) / "trainer.json").write_text(json.dumps(said))
        self.points()

    async def load_adapter(self, source: AdapterSource, pin: bool = False) -> AdapterInfo:
        await self._call()
        said = json.loads((Path(source.path) / "trainer.json").read_text())
        trainer = Trainer()
        trainer.step, trainer.shift, trainer.trained = said["step"], said["shift"], tuple(said["trained"])
        self.memory[trainer.digest] = trainer.state
        if pin:
            self.pinned.add(trainer.digest)
        return info(trainer.digest)

    def follow_adapter(self, ref: AdapterRef) -> None:
        self.followed.append(ref)


class Server:
    """`Serving` over the real registry. A sampled answer is `answer(shift of the adapter)`."""

    def __init__(
        self, client: Client, answer: Callable[[float], str] = lambda shift: "no", name: str = "policy"
    ) -> None:
        self.name = name
        self.registry = Registry()
        self.client, self.answer = client, answer
        self.retired: list[int] = []
        self.saves: list[str] = []
        self.relisted = 0
        self.seeds: list[int] = []
        self.expected: list[int] = []

    def publish(self, info: AdapterInfo, source: AdapterSource | None, number: int = 0) -> AdapterRef:
        self.client.points()
        return self.registry.publish(self.name, source, info, number=number)

    def reserve(self, info: AdapterInfo, number: int = 0) -> AdapterRef:
        self.client.points()
        return self.registry.reserve(self.name, info, number)

    def expect(self, numbers: Sequence[int]) -> None:
        self.expected = list(numbers)

    async def recovered(self) -> None:
        self.expected = []

    def count_from(self, number: int) -> None:
        self.registry.count_from(self.name, number)

    def current(self) -> AdapterRef | None:
        return self.registry.entry(self.name).ref if self.registry.is_read(self.name) else None

    async def retire(self, ref: AdapterRef) -> None:
        await asyncio.sleep(0)
        self.registry.retire(ref)
        self.retired.append(ref.version)

    def updated(self, report: UpdateReport, trajectories: Sequence[Trajectory]) -> None:
        pass

    def saved(self, info: AdapterInfo, folder: str, name: str) -> None:
        self.client.points()
        self.saves.append(name)

    def relist(self) -> None:
        self.client.points()
        self.relisted += 1

    async def sample(
        self, prompts: Sequence[tuple[int, ...]], n: int, params: SamplingParams, adapter: AdapterRef | None
    ) -> list[list[Sampled]]:
        if self.client.state != "ready":
            raise EngineUnavailable("not ready")
        assert adapter is not None
        await asyncio.sleep(0)
        self.client.points()
        self.seeds.append(params.seed)
        _, shift, _ = self.client.memory[adapter.digest]
        logprobs = (-1.0 - shift / 10,)
        made = []
        for _ in prompts:
            text = self.answer(shift)
            versions = (adapter.version,)
            made.append([Sampled((k + 1,), logprobs, logprobs, versions, text if k % 2 == 0 else "") for k in range(n)])
        return made

    def encode(self, prompt: str | list[dict[str, str]]) -> tuple[int, ...]:
        return tuple(map(ord, str(prompt)))


async def nothing(*_: object) -> None:
    """Take over nothing."""


def died() -> EngineDied:
    return EngineDied("the engine ended")


def config(
    folder: Path, *, interval: int = 1000, keep: int = 100, mode: str = "inference_and_training", **training: Any
) -> Config:
    settings: dict[str, Any] = {
        "enabled": True,
        "update_frequency": 4,
        "learning_rate": 0.5,
        "max_staleness": 100,
        "guard_prompts": 0,
    }
    return Config(
        EngineConfig(ModelConfig("base"), duty=DutyConfig(mode=mode)),  # type: ignore[arg-type]
        rl_training=RLTrainingConfig(**settings | training),
        checkpointing=CheckpointingConfig(str(folder), interval, keep),
    )


def group(number: int, *, version: int = 1, rewards: Sequence[float] = (0.0, 1.0), p: float = -1.0) -> list[Trajectory]:
    """Its completions end with tokens that no other has."""
    return [
        Trajectory(f"t{number}-{i}", f"g{number}", (1, 2), (100 * number + i,), (p,), (p,), (version,), 1.0, reward)
        for i, reward in enumerate(rewards)
    ]
