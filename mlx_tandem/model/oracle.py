"""Reference answers by mlx-lm itself: one sequence, its own loop, its own cache, its own way of applying an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model


class Oracle:
    """A model folder in float32, optionally with an adapter folder in mlx-lm's format."""

    def __init__(self, model: Path, adapter: Path | None = None):
        module, _ = load_model(model)
        self._module: Any = module if adapter is None else load_adapters(module, str(adapter))
        self._module.update(tree_map(lambda x: x.astype(mx.float32), self._module.parameters()))
        self._module.eval()

    def disagreement(
        self, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> tuple[int, float]:
        """Return how many tokens of a greedy answer equal mlx-lm's, and the largest difference of a logprob among
        them.

        Where two tokens are equally likely but for rounding (1e-5), the rest of the answer is not compared.
        """
        apart = 0.0
        steps = generate_step(mx.array(list(prompt)), self._module, max_tokens=len(tokens))
        for same, ((own, theirs), token, logprob) in enumerate(zip(steps, tokens, logprobs, strict=False)):
            row = np.array(theirs)
            if own != token and row[own] - row[token] > 1e-5:
                return same, apart
            apart = max(apart, abs(float(row[token]) - logprob))
            if own != token:
                break
        return len(tokens), apart
