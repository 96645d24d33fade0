"""What a draw did to the model's distribution, and whether a trainer can compute the same distribution."""

from __future__ import annotations

from msgspec.structs import asdict

from mlx_tandem.engine.learning import WHOLE, Truncation
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.types import SamplingParams

_PLAIN = SamplingParams(max_tokens=1)
_ALTERING = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "allowed_token_ids",
    "xtc_probability",
)


def altered(params: SamplingParams) -> str:
    """Return the name of a parameter whose distribution no trainer computes; empty: there is none.

    Temperature and truncation (top_p, top_k, min_p) depend on the logits alone, and trainers compute the same. The
    others depend on the tokens so far or on lists of tokens.
    """
    if params.thoughts is not None:
        return "thinking_token_budget"
    return next((name for name in _ALTERING if getattr(params, name) != getattr(_PLAIN, name)), "")


def truncation(params: SamplingParams) -> Truncation:
    """Return which tokens a draw with these parameters left out."""
    if params.greedy:
        return WHOLE  # a greedy choice counts as a draw from the model's own distribution
    return Truncation(params.top_p, params.top_k, params.min_p)


def check_same(params: SamplingParams, temperature: float, before: Truncation) -> None:
    """Check that a draw has the temperature and the truncation of the draws `before` it in its trajectory.

    A trajectory is trained on at one temperature and with one truncation. Raises InvalidRequest naming the parameter.
    """
    own = {"temperature": params.temperature, **asdict(truncation(params))}
    for name, value in {"temperature": temperature, **asdict(before)}.items():
        if own[name] != value:
            raise InvalidRequest(f"{name} must be {value:g}, as in the trajectory so far", param=name)
