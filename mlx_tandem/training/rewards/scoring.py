"""From what a request or the configuration names to a checked Scoring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mlx_tandem.config import RewardSpec
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.explain import explain
from mlx_tandem.limits import MAX_REWARD_BYTES, MAX_REWARD_PARTS, check, check_name
from mlx_tandem.training.rewards.builtin import BUILTINS
from mlx_tandem.training.rewards.messages import Scoring
from mlx_tandem.training.rewards.models import REWARD_MODEL, ModelOptions, RewardModels
from mlx_tandem.training.rewards.own import own_names

PARAM = "scoring_function"

OPTIONS = {name: builtin.options for name, builtin in BUILTINS.items()} | {REWARD_MODEL: ModelOptions}
"""The options of each function that is built in."""

LATER = "later"
"""The name that says that the reward is not computed here: somebody sends it."""


class Catalogue:
    """The names that may be asked for: built in, installed, and the configuration's composites."""

    def __init__(self, composites: Mapping[str, Sequence[RewardSpec]], models: RewardModels | None = None):
        """Take the configuration's composites and the server's reward models. Without `models` none can be asked."""
        self._models = models
        own = own_names()
        if taken := sorted(OPTIONS.keys() & set(own)):
            raise InvalidRequest(f"an installed package gives the reward function '{taken[0]}', which is built in")
        if LATER in own or LATER in composites:
            raise InvalidRequest(f"no reward function can be named '{LATER}': that says that the reward comes later")
        self._functions = OPTIONS.keys() | set(own)
        self._composites: dict[str, tuple[RewardSpec, ...]] = {}
        for name, parts in composites.items():
            where = f"rl_training.rewards.{name}"
            check_name(name, where)
            if name in self._functions:
                raise InvalidRequest(f"'{where}' has the name of a reward function", param=where)
            self._composites[name] = self._checked(parts, where)

    @property
    def names(self) -> list[str]:
        """Names of all functions and composites, sorted."""
        return sorted(self._functions | self._composites.keys())

    def check(self, scoring: str | Mapping[str, Any] | Sequence[Any], metadata: Mapping[str, Any]) -> Scoring:
        """Return how completions are scored; LATER gives no parts, and nothing is scored by it.

        Raises InvalidRequest naming `scoring_function` or a field of metadata.
        """
        if scoring == LATER:
            _check_size(metadata)
            return Scoring(LATER, (), dict(metadata))
        parts = self._parts(scoring)
        for part in parts:
            if part.function == REWARD_MODEL:
                self._check_model(msgspec.convert(part.options, ModelOptions).model)
            elif builtin := BUILTINS.get(part.function):
                builtin.needs(msgspec.convert(part.options, builtin.options), metadata)
        _check_size(metadata)
        name = scoring if isinstance(scoring, str) else "+".join(p.function for p in parts)
        return Scoring(name, parts, dict(metadata))

    def _check_model(self, name: str) -> None:
        """Raise InvalidRequest for a reward model that cannot be asked."""
        if self._models is None:
            raise InvalidRequest(f"{PARAM}: this server has no reward models", param=PARAM)
        self._models.check(name)

    def _parts(self, scoring: object) -> tuple[RewardSpec, ...]:
        if isinstance(scoring, str):
            if scoring in self._composites:
                return self._composites[scoring]
            if scoring not in self._functions:
                raise _unknown(PARAM, scoring, self.names)
            return self._checked([RewardSpec(scoring)], PARAM)
        if isinstance(scoring, Mapping):
            scoring = [RewardSpec(f, _weight(f, w)) for f, w in scoring.items()]
        if not isinstance(scoring, (list, tuple)):
            raise InvalidRequest(
                f"{PARAM} must be a name, an object of names and weights, or a list of functions",
                param=PARAM,
                code="invalid_type",
            )
        try:
            return self._checked(msgspec.convert(scoring, list[RewardSpec]), PARAM)
        except msgspec.ValidationError as e:
            raise explain(e, list[RewardSpec], PARAM) from None

    def _checked(self, parts: Sequence[RewardSpec], where: str) -> tuple[RewardSpec, ...]:
        if not 1 <= len(parts) <= MAX_REWARD_PARTS:
            raise InvalidRequest(f"{where} must have 1 to {MAX_REWARD_PARTS} parts", param=where)
        for part in parts:
            if part.function not in self._functions:
                raise _unknown(where, part.function, sorted(self._functions))
            check("reward_weight", part.weight, where)
            if kind := OPTIONS.get(part.function):
                try:
                    msgspec.convert(part.options, kind)
                except msgspec.ValidationError as e:
                    wrong = explain(e, kind, "options")
                    raise InvalidRequest(f"{where}: '{part.function}': {wrong.message}", param=where) from None
            else:
                _check_size(part.options, where)
        return tuple(parts)


def _weight(function: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        where = f"{PARAM}.{function[:64]}"
        raise InvalidRequest(f"{where} must be a number, its weight", param=where, code="invalid_type")
    return given


def _unknown(where: str, name: str, known: Sequence[str]) -> InvalidRequest:
    return InvalidRequest(f"{where}: '{name[:64]}' is not known; known are: {', '.join(known)}", param=where)


def _check_size(value: Mapping[str, Any], param: str = "metadata") -> None:
    """Raise InvalidRequest when `value` cannot be sent to a worker."""
    try:
        size = len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise InvalidRequest(f"{param} holds something that is not plain JSON", param=param) from None
    if size > MAX_REWARD_BYTES // 2:
        raise InvalidRequest(f"{param} is longer than {MAX_REWARD_BYTES // 2} bytes", param=param)
