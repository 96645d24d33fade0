"""PEFT's LoRA format: its configuration, and which tensor is which half of which module."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from mlx_tandem import limits
from mlx_tandem.adapters.formats.header import Tensor
from mlx_tandem.adapters.formats.parts import CONFIG, WEIGHTS, Half, LinearShape, Modules, Spec, layer_of, refuse
from mlx_tandem.adapters.formats.rules import integer, is_off, positive, rank_in_range, refuse_unknown

T = TypeVar("T")

_USED = frozenset(
    """peft_type r lora_alpha use_rslora rank_pattern alpha_pattern init_lora_weights bias layers_to_transform
    alora_invocation_tokens task_type modules_to_save""".split()
)
_HARMLESS = frozenset(
    """auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules
    exclude_modules lora_dropout fan_in_fan_out layers_pattern megatron_core qalora_group_size runtime_config
    eva_config ensure_weight_tying""".split()
)
_OFF = frozenset(
    """use_dora lora_bias layer_replication trainable_token_indices use_qalora loftq_config
    corda_config arrow_config target_parameters megatron_config""".split()
)
EXPERT = re.compile(r"(.+)\.experts\.(\d{1,6})\.([A-Za-z0-9_]+)")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LITERAL = re.compile(r"\^?(?:[A-Za-z0-9_.]|\\\.)+\$?")
PREFIX = "base_model.model."
SCORES = "SEQ_CLS"
"""PEFT's `task_type` of an adapter that scores texts."""

SCORE_HEAD = f"{PREFIX}score.weight"
"""The tensor of a score head, [1, hidden]."""

_HEADS = frozenset(("score", "classifier"))
"""The modules that PEFT names in `modules_to_save` for this task. Models have one of them; language models `score`."""

_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


def parse(
    config: Mapping[str, Any],
    header: Mapping[str, Tensor],
    linears: Mapping[str, LinearShape],
    max_rank: int,
    base_layers: int,
) -> Spec:
    """Return what to load from a folder in PEFT's format.

    Raise ModelError naming the key or tensor that is not supported. `linears`, `max_rank` and `base_layers` are as
    in `loading.read`.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        refuse(CONFIG, "peft_type", "is missing" if kind is None else f"is {str(kind)[:40]!r}; only 'LORA' is served")
    for key in sorted(_OFF & config.keys()):
        if not is_off(config[key]):
            refuse(CONFIG, key, "is set, which is not supported")
    if config.get("bias", "none") != "none":
        refuse(CONFIG, "bias", f"is {str(config['bias'])[:40]!r}; only 'none' is supported")
    init = config.get("init_lora_weights", True)
    if not any(init is k or (isinstance(k, str) and init == k) for k in _KEEPS_BASE):
        refuse(CONFIG, "init_lora_weights", f"is {str(init)[:40]!r}, which changes the base model's weights")
    if not isinstance(config.get("use_rslora", False), bool):
        refuse(CONFIG, "use_rslora", "must be true or false")
    refuse_unknown(config, _USED | _HARMLESS | _OFF)

    rank = rank_in_range(integer(config, "r"), "r", max_rank)
    alpha = positive(config.get("lora_alpha"), "lora_alpha", limits.MAX_LORA_ALPHA)
    root = bool(config.get("use_rslora"))
    ranks = _pattern(
        config, "rank_pattern", lambda v, f: rank_in_range(v, f, max_rank) if type(v) is int else _not_integer(f)
    )
    alphas = _pattern(config, "alpha_pattern", lambda v, f: positive(v, f, limits.MAX_LORA_ALPHA))
    layers = _layers(config)

    def scaled(a: float, r: int) -> float:
        scale = a / math.sqrt(r) if root else a / r
        if scale > limits.MAX_LORA_SCALE:
            field = "lora_alpha" if a == alpha else "alpha_pattern"
            refuse(CONFIG, field, f"gives a scale of {scale:g} at rank {r}; {limits.MAX_LORA_SCALE:g} is the limit")
        return scale

    name = WEIGHTS["peft"]
    spec = Spec(scaled(alpha, rank), {}, _invocation(config), _score_head(config, header))
    modules = Modules(linears, base_layers, header)
    for tensor in sorted(header.keys() - {spec.score_head}):
        if ".lora_magnitude_vector" in tensor:
            refuse(name, tensor, "is a DoRA magnitude; DoRA is not supported")
        stem, _, leaf = tensor.removesuffix(".weight").rpartition(".")
        if leaf not in ("lora_A", "lora_B") or not tensor.endswith(".weight") or not stem.startswith(PREFIX):
            refuse(name, tensor, "is not a LoRA weight of a linear layer")
        path = stem.removeprefix(PREFIX)
        named, expert = _expert(path, modules)
        target, shape = modules.shape(named, tensor, name)
        if expert is not None and expert >= shape.experts:
            refuse(name, tensor, f"names expert {expert}; the model has {shape.experts}")
        if layers is not None and layer_of(path) not in layers:
            refuse(name, tensor, "lies outside the layers of layers_to_transform")
        r = _first(ranks, path, rank)
        half = Half(tensor, expert, r, scaled(_first(alphas, path, alpha), r), turn=True)
        spec.modules.setdefault(target, ([], []))[leaf == "lora_B"].append(half)
    if not spec.modules:
        refuse(name, spec.score_head, "is all there is: an adapter needs LoRA weights of a linear layer, too")
    return spec


def _not_integer(field: str) -> NoReturn:
    refuse(CONFIG, field, "must be an integer")


def _expert(path: str, modules: Modules) -> tuple[str, int | None]:
    """Return a name of the served module and the expert's number for one of PEFT's linears.

    PEFT adapts one linear per expert; the served model stacks them in one module under another name.
    """
    m = EXPERT.fullmatch(path)
    if m is None or modules.paths(path):
        return path, None
    block, leaf = m.group(1), MIXTRAL.get(m.group(3), m.group(3))
    for middle in ("switch_mlp", "experts"):
        if modules.paths(f"{block}.{middle}.{leaf}"):
            return f"{block}.{middle}.{leaf}", int(m.group(2))
    return path, None


def _layers(config: Mapping[str, Any]) -> frozenset[int] | None:
    value = config.get("layers_to_transform")
    if is_off(value) and value is not False:
        return None
    items = value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in items):
        refuse(CONFIG, "layers_to_transform", "must be an integer or a list of integers")
    return frozenset(items)


def _invocation(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that invoke an activated LoRA (aLoRA); empty for an adapter that applies everywhere."""
    key = "alora_invocation_tokens"
    value = config.get(key)
    if is_off(value):
        return ()
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        refuse(CONFIG, key, "must be a list of token ids")
    most, highest = limits.MAX_INVOCATION_TOKENS, int(limits.MODEL["vocab_size"].high) - 1
    if len(value) > most:
        refuse(CONFIG, key, f"has {len(value)} tokens; {most} is the limit")
    for i, token in enumerate(value):
        if not 0 <= token <= highest:
            refuse(CONFIG, f"{key}[{i}]", f"must lie between 0 and {highest}")
    return tuple(value)


def _score_head(config: Mapping[str, Any], header: Mapping[str, Tensor]) -> str:
    """Return the name of the tensor with the score head; empty for an adapter that is no reward model."""
    key, file = "modules_to_save", WEIGHTS["peft"]
    saved = config.get(key)
    named = [] if is_off(saved) else saved
    if not isinstance(named, list) or not all(isinstance(name, str) and name in _HEADS for name in named):
        refuse(CONFIG, key, "is set to something else than ['score'], which is not supported")
    if config.get("task_type") != SCORES:
        if named:
            refuse(CONFIG, key, f"names a score head, but task_type is not {SCORES!r}")
        return ""
    head = header.get(SCORE_HEAD)
    if head is None:
        refuse(file, SCORE_HEAD, f"is missing: with the task_type {SCORES!r} the adapter needs its score head")
    if len(head.shape) != 2 or head.shape[0] != 1:
        refuse(
            file, SCORE_HEAD, f"has shape {list(head.shape)}; a reward model gives one score, so it needs [1, hidden]"
        )
    return SCORE_HEAD


def _pattern(config: Mapping[str, Any], key: str, check: Callable[[Any, str], T]) -> list[tuple[str, bool, T]]:
    """Return the (suffix, whole, value) entries of a pattern setting in file order.

    PEFT takes the keys as regular expressions. One that comes from outside can take for ever to match, so only plain
    names are accepted: letters, digits, '_', '.', and '^' in front.
    """
    value = config.get(key) or {}
    if not isinstance(value, dict):
        refuse(CONFIG, key, "must be an object")
    found = []
    for pattern, item in value.items():
        if not _LITERAL.fullmatch(pattern):
            refuse(CONFIG, f"{key}.{pattern[:80]}", "is a regular expression; only plain module names are supported")
        plain = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        found.append((plain, pattern.startswith("^"), check(item, f"{key}.{pattern[:80]}")))
    return found


def _first(patterns: list[tuple[str, bool, T]], path: str, default: T) -> T:
    for name, whole, value in patterns:
        if path == name or (not whole and path.endswith("." + name)):
            return value
    return default
