"""The disk cache as the engine sees it: blocks are written and read without waiting for the drive.

One thread owns all files; other threads check what it has read. Reads come before writes. Whatever goes wrong on the
drive, blocks are missing but none is wrong, and no call raises: a failed write is dropped or tried again, a full
drive makes the cache read-only for a while, and a folder that is gone or a thread that has ended turns it off.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mlx_tandem.config import DiskCacheConfig
from mlx_tandem.files import DISK, FileOps
from mlx_tandem.kv.disk.folder import CacheFolder, default_folder
from mlx_tandem.kv.disk.records import DIGEST, BlockId, Payload
from mlx_tandem.kv.disk.segments import Segments
from mlx_tandem.types import DiskStats

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
"""Bytes of a full segment."""

MAX_QUEUE_BYTES = 256 << 20
"""Most bytes of blocks that wait to be written."""

MOST_RECORD_BYTES = 255 << 20
"""Most bytes of a block or a state that is kept: it has to fit into a segment and into the queue."""

CHECKERS = 4
"""Blocks of a chain that are checked at once: hashing them is slower than reading them."""

LARGE = 256 << 10
"""Bytes of a record from which checking it on another thread is worth it."""

DRIVE_SECONDS = 10.0
"""Seconds that a caller waits for the drive at most."""

MAX_PAUSE = 60.0
"""Longest time in seconds between two attempts to write to a drive that refuses."""

_QUIET = 600.0
"""Seconds between two log lines about a drive that refuses."""

_END = object()
_FULL = (errno.ENOSPC, errno.EDQUOT)


def open_folder(config: DiskCacheConfig, ops: FileOps = DISK) -> CacheFolder:
    """Return the cache folder that `config` names, locked. Raise StorageError as CacheFolder does."""
    return CacheFolder(Path(config.dir).expanduser() if config.dir else default_folder(), ops)


class Read(NamedTuple):
    """The result of a `read`: the payloads of the first blocks, in order, as far as they were found."""

    ticket: int
    payloads: list[memoryview]


class _Request:
    def __init__(self, ticket: int, blocks: Sequence[BlockId]) -> None:
        self.ticket = ticket
        self.blocks = tuple(blocks)
        self.payloads: list[memoryview] = []
        self.deadline = time.monotonic() + DRIVE_SECONDS


class DiskCache:
    """The blocks of one base in a folder of their own.

    `base` is the digest of everything that the blocks have in common. `folder` is the folder that `config` names, if
    it is open already; it is closed with the cache. `config.policy` is for the caller, who decides when a block is
    put. `finished`, if given, is called on the cache's thread when `poll` has something to return. Raises
    StorageError if the folder cannot be used: see CacheFolder.
    """

    def __init__(
        self,
        config: DiskCacheConfig,
        base: bytes,
        finished: Callable[[], None] | None = None,
        *,
        folder: CacheFolder | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        now: Callable[[], float] = time.time,
        ops: FileOps = DISK,
    ) -> None:
        if len(base) != DIGEST:
            raise ValueError(f"digests have {DIGEST} bytes")
        self._config, self._finished = config, finished
        self.folder = folder or open_folder(config, ops)
        limit = int(config.max_size_gb * 1e9)
        self._segments = Segments(
            self.folder,
            base,
            limit=limit,
            segment_bytes=min(segment_bytes, max(limit // 8, 1)) if limit else segment_bytes,
            ttl=config.ttl_days * 86_400,
            durable=config.durability == "persistent",
            now=now,
            ops=ops,
        )
        self._trials = 1 + (config.persistent_max_retries if config.durability == "persistent" else 0)
        self._wake = threading.Condition()  # guards all attributes below
        self._reads: deque[_Request] = deque()
        self._tickets: dict[int, _Request] = {}  # not polled yet
        self._done: deque[_Request] = deque()
        self._last_ticket = 0
        self._queue: dict[bytes, tuple[BlockId, Payload]] = {}  # by key; the first one may be being written
        self._queue_bytes = 0
        self._failures = 0  # failed attempts to write the first block of the queue
        self._closing = False
        self._idle = False
        self._off = ""
        self._read_only = False
        self._pause, self._resume = 0.0, 0.0  # length of the pause of writing, and the time when it ends
        self._quiet = 0.0  # time of the next log line
        self._scan: Iterator[None] | None = self._segments.scan()
        self._hits = self._misses = self._dropped = self._reload_bytes = 0
        self._reload_seconds = 0.0
        self._checkers = ThreadPoolExecutor(min(CHECKERS, os.cpu_count() or 1), "kv-check")
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    # -- Called on the owner's thread -----------------------------------------------------------------------------

    def longest(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks of a chain are there, as far as the index and the queue say."""
        if self._off:
            return 0
        for i, key in enumerate(keys):
            if key not in self._segments and key not in self._queue:
                return i
        return len(keys)

    def put(self, block: BlockId, payload: Payload) -> bool:
        """Queue a block to be written; `payload` must not change from now on.

        Return False if it was dropped because the queue is full or the cache off. If writes are not asynchronous,
        wait until it is written.
        """
        with self._wake:
            if block.key in self._queue or block.key in self._segments:
                return not self._off
            if self._off or self._closing or not self._room(len(payload)):
                self._dropped += 1
                return False
            self._queue[block.key] = block, payload
            self._queue_bytes += len(payload)
            self._wake.notify_all()
            if self._config.async_writes:
                return True
            self._wake.wait_for(lambda: block.key not in self._queue or self._off, DRIVE_SECONDS)
            return block.key in self._segments

    def room(self, size: int) -> int:
        """Return how many blocks of `size` bytes would be accepted now."""
        with self._wake:
            if self._off or self._closing or time.monotonic() < self._resume:
                return 0
            most = self._config.writer_queue_size
            if self._config.async_writes:
                most = min(most - len(self._queue), (MAX_QUEUE_BYTES - self._queue_bytes) // size)
            return max(most, 0)

    def read(self, blocks: Sequence[BlockId]) -> int:
        """Begin to read a chain of blocks; return its ticket for `poll` or `forget`.

        The payloads take memory until they are polled.
        """
        with self._wake:
            self._last_ticket += 1
            request = self._tickets[self._last_ticket] = _Request(self._last_ticket, blocks)
            if not self._off:
                self._reads.append(request)
                self._wake.notify_all()
            return request.ticket

    def poll(self) -> list[Read]:
        """Return the reads that have finished. One that took longer than DRIVE_SECONDS has what was read so far."""
        with self._wake:
            now = time.monotonic()
            late = [r for r in self._tickets.values() if self._off or r.deadline < now]
            done = {r.ticket: r for r in [*self._done, *late]}
            self._done.clear()
            for ticket in done:
                del self._tickets[ticket]
            return [Read(ticket, list(r.payloads)) for ticket, r in done.items()]

    def forget(self, ticket: int) -> None:
        """Drop a read that nobody waits for any more."""
        with self._wake:
            request = self._tickets.pop(ticket, None)
            if request is not None and request in self._done:
                self._done.remove(request)

    def stats(self) -> DiskStats:
        """Return the statistics of the cache."""
        with self._wake:
            counts = self._segments.counts
            return DiskStats(
                bytes=self._segments.bytes,
                records=len(self._segments),
                segments=self._segments.count,
                queued=len(self._queue),
                hits=self._hits,
                misses=self._misses,
                written=counts.written,
                written_bytes=counts.written_bytes,
                dropped=self._dropped,
                evicted=counts.evicted,
                quarantined=counts.quarantined,
                errors=counts.errors,
                reload_bytes=self._reload_bytes,
                reload_seconds=self._reload_seconds,
                scanning=self._scan is not None,
                read_only=self._read_only,
                off=self._off,
            )

    def settle(self, timeout: float = DRIVE_SECONDS) -> bool:
        """Wait until everything asked for is done; return False if `timeout` seconds have passed before."""
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._off) or (self._idle and not self._busy()), timeout)

    def close(self, timeout: float = DRIVE_SECONDS) -> None:
        """Write the queue if the drive takes it within `timeout` seconds, and release the folder. A second call does
        nothing.
        """
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout)

    # -- On the cache's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
            self._turn_off("closed")
        except BaseException as e:
            log.exception("the disk cache is off: its thread has failed")
            self._turn_off(f"its thread has failed ({type(e).__name__}: {e})")
        finally:
            self._checkers.shutdown()
            with contextlib.suppress(OSError):
                self._segments.close()
            self.folder.close()

    def _work(self) -> None:
        interval = self._config.flush_interval_s
        flush = time.monotonic() + interval
        while not self._off:
            with self._wake:
                self._idle = not self._busy()
                if self._idle:
                    self._wake.notify_all()
                    if self._closing:
                        break
                    until = min(flush, self._resume) if self._queue else flush
                    self._wake.wait(max(0.0, until - time.monotonic()))
                self._idle = False
                request = self._reads.popleft() if self._reads else None
            if request is not None:
                self._read_one(request)
                continue
            if self._scan is not None and next(self._scan, _END) is _END:
                self._scan = None
            if self._may_write():
                self._write_one()
            if time.monotonic() >= flush:
                self._flush()
                flush = time.monotonic() + interval
        if not self._off:
            self._flush()

    def _busy(self) -> bool:
        return bool(self._reads) or self._scan is not None or self._may_write()

    def _may_write(self) -> bool:
        return bool(self._queue) and self._segments.ready and time.monotonic() >= self._resume

    def _room(self, size: int) -> bool:
        """Return whether a block may be queued. Without asynchronous writes it is written at once or not at all."""
        if not self._config.async_writes:
            return not self._queue and time.monotonic() >= self._resume
        return len(self._queue) < self._config.writer_queue_size and self._queue_bytes + size <= MAX_QUEUE_BYTES

    def _read_one(self, request: _Request) -> None:
        """Read a few blocks of a request, so that other requests get their turn."""
        if request.ticket not in self._tickets:
            return
        at = len(request.payloads)
        wanted = request.blocks[at : at + CHECKERS]
        payloads = self._find(wanted)
        missed = len(payloads) < len(wanted)
        with self._wake:
            request.payloads += payloads
            self._hits += len(payloads)
            self._misses += missed
            if not missed and len(request.payloads) < len(request.blocks):
                self._reads.append(request)
                return
            if request.ticket not in self._tickets:
                return
            self._done.append(request)
        if self._finished is not None:
            self._finished()

    def _find(self, blocks: Sequence[BlockId]) -> list[memoryview]:
        """Return the payloads of the first blocks that are there, with every byte checked."""
        began = time.perf_counter()
        found: list[memoryview] = []
        reloaded = 0
        for block, (read, check) in zip(blocks, list(self._checks(blocks)), strict=False):
            payload = check()
            if payload is None:
                self._segments.quarantine(block)
                break
            found.append(payload)
            reloaded += read * len(payload)
        if reloaded:
            self._reload_bytes += reloaded
            self._reload_seconds += time.perf_counter() - began
        return found

    def _checks(self, blocks: Sequence[BlockId]) -> Iterator[tuple[bool, Callable[[], memoryview | None]]]:
        """Yield for each block that is there whether it was read, and a function that returns its checked payload.

        While one block is read, those before it are checked on other threads if that takes longer than handing them
        over.
        """
        for block in blocks:
            with self._wake:
                queued = self._queue.get(block.key)
            if queued is not None:
                if queued[0] != block:
                    return
                yield False, memoryview(queued[1]).toreadonly
                continue
            record = self._fetch(block)
            if record is None:
                return
            check = partial(self._segments.checked, block, record)
            yield True, self._checkers.submit(check).result if len(record) >= LARGE else check

    def _fetch(self, block: BlockId) -> memoryview | None:
        try:
            return self._segments.fetch(block)
        except OSError:
            self._segments.counts.errors += 1
            self._check_folder()
            return None

    def _write_one(self) -> None:
        with self._wake:
            key, (block, payload) = next(iter(self._queue.items()))
        written = False
        try:
            written = key in self._segments or self._segments.append(block, payload)
        except OSError as e:
            self._failed(e)
            self._failures += 1
            if self._failures < self._trials:
                return
        else:
            self._works()
        with self._wake:
            if self._queue.pop(key, None) is not None:  # None: the cache was turned off meanwhile
                self._queue_bytes -= len(payload)
            self._failures = 0
            self._dropped += not written
            if not self._config.async_writes:
                self._wake.notify_all()

    def _flush(self) -> None:
        self._check_folder()
        for operation in (self._segments.sync, self._segments.expire):
            try:
                operation()
            except OSError as e:
                self._failed(e)

    def _works(self) -> None:
        self._read_only = False
        if time.monotonic() > self._resume + MAX_PAUSE:
            self._pause = 0.0

    def _failed(self, error: OSError) -> None:
        """Pause writing after an error, for longer each time that it fails again soon."""
        self._segments.counts.errors += 1
        self._check_folder()
        if self._off:
            return
        if error.errno in _FULL:
            with contextlib.suppress(OSError):
                self._segments.free()
        now = time.monotonic()
        self._read_only = True
        self._pause = min(MAX_PAUSE, max(self._config.flush_interval_s, 2 * self._pause))
        self._resume = now + self._pause
        if now >= self._quiet:
            self._quiet = now + _QUIET
            log.warning("the disk cache in %s is read-only for a while: %s", self.folder.path, error.strerror or error)

    def _check_folder(self) -> None:
        if not self._off and not self.folder.held():
            log.warning("the disk cache is off: %s is not there any more", self.folder.path)
            self._turn_off("its folder is not there any more")

    def _turn_off(self, why: str) -> None:
        with self._wake:
            self._off = self._off or why
            self._dropped += len(self._queue)
            self._queue.clear()
            self._queue_bytes = 0
            self._wake.notify_all()
        if self._finished is not None:
            self._finished()
