"""A pass cut into micro-batches, which have few shapes on a device that needs long to prepare for each shape.

On CUDA, cuDNN plans attention and its backward for each shape at its first use. That takes up to 100 ms, in which
streams wait. Lengths differ with every pass, so that nearly every micro-batch would have a new shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlx_tandem.engine.learning import Batch, Datum

_EVEN = 5
"""The sizes of micro-batches differ by at most one part in two to the power of this."""


class Cutting(NamedTuple):
    """The way in which passes are cut on a device, for a model."""

    forward_layers: int = 1  # that go forward in one slice
    few_shapes: bool = False  # micro-batches are padded, so that they have few shapes
    kept_bytes: int = 0  # activations of a micro-batch up to which they are kept for the backward
    mask_axes: int = 0  # axes of the model's masks between rows and queries; 0: nothing is shared by sequences


PLAIN = Cutting()
"""A layer in each slice, no padding but that of rows, nothing shared."""


@dataclass(frozen=True)
class Item:
    """A datum with its place in the pass."""

    batch: int
    index: int
    datum: Datum

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.datum.tokens)


@dataclass(frozen=True)
class Cutter:
    """The way in which passes are cut.

    With `few_shapes` rows and lengths are padded to `rounded` numbers: the length of a sequence alone only where that
    fits into a micro-batch, and none beyond the longest that the model takes.
    """

    tokens: int  # of a micro-batch, with padding; one sequence may have more
    mixed: bool  # several trainers may share a micro-batch
    few_shapes: bool = False
    longest: int = 1 << 30  # tokens

    def cut(self, batches: Sequence[Batch]) -> list[list[Item]]:
        """Return as few micro-batches as hold everything, about equally large.

        Sequences of about the same length are together, and within a micro-batch the rows of one trainer are.
        """
        items = sorted(items_of(batches), key=lambda item: (0 if self.mixed else item.batch, -item.length))
        return evenly(lambda tokens: self._filled(items, tokens), self.tokens)

    def shape(self, items: Sequence[Item]) -> tuple[int, int]:
        """Return rows and length of a micro-batch, with padding."""
        return self._padded(len(items), max(item.length for item in items))

    def _filled(self, items: Sequence[Item], tokens: int) -> list[list[Item]]:
        """Return micro-batches of up to `tokens` tokens, each filled before the next is begun."""
        cut: list[list[Item]] = []
        for item in items:
            last = cut[-1] if cut else []
            rows, length = self._padded(len(last) + 1, last[0].length if last else item.length)
            if last and rows * length <= tokens and (self.mixed or last[0].batch == item.batch):
                last.append(item)
            else:
                cut.append([item])
        return cut

    def _padded(self, rows: int, length: int) -> tuple[int, int]:
        if not self.few_shapes or (rows == 1 and rounded(length) > self.tokens):
            return rows, length
        return rounded(rows), min(rounded(length), self.longest)


def items_of(batches: Sequence[Batch]) -> list[Item]:
    """Return all data of a pass."""
    return [Item(b, i, datum) for b, batch in enumerate(batches) for i, datum in enumerate(batch.data)]


def evenly(filled: Callable[[int], list[list[Item]]], tokens: int) -> list[list[Item]]:
    """Return as few micro-batches as `filled(tokens)`, which fills each before the next, but about equally large.

    Within a micro-batch the rows of one trainer are together.
    """
    cut = filled(tokens)
    low, high = 0, tokens
    while len(cut) > 1 and high - low > max(tokens >> _EVEN, 1):
        middle = (low + high) // 2
        more = filled(middle)
        if len(more) > len(cut):
            low = middle
        else:
            cut, high = more, middle
    return [sorted(part, key=lambda item: (item.batch, item.index)) for part in cut]


def rounded(n: int) -> int:
    """Return `n` rounded up to one of eight numbers per octave; up to 16 it stays as it is."""
    step = 1 << max((n - 1).bit_length() - 4, 0)
    return -(-n // step) * step
