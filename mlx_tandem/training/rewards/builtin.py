"""The table of built-in reward functions. Each gives a number from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.limits import check
from mlx_tandem.training.rewards import answers, patterns
from mlx_tandem.training.rewards.messages import Sample


class LengthOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """In tokens: either `target`, or `min` or `max` or both."""

    target: int | None = None
    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        given = [f for f in ("target", "min", "max") if getattr(self, f) is not None]
        if not given or ("target" in given and len(given) > 1):
            raise ValueError("give either 'target', or 'min' or 'max' or both")
        try:
            for f in given:
                check("reward_tokens", getattr(self, f), f)
        except InvalidRequest as e:
            raise ValueError(e.message) from None
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min is {self.min}, over max, {self.max}")


def length(sample: Sample, options: LengthOptions) -> float:
    """Return 1 within the bounds; below them less, down to 0 at no token, above them down to 0 at twice the bound."""
    low, high = (options.target or options.min or 0), (options.target or options.max)
    if sample.tokens < low:
        return sample.tokens / low
    if high is not None and sample.tokens > high:
        return max(0.0, 2.0 - sample.tokens / high)
    return 1.0


def needs_nothing(options: object, metadata: Mapping[str, Any]) -> None:
    """Accept any metadata."""


@dataclass(frozen=True)
class Builtin:
    """`options`: a Struct that refuses wrong options with ValueError. `needs`: refuses wrong metadata with
    InvalidRequest, so that nothing is generated in vain.
    """

    score: Callable[[Sample, Any], float]
    options: type[Struct]
    needs: Callable[[Any, Mapping[str, Any]], None]


BUILTINS: dict[str, Builtin] = {
    "gsm8k": Builtin(answers.gsm8k, answers.NoOptions, answers.needs_number),
    "exact_match": Builtin(answers.exact_match, answers.TextOptions, answers.needs_text),
    "contains": Builtin(answers.contains, answers.TextOptions, answers.needs_texts),
    "regex": Builtin(patterns.regex, patterns.RegexOptions, patterns.needs_pattern),
    "json_schema": Builtin(patterns.json_schema, patterns.SchemaOptions, patterns.needs_schema),
    "length": Builtin(length, LengthOptions, needs_nothing),
}
