"""Checks at start, on the device that will serve, that a model's logprobs have the same bits whatever rows are computed
beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan, scored_positions
from mlx_tandem.errors import ModelError
from mlx_tandem.model.overlap import tables_of
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.types import EngineInfo, SamplingParams

LENGTHS = (70, 9, 20)
"""Tokens of the prompts. The first one's are compared; its keys are in two of the blocks that attention adds."""

CUT = 21
"""Tokens of the first chunk of the first prompt where it is read in two; fewer of a prompt that is not much longer."""

DECODED = 4
"""Tokens at the end of the first prompt that are read one by one where it decodes."""

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, prompt_logprobs=5)

Likeliest = dict[int, tuple[tuple[int, float], ...]]
"""The likeliest tokens after positions of the first prompt, and their logprobs."""


def check(runner: MLXRunner, info: EngineInfo) -> None:
    """Raise ModelError unless a prompt has the same logprobs in one piece, in chunks and decoded, alone and in company.

    Alone, all positions are compared. A product that depends on the number of rows gives some of them other bits.

    The prompts are shorter and fewer than LENGTHS says where the engine has no room for those. Where a sequence has no
    second token, nothing is compared.
    """
    size, lengths = info.block_size, _lengths(info)
    if lengths[0] < 2:
        return
    rng = np.random.default_rng(0)
    texts = [tuple(rng.integers(0, info.vocab_size, length).tolist()) for length in lengths]
    firsts = np.cumsum([1, *(-(-length // size) for length in lengths)]).tolist()

    def row(who: int, start: int, stop: int, *, decodes: bool = False, scored: bool = False) -> Row:
        tables = tables_of(info, *range(firsts[who], firsts[who + 1]))
        kind, targets = RowKind.DECODE if decodes else RowKind.PROMPT, texts[who][start + 1 : stop + 1]
        return Row(kind, who, who, 0, start, texts[who][start:stop], tables, True, targets if scored else ())

    def likeliest(steps: Sequence[Sequence[Row]]) -> Likeliest:
        """Return what these steps say of the first prompt, which is the first row of each."""
        seats = tuple(Seating(who, PARAMS, 0, len(text), text) for who, text in enumerate(texts))
        found: Likeliest = {}
        for n, rows in enumerate(steps):
            result = runner.wait(runner.launch(StepPlan(tuple(rows), seatings=() if n else seats)))
            found |= {rows[0].start + i: each.top for i, each in enumerate(result.scores.get(0, ()))}
            found |= {rows[0].start + len(rows[0].tokens) - 1: each.top for each in result.logprobs[0] or ()}
        return found

    whole, *others = lengths
    cut, first = min(CUT, whole - 1), max(1, whole - DECODED)
    company = [row(who, 0, length - 1) for who, length in enumerate(others, 1)]
    decoding = [row(who, length - 1, length, decodes=True) for who, length in enumerate(others, 1)]
    newest = [row(0, at, at + 1, decodes=True) for at in range(first, whole)]
    ways = {
        "in chunks alone": [[row(0, 0, cut, scored=True)], [row(0, cut, whole, scored=True)]],
        "as it decodes alone": [[row(0, 0, first)], *([each] for each in newest)],
    }
    if others:
        ways |= {
            "in chunks beside other rows": [[row(0, 0, cut), *company], [row(0, cut, whole), *decoding]],
            "as it decodes beside other rows": [[row(0, 0, first), *company], *([each, *decoding] for each in newest)],
        }
    expected = likeliest([[row(0, 0, whole, scored=True)]])
    for way, steps in ways.items():
        if any(expected[at] != found for at, found in likeliest(steps).items()):
            raise ModelError(
                f"--deterministic: on this device, a prompt of this model has other logprobs {way} than in one piece",
                param="deterministic",
            )


def _lengths(info: EngineInfo) -> list[int]:
    """Return the tokens of each prompt: those of LENGTHS, or as many as there is room for.

    No prompt is longer than what can be scored in one step.

    Prompts after the first are left out where the step has no row for them or the pool no two tokens.
    """
    size = info.block_size
    blocks = min(pool.num_blocks for pool in info.memory.pools) - 1  # the first one of a pool is scratch
    share = blocks // min(len(LENGTHS), info.max_num_seqs)
    others = [min(length, info.max_model_len, share * size) for length in LENGTHS[1 : info.max_num_seqs]]
    others = [length for length in others if length > 1]
    left = blocks - sum(-(-length // size) for length in others)
    return [min(LENGTHS[0], info.max_model_len, left * size, scored_positions(info.vocab_size)), *others]
