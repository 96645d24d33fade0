"""A summary of a model folder: what the model is, what its layers cache, and what is not supported for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mlx_tandem.config import EngineConfig
from mlx_tandem.model.cache.kvformat import LayerShape
from mlx_tandem.model.cache.states import StateShape
from mlx_tandem.model.kernel_checks import examine, prepare
from mlx_tandem.model.loader import LoadedModel, load_unread, read_weights, report_nothing
from mlx_tandem.model.probe import Examined, count_layers
from mlx_tandem.model.recurrent import NO_DRAFTS, verifies_drafts
from mlx_tandem.types import CacheGroupInfo, ModelSummary


def summarise(config: EngineConfig, *, check: bool = False) -> ModelSummary:
    """Return the summary of the folder of `config`. Raise ModelError if it is not served.

    `check`: whether to read the weights and to compare the model's answers with and without the server's caches, as a
    start does.
    """
    model = load_unread(config.model, report_nothing)
    if check:
        read_weights(model, report_nothing)
        prepare()
    found = examine(config, model, evaluate=check)
    return ModelSummary(
        model_type=model.model_type,
        dtype=str(model.dtype).rpartition(".")[2],
        quantization=model.quantization,
        parameters=model.parameters,
        layers=count_layers(model),
        groups=groups_of(found.layers, found.states),
        unsupported=tuple(_unsupported(model, found)),
        vision=model.vision,
    )


def groups_of(layers: Sequence[LayerShape], states: Sequence[StateShape]) -> tuple[CacheGroupInfo, ...]:
    """Return what the layers of each kind cache; layers with different windows are apart."""
    counts, sizes = Counter[int](), Counter[int]()
    for layer in layers:
        counts[layer.window or 0] += 1
        sizes[layer.window or 0] += layer.bytes_per_token()
    groups = [
        CacheGroupInfo("window" if window else "attention", counts[window], sizes[window], window)
        for window in sorted(counts)
    ]
    if states:
        groups.append(CacheGroupInfo("state", len(states), sum(state.nbytes() for state in states)))
    return tuple(groups)


def _unsupported(model: LoadedModel, found: Examined) -> Iterator[str]:
    if not verifies_drafts(model, found):
        yield f"drafts (--spec-decode): the family {NO_DRAFTS}"
