"""`tandem plan` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem import demo
from mlx_tandem.capacity.machines import Machine, machine
from mlx_tandem.cli.bench.shapes import SHAPES
from mlx_tandem.model import backend
from mlx_tandem.model.backend.elsewhere import elsewhere
from tests.fake_hub import fake_hub
from tests.unit.cli_tools import tandem, tandem_process

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def planned(*options: str) -> dict[str, Any]:
    done = tandem("plan", *options, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_text_fits_a_terminal_and_says_what_fits() -> None:
    done = tandem("plan", "--machine", "m4-max-64", "--bits", "4", "--learn")
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for part in ("memory", "weights", "activations", "learning", "adapter slots", "keys and values", "an adapter"):
        assert re.search(rf"^{part} +[\d.,]+ [MG]B", done.stdout, re.M), part
    assert "8 of rank 16 on every linear" in done.stdout and "a trainer of rank 16" in done.stdout
    rows = re.findall(r"^ *(\d+) +([\d.]+) +([\d,]+) +(\d+) +([\d.]+) +([\d,]+)$", done.stdout, re.M)
    assert [int(row[0]) for row in rows] == [1, 16, 64]
    assert "a prompt of 8,192 tokens takes" in done.stdout


def test_the_memory_of_a_card_is_divided_as_a_start_there_has_divided_it() -> None:
    """A start on an H200 with the same settings but for the slots' rank, whose budget is in the results."""
    measured = json.loads((RESULTS / "engine-8b.json").read_text(encoding="utf-8"))["engine"]
    found = planned("--machine", "h200", "--rank", "64")
    assert found["limit"] == measured["memory"]["limit"]
    assert found["adapter_slots"] == measured["memory"]["adapter_slots"]
    assert found["work"]["parameters"] == measured["parameters"]
    assert found["weights"] == measured["memory"]["weights"]
    assert sum(group["token_bytes"] for group in found["work"]["attention"]) == measured["kv_bytes_per_token"]
    assert abs(found["pool"] / measured["memory"]["pool"] - 1) < 0.01


def test_two_devices_hold_what_one_does_not(tmp_path: Path) -> None:
    settings = SHAPES["qwen3-8b"].config(32768, [1])
    settings |= {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    folder = str(tmp_path)
    alone = tandem("plan", "--model", folder, "--machine", "h100")
    assert alone.returncode == 1 and not alone.stdout
    assert re.fullmatch(
        r"tandem: the device has 84.47 GB for this server \(what an NVIDIA H100 has free\).*\n", alone.stderr
    )
    both = planned("--model", folder, "--machine", "h100", "--tensor-parallel-size", "2")
    assert both["devices"] == 2 and both["weights"] < both["limit"] == machine("h100").free
    assert both["streams"]["1024"] > 0


def test_learning_and_narrow_keys_change_what_fits() -> None:
    plain = planned("--machine", "m3-ultra-96")
    learns = planned("--machine", "m3-ultra-96", "--learn")
    narrow = planned("--machine", "m3-ultra-96", "--kv-bits", "8")
    assert learns["learning"] > plain["learning"] == 0
    assert learns["pool_tokens"] < plain["pool_tokens"] < 0.6 * narrow["pool_tokens"]


def test_more_streams_have_more_states_and_lines_stay_short() -> None:
    """Of a hybrid, whose states are made for so many streams."""
    few, many = (
        planned("--model", "qwen3.5-9b", "--machine", "h200", "--max-num-seqs", rows)["streams"]["1024"]
        for rows in ("64", "256")
    )
    assert few < many
    done = tandem("plan", "--model", "qwen3.5-9b", "--machine", "h200", "--max-num-seqs", "256")
    assert max(map(len, done.stdout.splitlines())) <= 80 and "at most 256 run at once" in " ".join(done.stdout.split())


def test_this_machine_is_the_default_and_has_no_speed_where_it_is_in_no_table(monkeypatch) -> None:
    done = tandem("plan", "--model", str(demo.MODEL_PATH))
    assert done.returncode == 0, done.stderr
    assert "machine         CPU, " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("speed           unknown for this device; --machine")


def test_this_machine_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    class H200(type(elsewhere(machine("h200")))):  # type: ignore[misc]
        def describe(self) -> str:
            return "NVIDIA H200"

    here = elsewhere(machine("h200"))
    monkeypatch.setattr(backend, "current", lambda: H200(**vars(here)))
    assert planned()["speed"]["bandwidth_gb_s"] == 4800


def test_of_a_hub_id_the_description_alone_is_fetched(tmp_path: Path) -> None:
    with fake_hub({"org/tiny": demo.MODEL_PATH}) as hub:
        done = tandem_process(
            "plan", "--model", "org/tiny", "--machine", "m1-8", "--json", env=hub.environment(tmp_path)
        )
        assert done.returncode == 0, done.stderr
        assert hub.files_asked() == {"config.json"}
    found = json.loads(done.stdout)
    assert found["work"] == planned("--model", str(demo.MODEL_PATH), "--machine", "m1-8")["work"]


@pytest.mark.parametrize(
    ("options", "flag", "hint"),
    [
        (("--machine", "m9"), "--machine", "m4-max-64"),
        (("--machine", "m4-max"), "--machine", "m4-max-128"),
        (("--model", "nowhere"), "--model", "nowhere"),
        (("--machine", "h200", "--tensor-parallel-size", "3"), "--tensor-parallel-size", "32 query heads"),
        (("--machine", "h200", "--tensor-parallel-size", "16"), "--tensor-parallel-size", "8 key heads"),
        (("--tensor-parallel-size", "0"), "--tensor-parallel-size", "1"),
        (("--bits", "3"), "--bits", "0 or 4 or 8"),
        (("--bits", "4", "--model", str(demo.MODEL_PATH)), "--bits", "built-in shape"),
        (("--kv-bits", "2"), "--kv-bits", "8 or 16"),
        (("--rank", "0"), "--rank", "1"),
        (("--adapters", "-1"), "--adapters", "0"),
        (("--context", "0"), "--context", "1"),
    ],
)
def test_a_wrong_option_is_named(options: tuple[str, ...], flag: str, hint: str) -> None:
    done = tandem("plan", *options)
    assert done.returncode == 2 and not done.stdout
    assert flag in done.stderr and hint in done.stderr


@pytest.mark.parametrize("name", ["m4-max-64", "h200"])
def test_a_plan_for_elsewhere_ends_with_the_block(name: str) -> None:
    before, there = backend.current(), elsewhere(machine(name))
    with backend.planning_for(there):
        assert backend.current() is there
    assert backend.current() is before
    assert isinstance(machine(name), Machine)
