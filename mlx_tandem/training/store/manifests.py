"""What a checkpoint says of itself: `manifest.json`, with a hash of every other file and of its own content."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct

from mlx_tandem import files
from mlx_tandem.files import StorageError

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20


def label(name: str, sequence: int) -> str:
    """Return what tells a checkpoint from all others, and from itself before it was renewed."""
    return f"{name}#{sequence}"


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint says of itself. `Checkpoints.commit` fills in `format` and what follows it."""

    name: str
    step: int  # of the optimiser
    version: int  # of the adapter, as it was served; 0: it was not
    digest: str  # of the adapter's content
    reward: float | None = None  # what `best-performance` is chosen by; None: never
    pinned: bool = False  # someone gave it its name: only `delete` removes it
    counters: dict[str, Any] = {}  # of the loop
    config: dict[str, Any] = {}  # that it was trained with
    format: int = FORMAT
    created: float = 0.0  # seconds since the epoch
    sequence: int = 0  # higher: made or renewed later
    files: dict[str, str] = {}  # BLAKE2b-256 by name

    @property
    def label(self) -> str:
        """The name and the sequence, which together are never used twice."""
        return label(self.name, self.sequence)


class _Sealed(Struct, frozen=True):
    manifest: Raw
    blake2b: str


class _Format(Struct, frozen=True):
    format: int


class Corrupt(StorageError):
    """A checkpoint is not as it was written."""

    code = "checkpoint_damaged"


def seal(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest.json`."""
    inner = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return msgspec.json.encode(_Sealed(Raw(inner), hashlib.blake2b(inner, digest_size=32).hexdigest())) + b"\n"


def read(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at `path`. Raises Corrupt, or StorageError when it has another format."""
    file = path / MANIFEST
    with files.storage(file), file.open("rb") as f:
        data = f.read(MAX_MANIFEST_BYTES)
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        inner = bytes(sealed.manifest)
        if hashlib.blake2b(inner, digest_size=32).hexdigest() != sealed.blake2b:
            raise Corrupt(f"{file} is not as it was written")
        found = msgspec.json.decode(inner, type=_Format).format
        if found != FORMAT:
            raise StorageError(
                f"{path} is a checkpoint of format {found}; this version of mlx-tandem reads format {FORMAT}. Move it "
                f"to another folder, or use the version that wrote it",
                code="unknown_format",
            )
        manifest = msgspec.json.decode(inner, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise Corrupt(f"{file} is not a manifest: {e}") from e
    if manifest.name != path.name or any(Path(name).name != name for name in manifest.files):
        raise Corrupt(f"{file} is that of another checkpoint")
    return manifest


def hash_file(path: Path) -> str:
    """Return BLAKE2b-256 of what a file holds. Raises StorageError."""
    with files.storage(path), path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
