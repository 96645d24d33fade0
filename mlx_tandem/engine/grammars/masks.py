"""The engine's grammars: compiled on a thread of their own, cached, and turned into masks.

The masks of a step are made within the step, for at most STEP_SECONDS. One that is late waits a turn: its row draws
nothing, and the mask is made ahead of the step in which the row draws again. So are the following masks of a slow
grammar. A mask that stays late, and masks that take too long in all, end their request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLTokenizer

from mlx_tandem.engine.grammars.compiling import STATES, LexerFull, compiled
from mlx_tandem.engine.grammars.matching import WAITING_SECONDS, Clock, Job, Matching
from mlx_tandem.engine.grammars.shared import SharedGrammar, Store, size_of
from mlx_tandem.engine.grammars.threads import Lanes, StepMasks
from mlx_tandem.engine.masks import Place
from mlx_tandem.engine.plan import Mask, mask_words
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.limits import MAX_COMPILED_GRAMMARS
from mlx_tandem.types import Grammar, Request

log = logging.getLogger(__name__)


class _Compilation(NamedTuple):
    """A text to compile, for a lexer of STATES[level] states at least, and the room that is reserved for it."""

    digest: bytes
    text: str
    level: int
    reserved: int


class Grammars:
    """The grammars of open requests. It is the scheduler's maker of masks.

    A request waits here while its grammar is compiled, or while those in use leave no memory for it. One thread
    compiles, and others make masks; everything else belongs to the loop.
    """

    def __init__(
        self,
        open_tokenizer: Callable[[], LLTokenizer],
        vocab_size: int,
        wake: Callable[[], None],
        *,
        most_bytes: int = MAX_COMPILED_GRAMMARS,
        clock: Clock = time.monotonic,
    ):
        """Make a store without grammars; `wake` is called on a thread whenever it has compiled one, or made a mask
        ahead of a step.

        `open_tokenizer` is called on the thread before the first grammar. It may raise InvalidRequest.
        """
        self._open_tokenizer = open_tokenizer
        self._mask_words = mask_words(vocab_size)
        self._computed_words = 0  # of a mask as llguidance computes it; the thread sets it before the first grammar
        self._wake = wake
        self._clock = clock
        self._store = Store(most_bytes)
        self._waiting: dict[bytes, list[Request]] = {}
        self._unstarted: dict[bytes, Grammar] = {}  # of those, the grammars for which there was no room
        self._places: dict[tuple[int, int], Matching] = {}  # by request and choice
        self._left: list[Matching] = []  # those of choices that have ended, with which a thread is not finished
        self._failures: dict[int, InvalidRequest] = {}  # by request
        self._jobs: SimpleQueue[_Compilation | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[_Compilation, SharedGrammar | InvalidRequest]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._in_steps = StepMasks()
        self._ahead: Lanes | None = None  # the thread makes them before the first grammar

    # requests, until they are scheduled

    @property
    def waiting(self) -> list[Request]:
        """The requests that wait for their grammars."""
        return [request for requests in self._waiting.values() for request in requests]

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its grammar."""
        return not self._waiting

    @property
    def is_making(self) -> bool:
        """Whether masks are being made ahead of steps."""
        return any(place.job is not None and place.job.is_open for place in self._places.values())

    def hold(self, request: Request) -> bool:
        """Return whether a request may be scheduled, which has no grammar or a compiled one.

        Otherwise it waits until `poll` returns it. Raises InvalidRequest for a grammar that cannot be compiled.
        """
        grammar = request.grammar
        if grammar is None:
            return True
        digest = sha256(grammar.text).digest()
        found = self._store.find(digest, request.n)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(found.message, param=grammar.param)
        if found is None or found.is_exhausted:
            if digest not in self._waiting:
                self._start(digest, grammar)
            self._waiting.setdefault(digest, []).append(request)
            return False
        for choice in range(request.n):
            self._places[request.id, choice] = Matching(found)
        return True

    def poll(self) -> Iterator[Request]:
        """Yield the requests whose grammars have been compiled since the last call; `hold` decides on each again."""
        if self._left:
            self._leave()
        for digest, grammar in list(self._unstarted.items()):
            del self._unstarted[digest]
            if self._waiting[digest]:
                self._start(digest, grammar)
            else:
                del self._waiting[digest]
        while self._waiting:
            try:
                job, made = self._done.get_nowait()
            except Empty:
                return
            self._store.add(job.digest, made, job.reserved)
            yield from self._waiting.pop(job.digest, [])

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
        """Let the threads end."""
        self._jobs.put(None)
        self._in_steps.close()
        if self._ahead is not None:
            self._ahead.close()

    # the scheduler's maker of masks

    def constrains(self, request: Request) -> bool:
        """Return whether the request has a grammar."""
        return request.grammar is not None

    def masks(self, places: Sequence[Place]) -> list[Mask | None]:
        """Return which tokens may follow at each place; an empty mask where the grammar fails, and None where it is
        late.
        """
        made = np.empty((len(places), self._computed_words), np.int32)
        found: list[Job | None] = []
        fresh: list[Job] = []
        now, address, size = self._clock(), made.ctypes.data, self._computed_words * made.itemsize
        for at, (request, choice, tokens) in enumerate(places):
            place = self._places[request.id, choice]
            begin = len(request.prompt)
            job = self._made_ahead(place, tokens, begin)
            if job is None and (not place.grammar.is_slow):
                job = Job(place, place.change(tokens, begin), made[at], address + at * size, now)
                if job.is_open:
                    fresh.append(job)
            found.append(job)
        if fresh:
            self._in_steps.run(fresh)
        for job in fresh:
            job.place.job = None if job.is_done else job
        return [self._mask(place.request, job) for place, job in zip(places, found, strict=True)]

    def _made_ahead(self, place: Matching, tokens: Sequence[int], begin: int) -> Job | None:
        """Return the job that has made the mask behind these tokens, or that keeps others from being made."""
        job = place.job
        if job is None or job.is_open or job.renews:
            return job
        return job if job.is_done and place.change(tokens, begin) == (0, []) else None

    def _mask(self, request: Request, job: Job | None) -> Mask | None:
        """Return the mask that a job has made; None if it has not made it yet."""
        if job is None:
            return None
        if not job.is_done:
            if not self._is_overdue(job):
                return None
            mask: Any = np.zeros(self._computed_words, np.int32)
            why = "the next mask takes too long"
        else:
            mask, why = job.mask, job.why
        if why:
            param = None if request.grammar is None else request.grammar.param
            message = f"the text became too complex for its grammar: {why}"
            self._failures[request.id] = InvalidRequest(message, param=param)
        return memoryview(mask[: self._mask_words]).cast("B")

    def _is_overdue(self, job: Job) -> bool:
        """Return whether a choice has waited for a mask for too long."""
        return self._clock() - job.asked > WAITING_SECONDS

    def is_slow(self, request: int, choice: int) -> bool:
        """Return whether the masks of a choice are made ahead of its steps."""
        place = self._places.get((request, choice))
        return place is not None and place.grammar.is_slow

    def prepare(self, place: Place) -> None:
        """Begin to make the mask of a place ahead of the step."""
        at = self._places[place.request.id, place.choice]
        job = at.job
        if job is not None and job.is_open:
            return
        if job is None or not job.renews:
            if job is not None and job.is_done and at.change(place.tokens, len(place.request.prompt)) == (0, []):
                return
            mask = np.empty(self._computed_words, np.int32)
            change = at.change(place.tokens, len(place.request.prompt))
            at.job = job = Job(at, change, mask, mask.ctypes.data, self._clock())
            if job.is_done:
                return
        assert self._ahead is not None
        self._ahead.submit(job)

    def is_ready(self, request: int, choice: int) -> bool:
        """Return whether the mask that `prepare` has begun is there, or there will be none."""
        job = self._places[request, choice].job
        return job is None or not job.is_open or self._is_overdue(job)

    def forget(self, request: int, choice: int) -> None:
        """Drop the state of a choice that has ended."""
        place = self._places.pop((request, choice), None)
        if place is not None:
            self._left.append(place)
            self._leave()

    def _leave(self) -> None:
        """Give back the grammars of choices that have ended, unless a thread is at work on them."""
        busy = [place for place in self._left if place.job is not None and place.job.is_open]
        for place in self._left:
            if place not in busy:
                self._store.leave(place.grammar)
        self._left = busy

    # compiling

    def _start(self, digest: bytes, grammar: Grammar) -> None:
        """Queue a grammar for the thread, if there is room for it."""
        text, before = grammar.text.decode(), self._store.find(digest)
        level = min(before.level + 1, len(STATES) - 1) if isinstance(before, SharedGrammar) else 0
        size = size_of(text, level)
        if not self._store.reserve(size):
            self._unstarted[digest] = grammar
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tandem-grammars", daemon=True)
            self._thread.start()
        self._jobs.put(_Compilation(digest, text, level, size))

    def _work(self) -> None:
        tokenizer: LLTokenizer | None = None
        while (job := self._jobs.get()) is not None:
            made: SharedGrammar | InvalidRequest
            try:
                if tokenizer is None:
                    tokenizer = self._open_tokenizer()
                    self._computed_words = mask_words(tokenizer.vocab_size)
                    self._ahead = Lanes(tokenizer, self._store, self._clock, self._wake)
                made = _compiled(tokenizer, job)
            except InvalidRequest as e:
                made = e
            except Exception as e:
                log.exception("a grammar could not be compiled")
                made = InvalidRequest(f"the grammar cannot be compiled: {type(e).__name__}")
            self._done.put((job, made))
            self._wake()


def _compiled(tokenizer: LLTokenizer, job: _Compilation) -> SharedGrammar:
    """Return a compiled grammar with the smallest lexer in which the beginning of a text fits."""
    level = job.level
    while True:
        try:
            root = compiled(tokenizer, job.text, STATES[level])
        except LexerFull:
            if level == len(STATES) - 1:
                raise
            level += 1
        else:
            return SharedGrammar(job.digest, job.text, level, root)
