"""A server that learns, of which only model, device and callers are simulated: everything else is the server's own.

A policy has a skill for each kind of prompt. It answers a prompt right with the probability sigmoid(skill - level),
where the level is how hard the prompt is. Training moves the skills along the policy gradient; a step that is too large
damages all of them. The same seed makes the same answer of versions that differ little.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from msgspec import Struct

from mlx_tandem import files
from mlx_tandem.config import Config
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.errors import EngineDied, EngineUnavailable, InvalidRequest, NotFound
from mlx_tandem.generation.adapters.model_names import Models
from mlx_tandem.generation.answers import Answer
from mlx_tandem.generation.events import Finish
from mlx_tandem.generation.front import Front
from mlx_tandem.training.live.learning import Learning
from mlx_tandem.training.live.recorder import Collect, Recorder
from mlx_tandem.training.online.serving import Sampled
from mlx_tandem.training.own_settings import own_settings
from mlx_tandem.training.store.shared import SharedDatabase
from mlx_tandem.training.trajectories import new_id, same_prompt
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, EngineStats, SamplingParams, TokenLogprob

KINDS = 3
"""Kinds of prompts, each with a skill of its own."""

LEVELS = 16
"""Levels of prompts, from the easiest to the hardest."""

HOPELESS = LEVELS
"""The level of prompts that no policy answers right."""

END, RIGHT, WRONG = 1, 2, 3
"""Tokens of answers."""

SAFE = 0.06
"""The longest step that does no damage. Beyond it, all skills lose `DAMAGE` times the rest."""

DAMAGE = 4.0

POLICY = "policy"

INFO = SimpleNamespace(max_model_len=100, micro_batch_tokens=64)
"""What an engine says of itself, as far as learning wants to know it."""


def level_of(index: int) -> float:
    """Return how hard the prompts of a level are, in logits."""
    return 50.0 if index == HOPELESS else 6.0 * index / (LEVELS - 1) - 3.0


class Weights(Struct, frozen=True):
    """A trained adapter with the state of its optimiser."""

    step: int = 0
    skills: tuple[float, ...] = (0.0,) * KINDS
    first: tuple[float, ...] = (0.0,) * KINDS  # moments
    second: tuple[float, ...] = (0.0,) * KINDS

    @property
    def digest(self) -> str:
        """The name of the content, which is the skills alone."""
        return hashlib.sha256(repr(self.skills).encode()).hexdigest()

    @property
    def info(self) -> AdapterInfo:
        """What an engine says of it."""
        return AdapterInfo(self.digest, 4, 2.0, "peft", ("q_proj",), 100, 100)

    def right(self, kind: int, level: int) -> float:
        """Return the probability of a right answer."""
        return 1.0 / (1.0 + math.exp(level_of(level) - self.skills[kind]))

    @property
    def reward(self) -> float:
        """The mean reward over all kinds and levels of prompts that can be answered."""
        return math.fsum(self.right(k, i) for k in range(KINDS) for i in range(LEVELS)) / (KINDS * LEVELS)

    def moved(self, gradient: Sequence[float], adam: AdamParams) -> Weights:
        """Return the weights after a step of Adam."""
        b1, b2, step = adam.beta1, adam.beta2, self.step + 1
        first = tuple(b1 * m + (1 - b1) * g for m, g in zip(self.first, gradient, strict=True))
        second = tuple(b2 * v + (1 - b2) * g * g for v, g in zip(self.second, gradient, strict=True))
        moves = [
            adam.learning_rate * (m / (1 - b1**step)) / (math.sqrt(v / (1 - b2**step)) + adam.eps)
            for m, v in zip(first, second, strict=True)
        ]
        damage = DAMAGE * max(max(map(abs, moves)) - SAFE, 0.0)
        skills = tuple(s + move - damage for s, move in zip(self.skills, moves, strict=True))
        return Weights(step, skills, first, second)


class Trainer:
    """The trainer of an engine."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.before: Weights | None = None
        self.gradient = [0.0] * KINDS

    def learn(self, batch: Batch) -> list[float]:
        """Add the gradient of a batch; return the logprob of each answer's first token."""
        logprobs = []
        for d in batch.data:
            kind, level = d.tokens[0] - 10, d.tokens[1] - 10
            p = self.weights.right(kind, level)
            x = float(d.tokens[d.prompt_length] == RIGHT)
            self.gradient[kind] += batch.loss.scale * d.weights[0] * (x - p) / len(batch.data)
            logprobs.append(_logprob(p, x > 0))
        return logprobs


def _logprob(p: float, right: bool) -> float:
    return math.log(max(p if right else 1.0 - p, 1e-30))


class Engine:
    """The front's end of an engine, as far as learning needs it. `kill` ends it, and `revive` starts another one.

    `point` is called wherever something could end.
    """

    def __init__(self, point: Callable[[], None]) -> None:
        self.epoch, self.state = 0, "ready"
        self.stats = EngineStats()
        self.info: Any = INFO
        self.memory: dict[str, Weights] = {}
        self.known: dict[str, AdapterSource] = {}
        self._trainers: dict[str, Trainer] = {}
        self._point = point

    def kill(self) -> None:
        """End the engine with everything in its memory."""
        self.state, self.info = "restarting", None
        self.memory, self.known, self._trainers = {}, {}, {}

    def revive(self) -> None:
        """Start another engine."""
        self.epoch += 1
        self.state, self.info = "ready", INFO

    @asynccontextmanager
    async def in_use(self, *, wakes: bool = True) -> AsyncIterator[None]:
        """Do nothing: this engine is never unloaded."""
        yield

    def check_ready(self) -> Any:
        """Return the description of the engine. Raises EngineUnavailable."""
        if self.state != "ready":
            raise EngineUnavailable("the engine is not there")
        return self.info

    def _call(self) -> None:
        self.check_ready()
        self._point()
        if self.state != "ready":
            raise EngineDied("the engine ended")

    def weights(self, ref: AdapterRef) -> Weights:
        """Return the content of a version. Raises EngineDied, EngineUnavailable and InvalidRequest."""
        self._call()
        return self.seen(ref)

    def seen(self, ref: AdapterRef) -> Weights:
        """Return the content of a version, read from its folder where it is not in memory, as an onlooker."""
        if ref.digest not in self.memory:
            if ref.digest not in self.known:
                raise InvalidRequest(f"the adapter {ref.label} is not there", param="model")
            self.memory[ref.digest] = _read(self.known[ref.digest].path)
        return self.memory[ref.digest]

    def answers(self, prompt: Sequence[int], n: int, seed: int, ref: AdapterRef) -> list[Sampled]:
        """Return answers to a prompt."""
        p = self.weights(ref).right(prompt[0] - 10, prompt[1] - 10)
        made = []
        for k in range(n):
            right = random.Random(f"{seed} {k} {tuple(prompt)}").random() < p
            logprobs = (_logprob(p, right), 0.0)
            tokens = (RIGHT if right else WRONG, END)
            made.append(Sampled(tokens, logprobs, logprobs, (ref.version,) * 2, "right" if right else "wrong"))
        return made

    def know_adapter(self, info: AdapterInfo, source: AdapterSource, pinned: bool) -> None:
        """Note a folder that has this content."""
        self.known[info.digest] = source

    def follow_adapter(self, ref: AdapterRef) -> None:
        """Do nothing: requests end before the next version comes."""

    async def load_adapter(self, source: AdapterSource, pin: bool = False) -> AdapterInfo:
        """Read a folder."""
        self._call()
        weights = _read(source.path)
        self.memory[weights.digest] = weights
        return weights.info

    async def unload_adapter(self, digest: str) -> None:
        """Forget content."""
        self._call()
        self.memory.pop(digest, None)
        self.known.pop(digest, None)

    async def open_trainer(self, spec: TrainerSpec, *, folder: str = "", digest: str = "") -> TrainerInfo:
        """Open the trainer from a folder, from content in memory, or fresh."""
        self._call()
        weights = _read(folder) if folder else Weights(0, self.memory[digest].skills) if digest else Weights()
        self._trainers[spec.name] = Trainer(weights)
        return TrainerInfo(spec.name, spec.rank, spec.alpha, (), KINDS, weights.step)

    def _trainer(self, name: str) -> Trainer:
        self._call()
        if name not in self._trainers:
            raise NotFound("there is no trainer")
        return self._trainers[name]

    async def run_pass(
        self, batches: Sequence[Batch], *, forward_only: bool = False, micro_batch_tokens: int = 0
    ) -> tuple[BatchResult, ...]:
        """Add the gradients of batches."""
        results = []
        for batch in batches:
            trainer = self._trainer(batch.trainer)
            before = list(trainer.gradient)
            own = tuple((p, 0.0) for p in trainer.learn(batch))
            if forward_only:
                trainer.gradient = before
            results.append(BatchResult(batch.trainer, 0.5, 2 * len(own), own, own))
        return tuple(results)

    async def step_trainer(self, trainer: str, adam: AdamParams, *, more: bool = False) -> StepDone:
        """Do a step of the optimiser, which can be taken back; with `more`, together with the next one."""
        own = self._trainer(trainer)
        own.before = own.before or own.weights
        own.weights = own.weights.moved(own.gradient, adam)
        norm = math.hypot(*own.gradient)
        own.gradient = [0.0] * KINDS
        return StepDone(trainer, own.weights.step, norm, True)

    async def settle_trainer(self, trainer: str, *, keep: bool) -> None:
        """Keep the last step, or take it back."""
        own = self._trainer(trainer)
        if not keep:
            own.gradient = [0.0] * KINDS
            own.weights = own.before or own.weights
        own.before = None

    async def publish_trainer(self, trainer: str) -> AdapterInfo:
        """Make a version of the trainer's weights."""
        weights = self._trainer(trainer).weights
        self.memory[weights.digest] = weights
        return weights.info

    async def save_trainer(self, trainer: str, folder: str) -> None:
        """Write the trainer's weights and its optimiser."""
        weights = self._trainer(trainer).weights
        with files.storage(Path(folder)):
            files.create(Path(folder) / "weights.json", msgspec.json.encode(weights))


def _read(folder: str) -> Weights:
    """Return the weights in a folder. Raises InvalidRequest, as an engine does for a folder that is gone."""
    try:
        return msgspec.json.decode((Path(folder) / "weights.json").read_bytes(), type=Weights)
    except FileNotFoundError as e:
        raise InvalidRequest(f"{folder} cannot be read: {e.strerror}", param="model") from e


class SimulatedLearning(Learning):
    """The learning side of a server, whose answers the simulated engine makes."""

    def __init__(self, front: Front, engine: Engine, clock: Callable[[], float]) -> None:
        (own,) = own_settings(front.config)
        super().__init__(front, own, SharedDatabase(own.database), clock)
        self._engine = engine

    def encode(self, prompt: Any) -> tuple[int, ...]:
        """Return the tokens of a text such as "2 5": a kind and a level."""
        return tuple(10 + int(word) for word in str(prompt).split())

    async def sample(
        self, prompts: Sequence[tuple[int, ...]], n: int, params: SamplingParams, adapter: AdapterRef | None
    ) -> list[list[Sampled]]:
        """Return answers to prompts."""
        assert adapter is not None
        return [self._engine.answers(prompt, n, params.seed, adapter) for prompt in prompts]


class Server:
    """One process that serves and learns."""

    def __init__(self, config: Config, clock: Callable[[], float], point: Callable[[], None]) -> None:
        self.engine = Engine(point)
        self.models = Models(config, cast(Any, self.engine))
        tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens)))
        front = SimpleNamespace(config=config, client=self.engine, models=self.models, tokenizer=tokenizer)
        self.learning = SimulatedLearning(cast(Front, front), self.engine, clock)
        self.models.rules.is_checkpoint = self.learning.is_checkpoint

    async def bring_up(self) -> None:
        """Do what the front does when an engine is ready."""
        await self.models.bring_up()
        await self.learning.bring_up()

    async def ask(self, kind: int, level: int, serial: int, n: int, seed: int) -> None:
        """Answer a request that is collected, and record the answers like the server's own routes."""
        learner = self.learning.learner
        ref = (await self.models.select(POLICY)).ref
        assert ref is not None
        prompt = (10 + kind, 10 + level, 100 + serial)
        pair = learner.choose(ref)
        params = SamplingParams(2, temperature=1.0, seed=seed)
        said = [_answer(s, k) for k, s in enumerate(self.engine.answers(prompt, n, seed, pair.first if pair else ref))]
        collect = Collect(
            adapter=POLICY,
            keep=True,
            shown=False,
            scoring=learner.rewards.check("exact_match", {"answer": "right"}),
            metadata={"answer": "right"},
            groups=(same_prompt(prompt) if n == 1 else new_id(),),
            shared=False,
            prompts=(f"{kind} {level}",),
            params=params,
            pair=pair,
        )
        await Recorder(self.learning, collect, [prompt], n).record(said)


def _answer(sampled: Sampled, choice: int) -> Answer:
    return Answer(
        texts=[sampled.text],
        tokens=list(sampled.tokens),
        logprobs=[TokenLogprob(p, p) for p in sampled.logprobs],
        versions=list(sampled.versions),
        finish=Finish(choice, "stop"),
    )
