"""What the text of an answer must match. These values are also the messages to the process that checks them."""

from __future__ import annotations

from msgspec import Struct

ANY_OBJECT = b'{"type":"object"}'
"""The schema of any JSON object."""


class Schema(Struct, frozen=True, array_like=True, tag=True):
    """A JSON value that is valid under a JSON schema. `json` is the schema as JSON, in UTF-8.

    `where` is the field of the request that has the schema, such as `response_format.json_schema.schema`.
    """

    json: bytes
    where: str = ""
    is_lenient: bool = False  # what cannot be enforced is left out and not refused


class Pattern(Struct, frozen=True, array_like=True, tag=True):
    """A text that a regular expression matches as a whole."""

    regex: str


class OneOf(Struct, frozen=True, array_like=True, tag=True):
    """One of several texts."""

    texts: tuple[str, ...]


class Rules(Struct, frozen=True, array_like=True, tag=True):
    """A text of the language of a context-free grammar, in Lark's notation as llguidance reads it, or in GBNF."""

    text: str


class Call(Struct, frozen=True, array_like=True):
    r"""A call of one tool: `begin`, the arguments as JSON, and `end`. The texts may spell control tokens.

    Hermes has `begin` = '<tool_call>\n{"name": "f", "arguments": ' and `end` = '}\n</tool_call>'.
    """

    begin: str
    arguments: Schema
    end: str


class Calls(Struct, frozen=True, array_like=True, tag=True):
    """Calls of tools in the form of a model's family: `open`, one or more calls with `separator` between them, `close`.

    `separator` is None where only one call may be made. With a `trigger`, any text may come before the calls, or
    instead of them; the first call, with `open`, then begins with the text `trigger`.
    """

    calls: tuple[Call, ...]
    separator: str | None = None
    open: str = ""
    close: str = ""
    trigger: str = ""


class Thought(Struct, frozen=True, array_like=True):
    """The thought before the answer, whose text is free. It ends with the marker `end`.

    `begin` is the marker that begins it, before which the model may also answer at once; it is empty where the prompt
    has already begun the thought.
    """

    end: str
    begin: str = ""


class Constraint(Struct, frozen=True, array_like=True):
    """What an answer must match, and the field of the request that says so."""

    form: Schema | Pattern | OneOf | Rules | Calls
    param: str
    thought: Thought | None = None
    is_compact: bool = False  # whether JSON has no whitespace between its parts
    calls: Calls | None = None  # calls of tools that may be made instead
