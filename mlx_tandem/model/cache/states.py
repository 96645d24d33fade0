"""The states of recurrent layers as mlx-lm's model modules see them: one cache object for each layer, over the pool.

A layer's state is a few arrays, such as the last inputs of a convolution and the sum of a linear attention. Each has an
array [rows, width] in the pool, with one line for each row of state. A forward gathers the lines of its rows and
scatters the new ones, or a kernel reads and writes them in place, so rows join and leave a batch without copying the
lines of others. Rows that begin have no state, as in mlx-lm, and are computed apart from rows that go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlx_tandem.model.cache.turns import Turns
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.inplace import after, write, zero_of


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a layer's state: `shape` and `dtype` of that of one sequence."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def heads(self) -> int:
        """Lines of one row of state."""
        return 1

    def lines(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """Return width and type of a line."""
        return ((prod(self.shape), self.dtype),)


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one layer for one sequence."""

    halves: tuple[StateArray, ...]

    def nbytes(self) -> int:
        """Return the bytes of the state."""
        return sum(width * dtype.size for array in self.halves for width, dtype in array.lines())


class StateView:
    """The inputs that all recurrent layers share in one forward, and the new states.

    Attributes:
        read: [rows] int32, the line that each row's state is read from; None: all rows begin.
        written_to: [rows] int32, the line that each row's state is written to; None with `turns`.
        turns: The turns of a forward that verifies drafts. Its states are written when its rows have drawn.
        written: Arrays that depend on the writes so far, where a kernel writes and the layers' outputs do not depend on
            that.
        lines: The new lines of all layers so far, where MLX's own operations write: they would copy an array that the
            same evaluation reads, so they write when it is done. With `turns`, the states after each turn.
    """

    def __init__(self, read: mx.array | None, written_to: mx.array | None, turns: Turns | None = None):
        self.read = read
        self.written_to = written_to
        self.turns = turns
        self.written: list[mx.array] = []
        self.lines: list[mx.array] = []


class PoolLines(NamedTuple):
    """The lines of the pool that hold one state array of a forward; a kernel may read and write them there.

    number: that of the array within the layer's state. pool: [lines, width]. read, write: int32 [rows], the line of
    each row before and after the forward.
    """

    number: int
    pool: mx.array
    read: mx.array
    write: mx.array


class StateCache(ArraysCache):
    """The cache of one recurrent layer, bound to arrays of the pool for each forward.

    It is one of mlx-lm's own caches, without padding: all rows of a forward have the same number of tokens.
    """

    def __init__(self, shape: StateShape):
        super().__init__(len(shape.halves))
        self.shape = shape
        self._arrays: list[mx.array] = []
        self._read: list[mx.array] = []
        self._view: StateView | None = None
        self._after_turns: dict[int, list[mx.array]] = {}  # the states of each array
        self._written: set[int] = set()  # arrays whose new states are in the pool already

    def gathered_bytes(self) -> int:
        """Return the bytes of one row's state that no kernel has written in place in this forward so far.

        The forward gathers these from the pool, and writes them back at its end.
        """
        halves = enumerate(self.shape.halves)
        return StateShape(tuple(own for i, own in halves if i not in self._written)).nbytes()

    @property
    def turns(self) -> Turns | None:
        """The turns of the forward, if it verifies drafts."""
        return None if self._view is None else self._view.turns

    def keep_turns(self, index: int, states: list[mx.array]) -> None:
        """Take the states of one array after each turn, [rows, …] after the first and [drafting, …] after others."""
        self._after_turns[index] = states

    def lines_of(self, state: mx.array) -> PoolLines | None:
        """Return the lines of an array that this cache gave to its layer. Return None if `state` is not such an array,
        or if `lines` returns None.
        """
        index = next((i for i, own in enumerate(self._read) if own is state), None)
        return None if index is None else self.lines(index)

    def lines(self, number: int) -> PoolLines | None:
        """Return the lines of the state array with this number. Return None if the rows begin, since there is no state
        to read, and if drafts are verified, since the states after each turn are then kept outside of the pool.
        """
        view = self._view
        if view is None or view.read is None or view.written_to is None:
            return None
        return PoolLines(number, self._arrays[number], view.read, view.written_to)

    def wrote(self, *each: PoolLines) -> None:
        """Note that the layer's kernels write the new states of these arrays into the pool.

        The layer's outputs must depend on these writes, so that whoever evaluates the outputs has them done.
        """
        self._written.update(lines.number for lines in each)

    def bind(self, arrays: Sequence[mx.array], view: StateView) -> None:
        """Bind the cache for a forward. `arrays`: [rows, width] for each array of the state."""
        self._arrays, self._view = list(arrays), view
        each = zip(arrays, self.shape.halves, strict=True) if view.read is not None else ()
        self._read = [pool[view.read].reshape(-1, *array.shape) for pool, array in each]
        state: Any = self._read or [None] * len(self._arrays)
        self.cache = list(state)

    def release(self) -> list[mx.array]:
        """Hand on the new states and drop the arrays, since the next write needs the only reference to them. Return
        the arrays.
        """
        view, arrays, read, state = self._view, self._arrays, self._read, list[Any](self.cache)
        assert view is not None
        self._arrays, self._read, self._view, self.cache = [], [], None, [None] * len(arrays)
        turns, self._after_turns = self._after_turns, {}
        written, self._written = self._written, set()
        if view.turns is not None:
            if len(turns) == len(arrays):  # else the forward has failed
                each = (turns[i] for i in range(len(arrays)))
                view.lines += [mx.concatenate([new.reshape(new.shape[0], -1) for new in after]) for after in each]
            return arrays
        lines = [new.reshape(new.shape[0], -1) for new in state if new is not None]
        if len(lines) < len(arrays):  # the forward has failed
            return arrays
        assert view.written_to is not None
        if inplace.writing().store is None:
            view.lines += lines
            return arrays
        read = [own for i, own in enumerate(read) if i not in written]
        rows = after([zero_of(read)], view.written_to) if read else view.written_to  # no write before the reads
        for i, new in enumerate(lines):
            if i in written:
                continue
            arrays[i], zero = write(arrays[i], rows, new)
            view.written += [] if zero is None else [zero]
        return arrays


def put(arrays: Sequence[mx.array], rows: mx.array, lines: Sequence[mx.array]) -> tuple[list[mx.array], mx.array]:
    """Write these lines into the arrays, which nothing in flight may read. Return the arrays, and one to evaluate."""
    return _put(list(arrays), rows, list(lines))


@mx.compile
def _put(arrays: list[mx.array], rows: mx.array, lines: list[mx.array]) -> tuple[list[mx.array], mx.array]:
    for array, new in zip(arrays, lines, strict=True):
        array[rows] = new
    return arrays, zero_of(arrays)


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """Yield the caches of a model, and those in its lists of caches in place of the lists."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def keeps_state(cache: Any) -> bool:
    """Return whether a cache that a model's own code made keeps a state instead of positions."""
    return isinstance(cache, ArraysCache)


def arranged(module: Any, positions: Sequence[Any], states: Sequence[Any]) -> list[Any]:
    """Return these caches, of layers with positions and of layers with states, in the places of the model's own."""
    kinds = iter(positions), iter(states)
    return _filled(make_prompt_cache(module), kinds)


def _filled(caches: Iterable[Any], kinds: tuple[Iterator[Any], Iterator[Any]]) -> list[Any]:
    return [
        CacheList(*_filled(cache.caches, kinds)) if isinstance(cache, CacheList) else next(kinds[keeps_state(cache)])
        for cache in caches
    ]
