"""The front's book of adapters: names, their immutable versions, and which version a name stands for now.

Plain data, one thread, no arrays and no files: the engine has read and checked the folder before `publish` is
called, and knows versions by digest only. A version, once given, never means anything else; removing a name and
publishing it again goes on counting, so that `name@2` seen in an old log is never another adapter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.types import AdapterInfo, AdapterRef


@dataclass
class Counters:
    """What requests did with one version, since it was published."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    errors: int = 0


@dataclass
class Entry:
    """One version of one name. Only the counters change."""

    name: str
    ref: AdapterRef
    path: str
    info: AdapterInfo
    created: float  # seconds since the epoch
    counters: Counters = field(default_factory=Counters)


@dataclass
class _Name:
    versions: dict[int, Entry] = field(default_factory=dict)  # in order of publication
    by_digest: dict[str, int] = field(default_factory=dict)
    current: int = 0  # the version that the bare name selects
    last: int = 0  # the highest number ever given


class Registry:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._names: dict[str, _Name] = {}
        self._folded: dict[str, str] = {}  # casefolded -> name, ever seen: see `check`
        self._retired: dict[str, int] = {}  # removed name -> highest number given
        self._holders: dict[str, int] = {}  # digest -> how many entries have it

    def check(self, name: str) -> str:
        """`name` when it may be published; names that differ only in case would be one on many disks."""
        limits.check_name(name)
        other = self._folded.get(name.casefold(), name)
        if other != name:
            raise InvalidRequest(f"name {name!r} differs from {other!r} in case only", param="name")
        return name

    def publish(self, name: str, path: str, info: AdapterInfo) -> AdapterRef:
        """Make `info`'s content the current version of `name` and return its reference.

        New content gets the next number. Content that this name already has keeps its number, path and counters,
        and the name stands for it again.
        """
        self.check(name)
        book = self._names.get(name)
        if book is None:
            book = self._names[name] = _Name(last=self._retired.pop(name, 0))
            self._folded[name.casefold()] = name
        number = book.by_digest.get(info.digest)
        if number is None:
            number = book.last = book.last + 1
            ref = AdapterRef(name, number, info.digest)
            book.versions[number] = Entry(name, ref, path, info, self._clock())
            book.by_digest[info.digest] = number
            self._holders[info.digest] = self._holders.get(info.digest, 0) + 1
        book.current = number
        return book.versions[number].ref

    def resolve(self, selector: str) -> AdapterRef:
        """The version that `name` or `name@version` selects; NotFound (`model_not_found`) when there is none."""
        return self.entry(selector).ref

    def entry(self, selector: str) -> Entry:
        """As `resolve`, with the whole record."""
        name, at, number = selector.partition("@")
        book = self._names.get(name)
        if book is not None:
            if not at:
                return book.versions[book.current]
            # Only the canonical spelling: neither '01' nor digits of other scripts.
            if number.isascii() and number.isdigit() and number[0] != "0" and len(number) < 10:
                found = book.versions.get(int(number))
                if found is not None:
                    return found
        raise NotFound(f"the model {selector[:140]!r} does not exist", param="model", code="model_not_found")

    def remove(self, name: str) -> list[AdapterRef]:
        """Forget `name` and all its versions and return them. Requests already pinned to one keep it.

        The engine should be told to unload those for which `held` is false afterwards.
        """
        book = self._names.pop(name, None)
        if book is None:
            raise NotFound(f"the adapter {name[:140]!r} does not exist", param="name", code="adapter_not_found")
        self._retired[name] = book.last
        refs = [entry.ref for entry in book.versions.values()]
        for ref in refs:
            self._holders[ref.digest] -= 1
            if not self._holders[ref.digest]:
                del self._holders[ref.digest]
        return refs

    def held(self, digest: str) -> bool:
        """Whether any name has a version with this content."""
        return digest in self._holders

    def versions(self, name: str) -> list[Entry]:
        """All versions of `name`, oldest first; NotFound when there is no such name."""
        self.entry(name)
        return list(self._names[name].versions.values())

    def entries(self) -> list[Entry]:
        """The current version of every name, in the order in which the names were first published."""
        return [book.versions[book.current] for book in self._names.values()]

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names
