"""How much of a machine's memory the server takes, beside other programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.config import EngineConfig, ModelConfig
from mlx_tandem.engine.budget import Needs, StepCost, divide
from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend, device
from mlx_tandem.model.device import UnifiedMemory, parse_vm_stat

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[3]
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                5000.
Pages active:                            300000.
Pages inactive:                          200000.
Pages speculative:                        10000.
Pages throttled:                              0.
Pages wired down:                        150000.
Pages purgeable:                           3000.
"Translation faults":                 123456789.
Pages copy-on-write:                    1234567.
"""


def test_pages_that_can_be_had_without_swapping_count() -> None:
    assert parse_vm_stat(VM_STAT) == 16384 * (5000 + 200_000 + 10_000 + 3000)
    assert parse_vm_stat(VM_STAT.replace("Pages purgeable:                           3000.\n", "")) == 16384 * 215_000


SAMPLES = {file.stem: file.read_text(encoding="utf-8") for file in (ROOT / "scripts" / "vm_stat").glob("*.txt")}


def test_files_that_are_cached_can_be_dropped() -> None:
    """Another program has read 11 GB of a model's file, which macOS keeps as long as nobody needs the memory."""
    files = 11 * 10**9 // 16384
    said = VM_STAT.replace("300000.", f"{300_000 + files}.") + f"File-backed pages:{files + 20_000:>30}.\n"
    found, before = parse_vm_stat(said), parse_vm_stat(VM_STAT)
    assert found is not None and before is not None
    assert 0.75 * files * 16384 < found - before < (files + 20_000) * 16384


def test_pages_of_files_that_were_read_ahead_count_once() -> None:
    assert parse_vm_stat(f"{VM_STAT}File-backed pages:{10_000:>30}.\n") == parse_vm_stat(VM_STAT)


@pytest.mark.parametrize("name", SAMPLES)
def test_on_macs_in_use_no_more_is_counted_than_there_is(name: str) -> None:
    """Pages that are wired or compressed never count, nor those of programs that are active."""
    counts = {kind: int(n) for kind, n in re.findall(r"^(?:Pages )?([\w -]+):\s+(\d+)\.$", SAMPLES[name], re.MULTILINE)}
    found = parse_vm_stat(SAMPLES[name])
    assert found is not None
    pages = found // 16384
    assert pages >= counts["free"] + counts["File-backed pages"]
    both = counts["free"] + counts["inactive"] + counts["speculative"] + counts["purgeable"]
    assert both < pages <= both + counts["File-backed pages"]
    assert pages <= counts["free"] + counts["purgeable"] + counts["active"] + counts["inactive"] + counts["speculative"]


def test_a_refusal_says_how_to_take_more_than_is_left() -> None:
    with pytest.raises(ModelError, match="--memory-limit-gb"):
        divide(CONFIG, 1000, needs(16 * 10**9), reason="other programs leave 2.0 GB of 17.2 GB", shared=True)
    with pytest.raises(ModelError) as refused:
        divide(CONFIG, 1000, needs(16 * 10**9), reason="as --memory-limit-gb allows")
    assert "whatever other programs use" not in refused.value.message


@pytest.mark.parametrize("said", ["", "Pages free: 1.", VM_STAT.replace("Pages free", "Pages lost"), "\0" * 100])
def test_other_output_is_not_believed(said: str) -> None:
    assert parse_vm_stat(said) is None


@given(
    st.integers(4, 512),
    st.floats(0.5, 1.0),
    st.one_of(st.none(), st.floats(0.0, 1.0)),
)
def test_a_mac_is_never_filled(gib: int, recommended: float, free: float | None) -> None:
    total = gib * GIB
    available = None if free is None else int(total * free)
    limit = UnifiedMemory(total, int(total * recommended), available).limit()
    assert 0 <= limit.size <= 0.9 * recommended * total
    assert limit.size + device.HOST_BYTES <= total
    if available is not None:
        assert limit.size <= max(available - device.RESERVE - device.HOST_BYTES, 0)
    assert limit.shared and limit.reason


def test_a_busy_mac_is_said_to_be_one() -> None:
    idle = UnifiedMemory(16 * GIB, 11 * GIB, 14 * GIB).limit()
    busy = UnifiedMemory(16 * GIB, 11 * GIB, 6 * GIB).limit()
    assert busy.size < idle.size
    assert "macOS recommends" in idle.reason
    assert "other programs leave" in busy.reason


def test_the_user_s_limit_holds() -> None:
    assert backend.current().memory_limit(1.5).size == 1_500_000_000
    assert "--memory-limit-gb" in backend.current().memory_limit(1.5).reason


def needs(weights: int, parameters: int = 0, slots: int = 0) -> Needs:
    step = StepCost(token=1000, pair=10, position=100, sampling=1000, tokens=256, rows=4, longest=1024)
    return Needs(weights, step, 0, slots, 1 << 20, 1024, parameters)


CONFIG = EngineConfig(ModelConfig(path=""))


@given(st.integers(0, 8 * GIB), st.integers(0, 8 * GIB))
def test_on_shared_memory_nothing_grows_into_the_rest(weights: int, slots: int) -> None:
    limit = 12 * GIB
    own = divide(CONFIG, limit, needs(weights, slots=slots), shared=True)
    left = limit - own.weights - own.activations
    assert own.adapter_slots == min(slots, (limit - weights) // 4) or own.adapter_slots <= left
    assert own.total <= limit
    assert limit - own.total >= 0.39 * (left - own.adapter_slots) - (1 << 20)


@pytest.mark.parametrize(("room", "bits"), [(9.2, 8), (7.2, 6), (6.0, 5), (5.2, 4), (4.1, 3)])
def test_a_model_that_is_too_large_is_refused_with_the_size_that_fits(room: float, bits: int) -> None:
    """8 billion parameters in bfloat16; a quantised one has half a bit more for its scales."""
    with pytest.raises(ModelError, match=rf"the same model in {bits} bits \(about [\d.]+ GB\)"):
        divide(CONFIG, int(room * 1e9), needs(16 * 10**9, 8 * 10**9))


def test_where_no_quantisation_fits_the_room_is_said() -> None:
    with pytest.raises(ModelError, match=r"a model whose weights take at most 0?\.?\d"):
        divide(CONFIG, int(1.5e9), needs(16 * 10**9, 8 * 10**9))
    with pytest.raises(ModelError, match="a smaller model"):
        divide(CONFIG, 1000, needs(16 * 10**9, 8 * 10**9))
