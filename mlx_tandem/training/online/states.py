"""The states of the trainer on the drive, from which a new process or a new engine goes on within seconds.

A state is a folder `.state-NAME-NUMBER` beside the database: adapter and optimiser as they were after an update. The
newest three are kept. The data of the updates since the oldest of them is kept in the database, so that whatever lies
between two states can be computed again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mlx_tandem import files
from mlx_tandem.files import StorageError
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.online.threads import to_the_end
from mlx_tandem.training.store import manifests
from mlx_tandem.training.store.records import Began, State
from mlx_tandem.training.store.saved import UpdateRow

log = logging.getLogger(__name__)

KEPT = 3
"""States that are kept: with the updates between them, they lead to each of the newest versions."""

REST = 20.0
"""The trainer is saved again once so many times as long has passed as saving took: it costs 5 % of the time."""

PREFIX = ".state-"


class Way(NamedTuple):
    """The way of the trainer to some content: from a state, by these updates."""

    base: State | None  # None: from what learning begins with
    updates: Sequence[UpdateRow] = ()


class Start(NamedTuple):
    """The way of a trainer to where the last one was."""

    way: Way
    served: State | None  # whose content is served until then; None: what learning begins with
    is_lost: bool = False  # updates are missing, since states are damaged or gone


class States:
    """The states of one ledger's trainer. `read` comes first."""

    def __init__(self, ledger: Ledger, adapter: str) -> None:
        self._ledger, self._prefix = ledger, f"{PREFIX}{adapter}-"
        self._states: list[State] = []  # oldest first
        self._rests_until = 0.0

    def __iter__(self) -> Iterator[State]:
        return iter(list(self._states))

    @property
    def is_due(self) -> bool:
        """Whether the trainer should be saved."""
        return self._ledger.unsaved > 0 and time.monotonic() >= self._rests_until

    def path(self, state: State) -> str:
        """Return the folder of a state."""
        return str(self._ledger.checkpoints.folder / state.folder)

    async def read(self) -> None:
        """Read which states there are and whole, and remove what a crash has left of others. Raises StorageError."""

        def whole() -> list[State]:
            return [s for s in self._ledger.saved.states() if self._is_whole(s)]

        self._states = await asyncio.to_thread(whole)
        await asyncio.to_thread(self._clear)

    # -- going on -------------------------------------------------------------------------------------------------

    async def start(self) -> Start:
        """Return the way to where the last trainer was: from the newest state that leads there, else from the newest
        checkpoint, whose later updates are lost then.
        """
        updates = await self._updates()
        for at in reversed(range(len(self._states) + 1)):
            base = self._states[at - 1] if at else None
            way = self._between(base, updates, None)
            if way is not None:
                self._states, self._ledger.unsaved = self._states[:at], len(way.updates)
                published = next((s for s in reversed(self._states) if s.version), None)
                own = base is None or base.folder.startswith(PREFIX)
                return Start(way, published if published is not None or own else base)
        self._states, self._ledger.unsaved = [], 1
        manifest = await asyncio.to_thread(self._ledger.checkpoints.newest)
        self._ledger.listed = await asyncio.to_thread(self._ledger.checkpoints.list)  # damaged ones have gone
        if manifest is None:
            return Start(Way(None), None, is_lost=self._ledger.counters.updates > 0)
        number, content = self._ledger.counters.updates, (manifest.step, manifest.version, manifest.digest)
        base = State(manifest.name, number, *content, manifest.files)
        return Start(Way(base), base, is_lost=True)

    async def way(self, digest: str) -> Way | None:
        """Return the way to a version with this content; None: nothing leads there any more."""
        state = next((s for s in reversed(self._states) if s.digest == digest), None)
        if state is not None:
            return Way(state)
        updates = await self._updates()
        target = next((u for u in reversed(updates) if u.stands and u.end.digest == digest), None)
        if target is None:
            return None
        base = next((s for s in reversed(self._states) if s.number < target.number), None)
        return self._between(base, updates, target.number)

    async def began(self, update: UpdateRow) -> Began:
        """Return the data of an update. Raises StorageError."""
        return await asyncio.to_thread(self._ledger.saved.began, update.number)

    async def _updates(self) -> list[UpdateRow]:
        await self._ledger.flush()
        return await asyncio.to_thread(self._ledger.saved.updates)

    def _between(self, base: State | None, updates: Sequence[UpdateRow], last: int | None) -> Way | None:
        """Return the way from a state to update `last`; None: updates are missing."""
        last = self._ledger.counters.updates if last is None else last
        first = 0 if base is None else base.number
        there = [u for u in updates if first < u.number <= last]
        if [u.number for u in there] != list(range(first + 1, last + 1)) or any(
            u.stands and not u.is_kept for u in there
        ):
            return None
        return Way(base, [u for u in there if u.stands])

    def _is_whole(self, state: State) -> bool:
        """Return whether every file of a state is as it was written."""
        folder = Path(self.path(state))
        try:
            for name, digest in state.files.items():
                if (folder / name).is_symlink() or manifests.hash_file(folder / name) != digest:
                    raise StorageError(f"{folder / name} is not as it was written")
        except StorageError as e:
            log.warning("state damaged", extra={"fields": {"folder": str(folder), "error": e.message}})
            return False
        return True

    # -- saving ---------------------------------------------------------------------------------------------------

    async def new(self) -> str:
        """Make the folder of the next state and return its path. Raises StorageError."""
        numbers = [int(s.folder.removeprefix(self._prefix)) for s in self._states if s.folder.startswith(self._prefix)]
        folder = self._ledger.checkpoints.folder / f"{self._prefix}{max(numbers, default=0) + 1}"

        def make() -> None:
            self._ledger.saved.database.check()
            with files.storage(folder):
                files.remove_tree(folder)
                files.DISK.mkdir(folder)

        await to_the_end(make)
        return str(folder)

    async def commit(self, folder: str, step: int, version: int, digest: str, began: float) -> None:
        """Let a folder from `new` be the newest state: what the trainer is after the last update. It is when this
        returns, and other states may go. `began` is the monotonic time when saving began. Raises StorageError.
        """
        found = await asyncio.to_thread(_settled, Path(folder))
        state = State(Path(folder).name, self._ledger.counters.updates, step, version, digest, found)
        own = [s for s in self._states if s.folder.startswith(PREFIX)]  # a checkpoint may go at any time
        newest = [*own, state][-KEPT:]
        published = [] if any(s.version for s in newest) else [s for s in own if s.version][-1:]
        self._states, self._ledger.unsaved = [*published, *newest], 0
        await self._ledger.flush(*self._ledger.rows.states(self._states, newest[0].number))
        await to_the_end(self._clear)
        now = time.monotonic()
        self._rests_until = now + REST * (now - began)

    def _clear(self) -> None:
        """Remove folders of states that are not kept. What cannot be removed now goes with the next ones."""
        kept = {s.folder for s in self._states}
        try:
            for path in self._ledger.checkpoints.folder.glob(f"{self._prefix}*"):
                number = path.name.removeprefix(self._prefix)
                if path.name not in kept and number.isdigit():
                    files.remove_tree(path)
        except OSError as e:
            log.warning("states not removed", extra={"fields": {"error": e.strerror or str(e)}})


def _settled(folder: Path) -> dict[str, str]:
    """Bring the files of a folder, and its name, to the drive; return their hashes."""
    found = {}
    with files.storage(folder):
        for path in sorted(folder.iterdir()):
            files.sync_file(path)
            found[path.name] = manifests.hash_file(path)
        files.sync_folder(folder)
        files.sync_folder(folder.parent)
    return found
