"""The stages of a start: how long they took, how long the rest takes by the last start, and where that is kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_tandem.config import Config, EngineConfig, LoraConfig, ModelConfig, ServerConfig
from mlx_tandem.engine.client import start_times
from mlx_tandem.engine.client.start_times import MOST_KEPT, KeptTimes, Stage, StartClock, StartProgress, last_start


@dataclass
class Now:
    """The seconds of a clock that is set by hand."""

    at: float = 100.0

    def __call__(self) -> float:
        return self.at


def config(path: str = "/models/one", **lora: int) -> Config:
    return Config(EngineConfig(ModelConfig(path), lora=LoraConfig(**lora)))


def run(clock: StartClock, now: Now, *stages: tuple[str, float, bool]) -> None:
    """Run a start in which each of these stages takes so many seconds after two for the launch."""
    clock.begin()
    now.at += 2
    for name, seconds, once in stages:
        clock.enter(name, once=once)
        now.at += seconds
    clock.end()
    clock.keep()


FIRST = (("reading weights", 4.0, False), ("checking attention", 30.0, True), ("warming up", 6.0, False))


def test_nothing_is_known_before_the_first_start(tmp_path: Path) -> None:
    now = Now()
    clock = StartClock(KeptTimes(tmp_path / "starts", config()), now)
    now.at += 1.26
    assert clock.progress() == StartProgress("starting", 0.0, 1.3, None)
    clock.enter("reading weights", 0.25)
    now.at += 1
    assert clock.progress() == StartProgress("reading weights", 0.25, 2.3, None)


def test_the_time_left_is_that_of_the_last_start_without_what_it_did_once(tmp_path: Path) -> None:
    now = Now()
    kept = KeptTimes(tmp_path / "starts", config())
    run(StartClock(kept, now), now, *FIRST)
    clock = StartClock(kept, now)
    assert clock.progress().left_s == 2 + 4 + 6
    now.at += 5  # the launch takes longer than last time
    assert clock.progress().left_s == 4 + 6
    clock.enter("reading weights")
    now.at += 1
    assert clock.progress().left_s == 3 + 6
    clock.enter("checking kernels")  # which the first start did not have
    assert clock.progress().left_s == 6
    clock.enter("warming up")
    now.at += 2
    assert clock.progress() == StartProgress("warming up", 0.0, 8.0, 4.0)
    assert [stage.name for stage in clock.end()] == ["starting", "reading weights", "checking kernels", "warming up"]


def test_what_was_done_once_is_expected_again_where_one_part_of_it_is_done_again(tmp_path: Path) -> None:
    now = Now()
    kept = KeptTimes(tmp_path / "starts", config())
    run(StartClock(kept, now), now, *FIRST[:1], ("checking products", 8.0, True), *FIRST[1:])
    clock = StartClock(kept, now)
    clock.enter("checking products", once=True)
    assert clock.progress().left_s == 8 + 4 + 30 + 6
    clock.enter("checking adapters", once=True)
    assert clock.progress().left_s is None, "nobody knows how long it takes"


def test_a_stage_that_is_entered_twice_is_one_stage() -> None:
    now = Now()
    clock = StartClock(None, now)
    for name in ("reading weights", "checking attention", "reading weights"):
        clock.enter(name)
        now.at += 3
    assert clock.end() == (Stage("starting", 0.0), Stage("reading weights", 6.0), Stage("checking attention", 3.0))


def test_a_restart_is_measured_from_its_own_launch() -> None:
    now = Now()
    clock = StartClock(None, now)
    clock.enter("warming up", 0.5)
    now.at += 7
    clock.begin()
    assert clock.progress() == StartProgress("starting", 0.0, 0.0, None)
    clock.end()
    clock.begin()
    assert clock.progress().left_s == 0.0, "the last start of this process is known without a file"


def test_times_belong_to_a_model_and_its_settings(tmp_path: Path) -> None:
    now = Now()
    run(StartClock(KeptTimes(tmp_path, config()), now), now, *FIRST)
    same = Config(config().engine, ServerConfig(port=9000, api_key="secret"))
    assert KeptTimes(tmp_path, same).find() is not None
    for other in (config("/models/two"), config(max_loras=2)):
        assert KeptTimes(tmp_path, other).find() is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": 5}', b"[]", b"\xff" * 9])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    now = Now()
    kept = KeptTimes(tmp_path, config())
    run(StartClock(kept, now), now, *FIRST)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    clock = StartClock(kept, now)
    assert clock.progress().left_s is None
    run(clock, now, *FIRST)
    found = kept.find()
    assert found is not None and found.seconds == 42


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    now = Now()
    kept = KeptTimes(tmp_path, config())
    run(StartClock(kept, now), now)
    (file,) = tmp_path.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert kept.find() is None


def test_a_folder_that_cannot_be_written_costs_the_time_left_only(tmp_path: Path) -> None:
    (tmp_path / "starts").write_text("a file")
    now = Now()
    run(StartClock(KeptTimes(tmp_path / "starts", config()), now), now, *FIRST)
    assert StartClock(KeptTimes(tmp_path / "starts", config()), now).progress().left_s is None


def test_the_times_of_many_subjects_are_kept_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_times, "folder", lambda: tmp_path)
    assert last_start() is None
    for number in range(MOST_KEPT + 3):
        KeptTimes(tmp_path, config(f"/models/{number}")).keep((Stage("starting", float(number)),))
        for file in tmp_path.iterdir():
            os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**9))
    assert len([*tmp_path.iterdir()]) == MOST_KEPT
    last = last_start()
    assert last is not None and last.model == f"/models/{MOST_KEPT + 2}" and last.seconds == MOST_KEPT + 2
