"""From a request for a pass to data of a trainer, and from the pass's result to Tinker's message.

The losses are those of Tinker's documentation, each summed over all positions of all examples, with p for the logprobs
of the model that is trained, q for `logprobs` and A for `advantages`:

    cross_entropy         -weights · p                                              target_tokens [T] or [T, K], weights
    importance_sampling   -exp(p - q) · A                                           target_tokens, logprobs, advantages
    ppo                   -min(exp(p - q) · A, clip(exp(p - q), low, high) · A)     the same; low 0.8, high 1.2
    cispo                 -stop(clip(exp(p - q), low, high)) · p · A                the same; low 0, high 4
    dro                   -(p · A - beta / 2 · (p - q)²)                            the same; beta 0.05
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from mlx_tandem import limits
from mlx_tandem.dialects.tinker import wire
from mlx_tandem.engine.learning import BatchResult, Datum, LossConfig, LossKind
from mlx_tandem.errors import ContextOverflow, InvalidRequest
from mlx_tandem.training.tinker.promises import Result

CLIPS: Mapping[str, tuple[float, float]] = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}
"""The bounds of the ratio by default, by the name of the loss."""

BETA = 0.05
"""The weight of dro's quadratic term by default."""

_NAMES = {"cross_entropy": ("target_tokens", "weights")}
_DRAWN = ("target_tokens", "logprobs", "advantages")
_LATER = ("gspo", "stable_reinforce", "custom")


def check_loss(name: str, given: Mapping[str, float | str]) -> LossConfig:
    """Return the configuration of a loss. Raises InvalidRequest naming `loss_fn` or the setting."""
    if name not in get_args(LossKind):
        what = "is not served here" if name in _LATER else "is not known"
        raise InvalidRequest(
            f"loss_fn {name[:64]!a} {what}; there are {', '.join(get_args(LossKind))}", param="loss_fn"
        )
    known = {"ppo": _CLIP_NAMES, "cispo": _CLIP_NAMES, "dro": ("beta",)}.get(name, ())
    numbers: dict[str, float] = {}
    for key, value in given.items():
        where = f"loss_fn_config.{ascii(key[:64])[1:-1]}"
        if key not in known:
            raise InvalidRequest(f"{where} is not a setting of {name}", param=where, code="unknown_parameter")
        if isinstance(value, str):
            raise InvalidRequest(f"{where} must be a number", param=where, code="invalid_type")
        numbers[key] = value
    low, high = (
        numbers.get(key, default) for key, default in zip(_CLIP_NAMES, CLIPS.get(name, (0.0, 1.0)), strict=True)
    )
    if not 0.0 <= low <= 1.0:
        raise InvalidRequest(f"loss_fn_config.{_CLIP_NAMES[0]} must be between 0 and 1", param="loss_fn_config")
    if not 1.0 <= high <= limits.LEARNING["clip_high"].high:
        raise InvalidRequest(
            f"loss_fn_config.{_CLIP_NAMES[1]} must be between 1 and {limits.LEARNING['clip_high'].high:g}",
            param="loss_fn_config",
        )
    beta = float(limits.check("beta", numbers.get("beta", BETA), "loss_fn_config.beta"))
    return LossConfig(name, clip_low=1.0 - low, clip_high=high - 1.0, beta=beta)  # type: ignore[arg-type]


_CLIP_NAMES = ("clip_low_threshold", "clip_high_threshold")


def check_data(
    data: Sequence[wire.Datum], loss: LossConfig, *, vocab_size: int, room: int
) -> tuple[tuple[Datum, ...], list[tuple[int, ...]]]:
    """Return the data of a pass, and the shapes of their targets. Raises InvalidRequest naming the field.

    `room` is the most tokens of an example with its last target.
    """
    if not data:
        raise InvalidRequest("data is empty", param="data")
    made = [_datum(own, loss, f"data[{i}]", vocab_size, room) for i, own in enumerate(data)]
    return tuple(datum for datum, _ in made), [shape for _, shape in made]


def _datum(
    given: wire.Datum, loss: LossConfig, where: str, vocab_size: int, room: int
) -> tuple[Datum, tuple[int, ...]]:
    """Return one example for a trainer, and the shape of its targets."""
    length = given.tokens.size
    if not length:
        raise InvalidRequest(f"{where}.model_input is empty", param=f"{where}.model_input")
    if length >= room:
        raise ContextOverflow(length, room - 1, room, param=f"{where}.model_input")
    names = _NAMES.get(loss.kind, _DRAWN)
    for name in given.inputs:
        if name not in names:
            raise InvalidRequest(
                f"{where}.loss_fn_inputs has {name[:32]!a}, which {loss.kind} does not read",
                param=f"{where}.loss_fn_inputs",
                code="unknown_parameter",
            )
    target = _targets(given.inputs.get("target_tokens"), length, f"{where}.loss_fn_inputs[target_tokens]")
    if target.ndim == 2 and loss.kind != "cross_entropy":
        raise InvalidRequest(
            f"{where}: {loss.kind} has one target token for each position", param=f"{where}.loss_fn_inputs"
        )
    _check_ids(given.tokens, vocab_size, f"{where}.model_input")
    _check_ids(target, vocab_size, f"{where}.loss_fn_inputs[target_tokens]")
    found = [_numbers(given.inputs.get(name), name, target, where) for name in names[1:]]
    flat = target.reshape(-1)
    tokens = (*given.tokens.tolist(), int(flat[-1]))
    drawn = loss.kind != "cross_entropy"
    return (
        Datum(
            tokens,
            1,
            found[1] if drawn else found[0],
            found[0] if drawn else (),
            # The quadratic term counts where the advantage is 0, too.
            mask=(1,) * flat.size if loss.kind == "dro" else (),
            targets=tuple(flat.tolist()),
        ),
        target.shape,
    )


def _targets(given: wire.Array | None, length: int, where: str) -> wire.Array:
    """Return the target tokens, [length] or [length, K]."""
    if given is None:
        raise InvalidRequest(f"{where} is missing", param=where, code="missing_required_parameter")
    if given.dtype.kind != "i":
        raise InvalidRequest(f"{where} must be whole numbers", param=where, code="invalid_type")
    if given.ndim not in (1, 2) or given.shape[0] != length:
        raise InvalidRequest(f"{where} has the shape {list(given.shape)}; model_input has {length} tokens", param=where)
    if given.ndim == 2 and not 1 <= given.shape[1] <= limits.MAX_TINKER_WIDTH:
        raise InvalidRequest(
            f"{where} has {given.shape[1]} tokens for each position; 1 to {limits.MAX_TINKER_WIDTH} are served",
            param=where,
        )
    return given


def _check_ids(ids: wire.Array, vocab_size: int, where: str) -> None:
    """Raise InvalidRequest for a token that is not in the vocabulary."""
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        token = int(ids.reshape(-1)[wrong[0]])
        raise InvalidRequest(f"{where}: {token} is not in the vocabulary of {vocab_size} tokens", param=where)


def _numbers(given: wire.Array | None, name: str, target: wire.Array, where: str) -> tuple[float, ...]:
    """Return a number for each target token; weights are 1 where there are none."""
    place = f"{where}.loss_fn_inputs[{name}]"
    if given is None:
        if name == "weights":
            return (1.0,) * target.size
        raise InvalidRequest(f"{place} is missing", param=place, code="missing_required_parameter")
    if given.shape != target.shape:
        raise InvalidRequest(
            f"{place} has the shape {list(given.shape)}, and target_tokens {list(target.shape)}", param=place
        )
    numbers = given.astype(np.float32).reshape(-1)
    most = np.float32(limits.LEARNING["example_weight"].high)
    if not np.isfinite(numbers).all() or (np.abs(numbers) > most).any():
        raise InvalidRequest(f"{place} must be numbers between -{most:g} and {most:g}", param=place)
    return tuple(numbers.tolist())


def writer(shapes: Sequence[tuple[int, ...]], forward_only: bool) -> Callable[[BatchResult], Result]:
    """Return what makes Tinker's message of a pass's result. `shapes` are those of the targets."""

    def write(found: BatchResult) -> Result:
        arrays: list[wire.Array] = [
            np.array(own, np.float32).reshape(shape) for own, shape in zip(found.logprobs, shapes, strict=True)
        ]
        metrics: dict[str, Any] = {"loss:sum": found.loss, "tokens:sum": float(found.tokens)}
        return Result(wire.write_pass(arrays, metrics), "protobuf")

    return write
