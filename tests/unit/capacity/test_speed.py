"""The predicted times of `tandem plan` beside measured ones: this engine's on GPUs, and published ones of Macs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.capacity.machines import CHIPS
from mlx_tandem.capacity.speed import decode_ms, prompt_seconds
from mlx_tandem.capacity.work import StepWork
from mlx_tandem.cli.bench.hybrid_shape import HYBRIDS
from mlx_tandem.cli.bench.shapes import SHAPES
from mlx_tandem.config import EngineConfig, ModelConfig
from mlx_tandem.model.workload import workload

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
CARDS = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}


def engine_steps() -> Iterator[tuple[str, str, str, int, float, int, float]]:
    """The (name, model, card, rows, context, adapters, milliseconds) of every decode step of the engine's results."""
    for file in sorted(RESULTS.glob("engine-*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        card, model = CARDS.get(result["engine"]["device"]), result["model"]
        if card is None:
            continue
        sides = {"tandem": 0, "same": 1, "mixed": result["load"]["adapters"]}
        for step in result["results"]:
            for side, adapters in sides.items():
                if side in step and (adapters == 0 or model not in HYBRIDS):
                    context = step["prompt_tokens"] + step[side]["generated_before"]
                    name = f"{file.stem}-{step['batch']}x{step['prompt_tokens']}-{side}"
                    yield name, model, card, step["batch"], context, adapters, step[side]["step_ms"]


STEPS = list(engine_steps())


@pytest.fixture(scope="module")
def work_of(tmp_path_factory: pytest.TempPathFactory):
    """Returns the work of a model of published.json or of a built-in shape, in so many bits."""

    @cache
    def made(model: str, bits: int, group: int = 64, head: int = 0) -> StepWork:
        config: dict[str, Any] = PUBLISHED["models"].get(model, {"shape": model})
        if "shape" in config:
            config = (SHAPES | HYBRIDS)[config["shape"]].config(32768, [1])
        settings = config | {"torch_dtype": "bfloat16", "eos_token_id": 1}
        if bits < 16:
            settings["quantization"] = {"bits": bits, "group_size": group}
        if head:
            settings["quantization"]["lm_head"] = {"bits": head, "group_size": group}
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(settings))
        return workload(EngineConfig(ModelConfig(str(folder), dtype="bfloat16", random_weights=True)), 16)

    return made


def off(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def test_the_committed_results_have_both_cards_and_adapters() -> None:
    assert {step[2] for step in STEPS} == {"h100", "h200"} and len(STEPS) >= 40
    assert {step[3] for step in STEPS} >= {1, 16, 64, 128, 256} and any(step[5] > 1 for step in STEPS)


def test_gpu_steps_are_predicted_within_20_percent(work_of) -> None:
    """Those of hybrids under adapters are left out: the page says how far they are off."""
    wrong = {
        name: round(found, 3)
        for name, model, card, rows, context, adapters, measured in STEPS
        if abs(found := off(decode_ms(work_of(model, 16), CHIPS[card], rows, context, adapters), measured)) > 0.2
    }
    assert not wrong


def test_gpu_prompts_are_predicted_within_20_percent(work_of) -> None:
    measured = json.loads((RESULTS / "decode_steps-h200.json").read_text(encoding="utf-8"))
    runs = [run for run in measured["runs"] if "every prompt token the same" not in run["what"]]
    found = [prompt for run in runs for prompt in run["prompts"]]
    assert {(prompt["rows"], prompt["length"]) for prompt in found} == {(1, 8192), (16, 1024)}
    work, chip = work_of("qwen3-8b", 16), CHIPS["h200"]
    for prompt in found:
        milliseconds = 1e3 * prompt["rows"] * prompt_seconds(work, chip, prompt["length"])
        shared = prompt["rows"] - -(-prompt["rows"] * prompt["length"] // 4096)  # steps have 4,096 tokens of prompts
        milliseconds -= max(shared, 0) * decode_ms(work, chip, 1, 0)
        assert abs(off(milliseconds, prompt["ms"])) < 0.2, prompt


def test_published_steps_of_macs_are_predicted_within_25_percent(work_of) -> None:
    wrong = {}
    for row in PUBLISHED["decode"]:
        work = work_of(row["model"], row["bits"], row["group"])
        found = off(decode_ms(work, CHIPS[row["chip"]], 1, row["context"]), 1e3 / row["tokens_per_s"])
        if abs(found) > 0.25:
            wrong[f"{row['engine']} {row['model']} in {row['bits']} bits on {row['chip']}"] = round(found, 3)
    assert not wrong
    assert len(PUBLISHED["decode"]) >= 25 and len({row["chip"] for row in PUBLISHED["decode"]}) >= 6


def test_published_prompts_of_macs_are_predicted_within_25_percent(work_of) -> None:
    for row in PUBLISHED["prompts"]:
        seconds = prompt_seconds(work_of(row["model"], row["bits"], row["group"]), CHIPS[row["chip"]], row["tokens"])
        assert abs(off(seconds, row["tokens"] / row["tokens_per_s"])) < 0.25, row


def test_a_group_divides_the_work_and_pays_for_its_sums(work_of) -> None:
    work, chip = work_of("qwen3-8b", 16), CHIPS["h200"]
    one, two = (decode_ms(work, chip, 64, 1024, devices=n) for n in (1, 2))
    sums = 2 * 36 * 0.008
    assert one / 2 + sums < two < one / 2 + sums + 36 * 0.040
    assert 0.55 < prompt_seconds(work, chip, 8192, 2) / prompt_seconds(work, chip, 8192) < 0.65


def test_two_gpus_are_predicted_within_20_percent(work_of) -> None:
    """Steps of the base, and a prompt: the host limits steps with adapters where this was measured."""
    measured = json.loads((RESULTS / "tensor_parallel-8b-h200.json").read_text(encoding="utf-8"))
    work, chip = work_of("qwen3-8b", 16), CHIPS["h200"]
    for step in measured["ranks"]["results"]:
        speed = statistics.median(found["decode_tokens_per_s"] for found in step["rounds"]["tandem"])
        milliseconds = decode_ms(work, chip, step["batch"], step["prompt_tokens"] + 32, devices=2)
        assert abs(off(milliseconds, 1e3 * step["batch"] / speed)) < 0.2, step["batch"]
    speed = statistics.median(found["prefill_tokens_per_s"] for found in step["rounds"]["tandem"])
    assert abs(off(prompt_seconds(work, chip, 8192, 2), 8192 / speed)) < 0.2


def test_only_the_picked_experts_are_read(work_of) -> None:
    work = work_of("Qwen3-30B-A3B", 4)
    one, all_of_them = work.weights_read(1), work.weights_read(1000)
    assert one == pytest.approx(work.read_bytes + work.expert_bytes * 8 / 128)
    assert all_of_them == pytest.approx(work.read_bytes + work.expert_bytes, rel=1e-6)
    assert 2.9e9 < work.row_parameters < 3.3e9  # A3B


def test_a_window_bounds_what_a_row_reads(work_of) -> None:
    work = work_of("Gemma-3-27B", 4)
    whole = sum(group.token_bytes for group in work.attention if not group.window)
    assert work.cached(8192) - work.cached(4096) == pytest.approx(4096 * whole)


def test_weights_have_the_bits_that_a_folder_says_of_each(work_of) -> None:
    work, wide = work_of("qwen3-8b", 4), work_of("qwen3-8b", 4, 64, 8)
    assert wide.read_bytes - work.read_bytes == work.head_parameters * 4 // 8
