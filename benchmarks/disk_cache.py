"""Compare the KV cache on the drive with the drive's own rates: writing, reloading and finding what is there.

    python benchmarks/disk_cache.py --json-out benchmarks/results/disk_cache.json

Blocks of a model's size are written and read by the cache and, in turn, as one plain file in pieces of the same
size. Each is read once from memory and once after the system was told to forget its pages. The scan is one of small
blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.table import Table

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.console import fail, show
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.config import DiskCacheConfig
from mlx_tandem.files import write_all
from mlx_tandem.kv.disk.cache import DiskCache
from mlx_tandem.kv.disk.folder import CacheFolder
from mlx_tandem.kv.disk.records import BlockId
from mlx_tandem.kv.disk.segments import Segments

BASE = b"b" * 32


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="the cache on the drive beside plain files")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-kb", type=int, default=2304, help="of one block (16 tokens of an 8B model in bf16)")
    parser.add_argument("--records", type=int, default=1_000_000, help="of the scan")
    parser.add_argument("--record-bytes", type=int, default=512, help="of a payload in the scan")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the drive to measure; a temporary folder if absent")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    size = args.block_kb << 10
    with tempfile.TemporaryDirectory(prefix="tandem-disk-", dir=args.folder) as scratch:
        result: dict[str, Any] = describe() | {
            "block_bytes": size,
            "blocks": args.blocks,
            "hash_gb_per_s": hash_rates(size, args.repeats),
            "gb_per_s": rates(Path(scratch), args.blocks, size, args.repeats),
            "scan": scan(Path(scratch) / "scan", args.records, args.record_bytes, args.repeats),
        }
    if args.json_out:
        write_json(args.json_out, result)
    report(result)


def block(i: int) -> BlockId:
    """Return the id of block `i`."""
    return BlockId(b"n" * 32, hashlib.sha256(b"%d" % i).digest(), b"", tuple(range(16)))


def hash_rates(size: int, repeats: int) -> dict[str, list[float]]:
    """Return the rates of hash functions on data of this size."""
    data = os.urandom(size)
    secret = os.urandom(32)
    ways: dict[str, Callable[[], object]] = {
        "blake2b keyed": lambda: hashlib.blake2b(data, key=secret, digest_size=16).digest(),
        "sha256": lambda: hashlib.sha256(data).digest(),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(rate(lambda way=way: [way() for _ in range(10)], 10 * size))  # type: ignore[misc]
    return found


def rates(scratch: Path, blocks: int, size: int, repeats: int) -> dict[str, list[float]]:
    """Return the rates of writing and reading by the cache and as a plain file."""
    found: dict[str, list[float]] = {}
    payloads = [os.urandom(size) for _ in range(blocks)]
    total = blocks * size
    ids = [block(i) for i in range(blocks)]
    for repeat in range(repeats):
        plain, folder = scratch / f"plain-{repeat}", scratch / f"disk-{repeat}"
        disk = DiskCache(DiskCacheConfig(dir=str(folder), async_writes=False), BASE)
        ways: dict[str, Callable[[], object]] = {
            "write plain": lambda plain=plain: write_plain(plain, payloads),  # type: ignore[misc]
            "write disk": lambda disk=disk: [disk.put(i, p) for i, p in zip(ids, payloads, strict=True)],  # type: ignore[misc]
            "read plain, from memory": lambda plain=plain: read_plain(plain, size),  # type: ignore[misc]
            "read disk, from memory": lambda disk=disk: read_disk(disk, ids, payloads),  # type: ignore[misc]
            "read plain": lambda plain=plain: read_plain(plain, size),  # type: ignore[misc]
            "read disk": lambda disk=disk: read_disk(disk, ids, payloads),  # type: ignore[misc]
        }
        for name, way in ways.items():
            if name in ("read plain", "read disk"):
                forget([plain, *folder.glob("segment-*")])
            found.setdefault(name, []).append(rate(way, total))
            progress(f"round {repeat + 1}/{repeats}  {name}: {found[name][-1]:.2f} GB/s")
        disk.close()
        plain.unlink()
        for file in folder.iterdir():
            file.unlink()
    return found


def write_plain(path: Path, payloads: list[bytes]) -> None:
    """Write payloads to one file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for payload in payloads:
        write_all(fd, payload)
    os.close(fd)


def read_plain(path: Path, size: int) -> None:
    """Read one file in pieces of `size` bytes."""
    fd = os.open(path, os.O_RDONLY)
    offset = 0
    while count := os.preadv(fd, [bytearray(size)], offset):
        offset += count
    os.close(fd)


def read_disk(disk: DiskCache, ids: list[BlockId], payloads: list[bytes]) -> None:
    """Read chains of 16 blocks as they are polled, and compare what comes."""
    waiting = {disk.read(ids[i : i + 16]): i for i in range(0, len(ids), 16)}
    while waiting:
        for ticket, found in disk.poll():
            first = waiting.pop(ticket)
            if len(found) != len(ids[first : first + 16]) or found[0] != payloads[first]:
                fail("the disk did not give back what it was given")
        time.sleep(0.001)


def forget(paths: list[Path]) -> None:
    """Remove these files' pages from memory, where the system can be told to."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        if sys.platform == "linux":
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def scan(folder: Path, records: int, size: int, repeats: int) -> dict[str, Any]:
    """Return the time to index a folder of small blocks."""
    payload = os.urandom(size)

    def opened() -> Segments:
        home = CacheFolder(folder)
        return Segments(home, BASE, limit=0, segment_bytes=256 << 20, ttl=0, durable=False, now=time.time)

    def close(found: Segments) -> None:
        found.close()
        found.folder.close()

    writer = opened()
    for _ in writer.scan():
        pass
    for i in range(records):
        writer.append(block(i), payload)
    size = writer.bytes
    close(writer)
    seconds, cpu = [], []
    for _ in range(repeats):
        forget(list(folder.glob("segment-*")))
        again = opened()
        began, busy = perf_counter(), time.thread_time()
        for _ in again.scan():
            pass
        seconds.append(round(perf_counter() - began, 3))
        cpu.append(round(time.thread_time() - busy, 3))
        if len(again) != records:
            fail("the scan did not find all")
        close(again)
        progress(f"scan of {records:,} records: {seconds[-1]} s, {cpu[-1]} s of CPU time")
    return {"records": records, "bytes": size, "seconds": seconds, "cpu_seconds": cpu}


def rate(work: Callable[[], object], size: int) -> float:
    """Return the GB/s at which `work` handles `size` bytes."""
    began = perf_counter()
    work()
    return round(size / (perf_counter() - began) / 1e9, 3)


def report(result: dict[str, Any]) -> None:
    """Show the results."""
    table = Table("what", "GB/s", title=f"blocks of {result['block_bytes'] >> 10} KB", title_style="")
    for name, rounds in (result["gb_per_s"] | result["hash_gb_per_s"]).items():
        table.add_row(name, f"{statistics.median(rounds):.2f}")
    show(table)
    found = result["scan"]
    print(f"{found['records']:,} records found in {statistics.median(found['seconds']):.2f} s")


def progress(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
