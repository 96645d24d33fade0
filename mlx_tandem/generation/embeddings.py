"""Embeddings: the pooled hidden states of texts, normalised and cut as a caller wants them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.small_files import read_object
from mlx_tandem.types import AdapterRef, EngineInfo, Pooling, SamplingParams

FILE = "1_Pooling/config.json"
"""The file in a model's folder by which embedding models say how they are pooled."""


@dataclass(frozen=True)
class EmbeddingOptions:
    """The form of the vectors: their pooling, whether their length is 1, and how many of their first numbers are kept.

    `dimensions` None keeps all of them. A cut vector is normalised after the cut.
    """

    pooling: Pooling
    normalize: bool = True
    dimensions: int | None = None


def default_pooling(folder: Path) -> Pooling:
    """Return the pooling that a model folder asks for; the mean if it asks for none.

    Raises ModelError for a file that cannot be read, and for a pooling that there is not.
    """
    found: dict[str, Any] = read_object(folder / FILE) or {}
    modes = sorted(key for key, value in found.items() if key.startswith("pooling_mode_") and value is True)
    if modes == ["pooling_mode_lasttoken"]:
        return "last"
    if modes in ([], ["pooling_mode_mean_tokens"]):
        return "mean"
    raise ModelError(f"{folder / FILE}: {' and '.join(modes)} cannot be computed here", param="pooling")


def embedding_request(
    info: EngineInfo,
    prompts: Sequence[Sequence[int]],
    adapter: AdapterRef | None,
    options: EmbeddingOptions,
    *,
    priority: int = 0,
    background: bool = False,
) -> Prompted:
    """Return the request for the hidden states of `prompts`. The one token that the engine draws for each is dropped.

    With `background` it runs in learning's share of the device.

    Raises InvalidRequest if the model has no hidden states to give, or fewer numbers than `dimensions`.
    """
    size, most = info.hidden_size, options.dimensions
    if most is not None and most > size > 0:
        raise InvalidRequest(f"dimensions is at most {size} for this model", param="dimensions")
    if not size:
        raise InvalidRequest("this model's family has no known output head, so it gives no embeddings", param="model")
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return Prompted(
        prompts,
        [adapter] * len(prompts),
        params,
        text=TextOptions(silent=True),
        priority=priority,
        background=background,
        pooling=options.pooling,
    )


def vectors(answers: Answers, options: EmbeddingOptions) -> list[array[float]]:
    """Return the vector of each prompt."""
    return [_shaped(array("f", prompt.embedding), options) for prompt in answers.prompts]


def _shaped(vector: array[float], options: EmbeddingOptions) -> array[float]:
    """Return the vector cut and normalised. A vector of zeros stays as it is."""
    vector = vector[: options.dimensions]
    length = math.sqrt(math.fsum(x * x for x in vector)) if options.normalize else 1.0
    return array("f", [x / length for x in vector]) if length not in (0.0, 1.0) else vector
