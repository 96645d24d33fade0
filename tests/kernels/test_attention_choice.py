"""Which back end of attention is taken, with kernels that really run: compiled for the CPU by the shim."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest

from mlx_tandem.errors import ModelError
from mlx_tandem.model.cache.kvformat import Asks, LayerShape, RowFormat
from mlx_tandem.model.ops.attention import choice as attention
from mlx_tandem.model.ops.attention.cache import LayerKernels
from mlx_tandem.model.ops.attention.division import LIVE_FLOATS, Division, live_floats, shorter, start
from mlx_tandem.model.ops.attention.fused import Fused
from tests.kernels import shim
from tests.kernels.broken import Broken

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

FORM = RowFormat(1, 32, mx.float32)
SHAPES = [LayerShape(FORM, FORM, Asks(2, False))] * 2
HALVES = RowFormat(1, 32, mx.float16)
START = start("metal", HALVES)
BLOCK = 16

choose = partial(attention.choose, rival=lambda *step: 1e-5)


@pytest.fixture(scope="module")
def right() -> Fused:
    return Fused("cuda", shim.maker())


def faster(shape: LayerShape, attention: LayerKernels | None, block_size: int, rows: int, context: int) -> float:
    return 1e-5 if attention else 2e-5


def test_what_is_right_and_faster_is_taken(right: Fused) -> None:
    made = choose("auto", SHAPES, BLOCK, [], [right], faster)
    assert made.name == "cuda" and all(made.layers)
    assert made.reason == (
        "faster: 10 µs a layer for 16 x 1,024 tokens, portable takes 20, contiguous keys 10; "
        "10 µs a layer for 1 x 16,384 tokens, portable takes 20, contiguous keys 10"
    )


def _contiguous(factor: float, shape: LayerShape, rows: int, context: int) -> float:
    """Return the seconds of MLX's attention over contiguous keys: long for many rows, `factor` times ours for one."""
    return 1e-5 * (factor if rows == 1 else 9.0)


def test_the_log_warns_where_mlx_is_faster_over_contiguous_keys(right: Fused, caplog: pytest.LogCaptureFixture) -> None:
    """In one of the steps; the kernels are used all the same, since a pool has no contiguous keys."""
    caplog.set_level("WARNING")
    for factor, warns in ((1.0, False), (0.95, False), (0.8, True)):
        caplog.clear()
        rival = partial(_contiguous, factor)
        made = attention.choose("auto", SHAPES, BLOCK, [], [right], faster, rival)
        assert made.name == "cuda" and "contiguous keys 90; " in made.reason
        assert ("slower than MLX's over contiguous keys" in caplog.text) == warns


def test_attention_over_contiguous_keys_is_timed_for_the_steps_that_decide(right: Fused) -> None:
    asked = []

    def rival(shape: LayerShape, rows: int, context: int) -> float:
        asked.append((shape, rows, context))
        return 1.0

    attention.choose("auto", SHAPES, BLOCK, [], [right], faster, rival)
    assert asked == [(SHAPES[0], *step) for step in attention.STEPS]
    sinks = LayerShape(FORM, FORM, Asks(4, True))
    assert 0 < attention.contiguous_seconds(sinks, 2, 100) < 60


def test_what_is_slower_is_not(right: Fused) -> None:
    def seconds(shape: LayerShape, attention: LayerKernels | None, block: int, rows: int, context: int) -> float:
        return 1e-5 if attention is None else 2e-5

    made = choose("auto", SHAPES, BLOCK, [], [right], seconds)
    assert made.name == "portable" and not any(made.layers)
    assert made.reason.startswith("cuda is not used: slower: ")


class Device:
    """A device on which one division of attention's work is `gain` times as fast as any other."""

    def __init__(self, best: Division, gain: float):
        self.best, self.gain = best, gain

    def __call__(self, shape: LayerShape, attention: LayerKernels | None, block: int, rows: int, context: int) -> float:
        if attention is None:
            return 2e-5
        return 1e-5 / (self.gain if attention.attention.division == self.best else 1.0)


@pytest.mark.parametrize(
    ("target", "best"),
    [
        ("cuda", Division(99, dense=True, grouped=True)),
        ("cuda", Division(1584, dense=True, grouped=True)),
        ("metal", Division(24, queries=2, depth=4)),
        ("metal", Division(96, queries=1, depth=2)),
        ("metal", Division(384, queries=4, depth=2)),
        ("metal", Division(384, queries=8, depth=1, narrow=True)),
    ],
)
def test_the_work_is_divided_as_is_fastest_here(right: Fused, target: str, best: Division) -> None:
    def steps_towards(shape: LayerShape, kernels: LayerKernels | None, block: int, rows: int, context: int) -> float:
        if kernels is None:
            return 1.0
        now = kernels.attention.division
        return 0.1 * 2.0 ** sum((now.blocks != best.blocks, (now.queries, now.depth) != (best.queries, best.depth)))

    shapes = [LayerShape(HALVES, HALVES, Asks(2, False))] * 2
    made = choose("auto", shapes, BLOCK, [], [replace(right, name=target)], steps_towards)
    assert made.name == target and {a.attention.division for a in made.layers if a} == {best}


def test_another_division_has_to_be_worthwhile(right: Fused) -> None:
    for gain, taken in ((1.03, START), (1.2, Division(96, queries=2, depth=2))):
        device = Device(Division(96, queries=2, depth=2), gain)
        shapes = [LayerShape(HALVES, HALVES, Asks(2, False))]
        made = choose("auto", shapes, BLOCK, [], [replace(right, name="metal")], device)
        assert {a.attention.division for a in made.layers if a} == {taken}


def test_a_division_that_is_wrong_is_not_taken(right: Fused) -> None:
    # A block that answers one query alone hides all keys.
    broken = replace(right, name="metal", make=Broken(right.make, "k < end && k <=", "k < end && QUERIES != 1 && k <="))
    shapes = [LayerShape(HALVES, HALVES, Asks(2, False))]
    made = choose("auto", shapes, BLOCK, [], [broken], Device(Division(96, queries=1, depth=2), 9.0))
    assert {a.attention.division for a in made.layers if a} == {START}


def test_a_division_that_does_not_compile_costs_the_others_nothing(right: Fused) -> None:
    class Fails(Device):
        def __call__(self, shape: LayerShape, attention: LayerKernels | None, *step: int) -> float:
            if attention is not None and attention.attention.division.queries == 1:
                raise RuntimeError("this kernel does not compile")
            return super().__call__(shape, attention, *step)

    shapes = [LayerShape(HALVES, HALVES, Asks(2, False))]
    made = choose("auto", shapes, BLOCK, [], [replace(right, name="metal")], Fails(START, 1.0))
    assert made.name == "metal" and {a.attention.division for a in made.layers if a} == {START}


@pytest.mark.parametrize(("body", "other"), [("(k) <= p ?", "(k) < p ?"), ("mma(", "no_such_word(")])
def test_a_kernel_for_groups_that_is_wrong_or_does_not_compile_costs_the_others_nothing(
    right: Fused, body: str, other: str
) -> None:
    form = RowFormat(2, 64, mx.bfloat16)
    shapes = [LayerShape(form, form, Asks(4, False))]
    for candidate, groups in ((right, True), (replace(right, make=Broken(right.make, body, other)), False)):
        (kernels,) = choose("cuda", shapes, 16, [], [candidate]).layers
        assert kernels is not None
        assert (kernels.grouped is not None) == kernels.attention.division.grouped == groups
        # Nor does it come back with another division.
        wider = Device(Division(99, dense=True, grouped=groups), 9.0)
        (kernels,) = choose("auto", shapes, 16, [], [candidate], wider).layers
        assert kernels is not None and kernels.attention.division == wider.best
        assert (kernels.grouped is not None) == groups


@pytest.mark.parametrize(
    ("asks", "window", "groups"),
    [
        (Asks(4, False), None, True),
        (None, None, True),
        (Asks(4, True), None, False),
        (Asks(4, False, casts=True), None, False),
        (Asks(4, False), 32, False),
    ],
)
def test_groups_are_for_layers_without_window_sinks_and_casts(
    right: Fused, asks: Asks | None, window: int | None, groups: bool
) -> None:
    form = RowFormat(2, 64, mx.bfloat16)
    kernels = right.kernels(LayerShape(form, form, asks, window), 16)
    assert (kernels.grouped is not None) == groups
    for unreadable in (
        RowFormat(2, 64, mx.bfloat16, 8, 32),
        RowFormat(2, 64, mx.float32),
        RowFormat(2, 96, mx.float16),
    ):
        assert right.kernels(LayerShape(unreadable, unreadable, asks, window), 16).grouped is None
    assert right.kernels(LayerShape(form, form, asks, window), 8).grouped is None


def test_what_metal_begins_with_fits_its_registers() -> None:
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        for bits in (0, 4, 8):
            form = RowFormat(8, 128, dtype, bits, 64)
            first = start("metal", form)
            for division in (first, *shorter(first, "metal", form)):
                assert live_floats(form, division) <= LIVE_FLOATS
    assert live_floats(HALVES, Division(96, depth=2)) > LIVE_FLOATS


@pytest.mark.parametrize(
    ("body", "other", "says"),
    [
        ("k <= position", "k < position", "wrong by"),
        ("BLOCK + KEY(t, u) % BLOCK;", "BLOCK + KEY(t, u + 1) % BLOCK;", "wrong by"),
        ("kv_heads * GROUP;", "kv_heads * GROUP +;", "does not compile"),
    ],
)
def test_what_is_broken_is_not(right: Fused, body: str, other: str, says: str) -> None:
    broken = replace(right, make=Broken(right.make, body, other))
    made = choose("auto", SHAPES, BLOCK, [], [broken], faster)
    assert made.name == "portable" and not any(made.layers)
    assert made.reason.startswith("cuda is not used: ") and says in made.reason
    with pytest.raises(ModelError, match="attention by 'cuda' is not possible: cuda is not used") as e:
        choose("cuda", SHAPES, BLOCK, [], [broken], faster)
    assert e.value.param == "attention_backend"


def test_windows_are_checked(right: Fused) -> None:
    broken = replace(right, make=Broken(right.make, "k > position - window", "k > position - window - 1"))
    assert choose("auto", SHAPES, BLOCK, [], [broken], faster).name == "cuda"
    assert choose("auto", SHAPES, BLOCK, [50], [broken], faster).name == "portable"


def test_tables_that_begin_with_a_window_are_checked(right: Fused) -> None:
    broken = replace(right, make=Broken(right.make, "/ BLOCK - passed]", "/ BLOCK]"))
    assert choose("auto", SHAPES, BLOCK, [], [broken], faster).name == "cuda"
    assert choose("auto", SHAPES, BLOCK, [50], [broken], faster).name == "portable"
    assert choose("auto", SHAPES, BLOCK, [50, 1024], [right], faster).name == "cuda"


def test_the_next_one_is_tried(right: Fused) -> None:
    broken = Fused("metal", Broken(right.make, "k <= position", "k < position"))
    assert choose("auto", SHAPES, BLOCK, [], [broken, right], faster).name == "cuda"


def test_what_is_asked_for_is_taken_without_a_race(right: Fused) -> None:
    assert choose("portable", SHAPES, BLOCK, [], [right], faster).name == "portable"
    made = choose("cuda", SHAPES, BLOCK, [], [right])
    assert made.name == "cuda" and made.reason == "asked for"


def test_what_is_not_there_cannot_be_asked_for() -> None:
    with pytest.raises(ModelError, match="'metal' is not possible: it needs another device"):
        choose("metal", SHAPES, BLOCK, [], [])
    assert choose("auto", SHAPES, BLOCK, [], []).reason == "this device has no other"


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (LayerShape(FORM, FORM), "layers that compute attention by themselves"),
        (LayerShape(FORM, replace(FORM, dim=64), Asks(2, False)), "keys and values of different shapes"),
        (LayerShape(replace(FORM, dim=40), replace(FORM, dim=40), Asks(2, False)), "heads of 40 numbers"),
    ],
)
def test_layers_that_no_kernel_reads_stay_portable(right: Fused, shape: LayerShape, why: str) -> None:
    made = choose("auto", [shape] * 2, BLOCK, [], [right], faster)
    assert (made.name, made.reason) == ("portable", f"the model has {why}")
    with pytest.raises(ModelError, match=why):
        choose("cuda", [shape] * 2, BLOCK, [], [right], faster)
    mixed = choose("auto", [shape, *SHAPES], BLOCK, [], [right], faster)
    assert mixed.name == "cuda" and [a is not None for a in mixed.layers] == [False, True, True]
