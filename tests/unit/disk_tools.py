"""Blocks whose bytes follow from their ids, and folders to keep them in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from mlx_tandem.config import DiskCacheConfig
from mlx_tandem.files import DISK, FileOps
from mlx_tandem.kv.disk.cache import DiskCache
from mlx_tandem.kv.disk.folder import CacheFolder
from mlx_tandem.kv.disk.records import BlockId
from mlx_tandem.kv.disk.segments import Segments

BASE, OTHER_BASE = b"b" * 32, b"o" * 32


def block(i: int) -> BlockId:
    key = hashlib.sha256(b"%d" % i).digest()
    parent = hashlib.sha256(b"%d" % (i - 1)).digest() if i else b""
    return BlockId(b"n" * 32, key, parent, tuple(range(i, i + i % 5)))


def payload(i: int, size: int = 200) -> bytes:
    return hashlib.shake_128(b"%d" % i).digest(size + i % 7)


def others(one: BlockId) -> Iterator[BlockId]:
    """Ids that differ from it in one part each, but not in the key that they are found by."""
    yield replace(one, namespace=b"m" * 32)
    yield replace(one, parent=b"p" * 32)
    yield replace(one, parent=b"" if one.parent else b"q" * 32)
    yield replace(one, tokens=(*one.tokens, 7))
    yield replace(one, tokens=(*one.tokens[:-1], 1 << 31))


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def segments(
    folder: Path | CacheFolder,
    *,
    ops: FileOps = DISK,
    base: bytes = BASE,
    limit: int = 0,
    segment_bytes: int = 4000,
    ttl: float = 0,
    now: Callable[[], float] | None = None,
    durable: bool = True,
) -> Segments:
    """What is in the folder, scanned."""
    found = Segments(
        folder if isinstance(folder, CacheFolder) else CacheFolder(folder, ops),
        base,
        limit=limit,
        segment_bytes=segment_bytes,
        ttl=ttl,
        durable=durable,
        now=now or Clock(),
        ops=ops,
    )
    for _ in found.scan():
        pass
    return found


def close(found: Segments) -> None:
    found.close()
    found.folder.close()


def filled(path: Path, count: int, size: int = 200) -> Path:
    """A folder with blocks 0 to `count` in one segment: that file."""
    found = segments(path, segment_bytes=1 << 20)
    for i in range(count):
        assert found.append(block(i), payload(i, size))
    close(found)
    (file,) = path.glob("segment-*")
    return file


def cache(path: Path, ops: FileOps = DISK, segment_bytes: int = 4000, **settings: object) -> DiskCache:
    defaults: dict[str, object] = {"flush_interval_s": 0.01, "max_size_gb": 0.0}
    config = DiskCacheConfig(dir=str(path), **defaults | settings)  # type: ignore[arg-type]
    return DiskCache(config, BASE, ops=ops, segment_bytes=segment_bytes)


def read(cache: DiskCache, blocks: list[BlockId]) -> list[bytes]:
    ticket = cache.read(blocks)
    assert cache.settle()
    (done,) = cache.poll()
    assert done.ticket == ticket
    return [bytes(p) for p in done.payloads]
