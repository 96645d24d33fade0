"""The parts of `--deterministic` for one model. Settings and models for which it cannot be kept are refused by name
before anything is served.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.config import EngineConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend, device
from mlx_tandem.model.backend import cpu_functions
from mlx_tandem.model.cache.kvformat import LayerShape
from mlx_tandem.model.choices import sources
from mlx_tandem.model.footprint import linears
from mlx_tandem.model.loader import LoadedModel
from mlx_tandem.model.ops.attention import fused
from mlx_tandem.model.ops.attention.division import Division
from mlx_tandem.model.ops.attention.ordered import OrderedAttention, WholeCache
from mlx_tandem.model.ops.attention.paged import PagedAttention
from mlx_tandem.model.ops.lora.slots import bucket
from mlx_tandem.model.ops.products.ordered import TiledDeltas, let_learn, use_tiles
from mlx_tandem.model.probe import Examined
from mlx_tandem.types import EngineInfo

log = logging.getLogger(__name__)

DIVISION = Division(blocks=1, depth=2)
"""The division of attention's work among the kernel's threads, which does not depend on the step."""


@dataclass(frozen=True)
class Deterministic:
    """The arithmetic of a model under `--deterministic`.

    Attributes:
        attention: The attention of each layer.
        windows: The window of each layer; None: it sees all positions.
        deltas: The products of adapters.
    """

    attention: tuple[OrderedAttention, ...]
    windows: tuple[int | None, ...]
    deltas: TiledDeltas

    def caches(self, rows: int) -> list[WholeCache]:
        """Return the caches of all layers for a forward of so many whole sequences."""
        offset = mx.zeros((rows,), mx.int32)
        return [
            WholeCache(attention, offset, window)
            for attention, window in zip(self.attention, self.windows, strict=True)
        ]

    @contextmanager
    def within(self) -> Iterator[None]:
        """Use one function of an activation for any number of elements while a forward is traced in the block."""
        with cpu_functions.alike():
            yield


def check_settings(config: EngineConfig, model: LoadedModel) -> None:
    """Raise ModelError for settings with which `--deterministic` cannot be kept."""
    refused = {
        "--attention-backend": config.cache.attention_backend not in ("auto", "portable"),
        "--lora-backend": config.lora.backend not in ("auto", "gather"),
        "--spec-decode mtp": config.speculation.method == "mtp",
        "images (--no-images leaves them out)": model.encoder is not None,
    }
    for name, given in refused.items():
        if given:
            raise _refusal(name)


def check_layers(found: Examined, *, by_kernel: bool) -> None:
    """Raise ModelError for a model with layers whose order of sums cannot be fixed.

    by_kernel: whether a kernel reads the pool.
    """
    if found.states:
        raise _refusal("a model with recurrent layers")
    for shape in found.layers:
        if shape.asks is None or shape.keys != shape.values or shape.asks.casts:
            raise _refusal("a model whose layers compute attention by themselves")
        if shape.asks.sinks:
            raise _refusal("a model with attention sinks")
        if shape.window is not None and by_kernel:
            raise _refusal("on a GPU, a model whose layers see a window")
        if by_kernel and (why := fused.unreadable(shape)):
            raise _refusal(f"on this GPU, a model with {why}")
    if found.mask_axes not in (0, 1):
        raise _refusal("a model whose layers compute attention by themselves")


def prepare(config: EngineConfig, model: LoadedModel) -> None:
    """Have the products of a model's linears computed in tiles; call it before the model is cloned.

    From now on all models of this process use the same number of BLAS threads.

    Raises:
        ModelError: The settings or the device do not allow it.
    """
    check_settings(config, model)
    device.always_use_every_core()
    sizes = use_tiles(model.module, model.dtype)
    log.info("products are computed in tiles of %s rows", "; ".join(", ".join(map(str, each)) for each in sizes))


def of(
    config: EngineConfig, model: LoadedModel, found: Examined, twin: nn.Module, backends: Sequence[fused.Fused]
) -> Deterministic:
    """Return the arithmetic of a model. Its clone `twin` is the one that will be trained.

    backends: the fused back ends of attention on this device, the first of which is used; a CPU has none.

    Raises:
        ModelError: The model or the device does not allow it.
    """
    check_layers(found, by_kernel=bool(backends))
    if not backends and not backend.current().products.one_by_one:
        raise _refusal("a GPU for which there is no kernel of attention")
    let_learn(twin)
    layers, block_size = found.layers, config.cache.block_size
    kinds = {shape: _attention(shape, block_size, model.dtype, backends) for shape in dict.fromkeys(layers)}
    rank = bucket(config.lora.max_lora_rank)
    deltas = TiledDeltas(rank)
    if config.lora.max_loras:
        adapters = mx.float32 if backend.current().products.only_float32_is_fast else model.dtype
        deltas = TiledDeltas.of(rank, linears(model.module).values(), adapters)
    return Deterministic(tuple(kinds[shape] for shape in layers), tuple(shape.window for shape in layers), deltas)


def arithmetic(info: EngineInfo) -> str:
    """Return everything besides the model, its settings of keys and the tokens that decides bits of keys and values.

    What others have kept on the drive is of use only to an engine for which this is the same.
    """
    parts = (
        "deterministic",
        f"sources {sources()}",
        f"mlx {version('mlx')}",
        f"mlx-lm {version('mlx-lm')}",
        info.device,
        device.blas(),
        f"adapters of rank {bucket(info.max_lora_rank)}",
    )
    return ", ".join(filter(None, parts))


def _attention(
    shape: LayerShape, block_size: int, dtype: mx.Dtype, backends: Sequence[fused.Fused]
) -> OrderedAttention:
    if backends:
        forms = shape.keys, replace(shape.keys, bits=0)
        kernel, plain = (PagedAttention(backends[0].make, form, block_size, DIVISION) for form in forms)
        attention = OrderedAttention.by_kernels(kernel, plain, block_size)
    else:
        attention = OrderedAttention.of(shape.keys.dim, dtype, block_size, shape.window)
    assert shape.asks is not None
    if problem := attention.problem(shape.asks.heads, shape.keys.heads, shape.keys.dim, dtype):
        raise ModelError(f"--deterministic: attention is {problem} on this device", param="deterministic")
    return attention


def _refusal(what: str) -> ModelError:
    return ModelError(f"--deterministic does not go with {what}", param="deterministic")
