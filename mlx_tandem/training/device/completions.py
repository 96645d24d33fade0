"""What a micro-batch makes of each batch's completions: the loss, its gradient, and the logprobs that are answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.engine.learning import Batch, BatchResult, LossConfig
from mlx_tandem.model.step.inputs import Numbers
from mlx_tandem.training.device import losses
from mlx_tandem.training.device.backward import MicroBatch
from mlx_tandem.training.device.cutting import Item
from mlx_tandem.training.device.losses import TokenBatch


class Part(NamedTuple):
    """The share that a micro-batch has of one batch. `span`: its part of the micro-batch's completion tokens, row after
    row.
    """

    batch: int
    items: list[Item]
    span: slice
    numbers: list[Numbers]  # fields of `TokenBatch`, where each token lies in them, and which rows lack logprobs


def split(items: Sequence[Item], shares: Sequence[Sequence[float]]) -> list[Part]:
    """Return a micro-batch's items by batch. `shares` says what a token counts in each completion of each batch."""
    grouped: defaultdict[int, list[Item]] = defaultdict(list)
    for item in items:
        grouped[item.batch].append(item)
    parts, done = [], 0
    for batch, own in grouped.items():
        count = sum(len(item.datum.weights) for item in own)
        parts.append(Part(batch, own, slice(done, done + count), _numbers(own, shares[batch])))
        done += count
    return parts


def _numbers(items: Sequence[Item], shares: Sequence[float]) -> list[Numbers]:
    """Return the numbers of a part, which are [rows, longest completion] each; the last are indices and flags."""
    lengths = [len(item.datum.weights) for item in items]
    filled = np.zeros((4, len(items), max(lengths)), np.float32)
    logprobs, weights, counts, mask = filled
    for row, (item, n) in enumerate(zip(items, lengths, strict=True)):
        logprobs[row, :n] = item.datum.logprobs or 0.0
        weights[row, :n] = item.datum.weights
        counts[row, :n] = shares[item.index]
        mask[row, :n] = item.datum.trained
    place = np.flatnonzero(np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int32)
    own = np.array([[item.datum.logprobs is None] for item in items], np.int32)
    return [*filled, place, own]


def loss(micro: MicroBatch, part: Part, arrays: Sequence[mx.array], config: LossConfig) -> tuple[mx.array, mx.array]:
    """Return what `results` reads of a part, [2 + 2 n], and the gradient [n] of its loss by the logprobs.

    `arrays` are the part's numbers, on the device. The first array has the loss, the sum of k3 to the base, and each
    token's logprob at its own temperature and at 1.
    """
    *fields, place, own = arrays
    batch = TokenBatch(*fields)

    def spread(flat: mx.array) -> mx.array:
        return mx.zeros((batch.mask.size,)).at[place].add(flat).reshape(batch.mask.shape)

    p = micro.logprobs[part.span]
    if any(item.datum.logprobs is None for item in part.items):
        batch = batch._replace(logprobs=mx.where(own != 0, spread(p), batch.logprobs))
    base = micro.base[part.span] if micro.base is not None and config.kl_coef else None
    value, gradient = mx.value_and_grad(
        lambda flat: losses.loss(spread(flat), batch, config, None if base is None else spread(base))
    )(p)
    kl = mx.array(0.0)
    if base is not None:
        d = base - p
        kl = ((mx.exp(d) - 1.0 - d) * batch.mask.reshape(-1)[place]).sum()
    return mx.concatenate([value.reshape(1), kl.reshape(1), p, micro.plain[part.span]]), gradient


def results(batches: Sequence[Batch], parts: Sequence[Part], found: npt.NDArray[np.float32]) -> tuple[BatchResult, ...]:
    """Return the results of all batches. `found` is what `loss` returned for the parts, one behind the other."""
    sums = np.zeros((len(batches), 2))
    sampled: list[dict[int, tuple[float, ...]]] = [{} for _ in batches]
    model: list[dict[int, tuple[float, ...]]] = [{} for _ in batches]
    values = found.tolist()
    at = 0
    for part in parts:
        sums[part.batch] += values[at : at + 2]
        at += 2
        for into in (sampled[part.batch], model[part.batch]):
            for item in part.items:
                n = len(item.datum.weights)
                into[item.index] = tuple(values[at : at + n])
                at += n
    return tuple(
        _result(batch, float(value), float(kl), own_sampled, own_model)
        for batch, (value, kl), own_sampled, own_model in zip(batches, sums, sampled, model, strict=True)
    )


def _result(
    batch: Batch, value: float, kl: float, sampled: dict[int, tuple[float, ...]], model: dict[int, tuple[float, ...]]
) -> BatchResult:
    trained = sum(sum(d.trained) for d in batch.data)
    order = range(len(batch.data))
    return BatchResult(
        batch.trainer,
        value,
        trained,
        tuple(sampled[i] for i in order),
        tuple(model[i] for i in order),
        kl / max(trained, 1),
    )
