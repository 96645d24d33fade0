"""What is compiled at once, and when, where kernels are compiled ahead of MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem.engine.cost import CostModel
from mlx_tandem.model import build, kernel_checks
from mlx_tandem.model.cache.kvformat import Asks, LayerShape, RowFormat
from mlx_tandem.model.choices import Kept
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.dialect import Constant, Kernel, Shaped, Source
from mlx_tandem.model.kernels.nvrtc import Unit
from mlx_tandem.model.ops.attention import choice as attention
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.ops.sampling import choice as sampling
from mlx_tandem.model.ops.sampling.sampler import MLX_PICKERS, Pickers
from tests import tiny_models
from tests.engine.mlx_engine import make_engine
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")


class Forms:
    """Makes kernels that run on the CPU, and notes in which order their forms were first called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.together: set[object] = set()
        self.alone: set[object] = set()
        self._is_together = False
        self._make = shim.maker()
        monkeypatch.setattr(dialect, "compile_together", self.compile_together)

    def compile_together(self, calls: Callable[[], None]) -> None:
        self._is_together = True
        calls()
        self._is_together = False

    def __call__(self, source: Source) -> Kernel:
        kernel = self._make(source)

        def call(
            inputs: Sequence[mx.array],
            template: Mapping[str, Constant],
            groups: tuple[int, int, int],
            threads: int,
            outputs: Sequence[Shaped],
        ) -> list[mx.array]:
            types = *(str(x.dtype) for x in inputs), *(str(dtype) for _, dtype in outputs)
            form = source.name, str(sorted(template.items(), key=str)), types
            if form not in self.together:
                (self.together if self._is_together else self.alone).add(form)
            return kernel(inputs, template, groups, threads, outputs)

        return call


def test_all_forms_of_attention_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = Forms(monkeypatch)
    form = RowFormat(2, 64, mx.bfloat16)
    shape = LayerShape(form, form, Asks(4, sinks=False))
    found = attention.choose("cuda", [shape], 16, (), [Fused("cuda", forms)])
    assert found.layers[0] is not None
    assert len(forms.together) > 4 and not forms.alone


def test_all_forms_that_pick_tokens_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = Forms(monkeypatch)

    def seconds(pickers: Pickers, dtype: mx.Dtype, vocabulary: int) -> sampling.Seconds:
        return sampling.Seconds(*[2.0 if pickers is MLX_PICKERS else 1.0] * 3)

    found = sampling.choose(mx.bfloat16, 500, [forms], seconds)
    assert found.chosen.truncated is not None
    assert len(forms.together) > 4 and not forms.alone


def test_a_start_compiles_while_weights_are_read_and_waits_before_it_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A first start and a later one."""
    events: list[str] = []

    class Modules:
        def begin(self, units: Iterable[Unit], slow: Iterable[Unit]) -> None:
            events.append("begin" if list(units) and not list(slow) else "begin something else")

        def wait(self, *, slow: bool) -> None:
            events.append("wait for all" if slow else "wait")

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (events.append(name), function(*args, **kwargs))[1]

    monkeypatch.setattr(dialect, "compiled_modules", Modules)
    monkeypatch.setattr(build, "read_weights", noted("read", build.read_weights))
    monkeypatch.setattr(kernel_checks, "prepare", noted("prepared", kernel_checks.prepare))
    monkeypatch.setattr(kernel_checks, "examine", noted("examine", kernel_checks.examine))
    kept = Kept(tmp_path / "choices")
    first = ["begin", "read", "prepared", "wait", "examine", "wait for all", "examine"]
    for order in (first, ["begin", "read", "wait for all", "prepared", "examine"]):
        events.clear()
        make_engine(tiny_models.make(tmp_path / "model", "llama"), num_blocks=12, kept=kept).built.warm_up(CostModel())
        assert events == order
