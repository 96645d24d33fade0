"""What a draw did to the model's distribution."""

from __future__ import annotations

import pytest

from mlx_tandem.engine.learning import WHOLE, Truncation
from mlx_tandem.training.draws import altered, truncation
from mlx_tandem.types import SamplingParams


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({}, ""),
        ({"temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4, "max_tokens": 9}, ""),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": -0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": ((3, 1.0),)}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"allowed_token_ids": (1, 2)}, "allowed_token_ids"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
    ],
)
def test_what_no_trainer_computes_is_named(params: dict[str, object], named: str) -> None:
    assert altered(SamplingParams(**{"max_tokens": 1} | params)) == named  # type: ignore[arg-type]


def test_truncation_is_that_of_the_draw() -> None:
    assert truncation(SamplingParams(1, top_p=0.5, top_k=3, min_p=0.1)) == Truncation(0.5, 3, 0.1)
    assert truncation(SamplingParams(1, temperature=0.0, top_p=0.5)) == WHOLE
