"""Learning in the engine's loop without a device: trainers whose slices are written down, and what is sent to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, LossConfig, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.engine.plan import Wait
from mlx_tandem.errors import NotFound
from mlx_tandem.types import Request
from tests.engine.front import Front, adapter


@dataclass
class Slices:
    """Trainers without a device. A pass is as many slices as it has batches; all of it is written down in `done`."""

    done: list[str] = field(default_factory=list)
    fail: dict[str, BaseException] = field(default_factory=dict)  # by what would be written down
    open_: dict[str, int] = field(default_factory=dict)  # name -> version of its weights
    writing: threading.Event = field(default_factory=threading.Event)
    may_write: threading.Event = field(default_factory=threading.Event)
    watch: Callable[[], None] = lambda: None
    calls: list[str] = field(default_factory=list)  # slices of passes launched and waited for; others may write here
    launched: int = 0  # slices of passes
    waited: int = 0

    def __post_init__(self) -> None:
        self.may_write.set()

    def _note(self, what: str) -> None:
        self.watch()
        self.done.append(what)
        if what in self.fail:
            raise self.fail[what]

    def _wait(self, slice_: int) -> None:
        self.waited += 1
        self.calls.append(f"read slice {slice_}")
        if f"wait {slice_}" in self.fail:
            raise self.fail[f"wait {slice_}"]

    def _version(self, name: str) -> int:
        if name not in self.open_:
            raise NotFound(f"there is no trainer {name}", param="trainer", code="trainer_not_found")
        return self.open_[name]

    def required_bytes(self, spec: TrainerSpec, folder: str) -> int:
        return spec.rank

    def open(self, spec: TrainerSpec, folder: str, weights: AdapterWeights | None) -> TrainerInfo:
        self._note(f"open {spec.name} {folder}{weights.info.digest if weights else ''}")
        self.open_[spec.name] = 0
        return TrainerInfo(spec.name, spec.rank, spec.alpha, (), 1, 0)

    def close(self, name: str) -> None:
        self._version(name)
        del self.open_[name]

    def run(
        self, batches: Sequence[Batch], forward_only: bool, micro_batch_tokens: int
    ) -> Generator[Wait, None, tuple[BatchResult, ...]]:
        self._version(batches[0].trainer)

        def slices() -> Generator[Wait, None, tuple[BatchResult, ...]]:
            for i, _ in enumerate(batches):
                self._note(f"slice {i}")
                self.launched += 1
                self.calls.append(f"slice {i}")
                yield lambda i=i: self._wait(i)
            return tuple(BatchResult(b.trainer, 1.0, 0, (), ()) for b in batches)

        return slices()

    def step(self, name: str, adam: AdamParams, more: bool = False) -> Generator[Wait, None, StepDone]:
        self._note(f"step {name}")
        self.open_[name] = self._version(name) + 1
        return StepDone(name, self.open_[name], 1.0, True)
        yield lambda: None

    def settle(self, name: str, keep: bool) -> None:
        self._note(f"settle {name} {keep}")

    def publish(self, name: str) -> Callable[[], AdapterWeights]:
        made = adapter(f"{name}{self._version(name)}")
        return lambda: made if name != "wide" else AdapterWeights(structs.replace(made.info, rank=16), {})

    def snapshot(self, name: str, optimizer: bool = True) -> Callable[[str], None]:
        version = self._version(name)

        def write(folder: str) -> None:
            self.writing.set()
            assert self.may_write.wait(60)
            self._note(f"write {name}{version} {folder}")

        return write

    def drop_gradients(self, name: str) -> None:
        self.done.append(f"drop {name}")


def open_trainer(call: int, name: str = "p", **more: Any) -> m.OpenTrainer:
    return m.OpenTrainer(call, TrainerSpec(name, 8, 16.0), **more)


def a_pass(call: int, slices: int = 3) -> m.ForwardBackward:
    return m.ForwardBackward(call, (Batch("p", (), LossConfig()),) * slices)


def background(r: Request) -> Request:
    return structs.replace(r, background=True)


def owe(front: Front) -> None:
    """So much that learning may go next, whatever the clock says."""
    front.duty.may_train(True, True)
    front.duty.note_serving(1e6)


def failures(front: Front) -> list[tuple[int, str]]:
    return [(x.call, x.code) for x in front.got(m.CallFailed)]
