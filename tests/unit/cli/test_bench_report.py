"""`tandem bench report`: the block that a machine's owner pastes into an issue."""

from __future__ import annotations

import re
from pathlib import Path

from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from tests.unit.cli_tools import tandem


def test_the_block_has_memory_and_speed_and_no_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "somebody" / "own-model", SHAPES["0.13m"])
    secret = {"SOME_TOKEN": "0.13m-is-no-secret"}
    done = tandem("bench", "report", str(folder), "--repeats", "1", env=secret)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("### tandem bench report: ")
    assert "Model own-model: qwen3, " in done.stdout
    assert "somebody" not in done.stdout
    rows = re.findall(
        r"^\| (\d+ × [\d,]+) \| ([\d,.]+) \| ([\d,.]+) \| [\d.]+ \| [\d,]+ \|$", done.stdout, re.MULTILINE
    )
    assert [row[0] for row in rows] == ["1 × 64", "16 × 64", "1 × 1,024"]
    assert re.search(r"^\| \| (\d+\.\d\d \| ){6}\S", done.stdout, re.MULTILINE), "the division of memory"
    assert "learning: micro-batches of 128 tokens" in done.stdout


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    done = tandem("bench", "report", str(tmp_path))
    assert done.returncode == 1 and not done.stdout
    assert re.fullmatch(r"tandem: .*config\.json is missing\n", done.stderr)
