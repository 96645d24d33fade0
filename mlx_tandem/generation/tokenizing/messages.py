"""What the front and the process that tokenises long texts say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from mlx_tandem.generation.parts import Part
from mlx_tandem.generation.tokenizing.listing import Listing
from mlx_tandem.isolation.frames import Busy


class Encode(Struct, frozen=True, array_like=True, tag=True):
    """Asks for token ids. With `begins` the only part is a whole prompt: it gets what the tokenizer begins one with."""

    parts: list[Part]
    begins: bool


class List(Struct, frozen=True, array_like=True, tag=True):
    """Asks for the same as JSON, with the tokens' pieces if they are wanted."""

    text: Encode
    pieces: bool


class Decode(Struct, frozen=True, array_like=True, tag=True):
    """Asks for the text of token ids, which have to be below `vocab_size`. They came in the field `param`."""

    ids: Sequence[int]
    vocab_size: int
    param: str


class FindSpecial(Struct, frozen=True, array_like=True, tag=True):
    """Asks which of these texts is the first that a special token is read out of."""

    texts: list[str]


class Ids(Struct, frozen=True, array_like=True, tag=True):
    """Token ids, as unsigned 32-bit integers in this machine's byte order."""

    ids: bytes


class Text(Struct, frozen=True, array_like=True, tag=True):
    """A text as a JSON string."""

    json: bytes


class Found(Struct, frozen=True, array_like=True, tag=True):
    """An index; None: there is none."""

    index: int | None


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """Why there is no answer. `refused`: for the reason in `detail`, over the field `param` if that is known."""

    kind: Literal["refused", "failed", "too_large"]
    detail: str = ""
    param: str | None = None


Question = Encode | List | Decode | FindSpecial
Answer = Ids | Listing | Text | Found | Failed

decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer | Busy).decode
