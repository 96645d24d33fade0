"""The runner of the leading rank: it sends each call to the other ranks before it does the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from mlx_tandem.config import EngineConfig
from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.engine.plan import Bytes, DeviceError, StepPlan, StepResult
from mlx_tandem.engine.ranks import messages as g
from mlx_tandem.engine.ranks.leader import RankLeader
from mlx_tandem.engine.ranks.weights import weights_digest
from mlx_tandem.errors import GroupFailed
from mlx_tandem.model import sharding
from mlx_tandem.model.choices import Choices
from mlx_tandem.model.inputs import Numbers
from mlx_tandem.model.loader import LoadedModel, first_line
from mlx_tandem.model.ops import residual
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.step.parts import Flight
from mlx_tandem.model_folder import text_settings
from mlx_tandem.types import MemoryBudget

log = logging.getLogger(__name__)


class LeadingRunner(MLXRunner):
    """A runner whose steps all ranks of a group compute. An error of the device ends the group.

    `leader` is set before the first step.
    """

    leader: RankLeader

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._launched = 0
        self._numbers: dict[int, int] = {}  # of launches, by the flight's id

    @property
    def ranks(self) -> int:
        """Number of ranks that compute the steps; blocks that are saved and loaded have the parts of all."""
        return self.leader.size

    @property
    def one_at_a_time(self) -> bool:
        """Whether a part is dispatched only when the part before it is done, on every rank."""
        return self.queue.one_at_a_time

    @one_at_a_time.setter
    def one_at_a_time(self, value: bool) -> None:
        self.leader.tell(g.OneAtATime(value))
        self.queue.one_at_a_time = value

    def launch(self, plan: StepPlan, on_built: Callable[[], None] | None = None) -> Flight:
        """Launch a step on all ranks. Raises GroupFailed."""
        if plan.uploads:
            for _, digest in plan.uploads:
                self.leader.offer(self._weights[digest])
            self.leader.forget_all_but(self._weights.keys())
        own, *others = _shares(plan, self.leader.size)
        if plan.has_step or not self.leader.is_over:
            if plan.loads:
                self.leader.tell_each([g.Launch.of(each) for each in others])
            else:
                self.leader.tell(g.Launch.of(plan))
        try:
            flight = super().launch(own, on_built)
        except DeviceError as e:
            raise self.leader.failed(f"the first rank: {e}") from e
        if plan.has_step:
            self._numbers[id(flight)] = self._launched
        self._launched += 1
        return flight

    def sample(self, handle: Flight, masks: list[list[Numbers]]) -> None:
        """Let the masked rows of the newest plan draw on all ranks. Raises GroupFailed."""
        numbers = tuple(tuple(g.Array.of(array) for array in each) for each in masks)
        self.leader.tell(g.Sample(self._numbers[id(handle)], numbers))
        try:
            super().sample(handle, masks)
        except DeviceError as e:
            raise self.leader.failed(f"the first rank: {e}") from e

    def wait(self, handle: Flight) -> StepResult:
        """Wait until a step is done on this rank, and have what all ranks have drawn compared. Raises GroupFailed."""
        self.leader.tell(g.Wait(self._numbers.pop(id(handle))))
        try:
            result = super().wait(handle)
        except DeviceError as e:
            raise self.leader.failed(f"the first rank: {e}") from e
        self.leader.compare(result.tokens)
        return replace(result, saves=self.leader.joined_saves(result.saves)) if result.saves else result

    def reset(self) -> None:
        """Drop everything in flight on all ranks."""
        self.leader.tell(g.Reset())
        self._numbers.clear()
        super().reset()


def _shares(plan: StepPlan, ranks: int) -> list[StepPlan]:
    """Return each rank's plan: a block that is loaded has the parts of all ranks, one after the other."""
    if not plan.loads:
        return [plan] * ranks
    parts = [[(block, _part(content, rank, ranks)) for block, content in plan.loads] for rank in range(ranks)]
    return [replace(plan, loads=tuple(own)) for own in parts]


def _part(content: Bytes, rank: int, ranks: int) -> Bytes:
    size = len(content) // ranks
    return content[rank * size : (rank + 1) * size]


def lead(
    runner: MLXRunner,
    leader: RankLeader,
    config: EngineConfig,
    model: LoadedModel,
    choices: Choices,
    memory: MemoryBudget,
    limits: StepLimits,
) -> None:
    """Tell the other ranks what was chosen here, and connect all ranks once each has its share of the model.

    Raises:
        ModelError: A rank cannot serve its share, or sums over the ranks are wrong.
        GroupFailed: A rank has ended.
    """
    assert isinstance(runner, LeadingRunner)
    runner.leader = leader
    weights = weights_digest(Path(config.model.path))
    leader.decide(g.Decided(msgspec.json.encode(choices), memory, limits, weights))
    shapes = shapes_of(config, model, limits)
    leader.join(shapes, lambda: connect(config, model, shapes))
    log.info("%d ranks compute together by %s", leader.size, config.parallel.mode)


def shapes_of(config: EngineConfig, model: LoadedModel, limits: StepLimits) -> tuple[tuple[int, int], ...]:
    """Return the shapes (rows, width) of sums that are checked at start: decoding rows, chunks of prompts, and more
    than two of the largest chunks.
    """
    width = int(text_settings(model.settings).get("hidden_size") or 64)
    rows = {1, 2, config.scheduler.max_num_seqs, max(1, limits.tokens // 2), limits.tokens, 2 * limits.tokens + 1}
    return tuple((each, width) for each in sorted(rows))


def available(mode: str) -> bool:
    """Return whether this MLX can connect ranks by `mode`."""
    return bool(mx.distributed.is_available(mode))


def group_of(mode: str) -> mx.distributed.Group:
    """Connect this process with the other ranks, once, and return the group.

    Raise GroupFailed if MLX cannot connect the ranks.
    """
    try:
        return mx.distributed.init(strict=True, backend=mode)
    except (RuntimeError, ValueError) as e:
        raise GroupFailed(f"MLX cannot connect the ranks by {mode}: {first_line(e)}") from e


MEETING_BYTES = 512
"""Most bytes that the first rank says when ranks meet."""


def meet(mode: str, said: bytes) -> bytes:
    """Connect this process with the other ranks, and return what the first of them passes as `said`.

    Raise GroupFailed if MLX cannot connect the ranks.
    """
    group = group_of(mode)
    own = said.ljust(MEETING_BYTES, b"\0") if group.rank() == 0 else bytes(MEETING_BYTES)
    heard: Any = mx.distributed.all_sum(mx.array(list(own), mx.int32), group=group).tolist()
    return bytes(heard).rstrip(b"\0")


def connect(config: EngineConfig, model: LoadedModel, shapes: Sequence[tuple[int, int]]) -> str:
    """Connect this rank with the others, check sums of these shapes, and have the model compute with the others from
    here on. Return what is wrong with a sum, or an empty string.

    Raise GroupFailed if MLX cannot connect the ranks.
    """
    group = group_of(config.parallel.mode)
    if group.size() != config.parallel.ranks:
        return f"MLX has connected {group.size()} ranks instead of {config.parallel.ranks}"
    problem = sharding.check_sums(group, shapes, model.dtype)
    if not problem:
        sums = sharding.join(model.module, group)
        log.info("sums over ranks are made %s", residual.join(model.module, sums))
    return problem
