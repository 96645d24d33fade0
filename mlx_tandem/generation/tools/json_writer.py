"""Writing a JSON value in pieces, so that it can be completed at any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_tandem.generation.events import Said


class JsonWriter:
    """A writer of one JSON value, which is given to `say` piece by piece.

    Commas, keys and white space wait for the value behind them. What has been said is therefore always the beginning of
    a valid value, which `complete` ends. With `spaced`, the white space is the writer's own instead of the reader's.
    """

    __slots__ = ("_comma", "_in_text", "_items", "_key", "_lead", "_open", "_say", "_spaced")

    def __init__(self, say: Callable[[str], Sequence[Said]], *, spaced: bool = False):
        self._say = say
        self._spaced = spaced
        self._open: list[str] = []  # what closes the lists and objects that are open
        self._items: list[bool] = []  # whether each of them has an item
        self._lead = ""  # what waits for the next value
        self._comma = False  # whether a comma waits
        self._key = False  # whether a key waits
        self._in_text = False

    @property
    def has_items(self) -> bool:
        """Whether the innermost list or object has an item."""
        return bool(self._items) and self._items[-1]

    def space(self, text: str) -> None:
        """Write white space."""
        if not self._spaced:
            self._lead += text

    def comma(self) -> None:
        """Write a comma. It is left out where no item follows, where none came before, and where one waits already."""
        if self.has_items and not self._comma:
            self._lead += ", " if self._spaced else ","
            self._comma = True

    def key(self, text: str) -> None:
        """Write the key `text`, which is a JSON string, and the colon behind it."""
        self._divide()
        self._lead += f"{text}: " if self._spaced else f"{text}:"
        self._key = True

    def begin(self, opener: str) -> Sequence[Said]:
        """Write the beginning of a list or an object."""
        said = self.atom(opener)
        self._open.append("}" if opener == "{" else "]")
        self._items.append(False)
        return said

    def end(self) -> Sequence[Said]:
        """Write the end of the innermost list or object."""
        lead = self._last()
        self._items.pop()
        return self._say(lead + self._open.pop())

    def atom(self, text: str) -> Sequence[Said]:
        """Write a value that is complete, or the beginning of one."""
        if not self._key:
            self._divide()
        lead, self._lead = self._lead, ""
        self._comma = self._key = False
        if self._items:
            self._items[-1] = True
        return self._say(lead + text)

    def text_begin(self) -> Sequence[Said]:
        """Write the beginning of a text."""
        self._in_text = True
        return self.atom('"')

    def text(self, piece: str) -> Sequence[Said]:
        """Write a piece of a text, which is escaped already."""
        return self._say(piece) if piece else ()

    def text_end(self) -> Sequence[Said]:
        """Write the end of a text."""
        self._in_text = False
        return self._say('"')

    def complete(self) -> Sequence[Said]:
        """Write what the value lacks, which is nothing if it has not begun. A key without a value gets null."""
        said = [*self.text_end()] if self._in_text else []
        while self._open:
            said += self.end()
        return said

    def _divide(self) -> None:
        """Let a comma wait if the next item needs one."""
        if self.has_items and not self._comma:
            self._lead = "," + (self._lead or " ")
            self._comma = True

    def _last(self) -> str:
        """Return what waits at the end of a list or an object: a key gets null, a comma is left out."""
        lead, self._lead = self._lead, ""
        if self._key:
            lead = f"{lead.rstrip()} null"
        elif self._comma:
            lead = lead.replace(",", "", 1).strip(" ") if self._spaced else lead.replace(",", "", 1)
        self._comma = self._key = False
        return lead
