"""Checkpoints of Tinker's clients on the drive: whole or not there, and nothing is trusted that lies there already."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.files import StorageError
from mlx_tandem.training.tinker.checkpoints import CHECKPOINT, RUN, Checkpoint, Checkpoints, Kind, Place, Run

ID = f"{'0' * 32}:train:0"
OWN = Run(ID, "me", "base", 4, ("attention", "mlp"), 1.0, {"a": "b"})


def new(name: str, kind: Kind = "weights", **more: Any) -> Checkpoint:
    return Checkpoint(ID, kind, name, 4, ("attention", "mlp"), 2.0, 0, **more)


def save(book: Checkpoints, made: Checkpoint, content: bytes = b"x", **more: Any) -> Checkpoint:
    async def write(folder: str) -> None:
        Path(folder, "adapter_model.safetensors").write_bytes(content)

    return asyncio.run(book.save(OWN, made, write, **more))


def opened(folder: Path, now: float = 10.0) -> Checkpoints:
    return Checkpoints(folder, clock=lambda: now)


def test_what_is_saved_is_there_after_a_restart(tmp_path: Path) -> None:
    book = opened(tmp_path)
    path = save(book, new("a", metadata={"epoch": "1"}), b"12345").path
    save(book, new("b", "sampler_weights"))
    with pytest.raises(StorageError, match="in use"):
        opened(tmp_path)
    book.close()
    again = opened(tmp_path)
    found = again.get(path, "me")
    assert (found.nbytes, found.metadata, found.path) == (5, {"epoch": "1"}, path)
    assert again.run(ID, "me") == OWN and {own.id for own in again.of_owner("me")} == {"weights/a", "sampler_weights/b"}
    assert Path(again.source(found).path, "adapter_model.safetensors").read_bytes() == b"12345"
    for wrong in (path.replace("weights/a", "weights/b"), path.replace("0:train", "1:train")):
        with pytest.raises(NotFound):
            again.get(wrong, "me")
    with pytest.raises(NotFound):
        again.get(path, "other")
    assert again.of_owner("other") == [] == again.runs("other")


def test_a_name_is_overwritten_only_on_request(tmp_path: Path) -> None:
    book = opened(tmp_path)
    save(book, new("a"), b"old")
    with pytest.raises(InvalidRequest, match="there is a checkpoint"):
        save(book, new("a"), b"new")
    found = save(book, new("a"), b"newer", overwrite=True)
    folder = Path(book.source(found).path)
    assert (folder / "adapter_model.safetensors").read_bytes() == b"newer" and found.nbytes == 5
    assert [path.name for path in folder.parent.iterdir()] == ["a"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    book = opened(tmp_path)
    save(book, new("a"), b"old")

    async def fails(folder: str) -> None:
        Path(folder, "half").touch()
        raise OSError("the drive is full")

    for name in ("a", "b"):
        with pytest.raises(OSError, match="full"):
            asyncio.run(book.save(OWN, new(name), fails, overwrite=True))
    folder = Path(book.source(book.get(new("a").path, "me")).path)
    assert (folder / "adapter_model.safetensors").read_bytes() == b"old"
    assert [path.name for path in folder.parent.iterdir()] == ["a"]


def test_what_a_crash_leaves_is_cleared_away(tmp_path: Path) -> None:
    book = opened(tmp_path)
    folder = Path(book.source(save(book, new("a"))).path)
    book.close()
    (folder.parent / ".new-b").mkdir()
    folder.rename(folder.parent / ".old-a")  # between the two renames of an overwrite
    again = opened(tmp_path)
    assert again.get(new("a").path, "me").name == "a"
    again.close()
    (folder.parent / ".old-a").mkdir()  # behind them
    opened(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == ["a"]


def test_checkpoints_expire(tmp_path: Path) -> None:
    book = opened(tmp_path)
    save(book, new("a", expires=20.0))
    kept = save(book, new("b"))
    asyncio.run(book.set_expiry(kept, 30.0))
    book.close()
    later = opened(tmp_path, 25.0)
    with pytest.raises(NotFound):
        later.get(new("a").path, "me")
    assert [own.name for own in later.of_run(ID)] == ["b"]
    save(later, new("a"))  # its name is free again
    asyncio.run(later.expire())
    assert {own.name for own in later.of_run(ID)} == {"a", "b"}
    later.close()
    last = opened(tmp_path, 35.0)
    asyncio.run(last.expire())
    assert not Path(last.source(kept).path).exists()
    asyncio.run(last.delete(last.get(new("a").path, "me")))
    assert last.of_run(ID) == []


def test_what_is_damaged_or_foreign_is_passed_over(tmp_path: Path) -> None:
    book = opened(tmp_path)
    folder = Path(book.source(save(book, new("a"))).path)
    save(book, new("b"))
    book.close()
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "linked").symlink_to(folder.parents[1])
    (folder.parent / "c").symlink_to(folder)
    info = msgspec.json.decode((folder / CHECKPOINT).read_bytes())
    for wrong in (b"{", msgspec.json.encode(info | {"name": "z"}), msgspec.json.encode(info | {"run": "../../x"})):
        (folder / CHECKPOINT).write_bytes(wrong)
        again = opened(tmp_path)
        assert [own.name for own in again.of_owner("me")] == ["b"]
        again.close()
    manifest = folder.parents[1] / RUN
    run = msgspec.json.decode(manifest.read_bytes())
    for wrong in (b"[]", msgspec.json.encode(run | {"id": "../../x:train:0"}), b" " * (2 << 20)):
        manifest.write_bytes(wrong)
        again = opened(tmp_path)
        assert again.runs("me") == [] and folder.exists()
        again.close()


@pytest.mark.parametrize(
    "path", ["", "tinker://", "a/weights/b", "tinker://a/b/c", "tinker://a/weights/b/c", "tinker://a/weights/"]
)
def test_paths_have_one_form(path: str) -> None:
    with pytest.raises(InvalidRequest, match="tinker://RUN/weights/NAME"):
        Place.of(path, "path")
