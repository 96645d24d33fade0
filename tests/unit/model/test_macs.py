"""Starts on Macs that nobody here has, decided by the code that a real one runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mlx_tandem.capacity.machines import SYSTEM
from mlx_tandem.cli.bench.shapes import write_model
from mlx_tandem.config import DutyConfig, EngineConfig, ModelConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model import build as build_module
from mlx_tandem.model.build import build
from mlx_tandem.training.device import pace

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "macs.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("macs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["macs"] = module
    spec.loader.exec_module(module)
    return module


macs = _load()
STARTS = list(zip(macs.MACS, macs.SERVED, strict=True))


def test_the_page_has_what_the_code_decides() -> None:
    assert macs.page() == macs.PAGE.read_text(encoding="utf-8"), "run: python scripts/macs.py"


@pytest.mark.parametrize(("mac", "served"), STARTS, ids=[mac.name for mac, _ in STARTS])
def test_model_adapters_pool_and_system_fit(mac: object, served: tuple[str, int]) -> None:
    decided = macs.decide(mac, *served)
    memory, total = decided.memory, mac.total  # type: ignore[attr-defined]
    assert memory.adapter_slots == memory.adapter_slots_wanted, "eight adapters of rank 16 have their slots"
    assert decided.pool_tokens >= 4096
    assert decided.everything + SYSTEM <= total
    assert decided.everything <= 0.75 * total
    assert decided.slice_ms <= max(decided.decode_ms, pace.LEAST_MS) or decided.micro_batch == pace.SIZES[0]
    assert decided.chunk >= 64, "a step of prompts is worth reading the weights for"


@pytest.mark.parametrize("learns", [False, True])
def test_learning_has_its_memory_too(learns: bool) -> None:
    mac = next(mac for mac in macs.MACS if mac.gib == 32)
    memory = macs.decide(mac, "4B", 4, learns=learns).memory
    assert bool(memory.learning) == learns
    assert memory.total <= memory.limit


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac = next(mac for mac in macs.MACS if mac.gib == 16)
    path = write_model(tmp_path / "model", macs._SIZES["8B"], weights=False)
    monkeypatch.setattr(build_module, "read_weights", lambda *_: pytest.fail("weights were read"))
    config = EngineConfig(ModelConfig(str(path), "bfloat16", random_weights=True), duty=DutyConfig())
    with macs.simulated(mac), pytest.raises(ModelError, match=r"the same model in \d bits \(about [\d.]+ GB\)"):
        build(config, {}, lambda stage, fraction: None)


@pytest.mark.parametrize(
    ("per_token_ms", "step_ms", "tokens"),
    [
        (0.001, 5.0, 512),
        (0.1, 50.0, 256),
        (0.1, 60.0, 512),
        (1.0, 80.0, 64),
        (10.0, 80.0, 64),
        (0.1, 1.0, 64),
        (0.3, 254.0, 256),
    ],
)
def test_slices_are_as_short_as_a_step(per_token_ms: float, step_ms: float, tokens: int) -> None:
    asked = []

    def slowest(n: int) -> float:
        asked.append(n)
        return n * per_token_ms

    assert pace.micro_batch_tokens(slowest, step_ms, 512) == tokens
    assert asked == [256], "one size is timed"
