"""The messages between the client of a chat template and its worker processes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from mlx_tandem.generation.parts import Part
from mlx_tandem.isolation.frames import Busy


class Setup(Struct, frozen=True, array_like=True):
    """A worker's template, its constant variables, and the texts of the model's control tokens."""

    source: str
    variables: dict[str, str]
    specials: tuple[str, ...]


class Rendered(Struct, frozen=True, array_like=True, tag=True):
    """The text of a prompt, in parts."""

    parts: list[Part]


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """The reason why there is no prompt.

    syntax: the template is not valid. refused: the template refuses the messages; `detail` has its own words. failed:
    the template raised an error. too_large: its output is over the size limit. unprinted: the template does not print
    the last message, so that message cannot be continued.
    """

    kind: Literal["syntax", "refused", "failed", "too_large", "unprinted"]
    detail: str = ""


decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_values = msgspec.msgpack.Decoder(dict[str, Any]).decode
decode_answer = msgspec.msgpack.Decoder(Rendered | Failed | Busy).decode
