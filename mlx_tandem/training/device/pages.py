"""Sequences as chains of pages, so that what several sequences begin with is computed once.

A page is a row of a micro-batch: up to `width` tokens of a sequence, padded on the right. Sequences that begin alike,
such as the answers to one prompt, have their first pages in common, and equal sequences all of them. A page attends to
the pages of its chain, as rows of served requests attend to the blocks of their tables: so any family that is served
runs on pages, with the cache of `PageCache` in place of the paged one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tandem.model.inputs import Numbers
from mlx_tandem.model.ops.attention.portable import LONG
from mlx_tandem.training.device.cutting import Item

MOST_PAGES = 8
"""Longest chain: each page gathers the keys of all pages of its chain."""

WIDTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Widths of a page that may be chosen, in tokens."""

WORTH = 0.9
"""Largest share of the tokens of all sequences that pages may have to be used: chains cost a gather."""


class Chains:
    """The pages of some sequences, each page once for each trainer."""

    def __init__(self, width: int) -> None:
        """Begin without sequences. `width`: tokens of a page."""
        self.width = width
        self.tokens: list[tuple[int, ...]] = []  # of each page
        self.chains: list[tuple[int, ...]] = []  # of each page: the pages before it, and itself
        self.offsets: list[int] = []  # of each page: the position of its first token in its sequences
        self.batches: list[int] = []  # of each page: the batch whose trainer computes it
        self.places: list[list[int]] = []  # of each sequence: where each of its tokens but the last lies
        self._known: dict[tuple[int, int, tuple[int, ...]], int] = {}

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self.tokens)

    def add(self, item: Item) -> None:
        """Add a sequence. Its completion begins with a page of its own, so that prompts that are alike share pages.

        The last token is left out, since nothing is predicted from it.
        """
        tokens, prompt = item.datum.tokens, item.datum.prompt_length
        places: list[int] = []
        last = -1
        for start, stop in ((0, prompt), (prompt, len(tokens) - 1)):
            for at in range(start, stop, self.width):
                own = tokens[at : min(at + self.width, stop)]
                last = self._page(item.batch, last, at, own)
                places += range(last * self.width, last * self.width + len(own))
        self.places.append(places)

    def _page(self, batch: int, before: int, offset: int, own: tuple[int, ...]) -> int:
        """Return the page with these tokens behind the page `before` (-1: at the beginning)."""
        key = (batch, before, own)
        page = self._known.get(key)
        if page is None:
            page = self._known[key] = len(self.tokens)
            self.tokens.append(own)
            self.chains.append((*(self.chains[before] if before >= 0 else ()), page))
            self.offsets.append(offset)
            self.batches.append(batch)
        return page

    def arrays(self) -> list[Numbers]:
        """Return tokens [pages, width], offsets [pages], and tables and filled, both [pages, longest chain], int32.

        A table has the pages of a chain, and `filled` the number of tokens that are read of each. Behind a chain's end
        stand pages of which none is read.
        """
        rows, longest = len(self), max(map(len, self.chains))
        tokens = np.zeros((rows, self.width), np.int32)
        tables, filled = np.zeros((2, rows, longest), np.int32)
        for row, (own, chain) in enumerate(zip(self.tokens, self.chains, strict=True)):
            tokens[row, : len(own)] = own
            tables[row, : len(chain)] = chain
            filled[row, : len(chain)] = [len(self.tokens[page]) for page in chain]
            filled[row, len(chain) - 1] = self.width  # its padding sees itself, since it has to see something
        return [tokens, np.array(self.offsets, np.int32), tables, filled]


def width_for(items: Sequence[Item]) -> int:
    """Return the width of pages on which all these sequences are the fewest tokens with padding; 0: pages save little.

    Sequences of more than LONG tokens are not cut into pages: their attention goes a block of queries at a time.
    """
    longest = max((item.length for item in items), default=0)
    most = WORTH * sum(item.length for item in items)
    if longest > LONG or len(items) < 2:
        return 0
    best = 0
    for width in WIDTHS:
        if -(-longest // width) + 1 > MOST_PAGES:
            continue
        if width > longest:
            break
        chains = chained(items, width)
        if len(chains) * width < most:
            best, most = width, len(chains) * width
    return best


def chained(items: Sequence[Item], width: int) -> Chains:
    """Return the chains of these sequences."""
    chains = Chains(width)
    for item in items:
        chains.add(item)
    return chains


def filled_up(items: Sequence[Item], width: int, tokens: int, mixed: bool) -> list[list[Item]]:
    """Return micro-batches whose pages have up to `tokens` tokens, each filled before the next is begun.

    Sequences that begin alike are neighbours. One sequence may have more. `mixed`: several trainers may share one.
    """
    cut: list[list[Item]] = []
    chains = Chains(width)
    for item in sorted(items, key=lambda item: (item.batch, item.datum.tokens)):
        chains.add(item)
        if not cut or len(chains) * width > tokens or not (mixed or cut[-1][0].batch == item.batch):
            cut.append([])
            chains = chained([item], width)
        cut[-1].append(item)
    return cut


class PageCache:
    """The cache of one layer, which mlx-lm's modules ask for keys and values: each page gets those of its chain."""

    def __init__(self, pages: PageInputs, window: int | None):
        self._pages = pages
        self._window = window

    @property
    def offset(self) -> mx.array:
        """Positions [pages] int32 of the pages' first tokens."""
        return self._pages.offsets

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return which positions of its chain each of the N tokens of a page sees."""
        return self._pages.mask(N, self._window if window_size is None else window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values [pages, heads, positions, dim] of the pages' chains."""
        return self._pages.gathered(keys), self._pages.gathered(values)


class PageInputs:
    """The offsets, tables and masks of a micro-batch's pages, which all layers share."""

    def __init__(self, arrays: Sequence[mx.array], mask_axes: int):
        """Take those of `Chains.arrays` but the tokens. `mask_axes`: axes of a mask between pages and queries."""
        self.offsets, self._tables, self._filled = arrays
        self._mask_axes = mask_axes
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, width: int, window: int | None) -> mx.array:
        """Return [pages, 1 (, 1), width, positions] bool. `window`: how many positions a token sees; None: all."""
        made = self._masks.get(window)
        if made is None:
            slots = mx.arange(width)
            key = (self.offsets[self._tables][..., None] + slots).flatten(1)[:, None]
            query = (self.offsets[:, None] + slots)[..., None]
            made = (slots < self._filled[..., None]).flatten(1)[:, None] & (key <= query)
            if window is not None:
                made = made & (key > query - window)
            made = self._masks[window] = mx.expand_dims(made, tuple(range(1, 1 + self._mask_axes)))
        return made

    def gathered(self, x: mx.array) -> mx.array:
        """Return `x` [pages, heads, width, dim] of all pages of each chain, [pages, heads, positions, dim]."""
        found: mx.array = _gathered(x, self._tables)
        return found

    def caches(self, windows: Sequence[int | None]) -> list[Any]:
        """Return a cache for each layer, by the windows of the layers."""
        made = {window: PageCache(self, window) for window in set(windows)}
        return [made[window] for window in windows]


def _gather(x: mx.array, tables: mx.array) -> mx.array:
    pages, heads, _, dim = x.shape
    runs = tables[:, None] * heads + mx.arange(heads)[:, None]  # of a head's tokens in a page, which lie end to end
    return x.reshape(pages * heads, -1)[runs].reshape(pages, heads, -1, dim)


def _gather_vjp(primals: Sequence[mx.array], cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    """Return the gradient of `_gather` by a product: MLX adds up what a page gets from each use one number at a time.

    The product's cost grows with the square of the pages, and is the smaller one up to some 300 pages.
    """
    x, tables = primals
    pages, heads, chain = x.shape[0], x.shape[1], tables.shape[1]
    each = cotangent.reshape(pages, heads, chain, -1).swapaxes(1, 2).reshape(pages * chain, -1)
    used = mx.arange(pages)[:, None] == tables.reshape(-1)
    summed = used.astype(mx.float32) @ each.astype(mx.float32)
    return summed.reshape(x.shape).astype(x.dtype), mx.zeros_like(tables)


_gathered: Any = mx.custom_function(_gather)
_gathered.vjp(_gather_vjp)
