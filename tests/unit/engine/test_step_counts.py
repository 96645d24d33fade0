"""What is counted of steps, and the speed that is told of them."""

from __future__ import annotations

import pytest

from mlx_tandem.engine.pipeline import StepCounts
from mlx_tandem.engine.plan import Row, RowKind, StepPlan


def row(kind: RowKind, tokens: int, slot: int = 0) -> Row:
    return Row(kind, 0, 0, slot, 3, (1,) * tokens, ((1,),), True)


def test_speed_is_that_of_prompts_and_of_what_is_decoded_apart() -> None:
    counts = StepCounts()
    prompts = row(RowKind.PROMPT, 300), row(RowKind.PROMPT, 100, 2)
    decoding = row(RowKind.DECODE, 1, 1), row(RowKind.VERIFY, 4, 2)
    counts.note(StepPlan((*prompts, *decoding)), 50.0, 8)
    assert (counts.prompt_rate, counts.decode_rate) == (400 / 0.05, 5 / 0.05)
    counts.note(StepPlan(decoding[:1]), 20.0, 8)
    assert (counts.prompt_rate, counts.decode_rate) == (8000, 50), "of the last steps that had any"
    counts.note(StepPlan(prompts[:1]), 100.0, 8)
    assert (counts.prompt_rate, counts.decode_rate) == (3000, 50)
    counts.note(StepPlan(()), 1000.0, 8)
    assert (counts.prompt_rate, counts.decode_rate) == (3000, 50)
    assert (counts.steps, counts.rows, counts.lora_rows) == (4, 6, 4)
    assert counts.step_tokens.total == 405 + 1 + 300 and sum(counts.step_tokens.counts) == 3
    assert counts.step_ms == pytest.approx(50 * 0.9**3 + 20 * 0.1 * 0.9**2 + 100 * 0.1 * 0.9 + 1000 * 0.1)


@pytest.mark.parametrize(("rows", "part"), [(1, 0), (2, 0), (3, 1), (4, 1), (10, 4), (11, 5), (19, 9), (20, 9)])
def test_a_batch_is_counted_by_the_tenth_up_to_which_its_seats_are_taken(rows: int, part: int) -> None:
    counts = StepCounts()
    counts.note(StepPlan((row(RowKind.DECODE, 1),) * rows), 1.0, 20)
    assert counts.batch_fill == [int(i == part) for i in range(10)]
