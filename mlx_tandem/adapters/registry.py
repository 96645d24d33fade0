"""The front's registry of adapters: names, their immutable versions, and which version a name stands for now.

Plain data, one thread, no arrays and no files: the engine has read and checked the folder, or has made the weights
itself, before `publish` is called, and knows versions by digest only. A version never changes its meaning: when a
name is removed and published again, its numbers go on, so that `name@2` in an old log is never another adapter. A
name may also be known by its folder only (`announce`); it gets its first version when somebody asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from mlx_tandem import limits
from mlx_tandem.errors import Conflict, InvalidRequest, NotFound
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource

REMEMBERED = 1 << 16
"""Most removed names whose numbers are remembered one by one. Names that are new after that begin above all others."""


@dataclass
class Counters:
    """Counts of the requests to one version, or to one arm of an alias, since it exists."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    errors: int = 0
    seconds: float = 0.0  # total duration of requests
    open: int = 0  # requests that use it now


@dataclass(eq=False)
class Entry:
    """One version of one name. Only its counters and its source change."""

    name: str
    ref: AdapterRef
    source: AdapterSource | None  # None: it exists in the engine's memory only
    info: AdapterInfo
    created: float  # seconds since the epoch
    pinned: bool = False
    counters: Counters = field(default_factory=Counters)


@dataclass
class _Name:
    versions: dict[int, Entry] = field(default_factory=dict)  # in order of publication
    by_digest: dict[str, int] = field(default_factory=dict)
    current: int = 0  # the version that the name alone stands for; 0: none yet
    last: int = 0  # the highest number ever given


class Registry:
    """All adapter names and versions that this server knows."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._names: dict[str, _Name] = {}
        self._unread: dict[str, AdapterSource] = {}  # announced names without a version
        self._folded: dict[str, str] = {}  # casefolded -> every name ever seen: see `check`
        self._retired: dict[str, int] = {}  # removed name -> highest number given
        self._highest = 0  # number that was given to a name which is no longer remembered
        self._holders: dict[str, list[Entry]] = {}  # by digest
        self.on_change: Callable[[], None] = lambda: None
        """A function that is called after versions were added or removed, or a name stands for another one."""

    def check(self, name: str) -> str:
        """Return `name` if it may be published; raise InvalidRequest if not.

        Names that differ only in case would be the same on many disks and are refused.
        """
        limits.check_name(name)
        other = self._folded.get(name.casefold(), name)
        if other != name:
            raise InvalidRequest(f"name {name!r} differs from {other!r} in case only", param="name")
        return name

    def announce(self, name: str, source: AdapterSource) -> None:
        """Make a name known by its folder alone; nothing happens if it has a version."""
        if name not in self._names:
            self.check(name)
            self._folded[name.casefold()] = name
            self._unread[name] = source

    def source(self, name: str) -> AdapterSource | None:
        """Return the folder of the current version of `name`, or the folder that was announced."""
        book = self._names.get(name)
        return book.versions[book.current].source if book is not None and book.current else self._unread.get(name)

    def is_read(self, name: str) -> bool:
        """Return whether `name` stands for a version."""
        return name in self._names and self._names[name].current > 0

    def was_removed(self, name: str) -> bool:
        """Return whether `name` existed and was removed."""
        return name in self._retired

    def publish(
        self, name: str, source: AdapterSource | None, info: AdapterInfo, pinned: bool = False, number: int = 0
    ) -> AdapterRef:
        """Make `info`'s content the current version of `name` and return its reference.

        New content gets the next number, or `number`, which this very content had before, unless it is taken.
        Content that this name already has keeps its number and counters, and the name stands for it again. Only the
        current version of a name can be pinned.
        """
        book, entry = self._add(name, source, info, number)
        book.current = entry.ref.version
        for other in book.versions.values():
            other.pinned = pinned and other is entry
        self.on_change()
        return entry.ref

    def reserve(self, name: str, info: AdapterInfo, number: int = 0) -> AdapterRef:
        """Add a version of `name`, numbered as in `publish`, which only `name@version` names until it is
        published.
        """
        ref = self._add(name, None, info, number)[1].ref
        self.on_change()
        return ref

    def _add(self, name: str, source: AdapterSource | None, info: AdapterInfo, wanted: int) -> tuple[_Name, Entry]:
        self.check(name)
        self._unread.pop(name, None)
        book = self._names.get(name)
        if book is None:
            book = self._names[name] = _Name(last=self._retired.pop(name, self._highest))
            self._folded[name.casefold()] = name
        number = book.by_digest.get(info.digest)
        if number is None:
            number = wanted if wanted > 0 and wanted not in book.versions else book.last + 1
            book.last = max(book.last, number)
            ref = AdapterRef(name, number, info.digest, info.invocation, bool(info.score_head))
            book.versions[number] = Entry(name, ref, source, info, self._clock())
            book.by_digest[info.digest] = number
            self._holders.setdefault(info.digest, []).append(book.versions[number])
        entry = book.versions[number]
        if source is not None:
            entry.source = source
        return book, entry

    def count_from(self, name: str, number: int) -> None:
        """Note that an earlier server has given the numbers of `name` up to `number`."""
        book = self._names.get(name)
        if book is not None:
            book.last = max(book.last, number)
        else:
            self._retired[name] = max(self._retired.get(name, self._highest), number)

    def retire(self, ref: AdapterRef) -> None:
        """Forget one version if it still exists. Raise Conflict if it is the current version of its name.

        The engine should then be told to unload a digest that has no `holders` any more.
        """
        book = self._names.get(ref.name)
        entry = None if book is None else book.versions.get(ref.version)
        if book is None or entry is None:
            return
        if book.current == ref.version:
            raise Conflict(f"{ref.label} is what {ref.name} stands for", param="version")
        del book.versions[ref.version], book.by_digest[ref.digest]
        self._let_go(entry)
        self.on_change()

    def entry(self, model_id: str) -> Entry:
        """Return the version that the id `name` or `name@version` names. Raise NotFound (`model_not_found`) if there is
        none.
        """
        name, at, number = model_id.partition("@")
        book = self._names.get(name)
        if book is not None:
            if not at and book.current:
                return book.versions[book.current]
            # Only the canonical spelling is accepted: neither '01' nor digits of other scripts.
            if number.isascii() and number.isdigit() and number[0] != "0" and len(number) < 10:
                found = book.versions.get(int(number))
                if found is not None:
                    return found
                if int(number) <= book.last:
                    raise NotFound(
                        f"the version {model_id!r} is no longer there", param="model", code="model_not_found"
                    )
        raise NotFound(f"the model {model_id[:140]!r} does not exist", param="model", code="model_not_found")

    def remove(self, name: str) -> list[AdapterRef]:
        """Forget `name` and all its versions, and return them. Requests already pinned to a version keep it.

        The engine should then be told to unload those that have no `holders` any more.
        """
        if self._unread.pop(name, None) is not None:
            self._retire(name, self._retired.get(name, self._highest))
            return []
        book = self._names.pop(name, None)
        if book is None:
            raise NotFound(f"the adapter {name[:140]!r} does not exist", param="name", code="adapter_not_found")
        self._retire(name, book.last)
        for entry in book.versions.values():
            self._let_go(entry)
        self.on_change()
        return [entry.ref for entry in book.versions.values()]

    def _retire(self, name: str, last: int) -> None:
        """Remember the highest number of a removed name, and forget the name that was removed first for it."""
        self._retired.pop(name, None)
        self._retired[name] = last
        while len(self._retired) > REMEMBERED:
            oldest = next(iter(self._retired))
            self._highest = max(self._highest, self._retired.pop(oldest))
            if oldest not in self:
                del self._folded[oldest.casefold()]

    def _let_go(self, entry: Entry) -> None:
        holders = self._holders[entry.ref.digest]
        holders.remove(entry)
        if not holders:
            del self._holders[entry.ref.digest]

    def holders(self, digest: str) -> list[Entry]:
        """Return the versions, of whatever names, that have this content."""
        return list(self._holders.get(digest, ()))

    def versions(self, name: str) -> list[Entry]:
        """Return all versions of `name` in the order of publication. Raise NotFound if it has none."""
        self.entry(name)
        return list(self._names[name].versions.values())

    def entries(self) -> list[Entry]:
        """Return the current version of every name, in the order in which the names were first published."""
        return [book.versions[book.current] for book in self._names.values() if book.current]

    def names(self) -> Iterator[str]:
        """Yield every name, those with a version first, in the order in which they became known."""
        return chain(self._names, self._unread)

    def unread(self) -> list[tuple[str, AdapterSource]]:
        """Return the names that were announced and never asked for, with their folders."""
        return list(self._unread.items())

    def __len__(self) -> int:
        return len(self._names) + len(self._unread)

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self._unread
