"""How long the steps of a model should take on a machine.

A step that decodes reads the weights once, and the keys, values and states of its rows. To that come a fixed time for
each layer, in which the device waits between operations, and the arithmetic of its rows. A step that reads a prompt
takes as long as one that decodes one row, and the time of the prompt's arithmetic. The shares and times below are
fitted to measurements: those of NVIDIA's cards to this engine's (benchmarks/results), those of Apple's chips to what
others have published of mlx-lm and llama.cpp (tests/unit/capacity/published.json). Nothing of this project has run on
Metal.
"""

from __future__ import annotations

from typing import NamedTuple

from mlx_tandem.capacity.machines import Chip
from mlx_tandem.capacity.work import StepWork

STATE_PASSES = 3.5
"""How often a step moves a row's recurrent states: read, gathered, computed and written back."""


class Rates(NamedTuple):
    """The shares of a chip's limits that steps reach, and times that no limit explains."""

    read: float  # share of the bandwidth
    layer_us: float  # of each layer in which nothing is read
    rows: float  # share of the arithmetic of rows that decode
    prompt: float  # share of the arithmetic of prompts
    adapter_us: float  # of each layer where a row has an adapter
    expert_us: float  # of each layer that picks experts
    sum_us: float  # of one sum over the devices of a tensor-parallel group for a few rows
    long_sum_us: float  # the same for many tokens, to which their bytes on the link come
    link: float  # GB/s between the devices of a group


RATES = {
    ("apple", 1): Rates(0.87, 52, 0.6, 0.68, adapter_us=52, expert_us=30, sum_us=50, long_sum_us=50, link=6),
    ("apple", 2): Rates(0.75, 80, 0.6, 0.68, adapter_us=80, expert_us=30, sum_us=50, long_sum_us=50, link=6),
    ("nvidia", 1): Rates(0.92, 40, 0.77, 0.58, adapter_us=40, expert_us=30, sum_us=8, long_sum_us=100, link=273),
}
"""By kind of chip and its number of dies. Some are assumptions, since nobody has measured them: `adapter_us` and all of
a group for Apple's chips, and `expert_us` of NVIDIA's.
"""

SUMS_PER_LAYER = 2
"""Sums over the devices in a layer of a tensor-parallel group: after attention and after the MLP."""


def decode_ms(work: StepWork, chip: Chip, rows: int, context: float, adapters: int = 0, devices: int = 1) -> float:
    """Return the milliseconds of a step in which `rows` rows decode at `context` tokens each.

    `adapters`: how many adapters the rows have together, in turn; 0: all rows are the base's. `devices`: the size of
    the tensor-parallel group, over which weights, keys, values and arithmetic are divided.
    """
    rates = RATES[chip.maker, chip.dies]
    moved = work.weights_read(rows) + rows * (work.cached(context) + STATE_PASSES * work.state_bytes)
    computed = 2 * (rows - 1) * work.row_parameters  # that of one row hides behind reading the weights
    own = (rates.layer_us + (rates.expert_us if work.experts else 0)) * work.layers
    if adapters:
        used = min(adapters, rows)
        moved += used * work.adapter_bytes
        computed += 2 * rows * work.adapter_parameters
        own += rates.adapter_us * work.layers
    if devices > 1:
        own += SUMS_PER_LAYER * work.layers * rates.sum_us
    read_ms = moved / devices / (rates.read * chip.bandwidth * 1e6)
    rows_ms = computed / devices / (rates.rows * chip.tflops * 1e9)
    return read_ms + rows_ms + own / 1e3


def chunk_ms(work: StepWork, chip: Chip, tokens: int, context: int, devices: int = 1) -> float:
    """Return the milliseconds of a step that reads so many tokens of a prompt, behind `context` others.

    A chunk of one token takes as long as a row that decodes.
    """
    rates = RATES[chip.maker, chip.dies]
    sums_us = 0.0
    if devices > 1 and tokens > 1:
        moved_us = 2 * tokens * work.hidden / rates.link / 1e3  # in 16 bits
        sums_us = SUMS_PER_LAYER * work.layers * (rates.long_sum_us + moved_us)
    computed = 2 * (tokens - 1) * (work.row_parameters - work.head_parameters) + work.pairs(context + tokens)
    computed -= work.pairs(context)
    computed_ms = computed / devices / (rates.prompt * chip.tflops * 1e9)
    return decode_ms(work, chip, 1, context, devices=devices) + computed_ms + sums_us / 1e3


def prompt_seconds(work: StepWork, chip: Chip, tokens: int, devices: int = 1) -> float:
    """Return the seconds until a prompt of so many tokens has been read, alone on the machine and in one step."""
    return chunk_ms(work, chip, tokens, 0, devices) / 1e3
