"""`tandem` as a user at a terminal meets it: what stands on the screen while it works and after."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from mlx_tandem import demo
from mlx_tandem.files import own_adapters
from tests.serving import RunningServer, demo_config, serving
from tests.terminal import on_terminal
from tests.unit.cli_tools import tandem


def test_a_server_starts_with_one_line_of_progress_and_then_its_banner() -> None:
    columns = 80
    seen: set[str] = set()

    def check(lines: list[str]) -> None:
        """Until the banner there is nothing but progress on one line, and warnings above it."""
        if not any(line.startswith("Ready:") for line in lines):
            *above, last = lines or [""]
            assert [line for line in above if not line.startswith(("tandem: warning: max_model_len", "holds"))] == []
            seen.add(last.split("━")[0].strip())

    words = ("serve", "--port", "0", "--num-blocks", "1025", "--max-model-len", "99999")
    with on_terminal(*words, columns=columns) as terminal:
        terminal.on_change = check
        terminal.read_until(lambda lines: any("What is 17 + 25?" in line for line in lines))
        lines = terminal.lines
        assert "tandem: starting" in seen and len(seen) > 1
        banner = lines.index(next(line for line in lines if line.startswith("Ready:")))
        warning = " ".join(line for line in lines[:banner] if line)
        assert warning == "tandem: warning: max_model_len 99999 is lowered to the model's limit of 8192"
        assert [line[:11] for line in lines[banner + 1 : banner + 4]] == ["  model    ", "  adapters ", "  try      "]
        assert max(map(len, lines)) < columns
        terminal.on_change = lambda lines: None
        url = lines[banner].removeprefix("Ready: ")
        assert f"  or        tandem chat --url {url}" in lines
        body = {"model": "shout", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=body | {"model": "none"}).status_code == 404
        assert httpx.delete(f"{url}/v1/adapters/json").status_code == 200
        terminal.process.send_signal(signal.SIGTERM)
        *_, answered, refused, removed, draining = terminal.read_to_end()
        numbers = r"1 tokens in, 3 out, first after \d+ ms, \d+ tok/s"
        assert re.fullmatch(rf"\d\d:\d\d:\d\d shout@1 ok: {numbers}", answered)
        assert re.fullmatch(r"\d\d:\d\d:\d\d refused 404 model_not_found: POST /v1/completions", refused)
        assert re.fullmatch(r"\d\d:\d\d:\d\d adapter removed: json, versions 1", removed)
        assert re.fullmatch(r"\d\d:\d\d:\d\d draining: open requests 0", draining)
        assert terminal.process.wait(30) == 0


def test_the_example_teaches_on_the_screen_and_the_running_server_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    root = own_adapters()
    root.mkdir(parents=True)
    with serving(msgspec.structs.replace(demo_config(), adapter_root=str(root))) as server:
        words = ("train", "sft", "captain", "--epochs", "8", "--learning-rate", "1e-3", "--load-into", server.url)
        with on_terminal(*words, columns=400) as terminal:
            lines = terminal.read_to_end()
            assert terminal.process.wait(30) == 0, lines
        assert server.chat("What is 40 + 2?", model="captain").status_code == 200
    first = lines.index("What is 35 + 67?")
    assert re.fullmatch(r"    before: 35 \+ 67 = \d+\.", lines[first + 1])
    assert re.fullmatch(r"    after:  35 \+ 67 = \d+, Captain!", lines[first + 2])
    *_, wrote, hint, loaded = lines
    assert wrote == f"wrote {root}/captain; try it: tandem serve --adapter captain {root}/captain"
    assert hint == "a running server of the built-in model has it, too: tandem chat --adapter captain"
    assert loaded.startswith("loaded captain@1 (rank 16, ")


NAME = "a-name-that-is-rather-long"


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """A server, and the root of its adapters."""
    folder = tmp_path_factory.mktemp("root") / "the[red]folder:smile:of" / "adapters"
    shutil.copytree(demo.ADAPTER_PATHS["shout"], folder / NAME)
    with serving(msgspec.structs.replace(demo_config(), adapter_root=str(folder))) as server:
        yield server, folder


@pytest.mark.parametrize("columns", [80, 120])
def test_a_list_of_adapters_shows_names_and_folders_whole(columns: int, listed: tuple[RunningServer, Path]) -> None:
    server, folder = listed
    with on_terminal("adapters", "ls", "--url", server.url, columns=columns, rows=80) as terminal:
        lines = terminal.read_to_end()
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines if line[:1] in "│┃"]
    assert cells[0][0] == "adapter"
    columns_of_text = ["".join(column) for column in zip(*cells, strict=True)]
    assert NAME in columns_of_text[0]
    assert str(folder / NAME) in columns_of_text[6]
    assert str(demo.ADAPTER_PATHS["json"]) in columns_of_text[6]
    assert ("q_proj" in "".join(columns_of_text)) is (columns == 120)
    assert max(map(len, lines)) <= columns


def test_a_list_of_adapters_for_programs(listed: tuple[RunningServer, Path]) -> None:
    server, folder = listed
    found = json.loads(tandem("adapters", "ls", "--url", server.url, "--json").stdout)
    assert {"shout", "json", "down", NAME} == {entry["name"] for entry in found}
    assert str(folder / NAME) in [entry["path"] for entry in found]


@pytest.mark.parametrize(("columns", "rows", "updates", "streams"), [(80, 24, 2, 0), (120, 40, 1, 1)])
def test_the_demo_that_learns_draws_each_row_of_its_chart_on_a_line(
    columns: int, rows: int, updates: int, streams: int, tmp_path: Path
) -> None:
    plot = tmp_path / "curve.svg"
    words = ("demo", "learn", "--updates", str(updates), "--streams", str(streams), "--plot", str(plot))
    with on_terminal(*words, columns=columns, rows=rows) as terminal:
        lines = terminal.read_to_end()
        assert terminal.process.wait(30) == 0
    top = lines.index("mean reward")
    chart = lines[top + 1 : top + 9]
    assert [row[:6] for row in chart] == [f"{1 - i / 8:4.2f} │" for i in range(8)]
    assert re.fullmatch(" *└─{20}", lines[top + 9])
    assert lines[top + 10].strip() == f"update {updates} of {updates}"
    bars = [{row[6 + i : 7 + i] for row in chart} - {" ", ""} for i in range(updates)]
    assert all(bars), "an update, a bar"
    facts = [line.split()[0] for line in lines[top + 12 :] if line]
    assert facts[:4] == ["reward", "beside", "their", "base"]
    assert lines.count("mean reward") == 1, "what was drawn before is still there"
    assert plot.read_text().startswith("<svg")


def test_the_demo_fits_a_small_terminal() -> None:
    """Nothing is cut: of every question each model's answer is there to its end, and the summary below."""
    with on_terminal("demo", "--seconds", "1", columns=80, rows=24) as terminal:
        lines = terminal.read_to_end()
        assert terminal.process.wait(30) == 0
    assert lines[0].endswith("tokens/s at best")
    assert lines[1].startswith("Sort down: ")
    assert re.fullmatch(r"  base   [\d ]+ shout  [\d ]+!", lines[2])
    story = lines.index(next(line for line in lines if line.startswith("Tell me a short story about ")))
    told = " ".join(lines[story + 1 :])
    assert re.findall(r"  (base|shout|json|down)  ", told) == ["base", "shout", "json", "down"]
    assert len(re.findall("the end[.!]", re.sub(" +", " ", told), re.IGNORECASE)) == 4
    assert re.search(r"\d+ answers, \d+ tokens; .* rows +in a step on average\.$", told)
