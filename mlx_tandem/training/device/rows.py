"""The rows of tokens of a micro-batch: a sequence each, or a page of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_tandem.model.inputs import Numbers
from mlx_tandem.training.device.cutting import Item
from mlx_tandem.training.device.pages import Chains


class Rows(NamedTuple):
    """The rows of tokens that a micro-batch computes, and the places of its sequences' completions in them."""

    items: list[Item]
    counts: list[int]  # rows of each batch that has any
    numbers: list[Numbers]
    """Tokens [rows, length]; where each predicted token is predicted, row · length + position; for pages their
    offsets, tables and filled.
    """


def of_sequences(items: list[Item], shape: tuple[int, int]) -> Rows:
    """Return rows of a sequence each, padded to `shape`."""
    tokens = np.zeros(shape, np.int32)
    for row, item in enumerate(items):
        tokens[row, : item.length] = item.datum.tokens
    at = [
        _repeated(row * shape[1] + np.arange(i.datum.prompt_length - 1, i.length - 1), i) for row, i in enumerate(items)
    ]
    counts = _counts([item.batch for item in items])
    counts[-1] += shape[0] - len(items)  # rows of padding: a part of their own would make a copy of all rows
    return Rows(items, counts, [tokens, np.concatenate(at).astype(np.int32)])


def of_pages(items: list[Item], chains: Chains) -> Rows:
    """Return the pages of sequences; `chains` are those of `items`."""
    tokens, *tables = chains.arrays()
    at = [
        _repeated(np.array(places[item.datum.prompt_length - 1 :]), item)
        for item, places in zip(items, chains.places, strict=True)
    ]
    return Rows(items, _counts(chains.batches), [tokens, np.concatenate(at).astype(np.int32), *tables])


def drawn(items: Sequence[Item], vocabulary: int) -> list[Numbers]:
    """Return which the predicted tokens are, and the temperature and truncation of their draws."""
    data = [item.datum for item in items]
    lengths = [len(d.predicted) for d in data]
    cuts = [(d.truncation.top_p, float(d.truncation.top_k or vocabulary), d.truncation.min_p) for d in data]
    return [
        np.concatenate([np.array(d.predicted, np.int32) for d in data]),
        np.repeat(np.array([d.temperature for d in data], np.float32), lengths),
        np.repeat(np.array(cuts, np.float32), lengths, axis=0),
    ]


def _repeated(places: npt.NDArray[np.int_], item: Item) -> npt.NDArray[np.int_]:
    """Return the place of each predicted token of a sequence. `places` are those of its completion."""
    return np.repeat(places, len(item.datum.predicted) // len(places))


def _counts(batches: Sequence[int]) -> list[int]:
    """Return how many rows each batch has; the rows of one are neighbours."""
    return [batches.count(batch) for batch in dict.fromkeys(batches)]
