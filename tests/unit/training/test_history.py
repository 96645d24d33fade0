"""The reports of updates are there after a restart, whatever became of their file."""

from __future__ import annotations

import asyncio
import logging
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


def test_a_drive_that_takes_nothing_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "history.jsonl").mkdir()
    with caplog.at_level(logging.WARNING):
        assert steps(tmp_path, 1, 2) == []
    assert [record.getMessage() for record in caplog.records] == [
        "the history of earlier updates cannot be read: Is a directory",
        "the history of updates is not written: [Errno 21] Is a directory: " + repr(str(tmp_path / "history.jsonl")),
    ]
