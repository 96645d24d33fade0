"""What the client of a chat template and its worker processes say to each other."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from mlx_tandem.generation.parts import Part
from mlx_tandem.isolation.frames import Busy


class Setup(Struct, frozen=True, array_like=True):
    """The template that a worker renders, with the variables that it always has and the texts of control tokens."""

    source: str
    variables: dict[str, str]
    specials: tuple[str, ...]


class Rendered(Struct, frozen=True, array_like=True, tag=True):
    """A prompt as text."""

    parts: list[Part]


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """A prompt that could not be rendered. `syntax`: the template is no template. `refused`: the template says so
    itself, in the words of `detail`. `failed`: it has raised. `too_large`: it prints too much. `unprinted`: it does not
    print the last message, which was to be continued."""

    kind: Literal["syntax", "refused", "failed", "too_large", "unprinted"]
    detail: str = ""


decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_values = msgspec.msgpack.Decoder(dict[str, Any]).decode
decode_answer = msgspec.msgpack.Decoder(Rendered | Failed | Busy).decode
