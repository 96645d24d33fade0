"""The versions that training has made: which the trainer's weights are, and which are kept for whom."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import EngineError, NotFound
from mlx_tandem.training.online.serving import Serving
from mlx_tandem.training.store.checkpoints import CheckpointInfo, Checkpoints
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource

RECENT = 3
"""How many of the newest versions stay, whatever they are needed for."""


@dataclass
class Version:
    """One version that training has made."""

    ref: AdapterRef
    info: AdapterInfo
    folder: str = ""  # of a checkpoint that has it, too


class Versions:
    """The versions of the trained adapter's name, and which of them the trainer's weights are."""

    def __init__(self, client: EngineClient, serving: Serving) -> None:
        self._client = client
        self._serving = serving
        self._known: dict[int, Version] = {}
        self.head: Version | None = None
        """What the trainer's weights are; None when they were never published."""
        self.switched = False
        """Somebody has made another version current since the last one was published."""
        self.last = 0
        """The highest number ever given."""
        self._chosen: AdapterRef | None = None  # what was switched to on an engine that has ended

    @property
    def recent(self) -> list[int]:
        """Numbers of the newest versions, ascending."""
        return sorted(self._known)[-RECENT:]

    @property
    def digests(self) -> set[str]:
        """Contents of all versions that are kept."""
        return {v.ref.digest for v in self._known.values()}

    def __iter__(self) -> Iterator[Version]:
        return iter(list(self._known.values()))

    def get(self, number: int) -> Version | None:
        """Return the version of this number; None when it is not kept."""
        return self._known.get(number)

    def count_from(self, number: int) -> None:
        """Give higher numbers than this one, up to which an earlier process gave them."""
        self.last = max(self.last, number)
        self._serving.count_from(self.last)

    def expect(self, numbers: Sequence[int]) -> None:
        """Note that versions of these numbers are being made again."""
        self._serving.expect(numbers)

    async def recovered(self) -> None:
        """Treat what was not made again by now as gone."""
        await self._serving.recovered()

    def publish(self, info: AdapterInfo, folder: str = "") -> AdapterRef:
        """Make the trainer's weights, which are `info`, current; requests that follow go on under them."""
        ref = self.show(info, folder)
        self.head, self.switched = self._known[ref.version], False
        return ref

    def reserve(self, info: AdapterInfo, number: int = 0) -> Version:
        """Give content that is not current a number: `number` if it had that before."""
        return self._note(self._serving.reserve(info, number), info, "")

    def begin(self, info: AdapterInfo, folder: str, number: int) -> Version:
        """Begin on a new engine, which has nothing but this content and what lies in folders.

        The content is served until `settle`, unless what is current lies in a folder.
        """
        current = self._serving.current()
        if self._chosen is None and self.switched:
            self._chosen = current
        known = None if current is None else self._known.get(current.version)
        if known is not None and known.folder:
            ref = self._serving.reserve(info, number)
        else:
            ref = self._serving.publish(info, AdapterSource(folder) if folder else None, number)
        self.head = self._note(ref, info, folder)
        return self.head

    def show(self, info: AdapterInfo, folder: str = "") -> AdapterRef:
        """Make this content current; the trainer goes on with what it has."""
        ref = self._serving.publish(info, AdapterSource(folder) if folder else None)
        self._note(ref, info, folder)
        self._client.follow_adapter(ref)
        self.switched = self.head is None or self.head.ref.version != ref.version
        return ref

    def settle(self, head: Version, made: Collection[int]) -> None:
        """Note that on a new engine the trainer is `head` and `made` are there again; what has no folder either is
        gone.
        """
        self._known = {n: v for n, v in self._known.items() if v.folder or n in made}
        chosen = None if self._chosen is None else self._known.get(self._chosen.version)
        self._chosen = None
        self.publish(head.info, head.folder)
        if chosen is not None:
            self.show(chosen.info, chosen.folder)

    def saved(self, version: AdapterInfo, folder: str, name: str) -> None:
        """Note that content lies in the folder of a checkpoint, too."""
        self._serving.saved(version, folder, name)
        for known in self._known.values():
            if known.ref.digest == version.digest:
                known.folder = folder

    def in_folder(self, folder: str, numbers: Collection[int]) -> bool:
        """Return whether one of the versions with these numbers lies in the folder of a checkpoint."""
        return any(v.folder == folder for n, v in self._known.items() if n in numbers)

    def removed(self, folder: str, others: Mapping[str, str]) -> None:
        """Note that the folder of a checkpoint is gone. `others`: folders that are left, by digest."""
        for known in self._known.values():
            if known.folder == folder:
                known.folder = others.get(known.ref.digest, "")

    def find(self, to: str, name: str, checkpoints: Checkpoints, listed: Sequence[CheckpointInfo]) -> tuple[str, str]:
        """Return the checkpoint's folder (empty: there is none) and the digest of what `to` names: 7, name@7 or a
        checkpoint.

        Reads from the disk. Raises NotFound, StorageError.
        """
        digits = to.removeprefix(f"{name}@")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 16):
            return str(checkpoints.path(to)), checkpoints.verify(to).digest
        known = self._known.get(int(digits))
        for info in listed:
            if info.digest == known.ref.digest if known is not None else 0 < info.version == int(digits):
                return str(checkpoints.path(info.name)), info.digest
        if known is None:
            raise NotFound(f"there is no version {digits} to go back to", param="to", code="version_not_found")
        return "", known.ref.digest

    def kept(self, checkpoints: Sequence[CheckpointInfo], more: Collection[int] = ()) -> set[int]:
        """Return the numbers that go on existing: recent ones, what is served and trained, those with a checkpoint, and
        `more`.
        """
        current = self._serving.current()
        digests = {info.digest for info in checkpoints}
        return {
            *self.recent,
            *more,
            *(() if current is None else (current.version,)),
            *(() if self.head is None else (self.head.ref.version,)),
            *(n for n, v in self._known.items() if v.ref.digest in digests),
        }

    async def retire_except(self, kept: Collection[int]) -> None:
        """Retire all versions but these."""
        for number in [n for n in self._known if n not in kept]:
            await self.retire(self._known[number].ref)

    async def retire(self, ref: AdapterRef) -> None:
        """Let a version go: nobody may ask for it any more."""
        self._known.pop(ref.version, None)
        with contextlib.suppress(EngineError):  # it went with its engine
            await self._serving.retire(ref)

    def _note(self, ref: AdapterRef, info: AdapterInfo, folder: str) -> Version:
        self.last = max(self.last, ref.version)
        known = self._known.setdefault(ref.version, Version(ref, info, folder))
        known.folder = folder or known.folder
        return known
