"""The answers of the process that checks constraints."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from mlx_tandem.generation.grammar.constraint import Constraint
from mlx_tandem.isolation.frames import Busy


class Compiled(Struct, frozen=True, array_like=True, tag=True):
    """The grammar of a constraint, in llguidance's notation. The engine can compile it within its limits."""

    grammar: str


class Refused(Struct, frozen=True, array_like=True, tag=True):
    """The reason why there is no grammar. `where` is the field of the mistake; "" for that of the constraint."""

    message: str
    where: str = ""


Answer = Compiled | Refused

decode_constraint = msgspec.msgpack.Decoder(Constraint).decode
decode_answer = msgspec.msgpack.Decoder(Compiled | Refused | Busy).decode
