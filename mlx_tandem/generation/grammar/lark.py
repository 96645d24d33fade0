"""Writing constraints as grammars in llguidance's notation, a variant of Lark's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from mlx_tandem.generation.grammar.constraint import Call, Calls, Constraint, OneOf, Pattern, Rules, Schema, Thought
from mlx_tandem.generation.grammar.schemas import SchemaError, checked
from mlx_tandem.generation.grammar.unrestricted import with_depth
from mlx_tandem.generation.templates.shields import texts

WHITESPACE = r"( |\n {0,64})"
"""The whitespace between parts of JSON: one space, or a line break and an indentation. Without a bound, a model that
has gone astray writes whitespace until its tokens are used up.
"""

_TEXT = "/(?s:.*)/"

_FREE_SPELLING = '%llguidance {"no_forcing": true}\n'
"""The option with which a text is spelled with any tokens. Without it, llguidance spells what must follow as the
tokenizer does, and takes the text of an added token for that token, which the grammar then refuses.
"""

_TEMPERATURE = re.compile(r"^[?!]?[\w-]+\[[^\]\n]*\btemperature\b", re.MULTILINE)


class Unwritable(Exception):
    """Raised for a constraint that has no grammar. `where` is the field of the mistake; "" for the constraint's."""

    def __init__(self, message: str, where: str = ""):
        super().__init__(message)
        self.where = where


def grammar_of(constraint: Constraint, added: Mapping[str, int]) -> str:
    """Return the grammar of a constraint. `added` are the ids of the vocabulary's added tokens by their texts.

    Raises Unwritable. Whether llguidance accepts the grammar is not checked here.
    """
    form, thought = constraint.form, constraint.thought
    if isinstance(form, Rules):
        if constraint.calls is not None:
            raise Unwritable("calls of tools are no alternative to a grammar of the request's own")
        if thought is not None and not thought.begin:
            raise Unwritable("a grammar of the request's own cannot follow the thought that the prompt begins")
        return _FREE_SPELLING + _lark(form.text)
    writer = _Writer(added, constraint.is_compact)
    match form:
        case Schema():
            answer = writer.json(form, with_depth)
        case Pattern(regex):
            if not regex:
                raise Unwritable("the pattern is empty")
            answer = "/" + regex_to_lark(regex, "d").replace("\n", "\\n") + "/"
            writer.may_spell(regex)
        case OneOf(texts):
            answer = " | ".join(map(_quoted, texts))
            writer.may_spell(*texts)
        case Calls():
            answer = writer.calls(form)
    if constraint.calls is not None:
        answer = f"( {answer} ) | ( {writer.calls(constraint.calls)} )"
    writer.rule("start", answer if thought is None else f"{writer.thought(thought)} ( {answer} )")
    return (_FREE_SPELLING if writer.spells_added else "") + writer.text


class _Writer:
    """The rules of one grammar."""

    def __init__(self, added: Mapping[str, int], is_compact: bool):
        self._added = added
        self._options = {
            "coerce_one_of": True,  # schemas.checked accepts it where it means the same as anyOf
            **({"whitespace_flexible": False} if is_compact else {"whitespace_pattern": WHITESPACE}),
        }
        names = sorted(filter(None, added), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._beginnings = frozenset(name[0] for name in names)
        self.text = ""
        self.spells_added = False

    def may_spell(self, *texts: str) -> None:
        """Note texts that an answer may have to contain. They may spell an added token, which it would not be."""
        self.spells_added = self.spells_added or not self._beginnings.isdisjoint("".join(texts))

    def rule(self, name: str, body: str) -> str:
        """Add a rule and return its name."""
        self.text += f"{name}: {body}\n"
        return name.partition("[")[0]

    def json(self, schema: Schema, bounded: Callable[[Any], Any] = dict) -> str:
        """Return the expression for JSON under a schema, which `bounded` may bound further. Raises Unwritable."""
        try:
            value = checked(json.loads(schema.json), is_lenient=schema.is_lenient)
        except ValueError as e:
            raise Unwritable("this is not JSON", schema.where) from e
        except SchemaError as e:
            raise Unwritable(str(e), schema.where + e.where) from e
        if value is False:
            raise Unwritable("nothing is valid under this schema", schema.where)
        self.may_spell(*texts(value))
        made = {
            **bounded({} if value is True else value),
            "x-guidance": {**self._options, "lenient": schema.is_lenient},
        }
        return f"%json {json.dumps(made, ensure_ascii=False)}"

    def literal(self, text: str) -> str:
        """Return the expression for a text, in which the texts of added tokens stand for the tokens."""
        parts, at = [], 0
        for found in self._pattern.finditer(text) if self._pattern is not None else ():
            parts += [_quoted(text[at : found.start()]), f"<[{self._added[found.group()]}]>"]
            at = found.end()
        return " ".join(part for part in [*parts, _quoted(text[at:])] if part != '""')

    def calls(self, calls: Calls) -> str:
        """Return the expression for calls of tools, with the text before and after them if they may be left out."""
        begun = len(calls.trigger)
        if not calls.trigger:
            return self._calls(calls, calls.open, [call.begin for call in calls.calls])
        if calls.open:
            some = self._calls(calls, calls.open[begun:], [call.begin for call in calls.calls])
        else:
            first = self._any(calls.calls, [call.begin[begun:] for call in calls.calls], "first")
            rest = self._any(calls.calls, [call.begin for call in calls.calls], "call")
            some = f"( {first} ) {self._more(calls, rest)} {self.literal(calls.close)}"
        return f"( {self._until('before', calls.trigger)} {some} )? {_TEXT}"

    def thought(self, thought: Thought) -> str:
        """Return the expression for a thought and the whitespace behind it."""
        ended = f"{self._until('thought', thought.end)} /[ \\n]{{0,4}}/"
        return f"( {self.literal(thought.begin)} {ended} )?" if thought.begin else ended

    def _until(self, name: str, marker: str) -> str:
        """Return the expression for any text up to the first `marker`, and the marker."""
        if marker in self._added:
            return f"{_TEXT} {self.literal(marker)}"
        return self.rule(f"{name}[suffix={_quoted(marker)}]", _TEXT)

    def _calls(self, calls: Calls, opened: str, begins: list[str]) -> str:
        call = self._any(calls.calls, begins, "call")
        return f"{self.literal(opened)} ( {call} ) {self._more(calls, call)} {self.literal(calls.close)}"

    def _more(self, calls: Calls, call: str) -> str:
        """Return the expression for the calls after the first."""
        return "" if calls.separator is None else f"( {self.literal(calls.separator)} ( {call} ) )*"

    def _any(self, calls: tuple[Call, ...], begins: list[str], name: str) -> str:
        """Return the expression for one of these calls."""
        pairs = enumerate(zip(calls, begins, strict=True))
        return " | ".join(
            self.rule(f"{name}_{i}", f"{self.literal(begin)} {self._arguments(call)} {self.literal(call.end)}")
            for i, (call, begin) in pairs
        )

    def _arguments(self, call: Call) -> str:
        # A thousand tools that take any object would make a grammar of more than it may have, were its depth limited.
        return self.rule(f"arguments_{self.text.count(chr(10))}", self.json(call.arguments))


def _quoted(text: str) -> str:
    """Return a text as a string of Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def _lark(text: str) -> str:
    """Return a grammar in GBNF or Lark's notation as one in Lark's. Raises Unwritable."""
    if _TEMPERATURE.search(text):
        raise Unwritable("the temperature of a rule cannot be changed")
    try:
        made: str = any_to_lark(text)
    except Exception as e:  # The conversion raises many types of errors for what is no GBNF.
        raise Unwritable(f"the grammar cannot be read: {e}") from e
    return made
