"""Adapter folders in, plain arrays out: mlx-lm's and PEFT's LoRA formats, read without trusting a byte of them.

`read` opens each file once, relative to the folder's descriptor, and works on that descriptor only: what is
checked, hashed and loaded is one and the same file. The Rust `safetensors` library checks the header (sizes,
overlaps, holes, overflow); then names, dtypes, shapes and the total size are held against the served model before
any tensor data is read. Whatever would change the meaning of the adapter and is not supported is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from mlx_tandem import limits
from mlx_tandem.errors import ModelError, TooLarge
from mlx_tandem.types import AdapterInfo

Array = npt.NDArray[np.float32]
Format = Literal["mlx-lm", "peft"]
T = TypeVar("T")

CONFIG = "adapter_config.json"
WEIGHTS: dict[Format, str] = {"mlx-lm": "adapters.safetensors", "peft": "adapter_model.safetensors"}
MAX_HEADER_BYTES = 64 << 20
MAX_NAME = 200  # characters of a name from a file that an error repeats


class LinearShape(NamedTuple):
    """A linear of the served model. `experts` is 0 unless the module holds one matrix per expert."""

    inputs: int
    outputs: int
    experts: int = 0


@dataclass(frozen=True)
class AdapterWeights:
    """One adapter, ready for the device.

    `tensors[path]` is (A, B), float32 and C-contiguous: A [inputs, r], B [r, outputs], or with a leading expert
    axis. The scale is folded into B, so the module's delta is x @ A @ B. Ranks may differ between modules.
    """

    info: AdapterInfo
    tensors: dict[str, tuple[Array, Array]]


def read(
    folder: Path,
    linears: Mapping[str, LinearShape],
    *,
    max_rank: int,
    base_layers: int,
    follow_links: bool = False,
) -> AdapterWeights:
    """The adapter in `folder`, checked against the model's `linears` (by module path) and `base_layers` layers.

    Raises ModelError (TooLarge for a file over its limit) naming the file and the field. `follow_links` permits
    the files to be symbolic links, as in a Hugging Face cache; the folder itself may always be reached by one.
    """
    with _directory(folder) as directory:
        config = _config(directory, follow_links)
        kind = _format(directory, config)
        with _file(directory, WEIGHTS[kind], limits.MAX_ADAPTER_BYTES, follow_links) as fd:
            header = _header(fd, WEIGHTS[kind])
            parse = _peft if kind == "peft" else _mlx_lm
            spec = parse(config, header, linears, max_rank, base_layers)
            return _load(fd, kind, header, spec, linears)


# --- opening -----------------------------------------------------------------------------------------------------


def refuse(where: str, field: str | None, problem: str) -> NoReturn:
    """`where` is a file of the folder or the request's own field; `field` a key or a tensor of the file."""
    name = (field or "")[:MAX_NAME]
    raise ModelError(f"{where}: {name + ' ' if name else ''}{problem}", param=name or where, code="invalid_adapter")


@contextmanager
def _directory(folder: Path) -> Iterator[int]:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError:
        refuse("path", None, "is not a folder")
    except (FileNotFoundError, ValueError):  # ValueError: a NUL in the path
        refuse("path", None, "does not exist")
    except OSError as e:
        refuse("path", None, f"cannot be opened: {e.strerror}")
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _file(directory: int, name: str, limit: int, follow_links: bool) -> Iterator[int]:
    """A descriptor of a regular file of at most `limit` bytes. A FIFO or device does not block the open."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        refuse(name, None, "is missing from the adapter folder")
    except OSError as e:
        try:
            link = stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
        except OSError:
            link = False
        refuse(name, None, "is a symbolic link, which is not followed" if link else f"cannot be opened: {e.strerror}")
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):
            refuse(name, None, "is not a regular file")
        if st.st_size > limit:
            raise TooLarge(f"{name}: is {st.st_size} bytes, more than the limit of {limit}", param=name)
        yield fd
    finally:
        os.close(fd)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _config(directory: int, follow_links: bool) -> dict[str, Any]:
    with _file(directory, CONFIG, limits.MAX_CONFIG_BYTES, follow_links) as fd:
        raw = _read_exactly(fd, 0, os.fstat(fd).st_size, CONFIG)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                refuse(CONFIG, key, "appears twice")
            found[key] = value
        return found

    def constant(name: str) -> NoReturn:
        refuse(CONFIG, None, f"contains {name}, which is not a number")

    try:
        config = json.loads(raw.tobytes().decode(), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError):
        refuse(CONFIG, None, "is not valid JSON")
    if not isinstance(config, dict):
        refuse(CONFIG, None, "must hold a JSON object")
    return config


def _format(directory: int, config: Mapping[str, Any]) -> Format:
    present: list[Format] = [kind for kind, name in WEIGHTS.items() if _exists(directory, name)]
    if len(present) == 1:
        return present[0]
    if len(present) == 2:
        return "peft" if "peft_type" in config else "mlx-lm"
    for name in ("adapter_model.bin", "adapter_model.pt", "adapters.npz"):
        if _exists(directory, name):
            refuse(name, None, "is a format that is not read; convert it to safetensors")
    kind: Format = "peft" if "peft_type" in config else "mlx-lm"
    refuse(WEIGHTS[kind], None, "is missing from the adapter folder")


def _read_exactly(fd: int, offset: int, size: int, name: str) -> npt.NDArray[np.uint8]:
    data = np.empty(size, np.uint8)
    view = data.data
    done = 0
    with FileIO(fd, closefd=False) as f:
        f.seek(offset)
        while done < size:
            n = f.readinto(view[done:])
            if not n:
                refuse(name, None, "is shorter than its header says")
            done += n
    return data


# --- the safetensors header --------------------------------------------------------------------------------------

_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file


def _header(fd: int, name: str) -> dict[str, Tensor]:
    """Names, dtypes, shapes and places of all tensors, from the descriptor's own header; no data is read."""
    size = os.fstat(fd).st_size
    if size < 8:
        refuse(name, None, "is not a safetensors file")
    length = int.from_bytes(_read_exactly(fd, 0, 8, name).tobytes(), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        refuse(name, None, "is not a safetensors file, or its header is cut off or too large")
    found: dict[str, Tensor] = {}
    try:
        # Through /dev/fd: the library opens by name, and only the descriptor names the file that was checked.
        # pread, not mmap: a file cut short under a mapping kills the process.
        with safe_open(f"/dev/fd/{fd}", framework="numpy", backend="pread") as f:
            at = 8 + length
            for key in f.offset_keys():  # by place; the library has made sure that there are no gaps
                part = f.get_slice(key)
                shape = tuple(int(n) for n in part.get_shape())
                dtype = str(part.get_dtype())
                if dtype not in _DTYPES:
                    refuse(name, key, f"has dtype {dtype}; F32, F16 and BF16 are read")
                found[key] = Tensor(dtype, shape, at)
                at += math.prod(shape) * _DTYPES[dtype]
    except SafetensorError as e:
        refuse(name, None, f"is not a valid safetensors file ({str(e).splitlines()[0][:120]})")
    except OSError as e:
        refuse(name, None, f"cannot be read: {e.strerror}")
    if at != size:
        refuse(name, None, "has a header that does not describe the whole file")
    if not found:
        refuse(name, None, "holds no tensors: the adapter is empty")
    return found


# --- what the configuration says ---------------------------------------------------------------------------------

# Each key of the two formats is one of: used by the code below; harmless (it says how the adapter was trained, or
# what the tensors' own names and shapes say better); or off: refused unless its value says that the thing is not
# used. A key in no table is refused too, unless its value is null, false or empty, as new switches arrive.
_PEFT_USED = frozenset(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern init_lora_weights bias layers_to_transform".split()
)
_PEFT_HARMLESS = frozenset(
    """task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules
    exclude_modules lora_dropout fan_in_fan_out layers_pattern megatron_core qalora_group_size runtime_config
    eva_config ensure_weight_tying""".split()
)
_PEFT_OFF = frozenset(
    """use_dora modules_to_save lora_bias layer_replication trainable_token_indices use_qalora loftq_config
    corda_config alora_invocation_tokens arrow_config target_parameters megatron_config""".split()
)
_MLX_USED = frozenset("fine_tune_type lora_parameters num_layers lora_layers use_dora".split())
_MLX_HARMLESS = frozenset(
    """model train optimizer optimizer_config data seed batch_size iters val_batches learning_rate steps_per_report
    steps_per_eval resume_adapter_file adapter_path adapter_file save_every test test_batches max_seq_length config
    grad_checkpoint grad_accumulation_steps clear_cache_threshold lr_schedule mask_prompt report_to project_name
    wandb trust_remote_code hf_dataset prompt_feature completion_feature chat_feature text_feature
    warmup""".split()
)
_MLX_PARAMETERS = frozenset("rank scale dropout keys".split())


def _off(value: object) -> bool:
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _unknown(config: Mapping[str, Any], known: frozenset[str], prefix: str = "") -> None:
    for key, value in config.items():
        if key not in known and not _off(value):
            refuse(CONFIG, prefix + key, "is not a known key of this adapter format")


def _integer(config: Mapping[str, Any], key: str, prefix: str = "") -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(CONFIG, prefix + key, "must be an integer" if key in config else "is missing")
    return value


def _positive(value: object, field: str, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(CONFIG, field, "is missing" if value is None else "must be a number")
    if not 0 < value <= high:  # in this form a NaN fails too
        refuse(CONFIG, field, f"must lie between 0 and {high:g}")
    return float(value)


def _rank(value: int, field: str, max_rank: int) -> int:
    if not 1 <= value <= max_rank:
        refuse(CONFIG, field, f"is {value}; ranks from 1 to {max_rank} are served")
    return value


# --- the two formats ---------------------------------------------------------------------------------------------


class Half(NamedTuple):
    """One tensor's place in a module's A or B. `expert` is set when the file holds one tensor per expert."""

    tensor: str
    expert: int | None
    rank: int
    scale: float
    turn: bool  # its last two axes are swapped with respect to ours


@dataclass
class Spec:
    """What to load: per module path the tensors of A and those of B."""

    scale: float
    modules: dict[str, tuple[list[Half], list[Half]]]


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")


def _layer(path: str) -> int | None:
    m = _LAYER.search(path)
    return int(m.group(1)) if m else None


def _mlx_lm(
    config: Mapping[str, Any],
    header: Mapping[str, Tensor],
    linears: Mapping[str, LinearShape],
    max_rank: int,
    base_layers: int,
) -> Spec:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        refuse(CONFIG, "fine_tune_type", f"is {str(kind)[:40]!r}; only 'lora' can be served beside other adapters")
    if not _off(config.get("use_dora")):
        refuse(CONFIG, "use_dora", "is set; DoRA is not supported")
    _unknown(config, _MLX_USED | _MLX_HARMLESS)
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        refuse(CONFIG, "lora_parameters", "must be an object" if "lora_parameters" in config else "is missing")
    _unknown(parameters, _MLX_PARAMETERS, "lora_parameters.")
    rank = _rank(_integer(parameters, "rank", "lora_parameters."), "lora_parameters.rank", max_rank)
    scale = _positive(parameters.get("scale"), "lora_parameters.scale", limits.MAX_LORA_SCALE)
    layers_key = "num_layers" if "num_layers" in config else "lora_layers"
    first = 0
    if layers_key in config:
        count = _integer(config, layers_key)
        first = base_layers - count if 0 < count < base_layers else 0

    name = WEIGHTS["mlx-lm"]
    spec = Spec(scale, {})
    for tensor in sorted(header):
        path, _, leaf = tensor.rpartition(".")
        if leaf == "m":
            refuse(name, tensor, "is a DoRA magnitude; DoRA is not supported")
        if leaf not in ("lora_a", "lora_b"):
            refuse(name, tensor, "is not a LoRA tensor")
        shape = _module(path, tensor, name, linears)
        layer = _layer(path)
        if layer is not None and layer < first:
            refuse(name, tensor, f"lies outside the last {base_layers - first} of {base_layers} layers ({layers_key})")
        # Dense tensors are stored as we want them; the switch layers' (E, r, in) and (E, out, r) are not.
        half = Half(tensor, None, rank, scale, turn=shape.experts > 0)
        spec.modules.setdefault(path, ([], []))[leaf == "lora_b"].append(half)
    return spec


_EXPERT = re.compile(r"(.+)\.experts\.(\d{1,6})\.([A-Za-z0-9_]+)")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LITERAL = re.compile(r"\^?(?:[A-Za-z0-9_.]|\\\.)+\$?")
_PEFT_PREFIX = "base_model.model."
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


def _peft(
    config: Mapping[str, Any],
    header: Mapping[str, Tensor],
    linears: Mapping[str, LinearShape],
    max_rank: int,
    base_layers: int,
) -> Spec:
    kind = config.get("peft_type")
    if kind != "LORA":
        refuse(CONFIG, "peft_type", "is missing" if kind is None else f"is {str(kind)[:40]!r}; only 'LORA' is served")
    for key in sorted(_PEFT_OFF & config.keys()):
        if not _off(config[key]):
            refuse(CONFIG, key, "is set, which is not supported")
    if config.get("bias", "none") != "none":
        refuse(CONFIG, "bias", f"is {str(config['bias'])[:40]!r}; only 'none' is supported")
    init = config.get("init_lora_weights", True)
    if not any(init is k or (isinstance(k, str) and init == k) for k in _KEEPS_BASE):
        refuse(CONFIG, "init_lora_weights", f"is {str(init)[:40]!r}, which changes the base model's weights")
    if not isinstance(config.get("use_rslora", False), bool):
        refuse(CONFIG, "use_rslora", "must be true or false")
    _unknown(config, _PEFT_USED | _PEFT_HARMLESS | _PEFT_OFF)

    rank = _rank(_integer(config, "r"), "r", max_rank)
    alpha = _positive(config.get("lora_alpha"), "lora_alpha", limits.MAX_LORA_ALPHA)
    root = bool(config.get("use_rslora"))
    ranks = _pattern(config, "rank_pattern", lambda v, f: _rank(v, f, max_rank) if type(v) is int else _not_integer(f))
    alphas = _pattern(config, "alpha_pattern", lambda v, f: _positive(v, f, limits.MAX_LORA_ALPHA))
    layers = _layers(config)

    def scaled(a: float, r: int) -> float:
        scale = a / math.sqrt(r) if root else a / r
        if scale > limits.MAX_LORA_SCALE:
            refuse(CONFIG, "lora_alpha", f"gives a scale of {scale:g}, over the limit of {limits.MAX_LORA_SCALE:g}")
        return scale

    name = WEIGHTS["peft"]
    spec = Spec(scaled(alpha, rank), {})
    for tensor in sorted(header):
        if ".lora_magnitude_vector" in tensor:
            refuse(name, tensor, "is a DoRA magnitude; DoRA is not supported")
        stem, _, leaf = tensor.removesuffix(".weight").rpartition(".")
        if leaf not in ("lora_A", "lora_B") or not tensor.endswith(".weight") or not stem.startswith(_PEFT_PREFIX):
            refuse(name, tensor, "is not a LoRA weight of a linear layer")
        path = stem.removeprefix(_PEFT_PREFIX)
        target, expert = _expert(path, linears)
        shape = _module(target, tensor, name, linears)
        if expert is not None and expert >= shape.experts:
            refuse(name, tensor, f"names expert {expert}; the model has {shape.experts}")
        if layers is not None and _layer(path) not in layers:
            refuse(name, tensor, "lies outside the layers of layers_to_transform")
        r = _first(ranks, path, rank)
        half = Half(tensor, expert, r, scaled(_first(alphas, path, alpha), r), turn=True)
        spec.modules.setdefault(target, ([], []))[leaf == "lora_B"].append(half)
    return spec


def _not_integer(field: str) -> NoReturn:
    refuse(CONFIG, field, "must be an integer")


def _expert(path: str, linears: Mapping[str, LinearShape]) -> tuple[str, int | None]:
    """PEFT adapts one linear per expert; the served model stacks them in one module under another name."""
    m = _EXPERT.fullmatch(path)
    if m is None or path in linears:
        return path, None
    block, leaf = m.group(1), _MIXTRAL.get(m.group(3), m.group(3))
    for middle in ("switch_mlp", "experts"):
        if f"{block}.{middle}.{leaf}" in linears:
            return f"{block}.{middle}.{leaf}", int(m.group(2))
    return path, None


def _layers(config: Mapping[str, Any]) -> frozenset[int] | None:
    value = config.get("layers_to_transform")
    if _off(value) and value is not False:
        return None
    items = value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in items):
        refuse(CONFIG, "layers_to_transform", "must be an integer or a list of integers")
    return frozenset(items)


def _pattern(config: Mapping[str, Any], key: str, check: Callable[[Any, str], T]) -> list[tuple[str, bool, T]]:
    """(suffix, whole, value) in file order. PEFT takes its keys as regular expressions; one that comes from
    outside can take for ever to match, so only plain names are read: letters, digits, '_', '.', '^' in front."""
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


def _module(path: str, tensor: str, file: str, linears: Mapping[str, LinearShape]) -> LinearShape:
    shape = linears.get(path)
    if shape is None:
        refuse(file, tensor, f"adapts {path[:200]!r}, which the served model does not have or cannot adapt")
    return shape


# --- loading -----------------------------------------------------------------------------------------------------


def _check(file: str, header: Mapping[str, Tensor], spec: Spec, linears: Mapping[str, LinearShape]) -> None:
    """Every tensor has its partner and the shape that the model and the configuration ask for."""
    for path, (a, b) in spec.modules.items():
        shape = linears[path]
        experts_a, experts_b = ({h.expert for h in side} for side in (a, b))
        for half in a:
            if half.expert not in experts_b:
                refuse(file, half.tensor, "has no matching B tensor")
        for half in b:
            if half.expert not in experts_a:
                refuse(file, half.tensor, "has no matching A tensor")
        if None in experts_a and len(experts_a) > 1:
            refuse(file, a[0].tensor, "adapts the same module as a whole and expert by expert")
        for side, halves in enumerate((a, b)):
            for half in halves:
                want: tuple[int, ...] = (shape.inputs, half.rank) if side == 0 else (half.rank, shape.outputs)
                if half.turn:
                    want = want[::-1]
                if shape.experts and half.expert is None:
                    want = (shape.experts, *want)
                got = header[half.tensor].shape
                if got != want:
                    refuse(file, half.tensor, f"has shape {list(got)}; {path} at rank {half.rank} needs {list(want)}")


def _load(
    fd: int, kind: Format, header: Mapping[str, Tensor], spec: Spec, linears: Mapping[str, LinearShape]
) -> AdapterWeights:
    file = WEIGHTS[kind]
    _check(file, header, spec, linears)
    digest = hashlib.blake2b(f"mlx-tandem adapter 1 {kind}\n".encode(), digest_size=32)
    tensors: dict[str, tuple[Array, Array]] = {}
    nbytes = 0
    for path, sides in sorted(spec.modules.items()):
        shape = linears[path]
        rank = max(half.rank for half in sides[0])
        lead = (shape.experts,) if shape.experts else ()
        pair = (np.zeros((*lead, shape.inputs, rank), np.float32), np.zeros((*lead, rank, shape.outputs), np.float32))
        for into, halves in zip(pair, sides, strict=True):
            for half in halves:
                t = header[half.tensor]
                raw = _read_exactly(fd, t.offset, math.prod(t.shape) * _DTYPES[t.dtype], file)
                nbytes += raw.nbytes
                _feed(digest, (half.tensor, t.dtype, *t.shape, half.scale.hex()))
                digest.update(raw.data)
                values = _decode(raw, t)
                # In this form a NaN fails too. The limit is float16's: beyond it a served model turns it into inf.
                scale = half.scale if into is pair[1] else 1.0
                if not float(np.abs(values).max(initial=0.0)) * scale <= limits.MAX_LORA_VALUE:
                    refuse(file, half.tensor, f"holds NaN, infinity or a value over {limits.MAX_LORA_VALUE:g}")
                values = values.swapaxes(-1, -2) if half.turn else values
                whole = into if half.expert is None else into[half.expert]
                rows, columns = values.shape[-2:]
                np.multiply(values, np.float32(scale), out=whole[..., :rows, :columns])
        tensors[path] = pair
    ranks = [half.rank for a, _ in spec.modules.values() for half in a]
    info = AdapterInfo(
        digest=digest.hexdigest(),
        rank=max(ranks),
        scale=spec.scale,
        format=kind,
        targets=tuple(sorted({_target(path) for path in tensors})),
        nbytes=nbytes,
    )
    return AdapterWeights(info, tensors)


def _feed(digest: hashlib.blake2b, fields: Iterable[object]) -> None:
    """Self-delimiting, so that no two different lists of fields feed the same bytes."""
    for field in fields:
        text = str(field).encode()
        digest.update(len(text).to_bytes(4, "little") + text)


def _decode(raw: npt.NDArray[np.uint8], t: Tensor) -> Array:
    if t.dtype == "F32":
        values = raw.view("<f4")
    elif t.dtype == "F16":
        values = raw.view("<f2").astype(np.float32)
    else:  # bfloat16 is the upper half of a float32
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return values.reshape(t.shape)


def _target(path: str) -> str:
    m = _LAYER.search(path)
    return path[m.end() :] if m else path
