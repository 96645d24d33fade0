"""The reports of updates are there after a restart, whatever became of their file."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path

import pytest

from mlx_tandem.training.online import history as module
from mlx_tandem.training.online.history import History
from mlx_tandem.training.online.serving import UpdateReport


def report(step: int) -> UpdateReport:
    fields = dict.fromkeys(UpdateReport.__struct_fields__[: UpdateReport.__struct_fields__.index("verdict")], 0)
    made = fields | {"step": step, "mean_reward": step / 8, "verdict": "ok", "outcome": "refused", "reason": "why"}
    return UpdateReport(**made)  # type: ignore[arg-type]


def steps(folder: Path, *more: int) -> list[int]:
    """The steps that a server knows after its start, which then makes more."""
    history = History(folder)
    asyncio.run(history.read())
    known = [each.step for each in history.updates]
    for step in more:
        history.append(report(step))
    history._writer.shutdown()
    return known


def test_reports_survive_and_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    assert steps(tmp_path, 1, 2) == []
    assert steps(tmp_path, 3, 4, 5, 6) == [1, 2]
    assert steps(tmp_path, 7) == [4, 5, 6]
    assert len((tmp_path / "history.jsonl").read_bytes().splitlines()) == 3
    assert steps(tmp_path) == [5, 6, 7]


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2)
    file = tmp_path / "history.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + b'{"step": 9}\n\xff\n' + b"[" * 50_000 + b"\n" + second + first[:20])
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("line", [b"\xff", b'{"reason": "\xff"}', b'{"x": ' + b"[" * 9000])
def test_a_damaged_line_does_not_stop_the_server(tmp_path: Path, line: bytes) -> None:
    """The decoder has another error for text that is not UTF-8, and for what is nested too deeply."""
    steps(tmp_path, 1)
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert steps(tmp_path) == [1]


def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2)
    file = tmp_path / "history.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert steps(tmp_path, 3, 4) == [1]
    assert steps(tmp_path) == [1, 3, 4]


def test_of_a_file_that_is_too_long_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(tmp_path, *range(9))
    file = tmp_path / "history.jsonl"
    monkeypatch.setattr(module, "MOST_BYTES", 2 * len(file.read_bytes()) // 9 + 10)
    assert steps(tmp_path, 9) == [7, 8]
    assert len(file.read_bytes().splitlines()) == 3  # it is written anew
    file.write_bytes(b"\n" * 100_000 + file.read_bytes())
    monkeypatch.undo()
    monkeypatch.setattr(module, "MOST", 3)
    assert steps(tmp_path, 10) == [7, 8, 9]
    assert len(file.read_bytes().splitlines()) == 3


def test_reports_that_wait_for_the_drive_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    steps(tmp_path, 1, 2, 3, 4, 5, 6)
    history = History(tmp_path)
    asyncio.run(history.read())
    goes_on = threading.Event()
    history._writer.submit(goes_on.wait)
    for step in (7, 8, 9):
        history.append(report(step))
    goes_on.set()
    history._writer.shutdown()
    kept = [json.loads(line)["step"] for line in (tmp_path / "history.jsonl").read_bytes().splitlines()]
    assert kept == [5, 6, 7, 8, 9]


def test_a_drive_that_takes_nothing_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "history.jsonl").mkdir()
    with caplog.at_level(logging.WARNING):
        assert steps(tmp_path, 1, 2) == []
    assert [record.getMessage() for record in caplog.records] == [
        "the history of earlier updates cannot be read: Is a directory",
        "the history of updates is not written: [Errno 21] Is a directory: " + repr(str(tmp_path / "history.jsonl")),
    ]
