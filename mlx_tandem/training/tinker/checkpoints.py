"""Checkpoints of Tinker's clients: PEFT folders on the drive, by run and name, which survive the server.

    DIR/RUN/run.json                          what the run is, and whose
    DIR/RUN/weights/NAME/                     an adapter in PEFT's format with the optimiser's state
    DIR/RUN/sampler_weights/NAME/             an adapter in PEFT's format

Each checkpoint has a `checkpoint.json` beside its files. Clients know it as tinker://RUN/weights/NAME.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar, get_args

import msgspec
from msgspec import Struct

from mlx_tandem import files, limits
from mlx_tandem.engine.learning import Part
from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.log import log
from mlx_tandem.types import AdapterSource

Kind = Literal["weights", "sampler_weights"]
"""Whether a trainer can go on from a checkpoint, or whether it can only be sampled from."""

RUN = "run.json"
CHECKPOINT = "checkpoint.json"

_RUN_ID = re.compile(r"([0-9a-f]{32}):train:([0-9]{1,9})")
_PATH = re.compile(r"tinker://([^/]+)/([^/]+)/([^/]+)")
_NEW, _OLD = ".new-", ".old-"


class Run(Struct, frozen=True):
    """The manifest of a run, which is one trained model. `id` is the model's id."""

    id: str
    owner: str
    base_model: str
    rank: int
    parts: tuple[Part, ...]
    created: float  # seconds since the epoch
    metadata: dict[str, str] = {}
    format: int = 1


class Checkpoint(Struct, frozen=True):
    """The manifest of one checkpoint of a run."""

    run: str
    kind: Kind
    name: str
    rank: int
    parts: tuple[Part, ...]
    created: float
    nbytes: int
    expires: float | None = None  # seconds since the epoch; None: never
    metadata: dict[str, str] = {}
    format: int = 1

    @property
    def path(self) -> str:
        """The path by which clients know it."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        """The id within its run."""
        return f"{self.kind}/{self.name}"


Manifest = TypeVar("Manifest", Run, Checkpoint)


class Place(Struct, frozen=True):
    """A path of Tinker's in its parts."""

    run: str
    kind: Kind
    name: str

    @classmethod
    def of(cls, path: str, param: str) -> Place:
        """Return the parts of tinker://RUN/KIND/NAME. Raises InvalidRequest naming `param`."""
        found = _PATH.fullmatch(path)
        if found is None or found[2] not in get_args(Kind):
            raise InvalidRequest(
                f"{param} must be tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME", param=param
            )
        return cls(found[1], found[2], found[3])  # type: ignore[arg-type]


class Checkpoints:
    """The checkpoints of all clients in one folder, which this process has for itself."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time):
        """Take the folder, clear away what a crash has left half done, and read what is there. Raises StorageError."""
        self.folder = folder.resolve()
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._known: dict[tuple[str, Kind, str], Checkpoint] = {}
        self._changing = asyncio.Lock()
        with files.storage(self.folder):
            files.make_folder(self.folder)
            self._lock = files.FolderLock(self.folder)
            for path in sorted(self.folder.iterdir()):
                if path.is_dir() and not path.is_symlink():
                    self._read(path)

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.release()

    # -- what is there ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of all clients' checkpoints on the drive."""
        return len(self._known)

    def runs(self, owner: str) -> list[Run]:
        """Return the runs of an owner, the newest first."""
        return sorted((r for r in self._runs.values() if r.owner == owner), key=lambda r: -r.created)

    def run(self, id: str, owner: str) -> Run:
        """Return a run. Raises NotFound for one that is not there, or is another owner's."""
        run = self._runs.get(id)
        if run is None or run.owner != owner:
            raise NotFound(f"there is no training run {id[:80]!r}", param="training_run_id")
        return run

    def of_run(self, id: str) -> list[Checkpoint]:
        """Return the checkpoints of a run, the newest first."""
        return sorted((c for c in self._live() if c.run == id), key=lambda c: -c.created)

    def of_owner(self, owner: str) -> list[Checkpoint]:
        """Return the checkpoints of all runs of an owner, the newest first."""
        mine = {run.id for run in self.runs(owner)}
        return sorted((c for c in self._live() if c.run in mine), key=lambda c: -c.created)

    def get(self, path: str, owner: str, param: str = "path") -> Checkpoint:
        """Return the checkpoint that a path of Tinker's names.

        Raises InvalidRequest for what is no such path, and NotFound for one that is not there or is another owner's.
        """
        place = Place.of(path, param)
        run = self._runs.get(place.run)
        found = self._known.get((place.run, place.kind, place.name))
        if run is None or run.owner != owner or found is None or self._is_over(found):
            raise NotFound(f"there is no checkpoint {path[:200]!r}", param=param, code="checkpoint_not_found")
        return found

    def source(self, checkpoint: Checkpoint) -> AdapterSource:
        """Return the folder of a checkpoint."""
        folder = self._folder_of(checkpoint.run) / checkpoint.kind / checkpoint.name
        return AdapterSource(str(folder), str(self.folder))

    def _live(self) -> Iterator[Checkpoint]:
        return (c for c in self._known.values() if not self._is_over(c))

    def _is_over(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.expires is not None and checkpoint.expires <= self._clock()

    def _folder_of(self, run: str) -> Path:
        found = _RUN_ID.fullmatch(run)
        assert found is not None
        return self.folder / f"{found[1]}-{found[2]}"

    # -- changes ------------------------------------------------------------------------------------------------

    async def save(
        self, run: Run, new: Checkpoint, write: Callable[[str], Awaitable[None]], *, overwrite: bool = False
    ) -> Checkpoint:
        """Make a checkpoint whose files `write` writes into the folder that it is given. It is there whole or not.

        Raises InvalidRequest for a name that is taken, unless it may be overwritten, and StorageError.
        """
        key = (new.run, new.kind, new.name)
        if key in self._known and not self._is_over(self._known[key]) and not overwrite:
            raise InvalidRequest(f"there is a checkpoint {new.path}", param="path", code="checkpoint_exists")
        if len(self._known) >= limits.MAX_TINKER_CHECKPOINTS:
            raise InvalidRequest(f"there are {len(self._known)} checkpoints: delete some first", param="path")
        async with self._changing:
            parent = self._folder_of(new.run) / new.kind
            temporary = parent / f"{_NEW}{new.name}"
            await asyncio.to_thread(self._begin, run, temporary)
            try:
                await write(str(temporary))
                done = await asyncio.to_thread(_commit, temporary, parent / new.name, new)
            except BaseException:
                await asyncio.to_thread(_remove, temporary)
                raise
            self._runs[run.id] = run
            self._known[key] = done
            return done

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint. Raises StorageError."""
        async with self._changing:
            self._known.pop((checkpoint.run, checkpoint.kind, checkpoint.name), None)
            await asyncio.to_thread(_remove, Path(self.source(checkpoint).path))

    async def set_expiry(self, checkpoint: Checkpoint, expires: float | None) -> None:
        """Change when a checkpoint expires, in seconds since the epoch; None: never. Raises StorageError."""
        async with self._changing:
            changed = msgspec.structs.replace(checkpoint, expires=expires)
            await asyncio.to_thread(_write_info, Path(self.source(checkpoint).path), changed)
            self._known[changed.run, changed.kind, changed.name] = changed

    async def expire(self) -> None:
        """Remove the checkpoints whose time is over."""
        for checkpoint in [c for c in self._known.values() if self._is_over(c)]:
            log("checkpoint expired", checkpoint=checkpoint.path)
            await self.delete(checkpoint)

    # -- the drive ----------------------------------------------------------------------------------------------

    def _begin(self, run: Run, temporary: Path) -> None:
        """Make the folder of a new checkpoint's files, and that of its run."""
        with files.storage(temporary):
            files.remove_tree(temporary)
            files.make_folder(temporary)
            manifest = self._folder_of(run.id) / RUN
            if not manifest.exists():
                files.replace(manifest, msgspec.json.encode(run))

    def _read(self, folder: Path) -> None:
        """Read one run with its checkpoints. What is damaged is left alone and logged."""
        run = _decoded(folder / RUN, Run)
        if run is None or _RUN_ID.fullmatch(run.id) is None or self._folder_of(run.id) != folder:
            log("folder passed over", folder=str(folder), reason=f"it has no {RUN} of this server")
            return
        self._runs[run.id] = run
        for kind in get_args(Kind):
            parent = folder / kind
            if not parent.is_dir() or parent.is_symlink():
                continue
            _clear(parent)
            for path in sorted(parent.iterdir()):
                found = _decoded(path / CHECKPOINT, Checkpoint)
                if found is None or (found.run, found.kind, found.name) != (run.id, kind, path.name):
                    log("checkpoint passed over", folder=str(path), reason=f"its {CHECKPOINT} cannot be used")
                    continue
                self._known[run.id, kind, path.name] = found


def _clear(folder: Path) -> None:
    """Clear away what a crash has left half done: of two folders of one checkpoint the older one stays."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(_OLD) and not (target := folder / path.name.removeprefix(_OLD)).exists():
            files.DISK.rename(path, target)
        elif path.name.startswith((_NEW, _OLD)):
            files.remove_tree(path)


def _decoded(path: Path, kind: type[Manifest]) -> Manifest | None:
    """Return a manifest; None for one that cannot be used."""
    try:
        if path.is_symlink() or path.stat().st_size > limits.MAX_CONFIG_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _commit(temporary: Path, target: Path, new: Checkpoint) -> Checkpoint:
    """Give a finished folder its name, in place of an older one, and return the checkpoint with its size."""
    with files.storage(target):
        nbytes = sum(path.stat().st_size for path in temporary.iterdir())
        done = msgspec.structs.replace(new, nbytes=nbytes)
        files.create(temporary / CHECKPOINT, msgspec.json.encode(done))
        files.sync_folder(temporary)
        old = target.with_name(f"{_OLD}{target.name}")
        if target.exists():
            files.remove_tree(old)
            files.DISK.rename(target, old)
        files.DISK.rename(temporary, target)
        files.sync_folder(target.parent)
        files.remove_tree(old)
        return done


def _write_info(folder: Path, checkpoint: Checkpoint) -> None:
    with files.storage(folder):
        files.replace(folder / CHECKPOINT, msgspec.json.encode(checkpoint))


def _remove(folder: Path) -> None:
    """Remove a checkpoint's folder, which is not there half at any time."""
    with files.storage(folder):
        if not folder.exists():
            return
        old = folder.with_name(f"{_OLD}{folder.name}")
        files.remove_tree(old)
        files.DISK.rename(folder, old)
        files.sync_folder(folder.parent)
        files.remove_tree(old)
