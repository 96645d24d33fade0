"""A model folder in, an mlx-lm model out, with everything wrong about the folder said before anything serves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes, load_model

from mlx_tandem.config import ModelConfig
from mlx_tandem.errors import ModelError

log = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 4096
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_EVAL_BYTES = 256 << 20

Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what its folder says of it."""

    module: nn.Module
    model_type: str
    dtype: mx.Dtype
    quantization: str | None
    parameters: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    heads: int  # of queries


def load(config: ModelConfig, report: Report) -> LoadedModel:
    """Return the model of `config.path` with its weights in memory. Raises ModelError."""
    model = load_unread(config, report)
    read_weights(model.module, report)
    return model


def load_unread(config: ModelConfig, report: Report) -> LoadedModel:
    """Return the model of `config.path` with its weights unread: there are shapes, and nothing must be computed with
    them before `read_weights`. `report(stage, fraction)` is told how far it is. Raises ModelError."""
    path = Path(config.path)
    settings = _read_settings(path)
    if "model_file" in settings:
        raise ModelError(f"{path / 'config.json'}: model_file asks to run code from the folder", param="model_file")
    report("reading weights", 0.0)
    try:
        if config.random_weights:
            module = _random_model(settings)
        else:
            _check_weights(path)
            module, settings = load_model(path, lazy=True)
    except ModelError:
        raise
    except (ValueError, OSError, KeyError, TypeError, RuntimeError, AttributeError, ImportError, SystemExit) as e:
        raise ModelError(f"{path}: {_first_line(e)}") from e
    module.eval()
    dtype = _cast(module, config)
    text = settings.get("text_config", settings)
    limit = int(text.get("max_position_embeddings") or DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > limit:
        log.warning("max_model_len is %d, the model's own limit %d: the latter holds", config.max_model_len, limit)
    quantization = settings.get("quantization")
    return LoadedModel(
        module,
        str(settings["model_type"]),
        dtype,
        f"{quantization['bits']}-bit" if quantization and "bits" in quantization else None,
        _count(module),
        int(text.get("vocab_size") or settings.get("vocab_size") or 0),
        _eos(settings),
        min(config.max_model_len or limit, limit),
        int(text.get("num_attention_heads") or text.get("n_head") or 32),
    )


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder", param="model")
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{file} is missing", param="model")
    try:
        settings = json.loads(file.read_text())
        generation = path / "generation_config.json"
        if generation.is_file() and (eos := json.loads(generation.read_text()).get("eos_token_id")) is not None:
            settings["eos_token_id"] = eos
    except (ValueError, UnicodeDecodeError) as e:
        raise ModelError(f"{path}: a configuration file is not JSON: {e}") from e
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise ModelError(f"{file}: model_type is missing", param="model_type")
    return settings


def _check_weights(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as e:
            raise ModelError(f"{index}: no weight_map in it") from e
        for shard in shards:
            if not isinstance(shard, str) or Path(shard).name != shard or not (path / shard).is_file():
                raise ModelError(f"{path / str(shard)} is missing; {index.name} names it", param="model")
    elif not any(path.glob("model*.safetensors")):
        raise ModelError(f"{path / 'model.safetensors'} is missing", param="model")


def _random_model(settings: dict[str, Any]) -> nn.Module:
    """The folder's shapes with random weights of a usual size, in its own precision, quantised if it says so; for
    benchmarks."""
    model_class, args_class = _get_classes(settings)
    module: nn.Module = model_class(args_class.from_dict(settings))
    dtype = _DTYPES.get(str(settings.get("torch_dtype", settings.get("dtype", "float32"))), mx.float32)
    mx.random.seed(0)

    def draw(path: str, p: mx.array) -> mx.array:
        if p.ndim == 1:
            return mx.ones(p.shape, dtype)
        return mx.random.normal(p.shape, dtype) * mx.array(p.shape[-1] ** -0.5, dtype)

    module.update(tree_map_with_path(draw, module.parameters()))
    if how := settings.get("quantization"):
        nn.quantize(module, int(how["group_size"]), int(how["bits"]))
    return module


def _cast(module: nn.Module, config: ModelConfig) -> mx.Dtype:
    """Bring floating-point weights to the precision that is computed in, and say which it is."""
    floating = [p for p in weights(module) if mx.issubdtype(p.dtype, mx.floating)]
    own = max((p.dtype for p in floating), key=[p.dtype for p in floating].count)
    if config.dtype != "auto":
        dtype = _DTYPES[config.dtype]
    else:
        # Only float32 goes through BLAS on a CPU: everything else is ten times slower there.
        dtype = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else own
    if dtype != own:
        keep = getattr(module, "cast_predicate", lambda _: True)
        module.update(
            tree_map_with_path(
                lambda k, p: p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) and keep(k) else p,
                module.parameters(),
            )
        )
    return dtype


def weights(module: nn.Module) -> list[mx.array]:
    """Every parameter array, in the order of the module tree."""
    leaves: Any = tree_flatten(module.parameters())
    return [p for _, p in leaves]


def read_weights(module: nn.Module, report: Report) -> None:
    """Read all weights into memory; `report(stage, fraction)` is told as they come in."""
    arrays = weights(module)
    total = sum(p.nbytes for p in arrays) or 1
    done, size = 0, 0
    batch: list[mx.array] = []
    for p in arrays:
        batch.append(p)
        size += p.nbytes
        if size >= _EVAL_BYTES:
            mx.eval(batch)
            done, batch, size = done + size, [], 0
            report("reading weights", done / total)
    mx.eval(batch)
    report("reading weights", 1.0)


def _count(module: nn.Module) -> int:
    """Weights as the model's authors count them: packed ones unpacked, scales left out."""
    total = 0
    for _, m in module.named_modules():
        own = {k: v for k, v in m.items() if isinstance(v, mx.array)}
        bits = getattr(m, "bits", None)
        for name, p in own.items():
            if bits and name == "weight":
                total += p.size * 32 // bits
            elif not (bits and name in ("scales", "biases")):
                total += p.size
    return total


def _eos(settings: dict[str, Any]) -> tuple[int, ...]:
    eos = settings.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return tuple(i for i in ids if isinstance(i, int))


def _first_line(e: BaseException) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
