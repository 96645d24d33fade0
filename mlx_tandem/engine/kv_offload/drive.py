"""The drive that blocks go to and come from, as the engine sees it, and the ids of blocks on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Protocol

from mlx_tandem.engine.kv_offload.forms import RecordForm
from mlx_tandem.kv.disk.cache import Read
from mlx_tandem.kv.disk.records import BlockId, Payload
from mlx_tandem.kv.hashing import ROOT

MOST_NAMESPACES = 4096
"""Most namespaces whose ids on the drive are kept."""


class Drive(Protocol):
    """The part of `kv/disk/cache.py` that the offload uses: blocks by their ids, without waiting for the drive."""

    def room(self, size: int) -> int:
        """Return how many blocks of `size` bytes would be accepted now."""

    def longest(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks of a chain the drive has."""

    def put(self, block: BlockId, payload: Payload) -> bool:
        """Queue a block to be written; return False if it was dropped."""

    def read(self, blocks: Sequence[BlockId]) -> int:
        """Begin to read a chain of blocks; return its ticket."""

    def poll(self) -> list[Read]:
        """Return the reads that have finished."""

    def forget(self, ticket: int) -> None:
        """Drop a read that nobody waits for any more."""


class Link:
    """The link to the drive, which saves and reads share; there may be no drive yet.

    `blocks` and `states` are the forms of its records. One step saves up to `step_bytes` of each, and loads
    up to `step_bytes` in all, but at least one record.
    """

    def __init__(self, blocks: RecordForm, states: RecordForm, step_bytes: int):
        self.blocks = blocks
        self.states = states
        self.forms = tuple(form for form in (states, blocks) if form.nbytes)
        self.step_bytes = step_bytes
        self.drive: Drive | None = None
        self._base = b""
        self._namespaces: dict[bytes, bytes] = {}

    def open(self, drive: Drive, base: bytes) -> None:
        """Begin to use a drive. `base`: the digest of everything that its records have in common."""
        self.drive, self._base = drive, base

    def id(self, form: RecordForm, namespace: bytes, parent: bytes, key: bytes, tokens: Iterable[int]) -> BlockId:
        """Return the id of the record of a block, whose namespace names the model as well.

        A state's record has the tokens of the block that it follows, and the block's key as its parent. Of the
        numbers that stand for an image only the last 32 bits go to the drive; the key tells images apart.
        """
        name = namespace + form.label
        own = self._namespaces.get(name)
        if own is None:
            if len(self._namespaces) > MOST_NAMESPACES:
                self._namespaces.clear()
            own = self._namespaces[name] = sha256(self._base + name).digest()
        before = key if form.label else parent
        return BlockId(own, form.key(key), b"" if before == ROOT else before, tuple([t & 0xFFFFFFFF for t in tokens]))
