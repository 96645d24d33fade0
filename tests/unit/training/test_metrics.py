"""Writers of metrics: what is written is read back; one that fails or is slow stops neither the others nor training."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem import demo
from mlx_tandem.config import Config, EngineConfig, ModelConfig, RLTrainingConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.prompt_text import said
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.training.live.reporting import KEPT_SAMPLES, NUMBERS, Reporting
from mlx_tandem.training.metrics import recorder
from mlx_tandem.training.metrics.jsonl import JsonLines
from mlx_tandem.training.metrics.recorder import Recorder, openers
from mlx_tandem.training.metrics.writer import MAX_TEXT, MissingExtra, Sample, require, trackers
from mlx_tandem.training.online.serving import UpdateReport
from mlx_tandem.training.trajectories import Trajectory
from tests.waiting import until

LOSSES = [2.0, 1.0, 0.5]
SAMPLES = [Sample("2 + 3\n= ?", "5", reward=1.0), Sample("7", "8", expected="9")]


def record(folder: Path, *names: str, file: Path | None = None) -> list[str]:
    """Record some metrics; what was warned of."""
    said: list[str] = []
    recording = Recorder(openers(file, names, folder, "mine", {"rank": 8}), said.append)
    for step, loss in enumerate(LOSSES, 1):
        recording.scalars("step", step, {"loss": loss, "kl": float("nan"), "validation": None})
    recording.samples(3, SAMPLES)
    recording.close()
    return said


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_has_a_line_for_each_entry(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    assert record(tmp_path, file=path) == []
    found = rows(path)
    assert [(row["kind"], row["step"], row["loss"]) for row in found[:3]] == [
        ("step", n, x) for n, x in enumerate(LOSSES, 1)
    ]
    assert all(row.keys() == {"time", "kind", "step", "loss"} for row in found[:3])
    assert [(row["prompt"], row["completion"], row.get("reward"), row.get("expected")) for row in found[3:]] == [
        ("2 + 3\n= ?", "5", 1.0, None),
        ("7", "8", None, "9"),
    ]
    record(tmp_path, file=path)
    assert len(rows(path)) == 10, "a file that exists is continued"


def test_a_line_that_was_torn_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "st')
    record(tmp_path, file=path)
    first, *rest = path.read_text().splitlines()
    assert first == '{"kind": "st' and [json.loads(line)["step"] for line in rest] == [1, 2, 3, 3, 3]


def test_the_file_is_bounded(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "m.jsonl", most_bytes=1000, clock=lambda: 0.0)
    for step in range(200):
        writer.scalars("step", step, {"loss": 1.0})
    writer.close()
    older, newer = rows(tmp_path / "m.jsonl.1"), rows(tmp_path / "m.jsonl")
    steps = [row["step"] for row in older + newer]
    assert steps == list(range(steps[0], 200)), "the newest lines, without a gap"
    assert {p.name for p in tmp_path.iterdir()} == {"m.jsonl", "m.jsonl.1"}
    assert all(p.stat().st_size <= 1000 for p in tmp_path.iterdir())


def test_long_texts_are_shortened() -> None:
    short = Sample("p" * 10_000, "begin" + "c" * 10_000 + "end").shortened()
    assert len(short.prompt) <= MAX_TEXT + 3
    assert short.completion.startswith("begin") and short.completion.endswith("end")


class Broken:
    """A writer that fails at its second entry."""

    def __init__(self) -> None:
        self.calls = 0

    def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        if self.calls == 2:
            raise OSError("no space left")

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self.calls += 1

    def close(self) -> None:
        raise AssertionError("it is not used any more")


def test_a_writer_that_fails_is_reported_once_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    broken, path = Broken(), tmp_path / "m.jsonl"

    def never() -> Broken:
        raise ConnectionError("no way out")

    recording = Recorder({"a": lambda: broken, "b": lambda: JsonLines(path), "c": never}, said.append)
    for step in range(5):
        recording.scalars("step", step, {"loss": 1.0})
    recording.samples(5, SAMPLES)
    recording.close()
    recording.scalars("step", 9, {"loss": 1.0})
    recording.close()
    assert sorted(said) == [
        "metrics: a failed and gets no more of them: OSError: no space left",
        "metrics: c failed and gets no more of them: ConnectionError: no way out",
    ]
    assert broken.calls == 2
    assert [row["step"] for row in rows(path)] == [0, 1, 2, 3, 4, 5, 5]


def test_a_file_is_written_again_when_the_drive_is_no_longer_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line that was written stays alone, and what was lost is counted."""
    file, full = tmp_path / "m.jsonl", False
    write = os.write

    def write_if_room(fd: int, data: bytes) -> int:
        if not full:
            return write(fd, data)
        if data.startswith(b"{"):
            return write(fd, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = JsonLines(file, clock=lambda: 1.0)
    monkeypatch.setattr(os, "write", write_if_room)
    warnings: list[str] = []
    recorder = Recorder({"m": lambda: writer}, warnings.append)
    for step in range(6):
        full = step in (2, 3)
        recorder.scalars("step", step, {})
        until(recorder._entries.empty)
        recorder.scalars("step", step, {})  # taken only when the one before has been handled
        until(recorder._entries.empty)
    full = False
    recorder.close()
    lines = [line for line in file.read_bytes().split(b"\n") if line]
    assert {json.loads(line)["step"] for line in lines if line.endswith(b"}")} >= {0, 1, 4, 5}
    assert [line for line in lines if not line.endswith(b"}")] == [b'{"tim']
    assert len(warnings) == 2 and "No space left" in warnings[0] and "takes entries again" in warnings[1]


def test_who_records_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that hangs costs entries, and at the end no more than the time that it is given."""
    monkeypatch.setattr(recorder, "MOST_WAITING", 10)
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 0.05)
    hang = threading.Event()
    said: list[str] = []

    class Hanging(Broken):
        def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
            hang.wait()

    recording = Recorder({"slow": Hanging}, said.append)
    for step in range(50):
        recording.scalars("step", step, {"loss": 1.0})
    recording.close()
    hang.set()
    assert "did not end in time" in said[0]
    assert "entries were lost" in said[1]


def test_a_failure_to_report_an_update_stays_here(tmp_path: Path) -> None:
    def no_text(tokens: Sequence[int]) -> str:
        raise IndexError("no such token")

    (tmp_path / "model").mkdir()
    training = RLTrainingConfig(enabled=True, metrics_file=str(tmp_path / "m.jsonl"))
    config = Config(EngineConfig(ModelConfig(str(tmp_path / "model"))), rl_training=training)
    fields = dict.fromkeys(UpdateReport.__struct_fields__[: UpdateReport.__struct_fields__.index("verdict")], 0)
    report = UpdateReport(**fields | {"step": 3, "loss": 0.5, "verdict": "ok", "outcome": "published"})  # type: ignore[arg-type]
    trajectory = Trajectory("t", "g", (1,), (2,), (-1.0,), (-1.0,), (1,), 1.0, 1.0)
    good, broken = (Reporting(config, text_of, text_of) for text_of in (lambda tokens: "text", no_text))
    for reporting in (broken, good):
        reporting.updated(report, [trajectory])
        reporting.close()
    assert [(row["kind"], row["step"]) for row in rows(tmp_path / "m.jsonl")] == [
        ("update", 3),
        ("update", 3),
        ("sample", 3),
    ]
    assert (len(broken.samples), len(good.samples)) == (0, 1)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert record(tmp_path, "tensorboard") == []
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["step/loss"]
    assert [(event.step, event.value) for event in found.Scalars("step/loss")] == [*enumerate(LOSSES, 1)]
    (event,) = found.Tensors("samples")
    texts = [text.decode() for text in event.tensor_proto.string_val]
    assert event.step == 3 and len(texts) == 2
    assert "    2 + 3\n    = ?" in texts[0] and "**expected**\n\n    9" in texts[1]


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format behind a header of 7 bytes: blocks of 32 kB, in which each record, or
    part of one, has a checksum, a length and a kind in front (1: whole, 2: first, 3: middle, 4: last part).
    """
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


def ended(file: Path, parsed: Callable[[bytes], Any]) -> list[bytes]:
    """All records of a run; its process writes the last ones a moment after the run has ended."""
    deadline = time.monotonic() + 60
    while not (found := [*log_records(file.read_bytes())]) or not parsed(found[-1]).HasField("exit"):
        assert time.monotonic() < deadline, "the run does not end"
        time.sleep(0.05)
    return found


def test_wandb_has_a_run_without_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for name, value in (("WANDB_MODE", "offline"), ("WANDB_PROJECT", "tests"), ("WANDB_ERROR_REPORTING", "false")):
        monkeypatch.setenv(name, value)
    assert record(tmp_path, "wandb") == []
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    logged: list[dict[str, Any]] = []
    names = []
    for data in ended(file, wandb_internal_pb2.Record.FromString):
        read = wandb_internal_pb2.Record()
        read.ParseFromString(data)
        if read.HasField("run"):
            names.append((read.run.display_name, read.run.project))
        if read.HasField("history"):
            items = read.history.item
            logged.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    assert ("mine", "tests") in names
    assert [(row["optimizer_step"], row["step/loss"]) for row in logged if "step/loss" in row] == [
        *enumerate(LOSSES, 1)
    ]
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text())["data"] == [["2 + 3\n= ?", "5", 1.0, None], ["7", "8", None, "9"]]


def test_trackio_has_a_run_on_this_machine(tmp_path: Path) -> None:
    """In a process of its own: the package reads its folder once, when it is imported."""
    pytest.importorskip("trackio")
    program = (
        "import sys; from pathlib import Path; from tests.unit.training.test_metrics import record\n"
        "assert record(Path(sys.argv[1]), 'trackio') == []"
    )
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "runs"), "TRACKIO_PROJECT": "tests"}
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=env, cwd=root)
    (file,) = (tmp_path / "runs").glob("tests*.db")
    with sqlite3.connect(file) as database:
        metrics = [json.loads(text) for (text,) in database.execute("SELECT metrics FROM metrics ORDER BY id")]
    assert [(m["optimizer_step"], m["step/loss"]) for m in metrics if "step/loss" in m] == [*enumerate(LOSSES, 1)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(MissingExtra) as missing:
        require((name,))
    assert (
        missing.value.message
        == f"reporting to {name} needs a package: pip install -e '.[{name}]' in the folder of its sources"
    )
    require(())


def test_trackers_are_named_with_commas() -> None:
    assert trackers("wandb, tensorboard,") == ("wandb", "tensorboard")
    with pytest.raises(InvalidRequest, match="no tracker 'paper'; there are tensorboard, wandb, trackio"):
        trackers("wandb,paper")


def test_an_update_is_recorded_with_how_it_ended(tmp_path: Path) -> None:
    """Each number under its name; no more samples than are asked for, of which the newest are kept."""
    (tmp_path / "model").mkdir()
    training = RLTrainingConfig(enabled=True, metrics_file=str(tmp_path / "m.jsonl"), metrics_samples=2)
    config = Config(EngineConfig(ModelConfig(str(tmp_path / "model"))), rl_training=training)
    reporting = Reporting(config, lambda tokens: f"text of {tokens}", lambda tokens: f"said in {tokens}")
    outcomes = {"published": (1.0, 0.0), "kept": (0.0, 0.0), "rolled_back": (0.0, 1.0), "refused": (0.0, 0.0)}
    made = [Trajectory(f"t{i}", "g", (i,), (i, i), (-1.0,) * 2, (-1.0,) * 2, (1,) * 2, 1.0, 0.5 + i) for i in range(3)]
    reports = []
    for step, outcome in enumerate(outcomes, start=5):
        numbers = {name: step + i / 16 for i, name in enumerate(NUMBERS)}
        reports.append(UpdateReport(step=step, verdict="ok", outcome=outcome, **numbers))  # type: ignore[arg-type]
        reporting.updated(reports[-1], made)
    reporting.close()
    written = rows(tmp_path / "m.jsonl")
    updates = [row for row in written if row["kind"] == "update"]
    for row, report, (published, undone) in zip(updates, reports, outcomes.values(), strict=True):
        numbers = {name: getattr(report, name) for name in NUMBERS}
        ended = {"kind": "update", "step": report.step, "published": published, "undone": undone}
        assert {name: value for name, value in row.items() if name != "time"} == numbers | ended
    samples = [
        (report.step, f"text of {t.prompt}", f"text of {t.tokens}", t.reward) for report in reports for t in made[:2]
    ]
    fields = "step", "prompt", "completion", "reward"
    assert [tuple(row[f] for f in fields) for row in written if row["kind"] == "sample"] == samples
    for_people = [(step, text.replace("text of", "said in"), *rest) for step, text, *rest in samples]
    assert [tuple(getattr(s, f) for f in fields) for s in reporting.samples] == for_people[-KEPT_SAMPLES:]


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("<|im_start|>user\nSort: 2 1<|im_end|>\n<|im_start|>assistant\n", "Sort: 2 1"),
        (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nmodel\nHi<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            "Be brief.\nmodel\nHi",
        ),
        ("<|im_start|>user<|im_end|>\n\nSort: 2 1<|im_end|><|im_start|>assistant<|im_end|>\n\n", "Sort: 2 1"),
        ("Once there was", "Once there was"),
        ("<|im_start|>", ""),
    ],
    ids=["ChatML", "system", "headers", "none", "nothing"],
)
def test_a_prompt_is_told_without_the_roles_of_its_template(template: str, shown: str) -> None:
    tokenizer = Tokenizer.load(demo.MODEL_PATH)
    assert said(tokenizer, tokenizer.encode(template)) == shown
