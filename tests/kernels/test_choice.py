"""Which back end of attention is taken, with kernels that really run: compiled for the CPU by the shim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_tandem.errors import ModelError
from mlx_tandem.model.attention.fused import Fused
from mlx_tandem.model.cache.kvcache import Asks, LayerKernels, LayerShape
from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.kernel_checks import attention as choice
from mlx_tandem.model.kernel_checks.attention import choose
from tests.kernels import shim
from tests.kernels.broken import Broken

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

FORM = RowFormat(1, 32, mx.float32)
SHAPES = [LayerShape(FORM, FORM, Asks(2, False))] * 2
BLOCK = 16


@pytest.fixture
def right(tmp_path: Path) -> Fused:
    return Fused("cuda", shim.maker(tmp_path))


def faster(shape: LayerShape, attention: LayerKernels | None, block_size: int) -> float:
    return 1e-5 if attention else 2e-5


def test_what_is_right_and_faster_is_taken(right: Fused) -> None:
    made = choose("auto", SHAPES, BLOCK, [], [right], faster)
    assert made.name == "cuda" and all(made.layers)
    assert made.reason == "faster: 10 µs a step and layer, portable takes 20"


def test_what_is_slower_is_not(right: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "ROWS", 2)
    monkeypatch.setattr(choice, "CHAIN", 2)
    made = choose("auto", SHAPES, BLOCK, [], [right])  # really timed: fibres lose to MLX
    assert made.name == "portable" and not any(made.layers)
    assert made.reason.startswith("cuda is not used: slower: ")


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
