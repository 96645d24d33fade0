"""Compiled grammars, which the choices of all requests with the same text share, within a number of bytes.

All copies of a matcher share llguidance's lexer, which adds a state for each way to go on that it has looked at. A
lexer that is full fails for all who use it, so everybody who meets it goes on with another one (`Store.renew`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from threading import Lock

import numpy as np
from llguidance import LLMatcher

from mlx_tandem.engine.grammars.compiling import STATES
from mlx_tandem.errors import InvalidRequest

MOST_GRAMMARS = 64
"""Most compiled grammars that are kept for requests to come, the last used ones."""

STATE_BYTES = 2048
"""Most bytes that a lexer takes for each of its states. About 1,500 were measured."""

TEXT_BYTES = 96
"""Most bytes that a compiled grammar takes for each byte of its text. 27 to 78 were measured."""

SLOW_SECONDS = 0.001
"""Seconds from which on a mask is not quick."""

QUICK_MASKS = 16
"""Number of quick masks in a row after which a grammar is not slow any more. Each time that it becomes slow again, it
has to make four times as many.
"""

Compile = Callable[[str, int], LLMatcher]
"""A function that compiles a text for a lexer of so many states. It may raise InvalidRequest."""


class SharedGrammar:
    """A compiled grammar.

    Attributes:
        root: A matcher at the beginning of a text.
        first: The mask there, [words] int32.
        lock: Held by the thread that uses one of the matchers. Without it, a thread might wait inside of llguidance for
            the lexer while it holds Python's global lock.
        is_slow: Whether its masks have made steps late, so that they are made ahead of the steps that draw by them.
        is_exhausted: Whether its lexer is full or broken.
        users: Number of choices that have a matcher of it.
        queue: What the lanes have to do with it, in this order.
        ms: A moving average of the milliseconds of its masks.
    """

    def __init__(self, digest: bytes, text: str, level: int, root: LLMatcher):
        """Take a compiled text. The lexer of `root` may have STATES[level] states."""
        self.digest = digest
        self.text = text
        self.level = level
        self.root = root
        self.first = np.frombuffer(root.compute_bitmask(), np.int32)
        self.lock = Lock()
        self.is_slow = self.is_exhausted = self.is_served = False
        self.users = 0
        self.queue: deque[Callable[[], None]] = deque()
        self.ms = 0.0
        self._quick = 0
        self._wanted = QUICK_MASKS  # quick masks, for it to be quick again

    @property
    def size(self) -> int:
        """The most bytes that it may take."""
        return size_of(self.text, self.level)

    def has_broken_lexer(self) -> bool:
        """Return whether even a text that has just begun fails. A full lexer may say that a token does not fit."""
        tokens = np.flatnonzero(np.unpackbits(self.first.view(np.uint8), bitorder="little"))
        probe = self.root.deep_copy()
        probe.consume_tokens(tokens[:1].tolist())
        probe.compute_bitmask()
        return bool(probe.is_error())

    def note(self, seconds: float) -> None:
        """Note how long a mask took."""
        self.ms += (seconds * 1e3 - self.ms) / 8
        self._quick = 0 if seconds >= SLOW_SECONDS else self._quick + 1
        if self.is_slow and self._quick >= self._wanted:
            self.is_slow = False
            self._wanted *= 4


def size_of(text: str, level: int) -> int:
    """Return the most bytes that a compiled text may take with a lexer of STATES[level] states."""
    return STATES[level] * STATE_BYTES + len(text) * TEXT_BYTES


class Store:
    """The compiled grammars in memory: those in use, and the last used ones for requests to come.

    Any thread may use it. A text whose compilation has begun has room reserved until it is added.
    """

    def __init__(self, most_bytes: int):
        """Make an empty store of at most so many bytes."""
        self.bytes = 0
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, SharedGrammar | InvalidRequest] = OrderedDict()
        self._lock = Lock()
        self._renewing = Lock()

    def find(self, digest: bytes, users: int = 0) -> SharedGrammar | InvalidRequest | None:
        """Return the grammar of a text, why it has none, or None if it is not known.

        A grammar whose lexer is not exhausted gets so many users.
        """
        with self._lock:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
            if isinstance(found, SharedGrammar) and not found.is_exhausted:
                found.users += users
            return found

    def reserve(self, size: int, most: int | None = None) -> bool:
        """Take room for a grammar; return False if those in use leave none, or would then have more than `most`."""
        most = self._most_bytes if most is None else most
        with self._lock:
            self._drop(lambda: self.bytes + size > most)
            if self.bytes + size > most:
                return False
            self.bytes += size
            return True

    def add(self, digest: bytes, made: SharedGrammar | InvalidRequest, reserved: int) -> None:
        """Keep a grammar for which this room was reserved, or the reason why there is none."""
        with self._lock:
            before = self._kept.pop(digest, None)
            self._kept[digest] = made
            self.bytes -= reserved
            if isinstance(made, SharedGrammar):
                self.bytes += made.size
            self._let_go(before)
            self._drop(lambda: len(self._kept) > MOST_GRAMMARS)

    def leave(self, grammar: SharedGrammar) -> None:
        """Note that a user of a grammar has gone."""
        with self._lock:
            grammar.users -= 1
            self._let_go(grammar)

    def renew(self, old: SharedGrammar, make: Compile, *, alone: bool) -> SharedGrammar:
        """Return a grammar of the same text whose lexer is not exhausted, and move a user of `old` there.

        Unless `alone`, others may share it. Raises InvalidRequest if there is no room for it.
        """
        with self._renewing:
            found = None if alone else self.find(old.digest, 1)
            if not isinstance(found, SharedGrammar) or found.is_exhausted:
                found = self._compiled_again(old, make, alone=alone)
            self.leave(old)
            return found

    def _compiled_again(self, old: SharedGrammar, make: Compile, *, alone: bool) -> SharedGrammar:
        level = min(old.level + 1, len(STATES) - 1)
        size = size_of(old.text, level)
        most = (
            self._most_bytes * 3 // 4 if alone else self._most_bytes
        )  # lexers of single choices leave room for others
        if not self.reserve(size, most + (old.size if old.users == 1 else 0)):
            raise InvalidRequest("no memory is left for its lexer")
        try:
            made = SharedGrammar(old.digest, old.text, level, make(old.text, STATES[level]))
        except BaseException:
            with self._lock:
                self.bytes -= size
            raise
        made.users = 1
        if not alone:
            self.add(old.digest, made, size)
        return made

    def _let_go(self, grammar: SharedGrammar | InvalidRequest | None) -> None:
        """Stop counting a grammar that nobody uses and that is not kept."""
        if not isinstance(grammar, SharedGrammar) or grammar.users:
            return
        if self._kept.get(grammar.digest) is grammar:
            if not grammar.is_exhausted:
                return
            del self._kept[grammar.digest]
        self.bytes -= grammar.size

    def _drop(self, is_too_much: Callable[[], bool]) -> None:
        """Drop grammars that nobody uses, the one that was not used for longest first, while there is too much."""
        for digest, made in list(self._kept.items()):
            if not is_too_much():
                return
            if isinstance(made, InvalidRequest):
                del self._kept[digest]
            elif not made.users:
                del self._kept[digest]
                self.bytes -= made.size
