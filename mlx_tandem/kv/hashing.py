"""Keys of cache blocks: digests of everything that decides what a block's keys and values are.

A key has 32 bytes and depends on the namespace, on all tokens before the block and on the block's own tokens. Blocks
with equal keys hold the same content. Callers compare the tokens of a block nevertheless before they use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from struct import error, pack

import msgspec
from msgspec import Struct

FORMAT = 1
"""Version of the format of blocks and their keys. A change of either needs another number."""

ROOT = bytes(32)
"""The key that stands for the parent of a sequence's first block."""


class Namespace(Struct, frozen=True):
    """Everything besides tokens that decides the content of a block. Blocks are shared within one namespace only.

    Names of adapters play no part: an adapter that is loaded again under its old name has another digest unless its
    content is the same.
    """

    weights: str  # digest of the model's weights
    tokenizer: str  # digest of the tokenizer
    dtype: str  # of the keys and values
    block_size: int
    kv_bits: int = 0  # 0: not quantised
    kv_group_size: int = 0
    positions: str = ""  # digest of the configuration that the model's positions and shapes follow
    layout: str = ""  # how the heads are spread over ranks
    adapter: str = ""  # digest of its content, with "+n" if it starts at offset n of a block; "": the base
    scope: str = ""  # who may share
    format: int = FORMAT

    def digest(self) -> bytes:
        """Return the SHA-256 of the fields as msgpack, an encoding that says where each field begins and ends."""
        return sha256(msgspec.msgpack.encode(self)).digest()


_IMAGE = 1 << 128
"""A bit of every number that stands for a part of an image, which makes it larger than any token id."""

_WIDE = 24
"""Bytes of each number of a block that has placeholders of images."""


def content_of(digest: bytes, first: int, count: int) -> list[int]:
    """Return the numbers that stand, in place of token ids, for the embeddings of an image from number `first` on.

    digest: of the image, 16 bytes. Different embeddings have different numbers.
    """
    image = (_IMAGE | int.from_bytes(digest)) << 32
    return [image | n for n in range(first, first + count)]


def _packed(tokens: Sequence[int]) -> bytes:
    """Return the bytes of a block's tokens. Blocks with and without placeholders of images have different lengths."""
    try:
        return pack(f"<{len(tokens)}I", *tokens)
    except error:
        return b"".join([token.to_bytes(_WIDE, "little") for token in tokens])


def block_key(namespace: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the block with `tokens` that follows the block with the key `parent`; ROOT: it is the first.

    `namespace` is the digest of a Namespace. Where the block has placeholders of an image, the numbers of
    `content_of` stand for them.
    """
    return sha256(namespace + parent + _packed(tokens)).digest()


class Chain:
    """The keys of one sequence's full blocks. Each key is computed once, when it is first asked for.

    The blocks before number `first` are in the namespace of the base model, the others in that of the sequence's
    adapter, so that sequences under different adapters share the former.
    """

    __slots__ = ("_base", "_first", "_own", "keys")

    def __init__(self, own: bytes, base: bytes = b"", first: int = 0):
        self._own = own
        self._base = base
        self._first = first
        self.keys: list[bytes] = []

    def namespace(self, index: int) -> bytes:
        """Return the digest of the namespace of block `index`."""
        return self._own if index >= self._first else self._base

    def key(self, index: int, tokens: Sequence[int], block_size: int) -> bytes:
        """Return the key of block `index`. `tokens` are the sequence's, at least to the end of that block."""
        keys = self.keys
        for i in range(len(keys), index + 1):
            own = tokens[i * block_size : (i + 1) * block_size]
            keys.append(block_key(self.namespace(i), self.parent(i), own))
        return keys[index]

    def parent(self, index: int) -> bytes:
        """Return the key of the block before `index`; it must have been computed already."""
        return self.keys[index - 1] if index else ROOT

    def fork(self) -> Chain:
        """Return a copy for a sequence that has the same tokens so far and may continue with others."""
        other = Chain(self._own, self._base, self._first)
        other.keys = self.keys[:]
        return other
