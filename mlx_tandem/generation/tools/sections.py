"""The base of families whose calls are between an opener and a closer, whichever form the model writes there."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Routine
from mlx_tandem.generation.tools.calls import LONGEST_NAME, NAME_CHARACTERS, CallParser
from mlx_tandem.generation.tools.glm_calls import KEY, read_keyed
from mlx_tandem.generation.tools.json_calls import read_calls
from mlx_tandem.generation.tools.pythonic_calls import read_pythonic
from mlx_tandem.generation.tools.schema_types import properties_of, types_of
from mlx_tandem.generation.tools.tagged import OPENERS, TaggedCall, read_tagged

_CALLS = ("call:", ":")
"""The texts that begin a call in Gemma's notation. Its models leave the word out."""


class SectionParser(CallParser):
    """A parser of calls between an opener and a closer, and of calls that begin with a tag of their own.

    Models mix the forms up: a model whose template shows JSON writes tags, and the other way round. What is written
    decides how it is read, whatever the family.
    """

    def calls(self, opener: str) -> Routine[None]:
        """Read the calls of one section, or one call without a section."""
        if opener in OPENERS:
            yield from TaggedCall(self, OPENERS[opener], is_bare=True).read()
            yield from self.accept(*self.closers)
            self.checkpoint()
        elif not opener:
            yield from self.bare()
        else:
            yield from self._section()

    def bare(self) -> Routine[None]:
        """Read the calls with which an answer begins, without an opener."""
        if (yield from self._is_json()):
            yield from read_calls(self, offered_only=True)
        else:
            yield from read_pythonic(self, offered_only=True)

    def _section(self) -> Routine[None]:
        """Read calls up to the closer, or as long as they come."""
        before = self.call_count
        while not (yield from self.ahead(self.closers))[0] and (yield from self._body()):
            pass
        yield from self.end_section(before)

    def _body(self) -> Routine[bool]:
        """Read the calls that come next in their form; return whether one came."""
        found, at = yield from self.ahead(("{", "[", "```", *_CALLS, *OPENERS))
        if found in OPENERS:
            yield from read_tagged(self)
        elif found in _CALLS:
            yield from self.accept(found)
            name = yield from self.name()
            yield from self.object(name, "", self.values(self._texts(name)))
        elif found in ("{", "```") or (found and (yield from self._is_json())):
            yield from read_calls(self)
        elif found:
            yield from read_pythonic(self)
        else:
            return found is None and (yield from self._named(at))
        return True

    def _texts(self, name: str) -> list[str]:
        """Return the parameters of a function that are texts only."""
        schema = self.tools.schema(name)
        return [key for key, inner in properties_of(schema).items() if types_of(inner, schema) == {"string"}]

    def _is_json(self) -> Routine[bool]:
        """Return whether an object or a list of objects comes next."""
        found, at = yield from self.ahead(("{", "["))
        return found == "{" or (found == "[" and (yield from self.ahead(("{",), at + 1))[0] == "{")

    def _named(self, at: int) -> Routine[bool]:
        """Read a call that begins with the name of its function, `at` characters ahead; return whether one came.

        Unless a key follows the name, only names that the request offers count.
        """
        name = yield from self.span_ahead(NAME_CHARACTERS, LONGEST_NAME, at)
        following, _ = yield from self.ahead((KEY, "{", "(", *self.closers), at + len(name))
        if not name or following is None or (following != KEY and name not in self.tools.functions):
            return False
        if (
            not following and KEY not in self.extra_markers
        ):  # a name at the end of the text, in a family without such calls
            return False
        if following == "(":
            yield from read_pythonic(self)
            return True
        yield from self.gap()
        yield from self.expect(name)
        if following == "{":
            yield from self.object(name, "", self.values())
        else:
            yield from read_keyed(self, name)
        return True
