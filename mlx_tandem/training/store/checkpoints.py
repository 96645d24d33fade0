"""Checkpoints: folders of an adapter in PEFT's format, the optimiser's state and what else is needed to go on.

`<folder>/<name>/` holds what the engine wrote and `manifest.json`, which has the BLAKE2b-256 of every other file and of
itself. A checkpoint appears under its name whole and durable and goes whole. Its files never change; its manifest is
replaced as a whole when it becomes the newest again or gets its reward. `best-performance` is the one with the highest
reward so far, as a folder of its own with the same files.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from mlx_tandem import files, limits
from mlx_tandem.errors import Conflict, InvalidRequest, NotFound
from mlx_tandem.files import DISK, FileOps, FolderLock, StorageError
from mlx_tandem.training.store import manifests
from mlx_tandem.training.store.manifests import FORMAT, MANIFEST, Corrupt, Manifest

log = logging.getLogger(__name__)

BEST = "best-performance"
LATEST = "latest"
"""The clients' name of the version that the trainer has now. No checkpoint has this name."""

AUTOMATIC = re.compile(rf"{BEST}|(checkpoint|guard)-\d+(\.\d+)?")
"""Names that checkpoints get when nobody gives them one."""

GUARDS = re.compile(r"guard-\d+(\.\d+)?")
"""Names of checkpoints that the guard goes back to."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_NEW = ".new-"
_OLD = ".old-"
_CORRUPT = re.compile(r".*\.corrupt(\.\d+)?")
_RESERVED = ("journal",)  # folders beside the checkpoints


class CheckpointInfo(Struct, frozen=True):
    """One checkpoint, as lists show it."""

    name: str
    step: int
    version: int
    digest: str
    created: float
    reward: float | None
    pinned: bool
    best: bool  # its content is that of `best-performance`
    sequence: int

    @property
    def label(self) -> str:
        """The name and the sequence, which together are never used twice."""
        return manifests.label(self.name, self.sequence)

    @property
    def guards(self) -> bool:
        """Whether it was made for the guard alone."""
        return GUARDS.fullmatch(self.name) is not None and not self.pinned


class Checkpoints:
    """The checkpoints in one folder, of which the newest `keep` that nobody named are meant to be kept, and the best.

    Looking at them needs no lock; `lock` comes before anything is changed. Every call may wait for the drive. Raises
    StorageError where a file cannot be read or written, and errors of requests for names that are wrong.
    """

    def __init__(self, folder: Path, keep: int, ops: FileOps = DISK) -> None:
        self.folder = folder.resolve()
        self.keep = keep
        self._ops = ops
        self._lock: FolderLock | None = None
        self._is_lent = False

    def lock(self, taken: FolderLock | None = None) -> None:
        """Take the folder, made when it is not there, and clear away what a crash has left half done. Raises
        StorageError, with the number of the process that has it, when it is taken.

        `taken` is the lock of this folder that the caller has already, and keeps after `close`.
        """
        with files.storage(self.folder):
            files.make_folder(self.folder, self._ops)
            self._lock = FolderLock(self.folder) if taken is None else taken
            self._is_lent = taken is not None
            old_best = self.folder / f"{_OLD}{BEST}"
            if old_best.exists() and not (self.folder / BEST).exists():  # killed between the two renames of a new best
                _rename(old_best, self.folder / BEST, self._ops)
            for path in sorted(self.folder.iterdir()):
                if path.name.startswith((_OLD, _NEW)):
                    files.remove_tree(path, self._ops)

    def held(self) -> bool:
        """Return whether the folder is still the one that `lock` has taken."""
        return self._lock is not None and self._lock.held()

    def close(self) -> None:
        """Let go of the folder. Twice is once."""
        if self._lock is not None:
            if not self._is_lent:
                self._lock.release()
            self._lock = None

    def list(self) -> Sequence[CheckpointInfo]:
        """Newest first, without those whose manifest is damaged or of another format. No other file is read."""
        found = []
        for name in self._names():
            with contextlib.suppress(StorageError):
                found.append(manifests.read(self.folder / name))
        best = next((m.digest for m in found if m.name == BEST), None)
        found.sort(key=lambda m: (-m.sequence, m.name == BEST))
        return [
            CheckpointInfo(
                m.name, m.step, m.version, m.digest, m.created, m.reward, m.pinned, m.digest == best, m.sequence
            )
            for m in found
        ]

    def surplus(
        self, infos: Sequence[CheckpointInfo], needed: frozenset[str] = frozenset()
    ) -> Sequence[CheckpointInfo]:
        """Return those of `infos`, from `list`, that are not to be kept: of those that nobody named, all but the newest
        `keep`, each content counted once, and of those of the guard all but the newest of all. `needed` ones stay.
        """
        kept: set[str] = set()
        going = []
        newest = next((i.name for i in infos if i.name != BEST), "")
        for info in (i for i in infos if not i.pinned and i.name != BEST):
            if info.guards:
                if info.name not in needed and info.name != newest:
                    going.append(info)
            elif info.digest in kept or len(kept) >= max(self.keep, 1):
                if info.name not in needed:
                    going.append(info)
            else:
                kept.add(info.digest)
        return going

    def path(self, name: str) -> Path:
        """Return the folder of the checkpoint `name`. Raises NotFound."""
        if limits.check_name(name, "checkpoint") not in self._names():
            raise NotFound(f"there is no checkpoint {name!r}", param="checkpoint", code="checkpoint_not_found")
        return self.folder / name

    def verify(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint, after reading every file and finding it as it was written.

        Raises Corrupt, or StorageError when it has another format.
        """
        path = self.path(name)
        manifest = manifests.read(path)
        for file, digest in manifest.files.items():
            target = path / file
            if target.is_symlink() or not target.is_file():
                raise Corrupt(f"{target} is missing from the checkpoint")
            if manifests.hash_file(target) != digest:
                raise Corrupt(f"{target} is not as it was written")
        return manifest

    def newest(self) -> Manifest | None:
        """Return the newest checkpoint that is whole, every byte of it checked. Damaged ones are renamed `*.corrupt`.

        Raises StorageError when there is one of another format: going on from an older one would lose what it holds.
        """
        self._locked()
        found: dict[str, Manifest] = {}
        for name in self._names():
            try:
                found[name] = manifests.read(self.folder / name)
            except Corrupt:
                self._quarantine(name)
        for manifest in sorted(found.values(), key=lambda m: (-m.sequence, m.name == BEST)):
            try:
                return self.verify(manifest.name)
            except Corrupt:
                self._quarantine(manifest.name)
        return None

    def free_name(self, step: int, *, guards: bool = False) -> str:
        """Return `checkpoint-<step>`, or `checkpoint-<step>.2` and so on when a course that was rolled back left that
        name; `guard-<step>` for one that is made for the guard.
        """
        first = f"{'guard' if guards else 'checkpoint'}-{step}"
        name, n = first, 1
        while (self.folder / name).exists():
            n += 1
            name = f"{first}.{n}"
        return name

    def new(self, name: str) -> Path:
        """Make an empty folder for a checkpoint's files and return it. Raises Conflict when there is a checkpoint of
        that name.
        """
        self._locked()
        self._free(name)
        temporary = self.folder / f"{_NEW}{name}"
        with files.storage(temporary):
            files.remove_tree(temporary, self._ops)
            self._ops.mkdir(temporary)
        return temporary

    def commit(self, temporary: Path, manifest: Manifest) -> CheckpointInfo:
        """Make what lies in `temporary`, from `new`, the checkpoint that `manifest` names. When it returns the
        checkpoint survives a loss of power; when it raises, it is there whole or not at all, and so is every other.
        """
        self._locked()
        self._free(manifest.name)
        with files.storage(temporary):
            manifest = msgspec.structs.replace(
                manifest,
                reward=_finite(manifest.reward),
                format=FORMAT,
                created=manifest.created or time.time(),
                sequence=self._next_sequence(),
                files={path.name: _settled(path, self._ops) for path in sorted(temporary.iterdir())},
            )
            files.create(temporary / MANIFEST, manifests.seal(manifest), self._ops)
            files.sync_folder(temporary, self._ops)
            _rename(temporary, self.folder / manifest.name, self._ops)
            self._keep_best()
        return self._info(manifest.name)

    def renew(self, manifest: Manifest) -> CheckpointInfo:
        """Make the checkpoint that `manifest` names, whose content it describes, the newest one; counters, settings and
        the reward, where it is known, become those of `manifest`. When it raises, the old or the new holds.
        """
        reward = _finite(manifest.reward)

        def renewed(old: Manifest) -> Manifest:
            return msgspec.structs.replace(
                old,
                counters=manifest.counters,
                config=manifest.config,
                sequence=self._next_sequence(),
                reward=old.reward if reward is None else reward,
            )

        return self._change(manifest.name, renewed)

    def judge(self, name: str, reward: float) -> CheckpointInfo:
        """Note what the checkpoint `name` is worth, which may make it the best."""
        return self._change(name, lambda old: msgspec.structs.replace(old, reward=_finite(reward)))

    def _change(self, name: str, change: Callable[[Manifest], Manifest]) -> CheckpointInfo:
        self._locked()
        path = self.path(name)
        with files.storage(path):
            files.replace(path / MANIFEST, manifests.seal(change(manifests.read(path))), self._ops)
            self._keep_best()
        return self._info(name)

    def _info(self, name: str) -> CheckpointInfo:
        return next(i for i in self.list() if i.name == name)

    def _next_sequence(self) -> int:
        return 1 + max((i.sequence for i in self.list()), default=0)

    def delete(self, name: str) -> None:
        """Remove a checkpoint. Raises NotFound."""
        self._locked()
        self.path(name)
        with files.storage(self.folder / name):
            self._remove(name)

    def export(self, name: str, target: Path) -> None:
        """Copy a checkpoint's adapter alone, checked, into a new folder in PEFT's format. Raises Conflict."""
        manifest = self.verify(name)
        target = target.absolute()
        if target.exists() or target.is_symlink():
            raise Conflict(f"{target} exists", param="target")
        temporary = target.with_name(f"{_NEW}{target.name}")
        with files.storage(target):
            files.make_folder(target.parent.resolve(), self._ops)
            files.remove_tree(temporary, self._ops)
            self._ops.mkdir(temporary)
            for file in ADAPTER_FILES:
                if file in manifest.files:
                    files.copy(self.folder / name / file, temporary / file, self._ops)
            files.sync_folder(temporary, self._ops)
            _rename(temporary, target, self._ops)

    def _names(self) -> Sequence[str]:
        if not self.folder.is_dir():
            return []
        return sorted(
            p.name
            for p in self.folder.iterdir()
            if limits.NAME.fullmatch(p.name) and not _CORRUPT.fullmatch(p.name) and (p / MANIFEST).is_file()
        )

    def _locked(self) -> None:
        if self._lock is None:
            raise RuntimeError("the folder is not locked")
        if not self._lock.held():
            raise gone(self.folder)

    def _free(self, name: str) -> None:
        limits.check_name(name, "checkpoint_name")
        if name in (*_RESERVED, BEST) or _CORRUPT.fullmatch(name):
            raise InvalidRequest(f"checkpoint_name may not be {name!r}", param="checkpoint_name")
        if (self.folder / name).exists():
            raise Conflict(f"there is a checkpoint {name!r}", param="checkpoint_name", code="checkpoint_exists")

    def _remove(self, name: str) -> None:
        old = self.folder / f"{_OLD}{name}"
        files.remove_tree(old, self._ops)
        _rename(self.folder / name, old, self._ops)
        files.remove_tree(old, self._ops)

    def _quarantine(self, name: str) -> None:
        new, n = self.folder / f"{name}.corrupt", 1
        while new.exists():
            n += 1
            new = self.folder / f"{name}.corrupt.{n}"
        log.warning("checkpoint %s is damaged; it is kept as %s", name, new)
        with files.storage(new):
            _rename(self.folder / name, new, self._ops)

    def _keep_best(self) -> None:
        """`best-performance` is the one with the highest reward of all that are there, the earlier of two."""
        judged = {i.name: (i.reward, -i.sequence) for i in self.list() if i.reward is not None}
        top = max(judged, key=lambda name: judged[name], default=BEST)
        if top == BEST or judged.get(BEST) == judged[top]:
            return
        source, best = self.folder / top, self.folder / BEST
        new, old = self.folder / f"{_NEW}{BEST}", self.folder / f"{_OLD}{BEST}"
        manifest = manifests.read(source)
        for path in (new, old):
            files.remove_tree(path, self._ops)
        self._ops.mkdir(new)
        for file in manifest.files:
            files.link_or_copy(source / file, new / file, self._ops)
        files.create(new / MANIFEST, manifests.seal(msgspec.structs.replace(manifest, name=BEST)), self._ops)
        files.sync_folder(new, self._ops)
        try:
            if best.exists():
                self._ops.rename(best, old)
            _rename(new, best, self._ops)
        except OSError:
            if old.exists() and not best.exists():
                self._ops.rename(old, best)
            raise
        files.remove_tree(old, self._ops)


def gone(folder: Path) -> StorageError:
    """Return the error of a folder that was taken and is no longer there."""
    return StorageError(f"{folder} was removed or replaced while it was in use: bring it back, or restart the server")


def _settled(path: Path, ops: FileOps) -> str:
    """Bring a file to the drive and return its hash."""
    if path.is_symlink() or not path.is_file():
        raise StorageError(f"{path} is not a regular file")
    files.sync_file(path, ops)
    return manifests.hash_file(path)


def _rename(old: Path, new: Path, ops: FileOps) -> None:
    """Rename durably."""
    ops.rename(old, new)
    files.sync_folder(new.parent, ops)


def _finite(reward: float | None) -> float | None:
    """Return the reward, or None for what is no number to compare."""
    return reward if reward is not None and math.isfinite(reward) else None
