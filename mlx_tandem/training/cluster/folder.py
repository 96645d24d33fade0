"""The folder of a machine of the cluster: adapters by digest, files that are not whole yet, and what is known.

`versions/DIGEST` is an adapter's folder. `parts/SENDER/SHA256` is a file that is on its way, or waits for the other
file of its adapter. Each sender has files of its own, so that none can remove or complete those of another. Names from
other machines are checked by their types and never become other paths.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from mlx_tandem import files
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.files import FolderLock
from mlx_tandem.training.cluster.bases import hash_file
from mlx_tandem.training.cluster.wire import CHUNK, File, Version
from mlx_tandem.types import AdapterSource

MOST_PARTS = 4
"""Files of one sender that may be on their way at once: the two of a version, and those of an earlier attempt."""

FETCHED = "fetched"
"""The sender of files that this machine fetches itself."""

Known = TypeVar("Known")


class ClusterFolder:
    """One folder, which this process holds from `lock` to `close`. Calls wait for the drive. Raises StorageError."""

    def __init__(self, path: str):
        """Prepare to use the folder at `path`, which `lock` makes if it is missing."""
        self.path = Path(path).resolve()
        self._lock: FolderLock | None = None

    def lock(self) -> None:
        """Take the folder, and clear away what a crash has left half done."""
        with files.storage(self.path):
            for name in ("versions", "parts"):
                files.make_folder(self.path / name)
            self._lock = self._lock or FolderLock(self.path)
            for path in (self.path / "versions").iterdir():
                if path.name.startswith(".new-"):
                    files.remove_tree(path)
            for path in (self.path / "parts").iterdir():
                if not path.is_dir():
                    files.remove_tree(path)

    @property
    def held(self) -> bool:
        """Whether the folder is still the one that was locked."""
        return self._lock is not None and self._lock.held()

    def close(self) -> None:
        """Let go of the folder. A second call does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- what is known ----------------------------------------------------------------------------------------------

    def read(self, name: str, kind: type[Known]) -> Known | None:
        """Return what `write` has kept under a name; None if there is nothing that can be read."""
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError, RecursionError):
            return None

    def write(self, name: str, value: Struct | Collection[Struct]) -> None:
        """Keep a value under a name."""
        with files.storage(self.path / name):
            files.replace(self.path / name, msgspec.json.encode(value))

    # -- versions ---------------------------------------------------------------------------------------------------

    def version(self, digest: str) -> Path:
        """Return the folder of the version with this digest, which need not be there."""
        return self.path / "versions" / digest

    def source(self, digest: str) -> AdapterSource | None:
        """Return the folder of a version; None if it is not there."""
        path = self.version(digest)
        return AdapterSource(str(path), str(self.path)) if path.is_dir() else None

    def digests(self) -> list[str]:
        """Return the digests of all versions that are there."""
        with files.storage(self.path):
            return sorted(p.name for p in (self.path / "versions").iterdir() if not p.name.startswith("."))

    def assemble(self, version: Version, sender: str = FETCHED) -> AdapterSource:
        """Make the folder of a version from a sender's files. Raises InvalidRequest unless all of them are complete.

        The files are compared with their hashes once more: another request may have named another size for them.
        """
        if len({file.name for file in version.files}) < len(version.files):
            raise InvalidRequest("the files of a version must have different names", param="version.files")
        new = self.new(version.digest)
        with files.storage(new):
            for file in version.files:
                part = self._part(file, sender)
                if self.received(file, sender) != file.size or hash_file(part) != file.sha256:
                    raise InvalidRequest(f"the file {file.sha256} is not there", param="version.files")
                files.link_or_copy(part, new / file.name)
            files.sync_folder(new)
        source = self.commit(version.digest)
        with files.storage(self.path):
            for file in version.files:
                files.remove_tree(self._part(file, sender))
        return source

    def new(self, digest: str) -> Path:
        """Make an empty folder for the files of a version, which `commit` gives its name."""
        new = self.version(digest).with_name(f".new-{digest}")
        with files.storage(new):
            files.remove_tree(new)
            files.DISK.mkdir(new)
        return new

    def commit(self, digest: str) -> AdapterSource:
        """Let the folder from `new` be that of a version, in place of an earlier one."""
        target = self.version(digest)
        with files.storage(target):
            files.remove_tree(target)
            files.DISK.rename(target.with_name(f".new-{digest}"), target)
            files.sync_folder(target.parent)
        return AdapterSource(str(target), str(self.path))

    def take_in(self, path: Path, digest: str) -> None:
        """Let a folder beside the versions be that of a version."""
        with files.storage(path):
            files.remove_tree(self.new(digest))
            files.DISK.rename(path, self.version(digest).with_name(f".new-{digest}"))
        self.commit(digest)

    def remove(self, digest: str) -> None:
        """Remove the folder of a version."""
        with files.storage(self.path):
            files.remove_tree(self.version(digest))

    # -- files on their way -----------------------------------------------------------------------------------------

    def _part(self, file: File, sender: str) -> Path:
        return self.path / "parts" / sender / file.sha256

    def received(self, file: File, sender: str = FETCHED) -> int:
        """Return how many bytes of a file are there."""
        try:
            return self._part(file, sender).stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, file: File, offset: int, content: bytes, sender: str = FETCHED) -> int:
        """Write bytes of a file from `offset` on, and return how many are there now.

        Bytes that are not the next ones change nothing. When the last ones come, the file is compared with its hash.
        Raises InvalidRequest for a file that is not what it is called; nothing of it is kept. The sender's file that it
        has asked about or written least recently goes when too many of them are on their way.
        """
        path, there = self._part(file, sender), self.received(file, sender)
        if offset != there or not content:
            if there:
                os.utime(path)
            return there
        if len(content) > CHUNK or there + len(content) > file.size:
            raise InvalidRequest(f"a file gets {CHUNK} bytes at once and {file.size} in all at most", param="offset")
        with files.storage(path):
            if not there:
                files.make_folder(path.parent)
                self._make_room(path.parent)
            with path.open("ab") as out:
                out.write(content)
            there += len(content)
            if there == file.size:
                files.sync_file(path)
                if hash_file(path) != file.sha256:
                    files.remove_tree(path)
                    raise InvalidRequest(f"the file is not {file.sha256}: its bytes were changed", param="file")
        return there

    def _make_room(self, parts: Path) -> None:
        """Remove the files that were used least recently until there is room for one more."""
        there = sorted(parts.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in there[: max(0, len(there) - MOST_PARTS + 1)]:
            files.remove_tree(path)

    def bound_senders(self, most: int, kept: Collection[str]) -> None:
        """Remove all that others than `kept` have sent least recently, so that at most `most` senders have files here.

        `kept` are at most as many.
        """
        with files.storage(self.path):
            others = [path for path in (self.path / "parts").iterdir() if path.name not in kept]
            others.sort(key=lambda path: path.stat().st_mtime_ns)
            for path in others[: max(0, len(others) + len(kept) - most)]:
                files.remove_tree(path)


def describe(folder: Path) -> tuple[File, ...]:
    """Return the files of an adapter's folder that this process has written itself. Raises StorageError."""
    with files.storage(folder):
        return tuple(
            File(path.name, path.stat().st_size, hash_file(path))  # type: ignore[arg-type]
            for path in sorted(folder.iterdir())
            if path.name in FILES
        )


FILES = frozenset({"adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"})
"""Names of the files of an adapter."""
