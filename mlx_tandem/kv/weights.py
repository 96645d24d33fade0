"""The digest of a model folder's files, which says which model it holds.

Reading a large model takes many seconds, so each file's digest is stored with the file's size, times and inode as soon
as it is known. A run that is interrupted continues where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from mlx_tandem import files
from mlx_tandem.files import DISK, FileOps

SUFFIXES = (".safetensors", ".json", ".model", ".txt", ".jinja", ".tiktoken")

_JUST_NOW = 2.0  # seconds within which a file may change without a change of its times
_MOST = 1000  # files whose digests are stored


class _Known(Struct, frozen=True, array_like=True):
    """A file's digest, with the status that the file had when it was read."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    digest: str


def folder_digest(path: Path, memory: Path | None = None, ops: FileOps = DISK) -> str:
    """Return the SHA-256, as hex, of the names and contents of a model folder's configuration, tokenizer and weights.

    `memory`: a file in which digests are stored; if it cannot be used, the call only takes longer. The call may read
    for many seconds, so it belongs on a thread of its own. Raises OSError when a file of the model cannot be read or
    changes meanwhile.
    """
    known = _load(memory) if memory else {}
    whole = hashlib.sha256()
    for file in sorted(p for p in path.resolve().iterdir() if p.suffix in SUFFIXES and p.is_file()):
        name = os.fsencode(file.name)
        whole.update(len(name).to_bytes(4, "little") + name + bytes.fromhex(_file(file, known, memory, ops)))
    return whole.hexdigest()


def _file(file: Path, known: dict[str, _Known], memory: Path | None, ops: FileOps) -> str:
    """Return the digest of one file, taken from `known` where the file has not changed; add new digests to it."""
    target = str(file.resolve())
    with open(target, "rb") as f:
        before = _status(f.fileno())
        found = known.get(target)
        if found is not None and msgspec.structs.replace(found, digest="") == before:
            return found.digest
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        if _status(f.fileno()) != before:
            raise OSError(f"{file} was changed while it was read")
    if memory and time.time() - max(before.mtime_ns, before.ctime_ns) / 1e9 > _JUST_NOW:
        known.pop(target, None)
        known[target] = msgspec.structs.replace(before, digest=digest)
        while len(known) > _MOST:
            del known[next(iter(known))]
        with contextlib.suppress(OSError):
            files.make_folder(memory.parent, ops)
            files.replace(memory, msgspec.json.encode(known), ops)
    return digest


def _status(fd: int) -> _Known:
    status = os.fstat(fd)
    return _Known(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev, "")


def _load(memory: Path) -> dict[str, _Known]:
    try:
        known = msgspec.json.decode(memory.read_bytes(), type=dict[str, _Known])
    except (OSError, msgspec.MsgspecError):
        return {}
    return {path: k for path, k in known.items() if len(k.digest) == 64 and not set(k.digest) - set("0123456789abcdef")}
