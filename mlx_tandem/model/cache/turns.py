"""Recurrent layers in a forward that verifies drafts, which compute the tokens of a row one after another.

Such a forward has a row for each token. A recurrent layer needs the state after the previous token, so it is called in
turns: turn n computes the n-th token of every row that has one, by the model's own code for one token. All other layers
compute all tokens at once. How many drafts are accepted is known only when the rows have drawn, so the states after
every turn are kept until then. The device then writes the states after accepted tokens into the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import Row, RowKind
from mlx_tandem.kv.groups.state import MOST_DRAFTS
from mlx_tandem.model.inputs import Numbers

_DRAFTS = (0, 1, 3, MOST_DRAFTS)
"""Values to which the number of drafts of the longest row is padded. Each draft is a turn."""

_BLOCKS = 4
"""Least width of a table. Rows with drafts rarely touch more blocks, and each width is another kind of step."""


class TurnShape(NamedTuple):
    """The padded sizes of the turns: numbers of rows, of rows with drafts, of drafts of a row, of blocks of a table."""

    rows: int
    drafting: int
    drafts: int
    blocks: int


class TurnNumbers(NamedTuple):
    """The numbers of a forward in turns, int32, as the host makes them.

    first: [rows], the place of each row's first token among the tokens of the forward; drafting: [drafting], the rows
    that have drafts; output: [tokens], the place of each token's output among those of all turns; base: [rows], the
    block that each table begins with; tables: [rows, blocks], the lines of state of each row's blocks; seats: [rows];
    drafts: [rows], how many each row verifies; own: [rows], the place of the row in `drafting`.
    """

    first: Numbers
    drafting: Numbers
    output: Numbers
    base: Numbers
    tables: Numbers
    seats: Numbers
    drafts: Numbers
    own: Numbers

    def for_forward(self) -> list[Numbers]:
        """Return the numbers that the forward needs."""
        return [self.first, self.drafting, self.output, self.base, self.tables]

    def for_keeping(self) -> list[Numbers]:
        """Return the numbers by which states are kept."""
        return [self.base, self.tables, self.seats, self.drafts, self.own]


def turn_numbers(
    rows: Sequence[Row], count: int, tokens: int, size: int, begin: int, nobody: int
) -> tuple[TurnShape, TurnNumbers]:
    """Return the numbers of a forward of these rows.

    Args:
        rows: Rows of the plan, each with one token or a token and its drafts.
        count: The padded number of rows.
        tokens: The padded number of tokens of all rows.
        size: Positions of a block.
        begin: The number of the first block of the pool of states.
        nobody: The seat of padded rows and of rows that do not draw.
    """
    lengths = [len(r.tokens) for r in rows]
    assert all(n == 1 or r.kind is RowKind.VERIFY for n, r in zip(lengths, rows, strict=True)), "only drafts take turns"
    drafting = [i for i, n in enumerate(lengths) if n > 1]
    bases = [(r.start - r.slack - 1) // size for r in rows]
    tables = [r.tables[-1][b : (r.start + n - 1) // size + 1] for r, b, n in zip(rows, bases, lengths, strict=True)]
    width = max(_BLOCKS, 1 << (max(map(len, tables)) - 1).bit_length())
    most = next(n for n in _DRAFTS if n >= max(lengths) - 1)
    shape = TurnShape(count, 1 << (len(drafting) - 1).bit_length() if drafting else 0, most, width)
    made = TurnNumbers(
        first=np.zeros(count, np.int32),
        drafting=np.zeros(shape.drafting, np.int32),
        output=np.zeros(tokens, np.int32),
        base=np.zeros(count, np.int32),
        tables=np.zeros((count, width), np.int32),
        seats=np.full(count, nobody, np.int32),
        drafts=np.zeros(count, np.int32),
        own=np.zeros(count, np.int32),
    )
    at = 0
    made.drafting[: len(drafting)] = drafting
    made.own[drafting] = np.arange(len(drafting))
    for i, (row, table, n) in enumerate(zip(rows, tables, lengths, strict=True)):
        made.first[i], made.base[i], made.drafts[i] = at, bases[i], n - 1
        made.tables[i, : len(table)] = np.maximum(np.array(table, np.int32) - begin, 0)
        made.seats[i] = row.seat if row.sample else nobody
        made.output[at] = i
        made.output[at + 1 : at + n] = count + np.arange(n - 1) * shape.drafting + made.own[i]
        at += n
    return shape, made


class HeldStates(NamedTuple):
    """The states after each turn of a forward whose rows have not drawn yet.

    lines: for each array of the pool of states [rows + drafts · drafting, width]; start: as in `kept_lines`.
    """

    shape: TurnShape
    numbers: TurnNumbers
    lines: list[mx.array]
    start: mx.array


class StateHolder(Protocol):
    """The cache of a recurrent layer, as `Turns` uses it."""

    cache: list[Any]

    def keep_turns(self, index: int, states: list[mx.array]) -> None:
        """Take the states of one array after each turn, [rows, …] after the first and [drafting, …] after others."""


class Turns:
    """The turns of one forward.

    Args:
        drafts: Turns after the first.
        first, drafting, output: As in `TurnNumbers`.
        narrowed: Returns a context in which the model's linears compute only these rows [n] of the forward.
    """

    def __init__(
        self,
        drafts: int,
        first: mx.array,
        drafting: mx.array,
        output: mx.array,
        narrowed: Callable[[mx.array], AbstractContextManager[None]],
    ):
        self._drafts = drafts
        self._first = first
        self._drafting = drafting
        self._output = output
        self._narrowed = narrowed

    def run(self, cache: StateHolder, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what `call` returns for all tokens of the forward, one turn after another.

        Arrays among the arguments whose first axis is that of the tokens are cut to those of a turn.
        """
        before = list(cache.cache)
        states: list[list[Any]] = []
        outputs: list[Any] = []
        begin = self._first
        for turn in range(1 + self._drafts):
            if turn == 1:
                cache.cache = [state[self._drafting] for state in cache.cache]
                begin = begin[self._drafting]
            rows = mx.minimum(begin + turn, len(self._output) - 1)
            with self._narrowed(rows):
                own = {name: self._cut(value, rows) for name, value in kwargs.items()}
                outputs.append(call(*(self._cut(value, rows) for value in args), **own))
            states.append(list(cache.cache))
        cache.cache = before
        for i, (old, new) in enumerate(zip(before, states[0], strict=True)):
            if new is not old:  # several modules may share a cache, each of which changes some of its arrays
                cache.cache[i] = new
                cache.keep_turns(i, [after[i] for after in states])
        return self._joined(outputs)

    def _cut(self, value: Any, rows: mx.array) -> Any:
        is_by_token = isinstance(value, mx.array) and value.ndim and value.shape[0] == len(self._output)
        return value[rows] if is_by_token else value

    def _joined(self, outputs: Sequence[Any]) -> Any:
        if isinstance(outputs[0], tuple):
            return tuple(self._joined(each) for each in zip(*outputs, strict=True))
        if not isinstance(outputs[0], mx.array):
            return outputs[0]
        return mx.concatenate(list(outputs))[self._output]


def line_of(base: mx.array, tables: mx.array, position: mx.array, size: int) -> mx.array:
    """Return the line [rows] of the state in the block of `position` [rows]. base, tables: as in `TurnNumbers`."""
    place = mx.clip(position // size - base, 0, tables.shape[1] - 1)  # padded rows may be anywhere
    return mx.take_along_axis(tables, place[:, None], 1)[:, 0]


def kept_lines(
    shape: TurnShape, size: int, numbers: Sequence[mx.array], start: mx.array, newest: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the lines [n] of the pool to write, and the index [n] of the state for each among those after all turns.

    In each block that has accepted tokens of a row, the state after the last of them is kept. States of
    other blocks go to the first line of the pool, which is scratch.

    Args:
        shape: The sizes of the turns.
        size: Positions of a block.
        numbers: The numbers of `TurnNumbers.for_keeping`.
        start: [rows], the position of each row's first token.
        newest: [seats], the position of each seat's newest token, which was drawn by the step.
    """
    base, tables, seats, drafts, own = numbers
    accepted = mx.where(drafts > 0, mx.clip(newest[seats] - start - 1, 0, drafts), 0)
    row = mx.arange(shape.rows, dtype=mx.int32)
    to, taken = [], []
    for n in range(1 + -(-shape.drafts // size)):
        block = start // size + n
        last = mx.minimum(accepted, (block + 1) * size - 1 - start)
        to.append(mx.where(block * size <= start + accepted, line_of(base, tables, block * size, size), 0))
        taken.append(mx.where(last > 0, shape.rows + (last - 1) * shape.drafting + own, row))
    return mx.concatenate(to), mx.concatenate(taken)
