"""Checks of every kernel: how long this device's compiler takes for it, and whether its results are right.

A start checks only the kernels that its model uses. This module checks the kernels of all models, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.errors import ModelError
from mlx_tandem.model.cache.kvformat import Asks, LayerShape, RowFormat
from mlx_tandem.model.kernels import dialect, inplace
from mlx_tandem.model.kernels.checking import checked
from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Shaped, Source, Target
from mlx_tandem.model.ops import gated_delta, mlp, residual
from mlx_tandem.model.ops.attention import choice
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.ops.lora import choice as lora
from mlx_tandem.model.ops.lora.kernel import LoraKernels
from mlx_tandem.model.ops.mlp import SwiGLU
from mlx_tandem.model.ops.residual import AddNorm, Norm
from mlx_tandem.model.ops.sampling import choice as sampling
from mlx_tandem.model.ops.sampling.draw import GumbelMax, TruncatedDraw

HALVES = (mx.float16, mx.bfloat16)

BLOCK_SIZE = 16

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 128

VOCABULARY = 1000

WIDTH = 512
"""Numbers of a hidden state."""


class Tried(NamedTuple):
    """The result of one kernel's check."""

    name: str
    forms: int
    """The number of different kernels that were compiled for it."""

    seconds: float
    """Seconds of the first calls of these kernels. Compiling takes nearly all of this time."""

    problem: str
    """Why the kernel must not be used; empty if it may."""


def tried(target: Target, make: Make | None = None) -> Iterator[Tried]:
    """Yield the result of each kernel's check for `target`. `make` makes the kernels, by default for this device."""
    make = make or dialect.maker(target)
    for name, check in _checks(target).items():
        calls = FirstCalls(make)
        problem = check(calls)
        yield Tried(name, calls.forms, calls.seconds, problem)


class FirstCalls:
    """A wrapper of a maker of kernels that times the first call of each form of a kernel.

    A form is a kernel with certain constants and types of inputs and outputs. Its first call compiles it.
    """

    def __init__(self, make: Make):
        self._make = make
        self.forms = 0
        self.seconds = 0.0

    def __call__(self, source: Source) -> Kernel:
        """Return the kernel of a source, whose first calls are timed."""
        kernel = self._make(source)
        seen: set[tuple[object, ...]] = set()

        def call(
            inputs: Sequence[mx.array],
            template: Mapping[str, Constant],
            groups: tuple[int, int, int],
            threads: int,
            outputs: Sequence[Shaped],
        ) -> list[mx.array]:
            types = *(array.dtype for array in inputs), *(dtype for _, dtype in outputs)
            form = *(str(each) for each in sorted(template.items(), key=str)), *(str(dtype) for dtype in types)
            if form in seen:
                return kernel(inputs, template, groups, threads, outputs)
            seen.add(form)
            mx.eval(list(inputs))
            started = time.perf_counter()
            made = kernel(inputs, template, groups, threads, outputs)
            mx.eval(made)
            self.seconds += time.perf_counter() - started
            self.forms += 1
            return made

        return call


def _checks(target: Target) -> dict[str, Callable[[Make], str]]:
    """Return the checks by the kernels' names. A check returns what is wrong; empty if the kernel may be used."""
    found: dict[str, Callable[[Make], str]] = {"store": inplace.problem}
    for dtype in HALVES:
        for bits in (0, 8):
            name = f"attention {str(dtype).rpartition('.')[2]}" + (f", {bits} bits" if bits else "")
            form = RowFormat(KV_HEADS, HEAD_DIM, dtype, bits, 64 if bits else 0)
            shape = LayerShape(form, form, Asks(HEADS, sinks=False))
            found[name] = lambda make, shape=shape: _attention(target, make, shape)  # type: ignore[misc]
    shapes = [lora.Shape(WIDTH, (WIDTH,) * members) for members in (1, 2, 3)]
    found["adapters"] = _by(lambda make: lora.wrong(LoraKernels(make), shapes, mx.bfloat16))
    dtypes = (mx.bfloat16, mx.float32)
    found["draws"] = _by(lambda make: sampling.wrong(GumbelMax(make), dtypes, VOCABULARY))
    found["truncated draws"] = _by(lambda make: sampling.wrong_truncated(TruncatedDraw(make), dtypes, VOCABULARY))
    found["swiglu"] = lambda make: mlp.problem(SwiGLU(make), (WIDTH,), mx.bfloat16)
    norm = Norm(mx.ones(WIDTH, mx.bfloat16), 1e-6)
    found["add and norm"] = lambda make: residual.problem(AddNorm(make), norm)
    return found | {"gated delta rule": gated_delta.problem}


def _by(wrong: Callable[[Make], str]) -> Callable[[Make], str]:
    """Return a check that returns the result of `wrong`, or the reason why the kernel could not be run."""
    return lambda make: checked("a kernel", lambda: wrong(make), lambda reason: reason)


def _attention(target: Target, make: Make, shape: LayerShape) -> str:
    """Return why the kernels of attention cannot be used for layers of this shape; empty if they can."""
    try:
        choice.choose(target, [shape], BLOCK_SIZE, (), [Fused(target, make)])
    except ModelError as e:
        return e.message
    return ""
