"""The token ids of a text, written as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.strict_json import dumps


class Listing(Struct, frozen=True, array_like=True, tag=True):
    """The number of a text's tokens, and their ids and, if wanted, their pieces of the vocabulary as JSON arrays."""

    count: int
    tokens: bytes
    pieces: bytes | None


def listing(tokenizer: Tokenizer, ids: Sequence[int], *, pieces: bool) -> Listing:
    """Return the listing of `ids`, with the pieces of the vocabulary if `pieces` is set."""
    known = {token: tokenizer.piece(token) for token in set(ids)} if pieces else {}
    return Listing(len(ids), dumps(ids), dumps([known[token] for token in ids]) if pieces else None)
