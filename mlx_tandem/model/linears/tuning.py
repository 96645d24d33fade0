"""What products cost on this device, found once by timing the model's own, and what follows from it.

On a GPU a product's time is erratic in the number of its rows: 12 may take a third of what 8 take. So decoding steps
are padded to counts that were measured to be good. And quantised linears dequantise where that is faster. What was
found is kept in the user's cache folder, for each device, version of MLX and set of linears.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import msgspec
from msgspec import Struct

from mlx_tandem import files
from mlx_tandem.model.linears.dequantise import dequantised, use_from, worth_from
from mlx_tandem.model.linears.products import Kind, Meter, input_of, kinds, pass_seconds
from mlx_tandem.model.step.shapes import row_count

log = logging.getLogger(__name__)

FORMAT = 2
MOST_ROWS = 512  # beyond, products are bound by arithmetic, and the fixed rule is as good
MOST_COUNTS = 24
"""Row counts that steps are padded to: each is traced when first met."""
TOKENS = (2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = 5.0  # after which nothing more is measured: what is left stays as it would be without
_ALIKE = 0.25  # times that differ by less are equal; a count so many times as large must be better by as many times it
_MOST_PADDED = 2  # so many times as many rows at most: what is not a product grows with them
_WIDER = 1.25  # a count is left out for one so much larger that takes as long


class Tuned(Struct, frozen=True):
    """What was found. `rows`: good counts, ascending; beyond the last the fixed rule holds. `dequantise`: by kind of
    linear, from how many tokens on."""

    rows: tuple[int, ...] = ()
    dequantise: dict[str, int] = {}


class Subject(Struct, frozen=True):
    """What findings hold for."""

    device: str
    mlx: str
    linears: dict[str, int]  # how many of each kind
    rows: int  # the most of a step
    products: str = ""  # what computes them besides MLX
    format: int = FORMAT


class _Record(Struct, frozen=True):
    subject: Subject
    tuned: Tuned


def tune(
    model: nn.Module,
    dtype: mx.Dtype,
    *,
    device: str,
    most_rows: int,
    activations: int,
    folder: Path,
    products: str = "",
    meter: Meter | None = None,
) -> Tuned:
    """Find out, or look up in `folder`, what is good for this model on this device, and change its quantised linears
    accordingly. `dtype`: of what goes through the layers; `activations`: bytes that steps may need; `products`: what
    computes some of them in place of MLX, in words that change when that does."""
    own = kinds(model)
    subject = Subject(device, version("mlx"), {name: len(k.modules) for name, k in own.items()}, most_rows, products)
    file = folder / f"{hashlib.sha256(msgspec.json.encode(subject)).hexdigest()[:32]}.json"
    tuned, how = _load(file, subject), f"as found in {file}"
    if tuned is None:
        meter = meter or Meter()
        started = meter.now()
        until = started + SECONDS
        thresholds = _thresholds(own, dtype, activations, meter, until)
        _apply(own, thresholds)
        tuned = Tuned(_row_counts(own, dtype, most_rows, meter, until), thresholds)
        how = f"measured in {meter.now() - started:.1f} s"
        mx.clear_cache()
        _save(file, _Record(subject, tuned))
    else:
        _apply(own, tuned.dequantise)
    log.info("decoding steps are padded to %s rows, %s", ", ".join(map(str, tuned.rows)) or "the usual", how)
    for name, tokens in tuned.dequantise.items():
        log.info("linears of %s dequantise from %d tokens on", name, tokens)
    return tuned


def good_counts(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """The counts to pad to, of those that were measured: none that a larger one beats, and few. Padding to the next of
    them takes no longer than any other measured count would, but for differences that are noise or rare."""
    counts = sorted(seconds)
    standing = [
        count
        for i, count in enumerate(counts)
        if all(
            seconds[count] <= seconds[more] * (1 + _ALIKE * more / count)
            for more in counts[i + 1 :]
            if more <= _MOST_PADDED * count
        )
    ]
    alike, wider = _ALIKE, _WIDER
    while True:
        kept: list[int] = []
        for count in reversed(standing):
            if not kept or seconds[kept[-1]] > (1 + alike) * seconds[count] or kept[-1] > wider * count:
                kept.append(count)
        if len(kept) <= MOST_COUNTS:
            return tuple(reversed(kept))
        alike, wider = 1.5 * alike, 1.1 * wider


def _row_counts(
    own: Mapping[str, Kind], dtype: mx.Dtype, most_rows: int, meter: Meter, until: float
) -> tuple[int, ...]:
    """As `good_counts`, for the time that all linears take together."""
    if not own:
        return ()
    most = row_count(min(most_rows, MOST_ROWS))
    counts = sorted({row_count(n) for n in range(1, most + 1)} | set(range(1, min(most, 16) + 1)))
    if not any(kind.packed for kind in own.values()):  # tensor cores take rows by eight
        counts = [n for n in counts if n <= 8 or n % 8 == 0 or n == most]
    pass_seconds(own, dtype, counts[0], meter)  # whatever is slow the first time
    seconds = {}
    for count in counts:
        if meter.now() > until:
            break
        seconds[count] = pass_seconds(own, dtype, count, meter)
    return good_counts(seconds)


def _thresholds(
    own: Mapping[str, Kind], dtype: mx.Dtype, activations: int, meter: Meter, until: float
) -> dict[str, int]:
    """By kind of quantised linears, the tokens from which they should dequantise. What MLX frees it may use again only
    when a whole graph is done, so the memory of all of them together is measured, as a step needs it."""
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
        if tokens_from is not None:
            found[name] = tokens_from
    if found:
        inputs = {name: input_of(own[name], dtype, tokens) for name, tokens in found.items()}
        calls = [partial(dequantised, m, x) for name, x in inputs.items() for m in own[name].packed]
        growth = meter.growth(calls)
        if growth > activations // 2:
            log.info("dequantised weights would be faster, but need %d MB of a step's memory", growth // 1_000_000)
            return {}
    return found


def _apply(own: Mapping[str, Kind], thresholds: Mapping[str, int]) -> None:
    for name, tokens in thresholds.items():
        for module in own[name].packed:
            use_from(module, tokens)


def _load(file: Path, subject: Subject) -> Tuned | None:
    """What the file says of the subject; None when it says nothing that could be used."""
    try:
        record = msgspec.json.decode(file.read_bytes(), type=_Record)
    except (OSError, msgspec.MsgspecError):
        return None
    rows, thresholds = record.tuned.rows, record.tuned.dequantise
    ascending = all(low < high for low, high in zip((0, *rows), rows, strict=False))
    known = {name for name in subject.linears if "bits" in name}
    if record.subject != subject or not ascending or (rows and rows[-1] > row_count(subject.rows)):
        return None
    return record.tuned if set(thresholds) <= known and all(tokens > 0 for tokens in thresholds.values()) else None


def _save(file: Path, record: _Record) -> None:
    """Without it the next start measures again."""
    with contextlib.suppress(OSError):
        files.make_folder(file.parent)
        files.replace(file, msgspec.json.encode(record))
