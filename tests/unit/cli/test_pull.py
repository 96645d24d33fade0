"""`tandem pull`: what is fetched, what an interruption leaves, and what is said when nothing comes."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_tandem import demo
from mlx_tandem.cli.pull import PARTIAL, PIECE
from tests.fake_hub import Hub, fake_hub
from tests.terminal import on_terminal
from tests.waiting import until

SIZE = 5 * PIECE + 17
"""Bytes of the large file."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    (folder / "config.json").symlink_to(demo.MODEL_PATH / "config.json")
    (folder / "model.safetensors").write_bytes(os.urandom(SIZE))
    (folder / "notes.bin").write_bytes(bytes(2 * PIECE))
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    with fake_hub({"org/tiny": repository}) as running:
        yield running


def started(hub: Hub, home: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mlx_tandem", "pull", *words]
    env = hub.environment(home, **more)
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def pulled(hub: Hub, home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    process = started(hub, home, *words, **more)
    out, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(words, process.returncode, out, errors)


def listed(hub: Hub, home: Path) -> subprocess.CompletedProcess[str]:
    """What `tandem models` finds there."""
    command = [sys.executable, "-m", "mlx_tandem", "models", "--json"]
    return subprocess.run(command, env=hub.environment(home), capture_output=True, text=True, check=True)


def partial(home: Path) -> int:
    """How many bytes of the large file an interruption has left."""
    return sum(file.stat().st_size for file in home.rglob(f"*{PARTIAL}"))


def test_an_interrupted_pull_goes_on_where_it_was(hub: Hub, repository: Path, tmp_path: Path) -> None:
    hub.held["model.safetensors"] = 3 * PIECE
    process = started(hub, tmp_path, "org/tiny")
    until(lambda: partial(tmp_path) == 3 * PIECE)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "tandem: interrupted; the same command goes on from here"

    hub.held.clear()
    hub.asked.clear()
    done = pulled(hub, tmp_path, "org/tiny", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "tandem: fetching 5.2 MB, of which 3.1 MB are there …\n"
    assert hub.ranges == ["bytes=0-", f"bytes={3 * PIECE}-"]
    assert hub.files_asked() == {"model.safetensors", "config.json"}
    told = json.loads(done.stdout)
    folder = Path(told["folder"])
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "config.json"}
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    assert (told["id"], told["bytes"]) == ("org/tiny", SIZE + (repository / "config.json").stat().st_size)
    assert not partial(tmp_path)

    found = json.loads(listed(hub, tmp_path).stdout)["models"]
    assert [(row["name"], row["folder"]) for row in found[1:]] == [("org/tiny", str(folder))]


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_has_one_line_of_progress_and_then_the_folder(
    hub: Hub, tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that breaks off once does not end it."""
    for name, value in hub.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    hub.broken["model.safetensors"] = PIECE
    shown: set[str] = set()
    with on_terminal("pull", "org/tiny", columns=columns) as terminal:
        terminal.on_change = lambda lines: shown.update(line for line in lines if "MB" in line)
        lines = terminal.read_to_end()
        assert terminal.process.wait(30) == 0
    assert any("/5.2 MB" in line for line in shown), shown
    assert max(map(len, shown)) <= columns
    assert "".join(lines).startswith("org/tiny is in ") and lines[-1] == "try: tandem serve org/tiny"
    assert hub.ranges == ["bytes=0-", f"bytes={PIECE}-"]


def test_a_file_with_another_hash_is_not_kept(hub: Hub, repository: Path, tmp_path: Path) -> None:
    """Its beginning is that of another file."""
    digest = hashlib.sha256((repository / "model.safetensors").read_bytes()).hexdigest()
    file = tmp_path / "hub" / "models--org--tiny" / "blobs" / f"{digest}{PARTIAL}"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(PIECE))
    done = pulled(hub, tmp_path, "org/tiny")
    assert done.returncode == 1
    assert hub.ranges == [f"bytes={PIECE}-"]
    assert "does not have the hash that the hub gives for it" in done.stderr
    assert not partial(tmp_path)


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        ("org/tiny", {"HF_TOKEN": "hf_bad"}, "does not accept HF_TOKEN for org/tiny (401)"),
        ("tiny", {}, "'tiny' is not the id of a model on the hub"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
    hub: Hub, tmp_path: Path, words: str, more: dict[str, str], said: str
) -> None:
    """As when a server fetches it (test_hub.py)."""
    hub.refused = frozenset({"hf_bad"})
    done = pulled(hub, tmp_path, words, **more)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_a_full_drive_is_named(hub: Hub, tmp_path: Path) -> None:
    """The limit of a file's size stands for the end of the drive: both are errors of a write."""
    command = [sys.executable, "-m", "mlx_tandem", "pull", "org/tiny"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PIECE, 2 * PIECE))

    done = subprocess.run(
        command, env=hub.environment(tmp_path), capture_output=True, text=True, check=False, preexec_fn=limit
    )
    assert done.returncode == 1
    assert "org/tiny was not fetched: there is no room left in " in done.stderr.splitlines()[-1]
    assert partial(tmp_path) == 2 * PIECE, "the rest can be fetched when there is room"
