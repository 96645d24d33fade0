"""The training loop, used for the base, the draft model and each adapter. Imports MLX."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.models.qwen3 import Model

from .model import cast

Loss = Callable[[Model, mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Fit:
    """The result of ``fit``: the mean loss at its start and end, seconds, and milliseconds of a median step."""

    steps: int
    first_loss: float
    last_loss: float
    seconds: float
    step_ms: float


def next_token_loss(model: Model, ids: mx.array, weights: mx.array) -> mx.array:
    """Return the weighted mean cross-entropy of each token after the first."""
    logits = model(ids[:, :-1]).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, ids[:, 1:])
    return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()


def distillation_loss(teacher: Model) -> Loss:
    """Return a loss: the weighted mean cross-entropy against the teacher's whole distribution."""

    def loss(model: Model, ids: mx.array, weights: mx.array) -> mx.array:
        target = mx.stop_gradient(mx.softmax(teacher(ids[:, :-1]).astype(mx.float32), axis=-1))
        logits = model(ids[:, :-1]).astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        losses = -(target * scores).sum(-1)
        return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()

    return loss


def fit(
    model: Model,
    loss: Loss,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    steps: int,
    rate: float,
    decay: float,
    compute: mx.Dtype,
    label: str,
) -> Fit:
    """Train the model's trainable parameters: AdamW in float32, forward and backward in ``compute``.

    The learning rate rises over the first 3 % of the steps and falls to 2 % of its peak along a cosine. The
    parameters are left in float32 in the model.
    """
    params: Any = cast(model.trainable_parameters(), mx.float32)
    warmup = max(1, min(100, steps // 30))
    schedule = optim.join_schedules(
        [
            optim.linear_schedule(0.0, rate, warmup),
            optim.cosine_decay(rate, max(1, steps - warmup), 0.02 * rate),
        ],
        [warmup],
    )
    optimizer = optim.AdamW(learning_rate=schedule, betas=[0.9, 0.95], weight_decay=decay)
    optimizer.init(params)

    def step(params: Any, state: Any, ids: mx.array, weights: mx.array) -> tuple[mx.array, Any, Any]:
        def objective(current: Any) -> mx.array:
            model.update(cast(current, compute))
            return loss(model, ids, weights)

        value, gradients = mx.value_and_grad(objective)(params)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.state = state
        return value, optimizer.apply_gradients(gradients, params), optimizer.state

    compiled = mx.compile(step)
    state = optimizer.state
    losses: list[mx.array] = []
    times: list[float] = []
    start = time.perf_counter()
    for ids, weights in batches:
        value, params, state = compiled(
            params, state, mx.array(ids.astype(np.int32)), mx.array(weights.astype(np.float32))
        )
        mx.eval(value, params, state)
        losses.append(value)
        times.append(time.perf_counter())
        if len(losses) % max(1, steps // 10) == 0:
            recent = float(mx.mean(mx.stack(losses[-20:])))
            print(f"{label}: step {len(losses)} loss {recent:.4f} {times[-1] - start:.0f} s", flush=True)
    model.update(params)
    mx.eval(model.parameters())
    window = max(1, min(20, len(losses) // 4))
    return Fit(
        steps=len(losses),
        first_loss=round(float(mx.mean(mx.stack(losses[:window]))), 4),
        last_loss=round(float(mx.mean(mx.stack(losses[-window:]))), 4),
        seconds=round(time.perf_counter() - start, 1),
        step_ms=round(1000 * float(np.median(np.diff([start, *times]))), 1),
    )
