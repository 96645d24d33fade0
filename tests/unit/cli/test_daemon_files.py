"""The files by which servers in the background are found."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from mlx_tandem.cli import daemon
from mlx_tandem.cli.daemon import Detached, State, _file, _write, born, read

FOLLOWING = State(pid=2, born="2", port=8000, argv=("next",), cwd="/", log="", key_variable=None)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def first() -> Iterator[State]:
    """A server that runs until somebody ends it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield replace(FOLLOWING, pid=child.pid, born=born(child.pid), argv=("first",))
        child.kill()


def test_a_server_that_ends_leaves_the_file_of_the_next_one_on_its_port(tmp_path: Path, first: State) -> None:
    for own, is_left in ((first, True), (FOLLOWING, False)):
        _write(FOLLOWING)
        Detached(-1, None, tmp_path / "log", None, state=own).end()
        assert _file(8000).exists() == is_left


def test_whoever_waits_for_a_server_s_end_leaves_the_file_of_the_next_one_on_its_port(first: State) -> None:
    _write(FOLLOWING)
    daemon._end(first, 60.0)
    assert born(first.pid) == "" and read(8000) == FOLLOWING


@pytest.mark.parametrize("runs", [True, False])
def test_a_server_that_is_stopped_has_no_file(first: State, capsys: pytest.CaptureFixture[str], *, runs: bool) -> None:
    _write(first if runs else replace(first, born="another process had this number"))
    daemon.stop(8000, 60.0)
    assert not _file(8000).exists() and (born(first.pid) == "") == runs
    assert ("had ended already" in capsys.readouterr().out) != runs


@pytest.mark.parametrize("taken", [True, False])
def test_after_a_restart_that_fails_another_attempt_knows_how_unless_the_port_is_taken(
    first: State, monkeypatch: pytest.MonkeyPatch, *, taken: bool
) -> None:
    """Whoever has taken the port meanwhile can still be stopped."""

    def start(argv: list[str], cwd: str | None, port: int | None) -> int:
        assert (argv, cwd, port) == (["first"], "/", 8000)
        assert not _file(8000).exists()
        if taken:
            _write(FOLLOWING)
        return 1

    monkeypatch.setattr(daemon, "start", start)
    _write(first)
    assert daemon.restart(8000, 60.0) == 1
    assert read(8000) == (FOLLOWING if taken else first)


def test_nobody_else_can_read_how_a_server_was_started(tmp_path: Path) -> None:
    _write(FOLLOWING)
    assert stat.S_IMODE(_file(8000).stat().st_mode) == 0o600
    assert stat.S_IMODE(_file(8000).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(("ended", "status"), [(0, 1), (1, 1), (3, 3), (70, 70), (-9, 1)])
def test_a_server_that_was_never_ready_is_a_failure_with_its_output(
    ended: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However it has ended: a status of 0 would say that it runs."""

    def start(words: list[str], **options: Any) -> Any:
        assert words[1:] == ["-P", "-m", "mlx_tandem", "serve"]
        options["stdout"].write(b"it is broken\n")
        return SimpleNamespace(wait=lambda: ended)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(daemon.subprocess, "Popen", start)
    assert daemon.start(["serve"]) == status
    assert capsys.readouterr().err == "it is broken\n"
    assert not list((tmp_path / "mlx-tandem" / "log").iterdir())


INTERRUPTED = """
import os, signal, subprocess, sys
from mlx_tandem.cli import daemon

start = subprocess.Popen

def interrupted(words, **options):
    signal.raise_signal(signal.{early})
    child = start([sys.executable, "-c", "import time; time.sleep(600)"], **options)
    print(child.pid, flush=True)
    signal.raise_signal(signal.{late})
    return child

daemon.subprocess.Popen = interrupted
sys.exit(daemon.start(["serve"]))
"""


@pytest.mark.parametrize(("early", "late"), [("SIGWINCH", "SIGINT"), ("SIGWINCH", "SIGTERM"), ("SIGINT", "SIGWINCH")])
def test_ctrl_c_at_the_moment_a_server_is_started_ends_it(early: str, late: str, tmp_path: Path) -> None:
    """A signal before the process's number is known waits until it is."""
    code = INTERRUPTED.format(early=early, late=late)
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    pid = int(done.stdout)
    alive = born(pid) != ""
    if alive:
        os.kill(pid, signal.SIGKILL)
    assert (done.returncode, alive) == (daemon.INTERRUPTED, False)
    assert "nothing is running" in done.stderr
    assert not list((tmp_path / "mlx-tandem" / "log").iterdir())


def test_a_server_that_is_ready_can_be_started_again_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log takes the name of its port, and that of the server before it is kept beside it."""
    monkeypatch.setattr("sys.argv", ["tandem", "-v", "serve", "--port", "8000"])
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 3):
        log = tmp_path / f"starting-{number}.log"
        log.write_text(f"log {number}")
        ours, theirs = os.pipe()
        link = Detached(theirs, None, log, "TANDEM_API_KEY")
        link.ready(8000, "ready\n")
        with open(ours) as said:
            assert said.read() == f"ready\n  log       {tmp_path}/8000.log\n  stop      tandem stop --port 8000\n"
        assert (tmp_path / "8000.log").read_text() == f"log {number}"
        before = tmp_path / "8000.before.log"
        assert (before.read_text() if before.exists() else None) == (f"log {number - 1}" if number > 1 else None)
        assert not log.exists()
    argv = ("-v", "serve", "--port", "8000")
    pid = os.getpid()
    log_file = str(tmp_path / "8000.log")
    assert read(8000) == State(pid, born(pid), 8000, argv, str(tmp_path), log_file, "TANDEM_API_KEY")


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert daemon.folder() == tmp_path / "mlx-tandem"
    monkeypatch.setattr(daemon.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(SystemExit):
        daemon.folder()
