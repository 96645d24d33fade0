"""The records of the offload: which cache groups' blocks lie in one record on the drive.

A block's keys and values are one record: the blocks of all groups that have one for each token. The state after a block
is a record of its own, since few blocks have one, and it takes as much as many blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate

from mlx_tandem.kv.groups import CacheGroup


@dataclass(frozen=True)
class RecordForm:
    """One kind of record. `label` distinguishes its keys and namespaces from those of the other kind.

    Attributes:
        groups: Indices of the cache groups whose blocks it holds, one after the other.
        sizes: Bytes of a block of each of these groups, on all ranks that compute the model together.
    """

    groups: tuple[int, ...]
    sizes: tuple[int, ...]
    label: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of the payload of a record."""
        return sum(self.sizes)

    def key(self, key: bytes) -> bytes:
        """Return the key of the record that belongs to the block with this key."""
        return sha256(self.label + key).digest() if self.label else key

    def parts(self, payload: memoryview) -> list[tuple[int, memoryview]]:
        """Return the parts of a record's payload, each with the index of its group."""
        ends = zip(self.groups, accumulate(self.sizes), self.sizes, strict=True)
        return [(group, payload[end - size : end]) for group, end, size in ends]


def forms_of(groups: Sequence[CacheGroup], ranks: int = 1) -> tuple[RecordForm, RecordForm]:
    """Return the forms of the records of blocks and of states. A form without bytes has no records.

    `ranks` is how many ranks compute the model together, each with blocks as `groups` say.
    """
    return _form(groups, ranks, snapshots=False), _form(groups, ranks, snapshots=True)


def _form(groups: Sequence[CacheGroup], ranks: int, *, snapshots: bool) -> RecordForm:
    own = [i for i, group in enumerate(groups) if group.snapshots == snapshots]
    return RecordForm(tuple(own), tuple(groups[i].block_bytes * ranks for i in own), b"state" if snapshots else b"")
