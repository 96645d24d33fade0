"""The engine's grammars: compiled on a thread of their own, cached, and turned into masks."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from queue import Empty, SimpleQueue

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from mlx_tandem.engine.grammars.compiling import compiled, reason
from mlx_tandem.engine.masks import Place
from mlx_tandem.engine.plan import Mask, mask_words
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.types import Grammar, Request

log = logging.getLogger(__name__)

MOST_GRAMMARS = 64
"""Most compiled grammars that are kept for requests to come, the last used ones."""

MOST_DRAFTS = 64
"""Most tokens at the end of a text that may differ from those of the mask before: drafts that were not accepted."""

Compiled = LLMatcher | InvalidRequest
"""A matcher at the beginning of a text, or the reason why there is none."""


class _State:
    """The state of one choice: a matcher and the output tokens that it has consumed."""

    __slots__ = ("consumed", "matcher")

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher
        self.consumed: list[int] = []

    def advance(self, tokens: Sequence[int], begin: int) -> None:
        """Bring the matcher behind the output, which is `tokens` from `begin` on."""
        consumed = self.consumed
        same = min(len(consumed), len(tokens) - begin)
        first = max(same - MOST_DRAFTS, 0)
        if consumed[first:same] != list(tokens[begin + first : begin + same]):
            same = next(i for i in range(first, same) if consumed[i] != tokens[begin + i])
        if same < len(consumed):
            self.matcher.rollback(len(consumed) - same)
            del consumed[same:]
        new = list(tokens[begin + same :])
        if new:
            self.matcher.consume_tokens(new)
            consumed += new


class Grammars:
    """The grammars of open requests. It is the scheduler's maker of masks.

    A request waits here while its grammar is compiled. One thread compiles; everything else belongs to the loop.
    """

    def __init__(self, open_tokenizer: Callable[[], LLTokenizer], vocab_size: int, wake: Callable[[], None]):
        """Make a store without grammars; `wake` is called on the thread whenever it has compiled one.

        `open_tokenizer` is called on the thread before the first grammar. It may raise InvalidRequest.
        """
        self._open_tokenizer = open_tokenizer
        self._mask_words = mask_words(vocab_size)
        self._computed_words = 0  # of a mask as llguidance computes it; the thread sets it before the first grammar
        self._wake = wake
        self._cache: OrderedDict[bytes, Compiled] = OrderedDict()
        self._waiting: dict[bytes, list[Request]] = {}
        self._states: dict[tuple[int, int], _State] = {}  # by request and choice
        self._failures: dict[int, InvalidRequest] = {}  # by request
        self._jobs: SimpleQueue[tuple[bytes, str] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[bytes, Compiled]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # requests, until they are scheduled

    @property
    def waiting(self) -> list[Request]:
        """The requests that wait for their grammars."""
        return [request for requests in self._waiting.values() for request in requests]

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its grammar."""
        return not self._waiting

    def hold(self, request: Request) -> bool:
        """Return whether a request may be scheduled, which has no grammar or a compiled one.

        Otherwise it waits until `poll` returns it. Raises InvalidRequest for a grammar that cannot be compiled.
        """
        grammar = request.grammar
        if grammar is None:
            return True
        digest = sha256(grammar.text).digest()
        found = self._cache.get(digest)
        if found is None:
            if digest not in self._waiting:
                self._start(digest, grammar)
            self._waiting.setdefault(digest, []).append(request)
            return False
        self._cache.move_to_end(digest)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(found.message, param=grammar.param)
        for choice in range(request.n):
            self._states[request.id, choice] = _State(found.deep_copy())
        return True

    def poll(self) -> Iterator[Request]:
        """Yield the requests whose grammars have been compiled since the last call; `hold` decides on each again."""
        while self._waiting:
            try:
                digest, made = self._done.get_nowait()
            except Empty:
                return
            self._cache[digest] = made
            while len(self._cache) > MOST_GRAMMARS:
                self._cache.popitem(last=False)
            yield from self._waiting.pop(digest, [])

    def cancel(self, request: int) -> None:
        """Drop a request that waits. Unknown ids are ignored."""
        for requests in self._waiting.values():
            requests[:] = [r for r in requests if r.id != request]

    def release(self, request: Request) -> None:
        """Drop what is kept for a request that was not scheduled after all."""
        for choice in range(request.n):
            self.forget(request.id, choice)

    def failure(self, request: int) -> InvalidRequest | None:
        """Return why a request had an empty mask, once; None if it had none."""
        return self._failures.pop(request, None)

    def close(self) -> None:
        """Let the thread end."""
        self._jobs.put(None)

    # the scheduler's maker of masks

    def constrains(self, request: Request) -> bool:
        """Return whether the request has a grammar."""
        return request.grammar is not None

    def masks(self, places: Sequence[Place]) -> list[Mask]:
        """Return which tokens may follow at each place; an empty mask where the grammar fails."""
        made = np.empty((len(places), self._computed_words), np.int32)
        first, size = made.ctypes.data, self._computed_words * made.itemsize
        for at, (request, choice, tokens) in enumerate(places):
            state = self._states[request.id, choice]
            state.advance(tokens, len(request.prompt))
            state.matcher.unsafe_compute_mask_ptr(first + at * size, size)
            if state.matcher.is_error():
                made[at] = 0
                self._fail(request, state.matcher)
        return [memoryview(row).cast("B") for row in made[:, : self._mask_words]]

    def _fail(self, request: Request, matcher: LLMatcher) -> None:
        """Note why a request has an empty mask."""
        why = reason(matcher.get_error())
        param = None if request.grammar is None else request.grammar.param
        self._failures[request.id] = InvalidRequest(f"the text became too complex for its grammar: {why}", param=param)

    def forget(self, request: int, choice: int) -> None:
        """Drop the state of a choice that has ended."""
        self._states.pop((request, choice), None)

    # compiling

    def _start(self, digest: bytes, grammar: Grammar) -> None:
        """Queue a grammar for the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tandem-grammars", daemon=True)
            self._thread.start()
        self._jobs.put((digest, grammar.text.decode()))

    def _work(self) -> None:
        tokenizer: LLTokenizer | None = None
        while (job := self._jobs.get()) is not None:
            digest, text = job
            made: Compiled
            try:
                if tokenizer is None:
                    tokenizer = self._open_tokenizer()
                    self._computed_words = mask_words(tokenizer.vocab_size)
                made = compiled(tokenizer, text)
            except InvalidRequest as e:
                made = e
            except Exception as e:
                log.exception("a grammar could not be compiled")
                made = InvalidRequest(f"the grammar cannot be compiled: {type(e).__name__}")
            self._done.put((digest, made))
            self._wake()
