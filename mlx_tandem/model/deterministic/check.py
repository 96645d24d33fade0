"""Checks at start, on the device that will serve, that a model's logprobs have the same bits whatever rows are computed
beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.errors import ModelError
from mlx_tandem.model.overlap import tables_of
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.types import EngineInfo, SamplingParams, TokenLogprob

LENGTHS = (37, 9, 20)
"""Tokens of the prompts. The answer to the first prompt is compared."""

CUT = 21
"""Tokens of the first of two chunks, where the first prompt is read in chunks."""

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)


def check(runner: MLXRunner, info: EngineInfo) -> None:
    """Raise ModelError unless a prompt alone, in chunks beside others, and decoded beside others has the same logprobs.

    Nothing is checked if the pool, the model's context or the number of rows is too small for these prompts.
    """
    size = info.block_size
    widths = [-(-length // size) for length in LENGTHS]
    room = min(pool.num_blocks for pool in info.memory.pools)
    if sum(widths) >= room or info.max_model_len < max(LENGTHS) or info.max_num_seqs < len(LENGTHS):
        return
    rng = np.random.default_rng(0)
    texts = [tuple(rng.integers(0, info.vocab_size, length).tolist()) for length in LENGTHS]
    firsts = np.cumsum([1, *widths]).tolist()

    def row(who: int, start: int, stop: int, *, decodes: bool = False) -> Row:
        tables = tables_of(info, *range(firsts[who], firsts[who + 1]))
        kind = RowKind.DECODE if decodes else RowKind.PROMPT
        return Row(kind, who, who, 0, start, texts[who][start:stop], tables, True)

    def answer(*steps: Sequence[Row]) -> TokenLogprob | None:
        """Return the logprobs of the token that the first row of the last of these steps has drawn."""
        seats = tuple(Seating(who, PARAMS, 0, len(text), text) for who, text in enumerate(texts))
        found = None
        for n, rows in enumerate(steps):
            plan = StepPlan(tuple(rows), seatings=() if n else seats)
            found = runner.wait(runner.launch(plan)).logprobs[0]
        return found[0] if found else None

    whole, second, third = LENGTHS
    company = row(1, 0, second - 1), row(2, 0, third - 1)
    decoding = row(1, second - 1, second, decodes=True), row(2, third - 1, third, decodes=True)
    alone = answer([row(0, 0, whole)])
    ways = {
        "in chunks, beside other rows": answer([row(0, 0, CUT), *company], [row(0, CUT, whole), *decoding]),
        "as it decodes beside other rows": answer(
            [row(0, 0, whole - 1), *company], [row(0, whole - 1, whole, decodes=True), *decoding]
        ),
    }
    for way, found in ways.items():
        if found != alone:
            raise ModelError(
                f"--deterministic: on this device, a prompt of this model has other logprobs {way} than alone",
                param="deterministic",
            )
