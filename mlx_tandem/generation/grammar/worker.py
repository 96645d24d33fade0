"""The program that checks constraints: `python -m mlx_tandem.generation.grammar.worker FD FOLDER BYTES TOKENS IDS`.

FD is its socket, FOLDER has the tokenizer, TOKENS is the size of the model's vocabulary, and IDS are the tokens that
end a text, with commas between them. The kernel ends the process when a constraint takes more than SECONDS of CPU time.
Besides the memory that it has with its tokenizer loaded, the process may use BYTES more.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from msgspec import structs

from mlx_tandem.engine.grammars.compiling import compiled, open_tokenizer
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.grammar.constraint import ANY_OBJECT, Calls, Constraint, Schema
from mlx_tandem.generation.grammar.lark import Unwritable, grammar_of
from mlx_tandem.generation.grammar.messages import Answer, Compiled, Refused, decode_constraint
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.isolation.program import connect, limit_memory, out_of_memory, say_busy, serve, time_limit

SECONDS = 2.0
"""CPU seconds that a constraint may take."""

REAL_SECONDS_PER_SECOND = 20.0
"""Seconds of real time that one second of CPU time may take while other programs use the machine."""

NICENESS = 5
"""Added to the process's nice value."""


_PREFIX = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
"""The beginning of llguidance's errors about a schema, which names a place in the grammar around it."""


class Worker:
    """A compiler of constraints for one tokenizer."""

    def __init__(self, tokenizer: LLTokenizer | InvalidRequest, added: dict[str, int]):
        """Make a compiler. `added` are the ids of the vocabulary's added tokens by their texts."""
        self._tokenizer = tokenizer
        self._added = added

    def answer(self, raw: bytes) -> Answer:
        """Return the grammar of an encoded constraint, or why it has none. A lack of memory ends the process."""
        try:
            with time_limit(signal.ITIMER_PROF, SECONDS):
                return self._answer(raw)
        except MemoryError:
            out_of_memory()
        except RecursionError:
            return Refused("the schema is nested too deeply")
        except BaseException:  # A panic of a library is not derived from Exception.
            return Refused("the grammar cannot be compiled")

    def _answer(self, raw: bytes) -> Answer:
        constraint = decode_constraint(raw)
        if isinstance(self._tokenizer, InvalidRequest):
            return Refused(self._tokenizer.message)
        try:
            # In a larger grammar, a schema under which nothing is valid would be found only when it is reached.
            for schema in _schemas(constraint):
                try:
                    self._compiled(structs.replace(constraint, form=schema, thought=None, calls=None))
                except InvalidRequest as e:
                    if not schema.is_lenient:
                        return Refused(_PREFIX.sub("", e.message), schema.where)
                    constraint = _with_any_object(constraint, schema)
            return Compiled(self._compiled(constraint))
        except Unwritable as e:
            return Refused(str(e), e.where)
        except InvalidRequest as e:
            return Refused(e.message)

    def _compiled(self, constraint: Constraint) -> str:
        """Return a constraint's grammar. Raises Unwritable, and InvalidRequest for what llguidance refuses."""
        assert not isinstance(self._tokenizer, InvalidRequest)
        grammar: str = LLMatcher.grammar_from_lark(grammar_of(constraint, self._added))
        compiled(self._tokenizer, grammar)
        return grammar


def _key(schema: Schema) -> tuple[bytes, bool]:
    """Return what a schema says, without the place where it says so."""
    return schema.json, schema.is_lenient


def _schemas(constraint: Constraint) -> list[Schema]:
    """Return the distinct schemas in a constraint."""
    forms = (constraint.form, constraint.calls)
    calls = [call for form in forms if isinstance(form, Calls) for call in form.calls]
    own = [constraint.form] if isinstance(constraint.form, Schema) else []
    found: dict[tuple[bytes, bool], Schema] = {}
    for schema in [*own, *(call.arguments for call in calls)]:
        found.setdefault(_key(schema), schema)
    return list(found.values())


def _with_any_object(constraint: Constraint, schema: Schema) -> Constraint:
    """Return a constraint whose calls with these arguments take any object instead."""

    def loose(form: Calls) -> Calls:
        loosened = structs.replace(schema, json=ANY_OBJECT)
        return structs.replace(
            form,
            calls=tuple(
                structs.replace(c, arguments=loosened) if _key(c.arguments) == _key(schema) else c for c in form.calls
            ),
        )

    calls = None if constraint.calls is None else loose(constraint.calls)
    form = loose(constraint.form) if isinstance(constraint.form, Calls) else constraint.form
    return structs.replace(constraint, form=form, calls=calls)


def main(fd: str, folder: str, size: str, tokens: str, ids: str) -> None:
    """Load the tokenizer and answer until the socket is closed."""
    sock = connect(fd)
    os.nice(NICENESS)
    tokenizer: LLTokenizer | InvalidRequest
    try:
        tokenizer = open_tokenizer(Path(folder), int(tokens), [int(i) for i in ids.split(",") if i])
    except InvalidRequest as e:
        tokenizer = e
    added = Tokenizer.load(Path(folder)).added_tokens
    limit_memory(int(size))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # Libraries print long reports of their panics.
    say_busy(sock, REAL_SECONDS_PER_SECOND * SECONDS)
    serve(sock, sock.makefile("rb"), Worker(tokenizer, added).answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
