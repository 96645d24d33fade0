"""The threads that make masks: one within steps, for a few milliseconds at most, and others ahead of steps."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from llguidance import LLTokenizer

from mlx_tandem.engine.grammars.matching import Clock, Job, Lane
from mlx_tandem.engine.grammars.shared import SharedGrammar, Store

log = logging.getLogger(__name__)

STEP_SECONDS = 0.008
"""Most seconds of processor time for which a step waits for its masks."""

REAL_SECONDS_PER_SECOND = 4.0
"""Seconds of real time that one of them may take while other programs use the machine."""

LANES = 2
"""Number of threads that make masks ahead of steps."""

BUSY_SECONDS = 0.02
"""Seconds that one of them waits for a grammar in use before it looks after another."""

NICENESS = 10
"""Added to the nice value of these threads, where threads have one."""


class _Batch:
    """Jobs of one step. A lock that is held until the thread is done with them stands for the end."""

    __slots__ = ("_jobs", "_lock", "end", "running")

    def __init__(self, jobs: Sequence[Job]):
        self._jobs = list(jobs)
        self._lock = threading.Lock()
        self.end = threading.Lock()
        self.end.acquire()
        self.running: Job | None = None

    def run(self) -> None:
        """Run the jobs until all are done or the batch is given up."""
        for job in self._jobs:
            with self._lock:
                if not self._jobs:
                    return
                self.running = job
            try:
                job.run()
            except Exception as e:
                _break(job, e)
        self.end.release()

    def give_up(self) -> Job | None:
        """Let no other job begin; return the one that runs, if there is one."""
        with self._lock:
            running = self.running
            self._jobs.clear()
        return running if running is not None and running.is_open else None


class StepMasks:
    """The thread that makes masks within steps. One that stays with a mask for too long is left alone, and another
    thread takes its place.
    """

    def __init__(self) -> None:
        self._batches: SimpleQueue[_Batch | None] | None = None
        self._cpu_clock: Clock = time.monotonic

    def run(self, jobs: Sequence[Job]) -> None:
        """Run jobs, the quickest grammars' first, for at most STEP_SECONDS.

        A grammar that keeps the others waiting is slow from then on. Jobs that did not begin are not open afterwards.
        """
        seconds = STEP_SECONDS
        left = list(jobs)
        if len({id(job.place.grammar) for job in left}) > 1:
            left.sort(key=lambda job: job.place.grammar.ms)
        while left:
            batch = _Batch(left)
            if self._batches is None:
                self._begin()
            assert self._batches is not None
            begun = self._cpu_clock()
            self._batches.put(batch)
            # Half of the time is left to those behind a mask that takes too long.
            if self._wait(batch, begun + max(seconds / 2, STEP_SECONDS / 8)):
                return
            stuck = batch.give_up()
            seconds -= max(seconds / 2, STEP_SECONDS / 8)
            self.close()
            left = [job for job in left if job.is_open and job is not stuck]
            if stuck is not None:
                stuck.place.grammar.is_slow = True
            for job in left:
                job.is_open = seconds > 0 and not job.place.grammar.is_slow
            left = [job for job in left if job.is_open]

    def _begin(self) -> None:
        """Start a thread."""
        self._batches = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._batches,), name="tandem-step-masks", daemon=True)
        thread.start()
        if sys.platform == "linux" and thread.ident is not None:  # macOS has no such clock
            clock = time.pthread_getcpuclockid(thread.ident)
            self._cpu_clock = lambda: time.clock_gettime(clock)

    def _wait(self, batch: _Batch, until: float) -> bool:
        """Wait for a batch until this time of the thread's clock; return whether it is done."""
        seconds = until - self._cpu_clock()
        most = time.monotonic() + REAL_SECONDS_PER_SECOND * seconds
        while seconds > 0 and (now := time.monotonic()) < most:
            if batch.end.acquire(timeout=min(max(seconds, 1e-4), most - now)):
                return True
            seconds = until - self._cpu_clock()
        return False

    def close(self) -> None:
        """Let the thread end."""
        if self._batches is not None:
            self._batches.put(None)
            self._batches = None


def _work(batches: SimpleQueue[_Batch | None]) -> None:
    while (batch := batches.get()) is not None:
        batch.run()


def _break(job: Job, e: Exception) -> None:
    """End a job in which an error of this program or of llguidance's interface was raised."""
    log.error("a mask could not be made", exc_info=e)
    job.fail(type(e).__name__)
    job.is_done, job.is_open = True, False


class Lanes:
    """The threads that make masks ahead of steps, of one grammar after the other."""

    def __init__(self, tokenizer: LLTokenizer, store: Store, clock: Clock, wake: Callable[[], None]):
        """Prepare the threads; `wake` is called on them whenever a mask is done."""
        self._tokenizer = tokenizer
        self._store = store
        self._clock = clock
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(LANES, thread_name_prefix="tandem-masks-ahead", initializer=_be_nice)
        self._lock = threading.Lock()
        self._wake = wake

    def submit(self, job: Job) -> None:
        """Run a job soon, behind those of the same grammar."""
        grammar = job.place.grammar
        job.is_open = True
        with self._lock:
            grammar.queue.append(lambda: self._run(job))
            if grammar.is_served:
                return
            grammar.is_served = True
        self._pool.submit(self._serve, grammar)

    def _serve(self, grammar: SharedGrammar) -> None:
        """Run the first job of a grammar, and let the other grammars go before the next one."""
        if grammar.lock.acquire(timeout=BUSY_SECONDS):
            grammar.lock.release()
            grammar.queue.popleft()()
        with self._lock:
            grammar.is_served = bool(grammar.queue)
            if not grammar.is_served:
                return
        self._pool.submit(self._serve, grammar)

    def _run(self, job: Job) -> None:
        try:
            if not hasattr(self._own, "lane"):
                self._own.lane = Lane(self._tokenizer, self._store, self._clock)
            self._own.lane.run(job)
        except Exception as e:
            _break(job, e)
        self._wake()

    def close(self) -> None:
        """Let the threads end once they have finished what they are at."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _be_nice() -> None:
    """Let this thread give way to the others of the machine."""
    if sys.platform == "linux":  # elsewhere the nice value is the process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
