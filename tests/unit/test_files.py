"""Durable files: whole or not at all, nobody else's to read, one process at a time."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_tandem import files
from mlx_tandem.files import FolderLock, StorageError
from tests.faulty import FaultFiles, ForgetfulFiles, contents


@pytest.mark.parametrize("renamed", [False, True])
def test_replace_is_all_or_nothing(tmp_path: Path, renamed: bool):
    path = tmp_path / "state"
    fail_at, ops = 0, FaultFiles(1)
    while ops.failed or not fail_at:
        fail_at += 1
        path.write_bytes(b"old")
        ops = FaultFiles(fail_at, renamed=renamed)
        try:
            files.replace(path, [b"new", b" content"], ops)
        except OSError:
            assert ops.failed
        else:
            assert path.read_bytes() == b"new content"
        assert path.read_bytes() in (b"old", b"new content")
        files.replace(path, b"again")
        assert contents(tmp_path) == {"state": b"again"}
    assert fail_at > 6


def test_replace_survives_a_loss_of_power(tmp_path: Path):
    path, ops = tmp_path / "state", ForgetfulFiles()
    files.replace(path, b"new", ops)
    ops.lose_power()
    assert path.read_bytes() == b"new"


def test_a_folder_survives_a_loss_of_power_with_its_parents(tmp_path: Path):
    ops = ForgetfulFiles()
    files.make_folder(tmp_path / "a" / "b" / "c", ops)
    files.create(tmp_path / "a" / "b" / "kept", b"x", ops)
    files.sync_folder(tmp_path / "a" / "b", ops)
    files.create(tmp_path / "a" / "lost", b"x", ops)
    ops.lose_power()
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert contents(tmp_path) == {"a/b/kept": b"x"}


def test_modes_and_links(tmp_path: Path):
    folder = tmp_path / "a" / "b"
    files.make_folder(folder)
    files.replace(folder / "f", b"x")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE((folder / "f").stat().st_mode) == 0o600
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("x")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "file-link").symlink_to(tmp_path / "outside" / "kept")
    with pytest.raises(OSError):
        files.sync_file(folder / "file-link")
    files.remove_tree(tmp_path / "a")
    files.remove_tree(tmp_path / "a")
    assert contents(tmp_path) == {"outside/kept": b"x"}


def test_create_never_overwrites(tmp_path: Path):
    files.create(tmp_path / "f", b"one")
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "f", b"two")
    with pytest.raises(FileExistsError):
        files.link_or_copy(tmp_path / "f", tmp_path / "f")
    files.link_or_copy(tmp_path / "f", tmp_path / "g", FaultFiles(1, error=95))  # a file system without links
    assert contents(tmp_path) == {"f": b"one", "g": b"one"}
    assert (tmp_path / "f").stat().st_ino != (tmp_path / "g").stat().st_ino


def test_a_lock_names_its_holder_and_goes_with_it(tmp_path: Path):
    holder = (
        f"import time; from pathlib import Path; from mlx_tandem.files import FolderLock;"
        f"lock = FolderLock(Path({str(tmp_path)!r})); print(1, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(StorageError, match=f"in use by process {child.pid}:"):
            FolderLock(tmp_path)
        os.kill(child.pid, signal.SIGKILL)
    lock = FolderLock(tmp_path)
    with pytest.raises(StorageError, match=f"in use by process {os.getpid()}:"):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    FolderLock(tmp_path).release()


def test_a_lock_names_its_holder_whatever_an_earlier_one_has_left(tmp_path: Path):
    (tmp_path / files.LOCK).write_text("12345678901234567890\nsomething else\n")
    lock = FolderLock(tmp_path)
    assert (tmp_path / files.LOCK).read_text() == f"{os.getpid()}\n"
    with pytest.raises(StorageError, match=f"{tmp_path} is in use by process {os.getpid()}: stop it"):
        FolderLock(tmp_path)
    lock.release()


def test_a_lock_is_held_as_long_as_its_folder_is_the_same(tmp_path: Path):
    folder = tmp_path / "a"
    folder.mkdir()
    lock = FolderLock(folder)
    assert lock.held()
    folder.rename(tmp_path / "b")
    assert not lock.held(), "the name leads nowhere"
    folder.mkdir()
    other = FolderLock(folder)
    assert other.held()
    assert not lock.held(), "the name leads to another folder"
    for each in (lock, other):
        each.release()
        assert not each.held()


def test_the_cache_folder_is_the_user_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for said in ("", None):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if said is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", said)
        assert files.cache_folder() == tmp_path / ".cache" / "mlx-tandem"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert files.cache_folder() == Path("/elsewhere/mlx-tandem")


def test_a_user_without_a_home_has_a_cache_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch):
    """What can do without it goes on, since it only sees that a folder cannot be made."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert files.cache_folder() == files.NO_HOME / ".cache" / "mlx-tandem"
