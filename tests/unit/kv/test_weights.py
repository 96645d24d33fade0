"""A model folder's digest follows its contents, whatever is remembered of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.kv import weights
from mlx_tandem.kv.disk.folder import DIGESTS, CacheFolder
from mlx_tandem.kv.weights import folder_digest
from tests.faulty import FaultFiles

FILES = {"config.json": b"{}", "model.safetensors": b"\0" * 1000, "tokenizer.json": b"[]"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in FILES.items():
        write(folder / name, data)
    return folder


def write(file: Path, data: bytes) -> None:
    file.write_bytes(data)


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_JUST_NOW", -1.0)  # the files of a test have only just been written


def count_reads(monkeypatch: pytest.MonkeyPatch, fail_at: int = 0) -> list[str]:
    """Names of the files that are read from now on; the `fail_at`-th cannot be."""
    read: list[str] = []
    real = weights.hashlib.file_digest

    def file_digest(f: Any, name: str) -> Any:
        if len(read) + 1 == fail_at:
            raise OSError("gone")
        read.append(Path(f.name).name)
        return real(f, name)

    monkeypatch.setattr(weights.hashlib, "file_digest", file_digest)
    return read


@pytest.mark.parametrize("remember", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_every_change_gives_another_digest(model: Path, tmp_path: Path, name: str, remember: bool) -> None:
    memory = tmp_path / "digests.json" if remember else None
    seen = {folder_digest(model, memory)}
    data = FILES[name]
    status = (model / name).stat()
    for changed in (data + b"x", data[:-1], bytes([data[0] ^ 1]) + data[1:]):
        write(model / name, changed)
        os.utime(model / name, ns=(status.st_atime_ns, status.st_mtime_ns))  # whoever hides that it was changed
        seen.add(folder_digest(model, memory))
    (model / name).rename(model / f"other-{name}")
    seen.add(folder_digest(model, memory))
    (model / f"other-{name}").unlink()
    seen.add(folder_digest(model, memory))
    assert len(seen) == 6


def change_unseen(file: Path, data: bytes) -> None:
    """Put other contents of the same length into a file; of its status only the time of the change of that differs."""
    before = file.stat()
    assert len(data) == before.st_size
    write(file, data)
    after = before
    while after.st_ctime_ns == before.st_ctime_ns:  # the clock of a file system may stand for milliseconds
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


@pytest.mark.parametrize("name", FILES)
def test_a_change_that_hides_behind_size_and_times_is_seen(model: Path, tmp_path: Path, name: str) -> None:
    memory = tmp_path / "digests.json"
    before = folder_digest(model, memory)
    change_unseen(model / name, FILES[name][:-1] + b"?")
    assert folder_digest(model, memory) == folder_digest(model) != before


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "model-00002-of-00002.safetensors",
        "qwen.tiktoken",
        "special_tokens_map.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ],
)
def test_every_file_that_decides_what_the_model_says_counts(model: Path, name: str) -> None:
    seen = {folder_digest(model)}
    for data in (b"", b"a", b"b"):
        write(model / name, data)
        seen.add(folder_digest(model))
    assert len(seen) == 4


def test_what_is_no_part_of_the_model_does_not_count(model: Path) -> None:
    before = folder_digest(model)
    write(model / "README.md", b"x")
    (model / "sub.json").mkdir()
    assert folder_digest(model) == before


def test_names_and_contents_are_kept_apart(tmp_path: Path) -> None:
    digests = set()
    for files in ({"a.json": b"b"}, {"a.json": b"", "b.json": b""}, {"b.json": b"a"}, {}):
        folder = tmp_path / str(len(digests))
        folder.mkdir()
        for name, data in files.items():
            write(folder / name, data)
        digests.add(folder_digest(folder))
    assert len(digests) == 4


def test_a_second_time_nothing_is_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "digests.json"
    read = count_reads(monkeypatch)
    first = folder_digest(model, memory)
    assert sorted(read) == sorted(FILES)
    assert folder_digest(model, memory) == first and len(read) == 3
    (tmp_path / "link").symlink_to(model)
    assert folder_digest(tmp_path / "link", memory) == first and len(read) == 3
    assert folder_digest(model) == first, "with and without memory"


def test_a_run_that_is_interrupted_goes_on(model: Path, tmp_path: Path) -> None:
    memory = tmp_path / "digests.json"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError):
        count_reads(patch, fail_at=3)
        folder_digest(model, memory)
    with pytest.MonkeyPatch.context() as patch:
        read = count_reads(patch)
        digest = folder_digest(model, memory)
        assert read == ["tokenizer.json"]
    assert digest == folder_digest(model)


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": [1, 2, 3, 4, 5, "zz"]}', None])
def test_a_memory_that_is_no_use(model: Path, tmp_path: Path, contents: bytes | None) -> None:
    memory = tmp_path / "digests.json"
    if contents is None:
        memory.mkdir()
    else:
        write(memory, contents)
    assert folder_digest(model, memory) == folder_digest(model)


def test_a_full_drive_costs_the_memory_only(model: Path, tmp_path: Path) -> None:
    ops = FaultFiles(1, repeat=1000)
    assert folder_digest(model, tmp_path / "digests.json", ops) == folder_digest(model)


def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest would be that of neither content."""
    real = weights.hashlib.file_digest

    def file_digest(f: Any, name: str) -> Any:
        found = real(f, name)
        if f.name.endswith(".safetensors"):
            change_unseen(model / "model.safetensors", b"\1" * 1000)
        return found

    monkeypatch.setattr(weights.hashlib, "file_digest", file_digest)
    memory = tmp_path / "digests.json"
    with pytest.raises(OSError, match=r"model\.safetensors was changed"):
        folder_digest(model, memory)
    assert "model.safetensors" not in memory.read_text()


def test_a_file_that_has_just_changed_is_not_remembered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_JUST_NOW", 3600.0)
    memory = tmp_path / "digests.json"
    folder_digest(model, memory)
    assert not memory.exists()


def test_a_file_that_has_just_changed_is_not_remembered_whatever_its_time_says(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sets the time of a file back cannot set back when that was done."""
    monkeypatch.setattr(weights, "_JUST_NOW", 3600.0)
    memory = tmp_path / "digests.json"
    for name in FILES:
        os.utime(model / name, (0, 0))
    folder_digest(model, memory)
    assert not memory.exists()


def test_it_may_be_remembered_in_a_folder_that_becomes_a_cache(model: Path, tmp_path: Path) -> None:
    memory = tmp_path / "kv-cache" / DIGESTS
    digest = folder_digest(model, memory)
    CacheFolder(memory.parent).close()
    assert memory.exists() and folder_digest(model, memory) == digest
