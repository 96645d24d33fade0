"""Times the model's products on this device once, and derives the row counts of decode steps and when to dequantise.

On a GPU the time of a product is erratic in the number of its rows: 12 may take a third of what 8 take. So decode
steps are padded to row counts that were measured to be good, and quantised linears dequantise where that is faster.
The server keeps the results for its next start (`model/choices.py`).

Quantised linears that multiply by a dequantised weight where that is faster than a product of the packed one.

A kernel for packed weights may be made for few tokens: a 4-bit one took 75 µs for one row on an H200, 246 for eight,
635 for 32. With more tokens it can be faster to unpack the weight into memory first and to leave the product to the
kernels for plain weights. `tune` measures whether it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from msgspec import Struct

from mlx_tandem.model import backend
from mlx_tandem.model.modules import mix_in
from mlx_tandem.model.ops.products.measure import Kind, Meter, input_of, kinds, pass_cost
from mlx_tandem.model.shapes import row_count

log = logging.getLogger(__name__)

GAIN = 0.95
"""Longest time with a dequantised weight, as a share of the packed product's time, that is worth the memory."""


def dequantised(linear: nn.QuantizedLinear, x: mx.array) -> mx.array:
    """Return the linear's output for x [..., inputs] by way of its weight in x's type."""
    weight = mx.dequantize(
        linear["weight"],
        linear["scales"],
        linear.get("biases"),
        linear.group_size,
        linear.bits,
        linear.mode,
        dtype=x.dtype,
    )
    y = x @ weight.T
    return y + linear["bias"] if "bias" in linear else y


def worth_from(packed: Mapping[int, float], plain: Mapping[int, float]) -> int | None:
    """Return from how many tokens on the dequantised weight is faster at every measured number; None if it is not.

    `packed` and `plain` are the measured seconds by number of tokens.
    """
    found = None
    for tokens in sorted(packed, reverse=True):
        if plain[tokens] >= GAIN * packed[tokens]:
            break
        found = tokens
    return found


def use_from(linear: nn.QuantizedLinear, tokens: int) -> None:
    """Have the linear dequantise its weight in calls with at least `tokens` tokens."""
    module: Any = linear
    module._dequantise_from = tokens
    mix_in(module, Dequantising)


class Dequantising:
    """Mixin of a quantised linear that dequantises for many tokens."""

    _dequantise_from: int

    def __call__(self, x: mx.array) -> mx.array:
        """Return the linear's output, by a dequantised weight if there are enough tokens."""
        if x.size // x.shape[-1] >= self._dequantise_from:
            return dequantised(self, x)  # type: ignore[arg-type]
        y: mx.array = super().__call__(x)  # type: ignore[misc]
        return y


MOST_ROWS = 512
"""Most rows that are timed. Beyond it arithmetic bounds the products, and the fixed rule is as good."""

MOST_COUNTS = 24
"""Most row counts that steps are padded to; each is traced when it is first used."""
TOKENS = (2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of tokens for which dequantised products are timed."""

SECONDS = 8.0
"""Seconds after which nothing more is timed; what is left keeps its default."""

_MOST_PADDED = 2
"""Most rows after padding per row before: everything but the products grows with them."""

_WIDER = 1.25
"""A count that is not a power of two is left out if a larger one, at most so many times as large, takes about as long.

Full batches mostly have a power of two of rows, and everything but the products takes longer with more rows. On an H200
with at most 80 rows, 64 had been padded to 80, for which attention takes 32 µs a layer instead of 22.
"""


class Tuned(Struct, frozen=True):
    """The results: good row counts, and when quantised linears dequantise."""

    rows: tuple[int, ...] = ()
    """Good row counts, ascending; beyond the last the fixed rule of `shapes.py` applies."""

    dequantise: dict[str, int] = {}
    """By kind of linear, the number of tokens from which it dequantises."""


def tune(model: nn.Module, dtype: mx.Dtype, *, most_rows: int, activations: int, meter: Meter | None = None) -> Tuned:
    """Find good row counts for this model on this device, and change its quantised linears accordingly.

    Args:
        model: The model, whose linears are timed.
        dtype: The type of the layers' inputs.
        most_rows: Most rows of a step.
        activations: Bytes that steps may use.
        meter: Measures times and memory; by default on this device.
    """
    own = kinds(model)
    meter = meter or Meter()
    started = meter.now()
    until = started + SECONDS
    thresholds = _thresholds(own, dtype, activations, meter, until)
    _apply(own, thresholds)
    tuned = Tuned(_row_counts(kinds(model, joined=True), dtype, most_rows, meter, until), thresholds)
    mx.clear_cache()
    log.info(
        "decoding steps are padded to %s rows, measured in %.1f s",
        ", ".join(map(str, tuned.rows)) or "the usual",
        meter.now() - started,
    )
    for name, tokens in tuned.dequantise.items():
        log.info("linears of %s dequantise from %d tokens on", name, tokens)
    return tuned


def use(model: nn.Module, tuned: Tuned) -> None:
    """Change the model's quantised linears according to the results of another process."""
    _apply(kinds(model), tuned.dequantise)


def good_counts(seconds: Mapping[int, float], alike: float) -> tuple[int, ...]:
    """Return the row counts to pad to: of the measured ones, a few that no larger one beats.

    Padding to the next of them costs no more than padding to any other measured count, up to differences that are noise
    or rare.

    seconds: the cost of each measured count (`pass_cost`); alike: the relative difference up to which two costs count
    as equal, as `Products.alike` of the back end.
    """
    counts = sorted(seconds)
    standing = [
        count
        for i, count in enumerate(counts)
        if all(
            seconds[count] <= seconds[more] * (1 + alike * more / count)
            for more in counts[i + 1 :]
            if more <= _MOST_PADDED * count
        )
    ]
    wider = _WIDER
    while True:
        kept: list[int] = []
        for count in reversed(standing):
            is_far = not kept or seconds[kept[-1]] > (1 + alike) * seconds[count] or kept[-1] > wider * count
            if is_far or count.bit_count() == 1:
                kept.append(count)
        if len(kept) <= MOST_COUNTS:
            return tuple(reversed(kept))
        alike, wider = 1.5 * alike, 1.1 * wider


def _row_counts(
    own: Mapping[str, Kind], dtype: mx.Dtype, most_rows: int, meter: Meter, until: float
) -> tuple[int, ...]:
    """Return good row counts for the time that all linears take together."""
    if not own:
        return ()
    most = row_count(min(most_rows, MOST_ROWS))
    counts = sorted({row_count(n) for n in range(1, most + 1)} | set(range(1, min(most, 16) + 1)))
    if not any(kind.packed for kind in own.values()):  # tensor cores take rows by eight
        counts = [n for n in counts if n <= 8 or n % 8 == 0 or n == most]
    pass_cost(own, dtype, counts[0], meter)  # warm-up
    seconds = {}
    for count in counts:
        if meter.now() > until:
            break
        seconds[count] = pass_cost(own, dtype, count, meter)
    return good_counts(seconds, backend.current().products.alike)


def _thresholds(
    own: Mapping[str, Kind], dtype: mx.Dtype, activations: int, meter: Meter, until: float
) -> dict[str, int]:
    """Return by kind of quantised linear the number of tokens from which it should dequantise.

    MLX can use freed memory again only when a whole graph is done, so the memory of all such linears together is
    measured, as a step needs it.
    """
    here = backend.current().products
    found: dict[str, int] = {}
    for name, kind in own.items():
        if not kind.packed or meter.now() > until:
            continue
        some = kind.packed[: min(2, len(kind.some()))]
        packed, plain = {}, {}
        for tokens in TOKENS:
            x = input_of(kind, dtype, tokens)
            packed[tokens] = meter.seconds(some, x)
            plain[tokens] = meter.seconds([partial(dequantised, m) for m in some], x)
        tokens_from = worth_from(packed, plain)
        if tokens_from is not None and tokens_from >= here.dequantised_tokens:
            found[name] = tokens_from
    if found:
        inputs = {name: input_of(own[name], dtype, tokens) for name, tokens in found.items()}
        at_once = here.dequantised_layers
        calls = [partial(dequantised, m, x) for name, x in inputs.items() for m in own[name].packed[:at_once]]
        growth = meter.growth(calls)
        if growth > activations // 2:
            log.info("dequantised weights would be faster, but need %d MB of a step's memory", growth // 1_000_000)
            return {}
    return found


def _apply(own: Mapping[str, Kind], thresholds: Mapping[str, int]) -> None:
    for name, tokens in thresholds.items():
        for module in own[name].packed:
            use_from(module, tokens)
