"""Reads from a model folder what its steps move and compute, without reading a weight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.nn as nn

from mlx_tandem.capacity.work import Attention, StepWork
from mlx_tandem.config import EngineConfig
from mlx_tandem.model import footprint
from mlx_tandem.model.kernel_checks import examine
from mlx_tandem.model.loader import LoadedModel, load_unread, report_nothing, weights
from mlx_tandem.model.probe import Examined, count_layers
from mlx_tandem.model.targets import find_head, find_targets
from mlx_tandem.model_folder import text_settings

_PICKED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "experts_per_token")
"""Names under which config.json says how many experts a token has."""


def workload(config: EngineConfig, rank: int) -> StepWork:
    """Return the work of the steps of the model of `config`, and of adapters of this rank on all its linears.

    Raise ModelError if the model cannot be served.
    """
    model = load_unread(config.model, report_nothing)
    found = examine(config, model, evaluate=False)
    targets = find_targets(model.module)
    experts = {path: target for path, target in targets.items() if target.shape.experts}
    expert_bytes = sum(p.nbytes for target in experts.values() for p in weights(target.module))
    expert_parameters = sum(t.shape.inputs * t.shape.outputs * t.shape.experts for t in experts.values())
    per_layer = max((t.shape.experts for t in experts.values()), default=0)
    picked = _picked(model) if experts else 0
    head = find_head(model.module)
    head_parameters = 0 if head is None else head.shape.inputs * head.shape.outputs
    used = expert_parameters * picked // max(per_layer, 1)
    shapes = {path: target.shape for path, target in targets.items()}
    widths = sum((s.inputs + s.outputs) * max(s.experts, 1) for s in shapes.values())
    return StepWork(
        model_type=model.model_type,
        dtype=str(model.dtype).rpartition(".")[2],
        quantization=model.quantization,
        parameters=model.parameters,
        layers=count_layers(model),
        hidden=_hidden(shapes),
        heads=model.heads,
        head_dim=found.layers[0].keys.dim if found.layers else 0,
        kv_heads=found.layers[0].keys.heads if found.layers else 0,
        read_bytes=footprint.read_by_a_step(model.module) - expert_bytes,
        expert_bytes=expert_bytes,
        experts=per_layer,
        experts_per_token=picked,
        row_parameters=model.parameters - _looked_up(model.module) - expert_parameters + used,
        head_parameters=head_parameters,
        attention=_attention(found),
        state_bytes=sum(state.nbytes() for state in found.states),
        adapter_bytes=footprint.adapter_bytes(model.module, rank, model.dtype.size),
        adapter_parameters=rank * widths,
    )


def _picked(model: LoadedModel) -> int:
    """Return how many experts of a layer a token has; 1 where config.json does not say."""
    text = text_settings(model.settings)
    return next((int(text[name]) for name in _PICKED if text.get(name)), 1)


def _hidden(shapes: dict[str, Any]) -> int:
    """Return the width of the model's hidden states, which most linears have as their input."""
    return Counter(shape.inputs for shape in shapes.values()).most_common(1)[0][0] if shapes else 0


def _looked_up(module: nn.Module) -> int:
    """Return the number of parameters of embeddings of which a step reads single rows; 0 if one is the head, too."""
    modules = module.named_modules()
    if not any(path.rpartition(".")[2] == "lm_head" for path, _ in modules):
        return 0
    tables = {id(m): m for _, m in modules if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))}
    return sum(_entries(table) for table in tables.values())


def _entries(table: Any) -> int:
    rows, width = table.weight.shape
    return int(rows) * int(width * 32 // table.bits if isinstance(table, nn.QuantizedEmbedding) else width)


def _attention(found: Examined) -> tuple[Attention, ...]:
    """Return the layers with attention, those with the same window together."""
    layers, sizes = Counter[int](), Counter[int]()
    for layer in found.layers:
        layers[layer.window or 0] += 1
        sizes[layer.window or 0] += layer.bytes_per_token()
    return tuple(Attention(layers[window], sizes[window], window) for window in sorted(layers))
