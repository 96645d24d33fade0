"""What a block of the cache is known by: everything that decides what its keys and values are.

A key is 32 bytes and depends on the namespace, on all tokens before the block and on its own. Two blocks of equal keys
hold the same; that their tokens are compared all the same, wherever one is used, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from struct import pack

import msgspec
from msgspec import Struct

FORMAT = 1
"""Of blocks and their keys; a change of either needs another number."""

ROOT = bytes(32)
"""The parent of the first block."""


class Namespace(Struct, frozen=True):
    """Blocks may be shared within one namespace and never across two. Names play no part: an adapter that is loaded
    again under its old name has another digest, unless its content is the same.
    """

    weights: str  # digest of the model's weights
    tokenizer: str  # digest of the tokenizer
    dtype: str  # of the keys and values
    block_size: int
    kv_bits: int = 0  # 0: not quantised
    kv_group_size: int = 0
    positions: str = ""  # digest of the configuration that the model's positions and shapes follow
    layout: str = ""  # how the heads are spread over ranks
    adapter: str = ""  # digest of the adapter's content; "": the base model
    scope: str = ""  # who may share
    format: int = FORMAT

    def digest(self) -> bytes:
        """SHA-256 over the fields as msgpack, which says where each begins and ends."""
        return sha256(msgspec.msgpack.encode(self)).digest()


def block_key(namespace: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """Of the block with `tokens` behind the one whose key is `parent` (ROOT: none), under a namespace's digest."""
    return sha256(namespace + parent + pack(f"<{len(tokens)}I", *tokens)).digest()


class Chain:
    """The keys of one sequence's full blocks, each computed once, when it is first asked for."""

    __slots__ = ("keys", "namespace")

    def __init__(self, namespace: bytes):
        self.namespace = namespace
        self.keys: list[bytes] = []

    def key(self, index: int, tokens: Sequence[int], block_size: int) -> bytes:
        """Of block `index`; `tokens` are the sequence's from its first on, and reach to the end of that block."""
        keys = self.keys
        for i in range(len(keys), index + 1):
            keys.append(block_key(self.namespace, self.parent(i), tokens[i * block_size : (i + 1) * block_size]))
        return keys[index]

    def parent(self, index: int) -> bytes:
        """The key of the block before `index`, which is known."""
        return self.keys[index - 1] if index else ROOT

    def fork(self) -> Chain:
        """For a sequence that goes another way from here on."""
        other = Chain(self.namespace)
        other.keys = self.keys[:]
        return other
