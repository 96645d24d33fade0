"""mlx-lm's adapter format: its configuration, and which tensor is which half of which module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_tandem import limits
from mlx_tandem.adapters.formats.header import Tensor
from mlx_tandem.adapters.formats.parts import CONFIG, WEIGHTS, Half, LinearShape, Modules, Spec, layer_of, refuse
from mlx_tandem.adapters.formats.rules import integer, is_off, positive, rank_in_range, refuse_unknown

_USED = frozenset("fine_tune_type lora_parameters num_layers lora_layers use_dora".split())
_HARMLESS = frozenset(
    """model train optimizer optimizer_config data seed batch_size iters val_batches learning_rate steps_per_report
    steps_per_eval resume_adapter_file adapter_path adapter_file save_every test test_batches max_seq_length config
    grad_checkpoint grad_accumulation_steps clear_cache_threshold lr_schedule mask_prompt report_to project_name
    wandb trust_remote_code hf_dataset prompt_feature completion_feature chat_feature text_feature
    warmup""".split()
)
_PARAMETERS = frozenset("rank scale dropout keys".split())


def parse(
    config: Mapping[str, Any],
    header: Mapping[str, Tensor],
    linears: Mapping[str, LinearShape],
    max_rank: int,
    base_layers: int,
) -> Spec:
    """Return what to load from a folder in mlx-lm's format.

    Raise ModelError naming the key or tensor that is not supported. `linears`, `max_rank` and `base_layers` are as
    in `loading.read`.
    """
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        refuse(CONFIG, "fine_tune_type", f"is {str(kind)[:40]!r}; only 'lora' can be served beside other adapters")
    if not is_off(config.get("use_dora")):
        refuse(CONFIG, "use_dora", "is set; DoRA is not supported")
    refuse_unknown(config, _USED | _HARMLESS)
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        refuse(CONFIG, "lora_parameters", "must be an object" if "lora_parameters" in config else "is missing")
    refuse_unknown(parameters, _PARAMETERS, "lora_parameters.")
    rank = rank_in_range(integer(parameters, "rank", "lora_parameters."), "lora_parameters.rank", max_rank)
    scale = positive(parameters.get("scale"), "lora_parameters.scale", limits.MAX_LORA_SCALE)
    layers_key = "num_layers" if "num_layers" in config else "lora_layers"
    first = 0
    if layers_key in config:
        count = integer(config, layers_key)
        first = base_layers - count if 0 < count < base_layers else 0

    name = WEIGHTS["mlx-lm"]
    spec = Spec(scale, {})
    modules = Modules(linears, base_layers, header)
    for tensor in sorted(header):
        path, _, leaf = tensor.rpartition(".")
        if leaf == "m":
            refuse(name, tensor, "is a DoRA magnitude; DoRA is not supported")
        if leaf not in ("lora_a", "lora_b"):
            refuse(name, tensor, "is not a LoRA tensor")
        path, shape = modules.shape(path, tensor, name)
        layer = layer_of(path)
        if layer is not None and layer < first:
            refuse(name, tensor, f"lies outside the last {base_layers - first} of {base_layers} layers ({layers_key})")
        # Dense tensors are stored in our layout; the switch layers' (E, r, in) and (E, out, r) are transposed.
        half = Half(tensor, None, rank, scale, turn=shape.experts > 0)
        spec.modules.setdefault(path, ([], []))[leaf == "lora_b"].append(half)
    return spec
