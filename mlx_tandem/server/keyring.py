"""Named keys: the file that lists them, and the keyring that finds the caller of a request and follows the file.

The command line uses this module, so it does not import the web framework.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.caller import ANYONE, Caller, KeyLimits, Scope, Use
from mlx_tandem.log import log
from mlx_tandem.server.keys import MAX_KEY, log_exposed, read_key
from mlx_tandem.strict_json import convert

MOST_BYTES = 1 << 20
"""Most bytes of a file of keys."""

MOST_DEPTH = 8
"""Deepest nesting of lists and objects in the file."""

LOOK_SECONDS = 1.0
"""Shortest time, in seconds, between two checks of whether the file has changed."""

SETTLED_SECONDS = 0.2
"""Shortest time, in seconds, since the last change of a file that is read again: an editor may still be writing it."""

NEVER = float("inf")
"""The expiry of a key that never expires, in seconds since 1970."""


class KeyEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key of the file."""

    name: str
    sha256: str = ""  # of the key, in hexadecimal
    key: str = ""  # the key itself, in place of its digest
    scopes: tuple[Scope, ...] = ("inference",)
    tenant: str = ""  # empty: the name
    limits: KeyLimits = KeyLimits()
    expires: str = ""  # a date or a time in ISO 8601, in UTC unless it says otherwise; empty: never

    @property
    def digest(self) -> bytes:
        """The SHA-256 digest of the key."""
        return hashlib.sha256(self.key.encode()).digest() if self.key else bytes.fromhex(self.sha256)

    def check(self) -> float:
        """Return when the key expires, in seconds since 1970. Raises InvalidRequest naming the field that is wrong."""
        limits.check_name(self.name)
        if self.tenant:
            limits.check_name(self.tenant, "tenant")
        if bool(self.key) == bool(self.sha256):
            raise InvalidRequest("sha256 must be given, or key in its place", param="sha256")
        if self.key:
            read_key(self.key, "")
        elif len(self.sha256) != 64 or not set(self.sha256) <= set("0123456789abcdef"):
            raise InvalidRequest("sha256 must be 64 hexadecimal digits in lower case", param="sha256")
        if not self.scopes:
            raise InvalidRequest("scopes must name at least one scope", param="scopes")
        if not self.expires:
            return NEVER
        try:
            when = datetime.fromisoformat(self.expires)
        except ValueError:
            raise InvalidRequest("expires must be a date or a time such as 2027-01-31T12:00:00Z") from None
        return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True)
class PlacedEntry:
    """An entry of the file, and where it is: from the line `first`, counted from 0, up to before the line `end`."""

    entry: KeyEntry
    first: int
    end: int


@dataclass(frozen=True)
class KeyFile:
    """What a file of keys says. `is_flow` tells whether it is written with brackets, as JSON is."""

    entries: Sequence[PlacedEntry]
    is_flow: bool


def parse(text: str) -> KeyFile:
    """Return what the text of a file of keys says. Raises InvalidRequest naming the line and the field."""
    import yaml

    kind: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader, depth = kind(text), 0
    try:
        for event in yaml.parse(text, kind):  # libyaml's loader recurses without a limit
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise InvalidRequest(f"values are nested over {MOST_DEPTH} deep")
        root = loader.get_single_node()
        values = [] if root is None else loader.construct_document(root)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise InvalidRequest(f"{line}this is not YAML: {getattr(e, 'problem', None) or 'it cannot be read'}") from None
    except (RecursionError, ValueError):
        raise InvalidRequest("this is not YAML: a value cannot be read") from None
    finally:
        loader.dispose()
    if not isinstance(values, list):
        raise InvalidRequest("the file must be a list of keys, each with its name and sha256")
    entries: list[PlacedEntry] = []
    names: set[str] = set()
    digests: set[bytes] = set()
    for node, value in zip([] if root is None else root.value, values, strict=True):
        line = node.start_mark.line
        try:
            entry = _entry(node, value)
            if entry.name in names:
                raise InvalidRequest(f"another key has the name '{entry.name}'", param="name")
            if entry.digest in digests:
                raise InvalidRequest("another entry has the same key", param="sha256")
        except InvalidRequest as e:
            name = value.get("name") if isinstance(value, dict) else None
            whose = f", key '{name}'" if isinstance(name, str) else ""
            raise InvalidRequest(f"line {line + 1}{whose}: {e.message}", param=e.param) from None
        names.add(entry.name)
        digests.add(entry.digest)
        entries.append(PlacedEntry(entry, line, node.end_mark.line))
    return KeyFile(entries, root is not None and bool(getattr(root, "flow_style", False)))


def _entry(node: Any, value: object) -> KeyEntry:
    """Return the entry that a node of the file says. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise InvalidRequest("an entry must hold fields by name, such as name and sha256")
    written = [key.value for key, _ in node.value]
    if len(written) != len(set(written)):
        raise InvalidRequest(f"{next(key for key in written if written.count(key) > 1)} is given twice")
    if isinstance(when := value.get("expires"), date):
        value = {**value, "expires": when.isoformat()}
    entry = convert(value, KeyEntry)
    entry.check()
    return entry


def read(path: Path, on_exposed: Callable[[Path, int], None] = log_exposed) -> str:
    """Return the text of a file of keys. `on_exposed` is called as by `read_key`. Raises InvalidRequest."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(MOST_BYTES + 1)
    except OSError as e:
        raise InvalidRequest(f"the file of keys {path} cannot be read: {e.strerror}", param="keys_file") from None
    if len(content) > MOST_BYTES:
        raise InvalidRequest(f"the file of keys {path} has more than {MOST_BYTES} bytes", param="keys_file")
    if mode & 0o077:
        on_exposed(path, mode)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"the file of keys {path} is not UTF-8", param="keys_file") from None


class Keyring:
    """The keys of a server: a single one with all scopes, and those of a file, which is read again when it changes.

    A file that has become wrong is logged, and the keys that were known stay. What was counted for a key goes on under
    its name.

    Keys are looked up by their digests, blinded with a secret of this process: nobody can choose a key whose blinded
    digest begins like another one, so the time of a look-up tells nothing.
    """

    def __init__(
        self, key: str, path: str, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ):
        """Read the file at `path`; empty: there is none. An empty `key` is none. Raises InvalidRequest."""
        self._clock = clock
        self._now = now
        self._secret = os.urandom(32)
        self._own = {self._blinded(hashlib.sha256(key.encode()).digest()): (Caller(), NEVER)} if key else {}
        self._path = Path(path).absolute() if path else None
        self._known: Mapping[bytes, tuple[Caller, float]] = self._own
        self._looked = clock()
        self._state: tuple[int, ...] = ()
        if self._path is not None:
            self._state = _state(self._path)
            self._take(self._path)

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return self._path is None and not self._own

    @property
    def callers(self) -> Sequence[Caller]:
        """The callers with names, in the order of the file."""
        return [caller for caller, _ in self._known.values() if caller.name]

    def named(self, name: str) -> Caller | None:
        """Return the caller with the key of this name, or the caller without a name; None if the key is gone."""
        if not name:
            return ANYONE
        self._follow()
        there = (caller for caller, expires in self._known.values() if self._now() < expires)
        return next((caller for caller in there if caller.name == name), None)

    def find(self, keys: Sequence[bytes]) -> tuple[Caller | None, bool]:
        """Return the caller that these keys stand for, and whether there is none because a key has expired.

        There is none if no key is known, or if they stand for different callers.
        """
        self._follow()
        found: Caller | None = None
        expired = False
        for shown in keys:
            if len(shown) > MAX_KEY:
                continue
            caller, expires = self._known.get(self._blinded(hashlib.sha256(shown).digest()), (None, NEVER))
            if caller is None:
                continue
            if self._now() >= expires:
                expired = True
            elif found is not None and caller is not found:
                return None, False
            else:
                found = caller
        return found, expired and found is None

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def _follow(self) -> None:
        """Look whether the file has changed, unless that was done just now."""
        if self._path is not None and self._clock() - self._looked >= LOOK_SECONDS:
            self._look(self._path)

    def _look(self, path: Path) -> None:
        """Read the file again if it is not the one that was seen last."""
        self._looked = self._clock()
        state = _state(path)
        if state == self._state or (state and 0 <= self._now() - state[-1] / 1e9 < SETTLED_SECONDS):
            return
        self._state = state
        try:
            self._take(path)
        except InvalidRequest as e:
            log("the file of keys is wrong, so the keys stay as they were", logging.ERROR, reason=e.message)
            return
        log("the file of keys was read again", path=str(path), keys=len(self.callers))

    def _take(self, path: Path) -> None:
        """Read the file. Raises InvalidRequest naming it, the line and the field."""
        text = read(path)
        try:
            entries = [placed.entry for placed in parse(text).entries]
        except InvalidRequest as e:
            raise InvalidRequest(f"{path}: {e.message}", param="keys_file") from None
        uses = {caller.name: caller.use for caller in self.callers}
        known = {
            self._blinded(entry.digest): (
                Caller(
                    name=entry.name,
                    tenant=entry.tenant or entry.name,
                    scopes=frozenset(entry.scopes),
                    limits=entry.limits,
                    use=uses.get(entry.name) or Use(self._clock),
                ),
                entry.check(),
            )
            for entry in entries
        }
        self._known = {**known, **self._own}


def _state(path: Path) -> tuple[int, ...]:
    """Return numbers that change when the file does; none for a file that cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns  # the last is used by `_look`
