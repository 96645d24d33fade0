"""What a micro-batch makes of each batch's completions: the loss, its gradient, and the logprobs that are answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.engine.learning import Batch, BatchResult, LossConfig
from mlx_tandem.model.inputs import Numbers
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
    numbers: list[Numbers]  # fields of `TokenBatch`, references, where each token lies in them, and what rows lack


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
    filled = np.zeros((6, len(items), max(lengths)), np.float32)
    logprobs, weights, counts, mask, anchor, reference = filled
    for row, (item, n) in enumerate(zip(items, lengths, strict=True)):
        logprobs[row, :n] = item.datum.logprobs or 0.0
        weights[row, :n] = item.datum.weights
        counts[row, :n] = shares[item.index]
        mask[row, :n] = item.datum.trained
        anchor[row, :n] = item.datum.anchor or 0.0
        reference[row, :n] = item.datum.reference or 0.0
    place = np.flatnonzero(np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int32)
    lacks = [(item.datum.logprobs is None, not item.datum.anchor, not item.datum.reference) for item in items]
    return [*filled, place, np.array(lacks, np.int32)]


def loss(
    micro: MicroBatch, part: Part, arrays: Sequence[mx.array], config: LossConfig, truncated: bool
) -> tuple[mx.array, tuple[mx.array, ...]]:
    """Return what `results` reads of a part, [2 + 2 n], and the gradients [n] of its loss by the logprobs.

    With `truncated` the gradient by the logprobs as drawn is followed by the one by those of the whole vocabulary.

    `arrays` are the numbers of the part, on the device. The first array has the loss, the sum of k3 to the reference,
    and each token's logprob as it was drawn and at temperature 1.
    """
    *fields, given, place, lacks = arrays
    batch = TokenBatch(*fields)

    def spread(flat: mx.array) -> mx.array:
        return mx.zeros((batch.mask.size,)).at[place].add(flat).reshape(batch.mask.shape)

    def filled(known: mx.array, column: int, flat: mx.array) -> mx.array:
        """Return numbers of the data, with those of this pass in rows that have none."""
        return mx.where(lacks[:, column : column + 1] != 0, spread(flat), known)

    p = micro.logprobs[part.span]
    data = [item.datum for item in part.items]
    if any(datum.logprobs is None for datum in data):
        batch = batch._replace(logprobs=filled(batch.logprobs, 0, p))
    if config.decoupled and not all(datum.anchor for datum in data):
        batch = batch._replace(anchor=filled(batch.anchor, 1, p))
    reference = None
    if config.kl_coef:
        reference = given if micro.base is None else filled(given, 2, micro.base[part.span])
    whole = micro.whole[part.span]
    value, gradients = mx.value_and_grad(
        lambda flat: losses.loss(spread(flat[0]), batch, config, reference, spread(flat[-1]))
    )([p, whole] if truncated else [p])
    kl = mx.array(0.0)
    if reference is not None:
        d = reference - spread(whole)
        kl = ((mx.exp(d) - 1.0 - d) * batch.mask).sum()
    return mx.concatenate([value.reshape(1), kl.reshape(1), p, micro.plain[part.span]]), tuple(gradients)


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
