"""The messages between the front and the process that tokenises long texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from mlx_tandem.generation.parts import Part
from mlx_tandem.generation.tokenizing.listing import Listing
from mlx_tandem.isolation.frames import Busy


class Encode(Struct, frozen=True, array_like=True, tag=True):
    """A question for the token ids of a text.

    With `begins` the text is a whole prompt in one part, and gets the special tokens that begin one.
    """

    parts: list[Part]
    begins: bool


class List(Struct, frozen=True, array_like=True, tag=True):
    """A question for token ids as JSON, with the tokens' pieces of the vocabulary if `pieces` is set."""

    text: Encode
    pieces: bool


class Decode(Struct, frozen=True, array_like=True, tag=True):
    """A question for the text of token ids below `vocab_size`. `param` is their field in the request."""

    ids: Sequence[int]
    vocab_size: int
    param: str


class FindSpecial(Struct, frozen=True, array_like=True, tag=True):
    """A question for the first of these texts that encodes to a special token."""

    texts: list[str]


class Ids(Struct, frozen=True, array_like=True, tag=True):
    """The answer to Encode: token ids as unsigned 32-bit integers in this machine's byte order."""

    ids: bytes


class Text(Struct, frozen=True, array_like=True, tag=True):
    """The answer to Decode: a text as a JSON string."""

    json: bytes


class Found(Struct, frozen=True, array_like=True, tag=True):
    """The answer to FindSpecial: an index, or None if no text encodes to a special token."""

    index: int | None


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """The reason why there is no answer.

    refused: the request is invalid for the reason in `detail`, in the field `param` if that is known. failed: the
    library failed. too_large: the answer would be over its size limit.
    """

    kind: Literal["refused", "failed", "too_large"]
    detail: str = ""
    param: str | None = None


Question = Encode | List | Decode | FindSpecial
Answer = Ids | Listing | Text | Found | Failed

decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer | Busy).decode
