"""What a draw did to the model's distribution."""

from __future__ import annotations

import pytest

from mlx_tandem.engine.learning import WHOLE, Truncation
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training import draws
from mlx_tandem.training.draws import altered, check_same, truncation
from mlx_tandem.types import SamplingParams, ThoughtBudget

NEUTRAL = {
    "max_tokens": 9, "temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4, "stop_token_ids": (5,),
    "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1,
    # Of no effect without others.
    "repetition_context": 7, "xtc_threshold": 0.2, "xtc_kept": (1,),
}  # fmt: skip
"""Parameters that leave the distribution as a trainer computes it."""


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({}, ""),
        (NEUTRAL, ""),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": -0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": ((3, 1.0),)}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"allowed_token_ids": (1, 2)}, "allowed_token_ids"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"thoughts": ThoughtBudget(4, (1,), (2,), (2,), False)}, "thinking_token_budget"),
    ],
)
def test_what_no_trainer_computes_is_named(params: dict[str, object], named: str) -> None:
    assert altered(SamplingParams(**{"max_tokens": 1} | params)) == named  # type: ignore[arg-type]
    others = set(SamplingParams.__struct_fields__) - NEUTRAL.keys() - set(draws._ALTERING)
    assert others == {"thoughts"}, "a parameter of which nobody has said what it does"


def test_truncation_is_that_of_the_draw() -> None:
    assert truncation(SamplingParams(1, top_p=0.5, top_k=3, min_p=0.1)) == Truncation(0.5, 3, 0.1)
    assert truncation(SamplingParams(1, temperature=0.0, top_p=0.5)) == WHOLE


@pytest.mark.parametrize("other", [{"temperature": 0.8}, {"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.2}])
def test_a_trajectory_has_one_temperature_and_one_truncation(other: dict[str, float]) -> None:
    before: dict[str, float] = {"temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1}

    def check(params: dict[str, float]) -> None:
        check_same(SamplingParams(1, **params), 0.7, Truncation(0.5, 3, 0.1))  # type: ignore[arg-type]

    check(before)
    with pytest.raises(InvalidRequest) as e:
        check(before | other)
    ((name, _),) = other.items()
    assert e.value.param == name and f"must be {before[name]:g}" in e.value.message
