"""mlx-lm's BatchGenerator as the peer of `tandem bench engine`: same weights, prompts and sampling, by its public
interface.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_tandem.config import ModelConfig
from mlx_tandem.model import device, loader

__all__ = ["BatchGeneratorPeer", "device", "free_dropped_memory"]

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler


def free_dropped_memory() -> None:
    """Collect all objects that nobody holds, frozen ones too, and empty MLX's cache. The others are frozen again."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    mx.clear_cache()


class BatchGeneratorPeer:
    """A model loaded for BatchGenerator; `generate` runs one batch to its end."""

    def __init__(self, config: ModelConfig):
        self._model = loader.load(config, lambda stage, fraction: None).module

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sequence[tuple[float, float]]
    ) -> Iterator[list[int]]:
        """Yield for each step the rows that got a token.

        Rows with the same (temperature, top_p) share a sampler, which the peer calls once for all of them.
        """
        batch = len(prompts)
        generator: Any = BatchGenerator(self._model, completion_batch_size=batch, prefill_batch_size=batch)
        of = {(t, p): make_sampler(t, top_p=p if p < 1.0 else 0.0) for t, p in sampling}
        samplers = [of[pair] for pair in sampling]
        ids = generator.insert([list(p) for p in prompts], max_tokens=[max_tokens] * batch, samplers=samplers)
        rows = {uid: row for row, uid in enumerate(ids)}
        try:
            while responses := generator.next_generated():
                yield [rows[r.uid] for r in responses]
        finally:
            generator.close()
