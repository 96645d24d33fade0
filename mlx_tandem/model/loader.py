"""Loads a model folder as an mlx-lm model, and says everything that is wrong with the folder before anything is
served.
"""

from __future__ import annotations

import dataclasses
import glob
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes, dequantize_model, load_model
from safetensors import SafetensorError, safe_open

from mlx_tandem.adapters import refuse_adapter
from mlx_tandem.config import ModelConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend
from mlx_tandem.model.mtp import PredictionHead, load_head
from mlx_tandem.model.vision import library
from mlx_tandem.model.vision.encoder import Encoder, load_encoder
from mlx_tandem.model.vision.library import TextArgs, TextModel
from mlx_tandem.model_folder import CONFIG, VISION_FAMILIES, check_text, check_vision, text_settings
from mlx_tandem.printable import printable
from mlx_tandem.small_files import read_object
from mlx_tandem.types import VisionInfo

log = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 4096
"""Longest sequence of a model whose folder names no limit."""
_MODEL_TYPE = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Pattern of a `model_type`, which becomes the name of a Python module."""

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_EVAL_BYTES = 256 << 20
"""Bytes of weights that are read at a time."""

Report = Callable[[str, float], None]
"""Function that is told the stage of loading and the fraction of it that is done."""


def report_nothing(stage: str, fraction: float) -> None:
    """Ignore the stage: a Report for callers that show no progress."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what its folder says about it."""

    folder: Path
    settings: Mapping[str, Any]
    """The contents of config.json."""

    module: nn.Module
    model_type: str
    dtype: mx.Dtype
    quantization: str | None
    parameters: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    heads: int
    """Number of query heads."""

    mtp: PredictionHead | None = None
    """The head for multi-token prediction, if it was asked for."""

    encoder: Encoder | None = None
    """The encoder of images, if they are served."""

    vision: VisionInfo | None = None
    """What the folder has for images; None: nothing."""


def load(config: ModelConfig, report: Report) -> LoadedModel:
    """Return the model of `config.path` with its weights in memory. Raise ModelError if it cannot be loaded."""
    model = load_unread(config, report)
    read_weights(model, report)
    return model


def load_unread(config: ModelConfig, report: Report, *, mtp: bool = False) -> LoadedModel:
    """Return the model of `config.path` with its weights unread.

    Its arrays have shapes, but nothing may be computed with them before `read_weights`. `report(stage, fraction)` is
    told how far loading is. With `mtp` it has its head for multi-token prediction. Raise ModelError if the model cannot
    be loaded.
    """
    path = Path(config.path)
    file = path / CONFIG
    settings = _read_settings(path)
    report("reading weights", 0.0)
    with blamed_on(path, f"its weights do not fit {CONFIG}", settings):
        if config.random_weights:
            module = _random_model(settings)
        else:
            _check_weights(path)
            with _without_patterns(path) as plain:
                module, settings = load_model(plain, lazy=True, get_model_classes=lambda config: _classes(config, file))
        module.eval()
        dtype = _cast(module, config)
        head = load_head(module, settings, _stored(path), dtype, str(path)) if mtp else None
    encoder, vision = _load_vision(config, settings, dtype)
    text = text_settings(settings)
    limit = _first(text, "max_position_embeddings") or DEFAULT_MAX_MODEL_LEN
    if config.max_model_len > limit:
        log.warning("max_model_len %d is lowered to the model's limit of %d", config.max_model_len, limit)
    quantization = settings.get("quantization")
    return LoadedModel(
        path,
        settings,
        module,
        str(settings["model_type"]),
        dtype,
        f"{quantization['bits']}-bit" if quantization and "bits" in quantization else None,
        _count(module),
        _first(text, "vocab_size") or _first(settings, "vocab_size"),
        _eos(settings),
        min(config.max_model_len or limit, limit),
        _first(text, "num_attention_heads", "n_head") or 32,
        head,
        encoder,
        vision,
    )


def _load_vision(
    config: ModelConfig, settings: Mapping[str, Any], dtype: mx.Dtype
) -> tuple[Encoder | None, VisionInfo | None]:
    """Return the encoder of a folder's images, if they are served, and what the folder has for them.

    A part for images that cannot be loaded is no reason to refuse the folder, which is served as a text model then.
    """
    if not library.has_images(settings):
        return None, None
    if reason := library.refusal(config, settings, installed=library.is_installed()):
        return None, VisionInfo(refusal=reason)
    try:
        check_vision(settings, CONFIG)
        encoder = load_encoder(settings, _stored(Path(config.path)), dtype)
    except Exception as e:  # mlx-vlm trusts a folder and fails in many ways
        log.warning("%s: its part for images cannot be loaded: %s", config.path, first_line(e))
        return None, VisionInfo(refusal=printable(f"the part for images cannot be loaded ({first_line(e)})"))
    return encoder, VisionInfo(encoder.image_token, video_token=encoder.video_token)


def _stored(path: Path) -> dict[str, mx.array]:
    """Return all weights of a folder by their names there, unread."""
    files: list[Any] = [mx.load(str(file)) for file in path.glob("model*.safetensors")]
    return {name: array for arrays in files for name, array in arrays.items()}


@contextmanager
def _without_patterns(path: Path) -> Iterator[Path]:
    """Yield a path of the same folder without `*`, `?` and `[`, since mlx-lm looks for weights by a pattern of it."""
    if glob.escape(str(path)) == str(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as folder:
        link = Path(folder) / "model"
        link.symlink_to(path.resolve(), target_is_directory=True)
        yield link


@contextmanager
def blamed_on(file: Path, problem: str, settings: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn every error inside the block into a ModelError about `file`.

    mlx-lm trusts a folder and fails in many ways. The error names the `settings` whose type is not the one that the
    model family expects.
    """
    try:
        yield
    except ModelError:
        raise
    except (Exception, SystemExit) as e:
        raise ModelError(f"{file}: {problem} ({first_line(e)}){suspects(settings or {})}", param=file.name) from e


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return ": ".join([type(error).__name__, *(line[:500] for line in str(error).strip().splitlines()[:1])])


def suspects(settings: Mapping[str, Any]) -> str:
    """Return the end of an error message that lists settings of another type than mlx-lm's arguments; empty if there
    are none.

    This alone is no reason to refuse a folder, because mlx-lm's type hints are not always right.
    """
    found = []
    try:
        hints = get_type_hints(_get_classes(dict(settings))[1])
    except Exception:  # a module of mlx-lm may fail in any way on import
        return ""
    for name, hint in hints.items():
        try:
            if name in settings:
                msgspec.convert(settings[name], hint)
        except msgspec.ValidationError:
            found.append(name)
        except TypeError:  # a type that the library does not know
            continue
    return f"; of another type than expected: {', '.join(found)}" if found else ""


def _classes(config: dict[str, Any], file: Path) -> tuple[Any, Any]:
    """Return the functions that mlx-lm calls to make the model and its arguments; their errors name `file`."""
    with blamed_on(file, f"model_type {config['model_type']!r} is not supported"):
        model_class, args_class = classes_of(config)

    def build(make: Callable[..., Any], given: Any) -> Any:
        with blamed_on(file, "no model can be made of it", config):
            return make(given)

    return partial(build, model_class), SimpleNamespace(from_dict=partial(build, args_class.from_dict))


def classes_of(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the classes of a model and of its arguments. Raises ValueError if there are none for it."""
    family = VISION_FAMILIES.get(settings["model_type"])
    if family is not None and family.own_text_part:
        return TextModel, TextArgs
    found: tuple[Any, Any] = _get_classes(settings)
    return found


def _read_settings(path: Path) -> dict[str, Any]:
    """Return config.json with the end tokens of generation_config.json. Raise ModelError if it cannot be served."""
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder", param="model")
    file = path / CONFIG
    settings = read_object(file)
    refuse_adapter(path)
    if settings is None:
        raise ModelError(f"{file} is missing", param="model")
    eos = (read_object(path / "generation_config.json") or {}).get("eos_token_id")
    if eos is not None:
        settings["eos_token_id"] = eos
    if not isinstance(settings.get("model_type"), str):
        raise ModelError(f"{file}: model_type is missing", param="model_type")
    if not _MODEL_TYPE.fullmatch(settings["model_type"]):
        raise ModelError(f"{file}: model_type {settings['model_type']!r} is no model's name", param="model_type")
    if "model_file" in settings:
        raise ModelError(f"{file}: model_file asks to run code from the folder", param="model_file")
    check_text(settings, str(file))
    return settings


def is_packed(config: ModelConfig) -> bool:
    """Return whether the model's weights are quantised. Raise ModelError if its config.json cannot be served."""
    return bool(_read_settings(Path(config.path)).get("quantization"))


def _check_weights(path: Path) -> None:
    """Raise ModelError unless all files of weights exist and have sound headers. MLX itself trusts a header."""
    index = path / "model.safetensors.index.json"
    if (listed := read_object(index)) is not None:
        shards = listed.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ModelError(f"{index}: weight_map must name the file of each tensor", param="weight_map")
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard or not (path / shard).is_file():
                raise ModelError(f"{path / shard} is missing; {index.name} names it", param="model")
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{path / 'model.safetensors'} is missing", param="model")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is not a regular file", param=file.name)
        try:
            with safe_open(file, framework="numpy", backend="pread"):
                pass
        except (SafetensorError, OSError) as e:
            raise ModelError(f"{file} is not a valid safetensors file: {e}", param=file.name) from e


def _random_model(settings: dict[str, Any]) -> nn.Module:
    """Return a model of the folder's shapes and precision with random weights, quantised if the folder says so.

    It is for benchmarks.
    """
    model_class, args_class = classes_of(settings)
    module: nn.Module = model_class(args_class.from_dict(settings))
    dtype = _DTYPES.get(str(settings.get("torch_dtype", settings.get("dtype", "float32"))), mx.float32)
    mx.random.seed(0)

    def draw(path: str, p: mx.array) -> mx.array:
        if p.ndim == 1:
            return mx.ones(p.shape, dtype)
        return mx.random.normal(p.shape, dtype) * mx.array(p.shape[-1] ** -0.5, dtype)

    module.update(tree_map_with_path(draw, module.parameters()))
    if how := settings.get("quantization"):
        nn.quantize(
            module,
            int(how["group_size"]),
            int(how["bits"]),
            mode=str(how.get("mode", "affine")),
            # As mlx-lm does: a module has the settings under its own name, or False, where there are any.
            class_predicate=lambda path, m: how.get(path, True) if hasattr(m, "to_quantized") else False,
        )
    return module


def _cast(module: nn.Module, config: ModelConfig) -> mx.Dtype:
    """Convert floating-point weights to the type that the model computes in, and return that type."""
    floating = [p for p in weights(module) if mx.issubdtype(p.dtype, mx.floating)]
    own = max((p.dtype for p in floating), key=[p.dtype for p in floating].count)
    if config.dtype != "auto":
        dtype = _DTYPES[config.dtype]
    else:
        dtype = mx.float32 if backend.current().products.only_float32_is_fast else own
    if dtype != own:
        keep = getattr(module, "cast_predicate", lambda _: True)
        module.update(
            tree_map_with_path(
                lambda k, p: p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) and keep(k) else p,
                module.parameters(),
            )
        )
    return dtype


def not_finite(module: nn.Module) -> str | None:
    """Return the name of the first weight that holds NaN or infinity, None if there is none."""
    leaves: Any = tree_flatten(module.parameters())
    for name, p in leaves:
        if mx.issubdtype(p.dtype, mx.floating) and not mx.isfinite(p).all().item():
            return str(name)
    return None


def weights(module: nn.Module) -> list[mx.array]:
    """Return every parameter array, in the order of the module tree."""
    leaves: Any = tree_flatten(module.parameters())
    return [p for _, p in leaves]


def every_weight(model: LoadedModel) -> list[mx.array]:
    """Return every parameter array of a model, of its head for multi-token prediction and of its encoder."""
    parts = [model.module, model.mtp, None if model.encoder is None else model.encoder.module]
    return [array for part in parts if part is not None for array in weights(part)]


def read_weights(model: LoadedModel, report: Report) -> None:
    """Read all weights into memory. `report(stage, fraction)` is told how far it is. Raise ModelError if they are
    unreadable.
    """
    arrays = every_weight(model)
    total = sum(p.nbytes for p in arrays) or 1
    done, size = 0, 0
    batch: list[mx.array] = []
    with blamed_on(model.folder, "its weights cannot be read"):
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
    """Return the number of weights as the model's authors count them: quantised ones unpacked, scales left out."""
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


def _first(settings: Mapping[str, Any], *names: str) -> int:
    """Return the first of these settings that is set, the largest if it is a list with one per layer; 0 if none is."""
    values = (settings.get(name) for name in names)
    return next((int(max(value) if isinstance(value, list) else value) for value in values if value), 0)


def _eos(settings: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids of the end tokens."""
    eos = settings.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return tuple(i for i in ids if type(i) is int and i >= 0)


# --- Weights in a CPU's memory ---------------------------------------------------------------------------------------


def lay_out(module: nn.Module) -> None:
    """Lay the float32 weights of all linears out in this way, one after the other; their values and shapes stay."""
    for each in module.modules():
        own: Any = each
        if isinstance(each, nn.Linear) and own.weight.dtype == mx.float32:
            own.weight = mx.contiguous(own.weight.T).T
            mx.eval(own.weight)


UNPACKED = ", unpacked"
"""End of the quantisation of a model whose weights were unpacked."""

MOST_SHARE = 0.5
"""Largest share of the memory limit that unpacked weights may take."""


def unpack_for_cpu(model: LoadedModel, config: ModelConfig, limit: int) -> LoadedModel:
    """Return the model with its packed weights unpacked to the type that it computes in, if the device is a CPU.

    Weights stay packed if the settings say so, or if they would take more than MOST_SHARE of `limit` bytes. Nothing is
    evaluated: call it before the weights are read.
    """
    if not backend.current().products.only_float32_is_fast or not config.unpack_weights or model.quantization is None:
        return model
    packed = sum(p.nbytes for p in weights(model.module))
    size = model.parameters * model.dtype.size
    if size > MOST_SHARE * limit:
        log.warning(
            "its %s weights stay packed, which is slow on a CPU: as %s they would take %.1f GB of %.1f",
            model.quantization,
            _name(model.dtype),
            size / 1e9,
            limit / 1e9,
        )
        return model
    log.info(
        "its %s weights are unpacked to %s, which this CPU multiplies faster: %.1f GB instead of %.1f",
        model.quantization,
        _name(model.dtype),
        size / 1e9,
        packed / 1e9,
    )
    for module in (model.module, model.mtp):
        if module is not None:
            _unpack(module, model.dtype)
    return dataclasses.replace(model, quantization=f"{model.quantization}{UNPACKED}")


def _unpack(module: nn.Module, dtype: mx.Dtype) -> None:
    """Replace all modules that have packed weights by ones that have weights of this type."""
    packed = [path for path, each in module.named_modules() if "scales" in each]
    dequantize_model(module)
    plain = dict(module.named_modules())
    for path in packed:
        each: Any = plain[path]
        if "scales" not in each:
            each.weight = each.weight.astype(dtype)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


# --- Families that are refused by name -------------------------------------------------------------------------------

_SPARSE = "each of its positions chooses which earlier ones it sees (sparse attention), which the paged cache cannot do"

UNSERVED = {
    "afm7": "its last layers compute their positions from the number of keys in the cache, which is padded in a batch",
    "dbrx": "its code waits in the middle of a step for the experts that were chosen, so no step can be compiled",
    "deepseek_v32": _SPARSE,
    "deepseek_v41": "its layers cache groups of positions that are compressed into one",
    "glm_moe_dsa": _SPARSE,
    "gpt_bigcode": "its code takes one position for all rows of a batch, whose positions differ",
    "llama4": "its layers see chunks of positions, and its code takes one position for all rows of a batch",
    "minimax_m3_vl": _SPARSE,
    "phi3small": "mlx-lm's code for its block-sparse attention ends the process with an invalid memory access",
}
"""The reason why a family is not served, by `model_type`."""
