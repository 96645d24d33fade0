"""The folder of a fine-tuning that has not ended: the trainer's newest state and all events, from which it resumes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlx_tandem import files
from mlx_tandem.errors import Conflict, InvalidRequest
from mlx_tandem.training.fit import Event, Step
from mlx_tandem.training.sft import Taught

STATE = "run.json"
_STATES = re.compile(r"state-(\d{1,12})-(\d{1,12})")
MAX_STATE_BYTES = 1 << 30


class RunState(Struct, frozen=True, forbid_unknown_fields=True):
    """What a run has done. `about` is everything that decides its course: with other values it would be another run."""

    about: dict[str, Any]
    events: list[Event]
    format: int = 1


class RunFolder:
    """The folder beside an adapter's, with ".run" behind its name. One process at a time uses it.

    States are written into new folders, and the last one is removed when the next is complete, so that a run can be
    killed at any moment.
    """

    def __init__(self, out: Path):
        """Name the folder of the run that makes the adapter `out`; nothing is written."""
        self.path = out.absolute().with_name(f"{out.absolute().name}.run")
        self._lock: files.FolderLock | None = None

    def check(self, resume: bool) -> None:
        """Raise Conflict when there is a run that is not to be resumed, InvalidRequest when there is none to resume."""
        if resume and not self.path.is_dir():
            raise InvalidRequest(f"there is no unfinished run in {self.path} to be resumed", param="resume")
        if not resume and self._states():
            raise Conflict(
                f"{self.path} has a run that was not finished: --resume continues it; else remove the folder"
            )

    def saved_step(self) -> int | None:
        """Return the number of steps after which the newest state was saved; None if no state was saved."""
        states = self._states()
        match = _STATES.fullmatch(states[-1].name) if states else None
        return int(match[1]) if match else None

    def begin(self) -> None:
        """Make the folder, or take over that of an unfinished run. Raises StorageError when another process has it."""
        with files.storage(self.path):
            files.make_folder(self.path)
            self._lock = files.FolderLock(self.path)

    def load(self, about: Mapping[str, Any]) -> tuple[Path, RunState] | None:
        """Return the folder of the newest state and the state; None when the run ended before the first was saved.

        Raises InvalidRequest naming what differs when the run is not the one that `about` describes.
        """
        states = self._states()
        if not states:
            return None
        folder = states[-1]
        try:
            raw = (folder / STATE).read_bytes()
            state = msgspec.json.decode(raw, type=RunState)
        except (OSError, msgspec.MsgspecError) as e:
            raise InvalidRequest(f"{folder / STATE} cannot be read: {e}", param="resume") from e
        wanted = msgspec.json.decode(msgspec.json.encode(about))
        for name in dict.fromkeys([*wanted, *state.about]):
            if wanted.get(name) != state.about.get(name):
                was, now = _difference(state.about.get(name), wanted.get(name))
                raise InvalidRequest(f"the run in {self.path} was begun with {name} {was}, not {now}", param="resume")
        return folder, state

    def save(self, write: Callable[[Path], None], state: RunState) -> None:
        """Save a state, with what `write` writes into a new folder. Raises StorageError."""
        old = self._states()
        done = next((e.step for e in reversed(state.events) if isinstance(e, Step)), 0)
        new = self.path / f"state-{done}-{len(state.events)}"
        with files.storage(self.path):
            files.remove_tree(new)
            write(new)
            files.create(new / STATE, msgspec.json.encode(state))
            files.sync_folder(new)
            for folder in old:
                if folder != new:
                    files.remove_tree(folder)

    def end(self, out: Path) -> None:
        """Move what is left besides states into `out`, and remove the folder."""
        with files.storage(self.path):
            for folder in self._folders():
                files.remove_tree(folder)
            for entry in sorted(self.path.iterdir()):
                if entry.name != files.LOCK:
                    files.remove_tree(out / entry.name)
                    files.DISK.rename(entry, out / entry.name)
            files.sync_folder(out)
            self.release()
            files.remove_tree(self.path)

    def release(self) -> None:
        """Let another process use the folder. An empty one is removed."""
        if self._lock is None:
            return
        self._lock.release()
        self._lock = None
        if self.path.is_dir() and [entry.name for entry in self.path.iterdir()] == [files.LOCK]:
            files.remove_tree(self.path)

    def _folders(self) -> list[Path]:
        found = [(m, entry) for entry in self.path.iterdir() if (m := _STATES.fullmatch(entry.name))]
        return [entry for m, entry in sorted(found, key=lambda pair: (int(pair[0][1]), int(pair[0][2])))]

    def _states(self) -> list[Path]:
        """Return the complete states, the newest last."""
        return [folder for folder in self._folders() if (folder / STATE).is_file()] if self.path.is_dir() else []


def digest(train: Sequence[Taught], valid: Sequence[Taught]) -> str:
    """Return a digest of the data of a run, in their order."""
    found = hashlib.blake2b(digest_size=16)
    for part in (train, valid):
        found.update(msgspec.msgpack.encode(part))
    return found.hexdigest()


def _difference(was: Any, now: Any, name: str = "") -> tuple[str, str]:
    """Return both values in short, with the key where two objects differ."""
    if isinstance(was, dict) and isinstance(now, dict):
        key = next(key for key in dict.fromkeys([*now, *was]) if was.get(key) != now.get(key))
        return _difference(was.get(key), now.get(key), f"{name}{key} ")
    return f"{name}{str(was)[:80]}", str(now)[:80]
