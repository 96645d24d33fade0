"""A GPU that is not there: everything in the package takes the device for one, and its kernels run on the CPU.

What MLX itself computes is computed by its CPU back end. Kernels are those of `shim.py`; some can be made to fail.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem.model import backend, build
from mlx_tandem.model.backend.cuda import CUDA
from mlx_tandem.model.backend.metal import METAL
from mlx_tandem.model.device import Limit
from mlx_tandem.model.kernels import checking, dialect, inplace
from mlx_tandem.model.kernels.checking import Verdict
from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Shaped, Source, Target
from mlx_tandem.model.ops import delta_net, gated_delta
from mlx_tandem.model.ops.attention import choice
from mlx_tandem.model.ops.products.tuning import Tuned
from tests.hazards.graph import flat

Around = Callable[[Source, Make], Kernel]
"""Makes a kernel of a source, by what makes right ones."""


@dataclass
class Gpu:
    """`faults` has a way of making those kernels that are not to be right, by the beginning of their names. `clock` is
    what the kernel checks at start see: so many seconds for each kernel, and for each operation of MLX's own. While
    `records` is set kernels are what MLX would compile for Metal: they can be recorded and not run."""

    make: Make
    recorded: Make
    records: bool = False
    faults: dict[str, Around] = field(default_factory=dict)
    sources: dict[tuple[str, int], Source] = field(default_factory=dict)  # made so far, by name and number of inputs
    forms: set[tuple[str, ...]] = field(default_factory=set)  # what a device's compiler would have made for the calls
    called: Counter[str] = field(default_factory=Counter)  # kernels that write inputs, while it records
    clock: float = 0.0
    kernel_seconds: float = 1e-7
    operation_seconds: float = 1e-6

    def maker(self, target: Target) -> Make:
        def make(source: Source) -> Kernel:
            self.sources[source.name, len(source.inputs)] = source
            found = [fault for name, fault in self.faults.items() if source.name.startswith(name)]
            kernel = found[0](source, self.make) if found else self.make(source)
            recorded = self.recorded(source)

            def call(
                inputs: Sequence[mx.array],
                template: Mapping[str, Constant],
                groups: tuple[int, int, int],
                threads: int,
                outputs: Sequence[Shaped],
            ) -> list[mx.array]:
                self.clock += self.kernel_seconds
                types = *(x.dtype for x in inputs), *(dtype for _, dtype in outputs)
                constants = sorted(f"{name}={value}" for name, value in template.items())
                self.forms.add((source.name, str(len(inputs)), *constants, *map(str, types)))
                if self.records:
                    self.called[source.name] += bool(source.writes)
                    return recorded(inputs, template, groups, threads, outputs)
                return kernel(inputs, template, groups, threads, outputs)

            return call

        return make

    def count(self, arrays: Any) -> None:
        """Let the time pass that MLX's operations take which make these arrays."""
        graph = io.StringIO()
        mx.export_to_dot(graph, *flat(arrays))
        self.clock += self.operation_seconds * graph.getvalue().count("rectangle")


def simulated(target: Target, limit: Limit | None = None) -> backend.Backend:
    """Return the back end of a GPU that is not there, with so much memory."""
    real = {"cuda": CUDA, "metal": METAL}[target]

    class NotThere(type(real)):  # type: ignore[misc]
        def describe(self) -> str:
            return f"a {target} GPU that is not there"

        def free_memory(self) -> Limit:
            return limit or Limit(1 << 30, "", shared=target == "metal")

    return NotThere(**{field.name: getattr(real, field.name) for field in fields(real)})


def install(target: Target, make: Make, monkeypatch: pytest.MonkeyPatch, limit: Limit | None = None) -> Gpu:
    """Have the package find a GPU of this kind for the rest of the test. Whoever calls it clears `inplace.writing` when
    the test is over."""
    gpu, there = Gpu(make, dialect.maker("metal")), simulated(target, limit)
    monkeypatch.setattr(backend, "current", lambda: there)
    monkeypatch.setattr(dialect, "maker", gpu.maker)
    monkeypatch.setattr(mx, "set_memory_limit", lambda size: 0)  # it would hold for the rest of this process
    monkeypatch.setattr(build, "tune", lambda *args, **options: Tuned())
    monkeypatch.setattr(gated_delta, "kernel", cache(gated_delta.kernel.__wrapped__))
    monkeypatch.setattr(gated_delta, "verdict", Verdict())
    monkeypatch.setattr(delta_net, "TIMED_ROWS", 1)  # emulated, larger ones would take seconds
    monkeypatch.setattr(gated_delta, "TIMED_ROWS", 1)
    monkeypatch.setattr(gated_delta, "TIMED", gated_delta.Sizes(1, 1, 32, 32))
    # Several calls in a row keep a device busy; each of an emulated kernel takes as long as the last.
    seconds = checking.seconds
    monkeypatch.setattr(checking, "seconds", lambda work, several=1: seconds(work, 1))
    inplace.writing.cache_clear()
    return gpu


def time_by_clock(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernel checks at start measure time by the clock of `gpu`."""
    evaluate = mx.eval

    def counted(*arrays: Any) -> None:
        gpu.count(list(arrays))
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    for module in (choice, checking):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: gpu.clock))
    monkeypatch.setattr(checking, "_LONG_ENOUGH", 1e-9)  # by this clock every run takes the same


def uncompilable(source: Source, make: Make) -> Kernel:
    """A kernel whose text the device's compiler does not take, which it says when the kernel is run."""

    def call(*args: Any) -> list[mx.array]:
        raise RuntimeError(f"[metal::Device] Unable to build metal library from source: {source.name}")

    return call


def instead(right: str, wrong: str) -> Around:
    """Kernels in whose text, where it has the one, the other stands."""

    def around(source: Source, make: Make) -> Kernel:
        return make(replace(source, body=source.body.replace(right, wrong)))

    return around


def slow(gpu: Gpu) -> Around:
    """Kernels that take a second each."""

    def around(source: Source, make: Make) -> Kernel:
        kernel = make(source)

        def call(*args: Any) -> list[mx.array]:
            gpu.clock += 1.0
            return kernel(*args)

        return call

    return around
