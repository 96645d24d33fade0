"""How many bytes a model's parts will take, from shapes alone: nothing here is computed on the device.

Weights, blocks and slots are exact. What a step needs is an upper estimate, whose factors were measured on the CPU back
end with every feature on, and doubled or more for others; tests/engine/test_memory.py holds it against measured peaks.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.config import EngineConfig
from mlx_tandem.engine.budget import ACTIVATION_SHARE, Needs, StepCost
from mlx_tandem.engine.cost import padded_length
from mlx_tandem.errors import ModelError
from mlx_tandem.kv.pool import Window
from mlx_tandem.model import device
from mlx_tandem.model.cache.kvcache import LayerShape
from mlx_tandem.model.cache.pools import windows_of
from mlx_tandem.model.loader import LoadedModel, weights
from mlx_tandem.model.lora.adapted import find_targets

MICRO_BATCH_TOKENS = {"cpu": 128, "cuda": 1536, "metal": 512}
"""Tokens of one forward and backward, for which memory is kept. A slice of it is one layer or a few, and streams wait
for a slice. On Metal the start measures a slice and takes fewer where it is slow (`training/device/pace.py`)."""

FORWARD_LAYERS = {"cpu": 1, "cuda": 3, "metal": 1}
"""In a slice of the forward: a layer of the backward, which computes the layer again and two gradients, takes as long
as three. On a CPU streams would wait longer for them than for that."""

CHUNK_TOKENS: dict[device.Kind, tuple[int, ...]] = {
    "cpu": (1024,),
    "cuda": (4096, 2048, 1024),
    "metal": (2048, 1024, 512, 256),
}
"""Prompt tokens of one step: the first entry whose activations are no more than their share or than what the last entry
needs. An H200 is at its best from about 4,096 on; a CPU gains nothing beyond a few hundred; a Mac's memory is small."""

SMALLEST_RANK = 8

_SAMPLING = 24  # float32 [rows, vocabulary] alive at once with every feature on
_STATE = 25  # bytes of a row and token that seats and their arrays keep: penalties, biases, banned tokens
_SCORED = 4 << 26  # logits of a prompt's own tokens, and what is made of them
_TRAINER = 13
"""float32 copies of an adapter: its arrays, moments, gradients, their sums, those before the last step, those that
slices multiply by, and those that are read or wait for a slot."""
_LAYER = re.compile(r"\.(\d+)\.")


def needs(
    config: EngineConfig,
    limit: int,
    model: LoadedModel,
    layers: Sequence[LayerShape],
    vocab_size: int,
    linears: Mapping[str, LinearShape],
    lora_dtype: mx.Dtype,
) -> Needs:
    """Return what `model` needs on a device with `limit` bytes. `layers`: as they lie in the pool."""
    lora = config.lora
    weight_bytes = sum(p.nbytes for p in weights(model.module))
    learning = 0
    if config.duty.trainer_rank:
        learning = trainer_bytes(linears, config.duty.trainer_rank)
        learning += pass_bytes(config, model, len(layers), vocab_size, linears)
    share = (limit - weight_bytes - learning) // ACTIVATION_SHARE
    asked = config.scheduler.max_chunk_tokens
    sizes = (asked,) if asked else CHUNK_TOKENS[device.kind()]
    steps = [_step(config, size, model, layers, vocab_size, linears) for size in sizes]
    # What the smallest chunk needs anyway, mostly to draw tokens for every row, a larger one may have, too.
    allowed = max(share, steps[-1].least())
    chunk, step = next((size, step) for size, step in zip(sizes, steps, strict=True) if step.least() <= allowed)
    windows, size = windows_of(layers), config.cache.block_size
    windowed = sum(s.bytes_per_token() for s in layers if s.window is not None)
    others = sum(s.bytes_per_token() for s in layers) - windowed
    return Needs(
        weights=weight_bytes,
        step=step,
        learning=learning,
        adapter_slots=slot_bytes(linears, linears, lora.max_loras, bucket(lora.max_lora_rank), lora_dtype.size)
        if lora.max_loras
        else 0,
        block=(others or windowed) * size,
        max_model_len=model.max_model_len,
        parameters=model.parameters,
        chunk_tokens=chunk,
        window=None if windows[-1] is None else Window(windows[-1], chunk),
        window_block=windowed * size if others else 0,
    )


def bucket(rank: int) -> int:
    """The rank that stacked arrays have to hold `rank`."""
    wide = SMALLEST_RANK
    while wide < rank:
        wide *= 2
    return wide


def slot_bytes(linears: Mapping[str, LinearShape], paths: Iterable[str], slots: int, rank: int, itemsize: int) -> int:
    """Of the stacked arrays of the linears `paths`."""
    widths = sum((s.inputs + s.outputs) * max(s.experts, 1) for s in (linears[p] for p in paths))
    return (slots + 1) * rank * widths * itemsize


def adapter_bytes(model: nn.Module, rank: int, itemsize: int) -> int:
    """Of one adapter on every linear, as it lies on the device."""
    own = linears(model)
    return slot_bytes(own, own, 0, bucket(rank), itemsize)


def linears(model: nn.Module) -> dict[str, LinearShape]:
    """Return every module that an adapter may target, by path."""
    return {path: target.shape for path, target in find_targets(model).items()}


def read_by_a_step(model: nn.Module) -> int:
    """Bytes of the weights that a step reads, however many rows it has: all but an embedding of which only the rows'
    own lines are looked up. Of experts all count, since rows that are many enough use each of them."""
    modules = model.named_modules()
    headed = any(path.rpartition(".")[2] == "lm_head" for path, _ in modules)
    looked_up = {id(m): m for _, m in modules if headed and isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))}
    return sum(p.nbytes for p in weights(model)) - sum(p.nbytes for m in looked_up.values() for p in weights(m))


class SlotRoom:
    """How far the stacked arrays may grow. Thread-safe: adapters are read beside the engine's loop."""

    def __init__(self, linears: Mapping[str, LinearShape], slots: int, itemsize: int, most: int):
        self._linears, self._slots, self._itemsize, self._most = linears, slots, itemsize, most
        self._rank = 0
        self._paths: set[str] = set()
        self._lock = threading.Lock()

    def promise(self, rank: int, paths: Iterable[str]) -> None:
        """Room for an adapter beside all that was promised before. Raises ModelError when there is none."""
        with self._lock:
            wide, known = max(self._rank, bucket(rank)), self._paths | set(paths)
            size = slot_bytes(self._linears, known, self._slots, wide, self._itemsize)
            if size > self._most:
                raise ModelError(
                    f"with an adapter of rank {rank} the slots would take {size / 1e6:,.1f} MB; "
                    f"{self._most / 1e6:,.1f} MB are there for them. A lower --max-loras or --memory-fraction helps",
                    param="rank",
                )
            self._rank, self._paths = wide, known


def _flow(linears: Mapping[str, LinearShape]) -> int:
    """Numbers that a token has as inputs and outputs of the widest layer's linears. Experts count once: a few of them
    are used, and each is narrow."""
    layers: defaultdict[str, int] = defaultdict(int)
    for path, shape in linears.items():
        found = _LAYER.search(path)
        layers[found[1] if found else ""] += shape.inputs + shape.outputs
    return max(layers.values(), default=1)


def _step(
    config: EngineConfig,
    chunk: int,
    model: LoadedModel,
    layers: Sequence[LayerShape],
    vocab_size: int,
    linears: Mapping[str, LinearShape],
) -> StepCost:
    cpu = device.is_cpu()
    alive, scores, copies = (2, 9, 1.3) if cpu else (8, 3, 3.0)  # layers, matrices of scores, gathered keys and values
    if config.cache.kv_bits < 16:
        copies *= 2  # codes on their way to numbers
    size, rows = model.dtype.size, config.scheduler.max_num_seqs
    pair = scores * model.heads * max(size, 4 if cpu else 2) + 2  # a mask, too
    read = max(sum(half.heads * half.dim * half.dtype.size for half in s.halves) for s in layers)
    return StepCost(
        token=alive * _flow(linears) * size,
        pair=pair,
        position=int(copies * read) + pair,
        sampling=rows * vocab_size * (4 * _SAMPLING + _STATE) + min(_SCORED, 16 * chunk * vocab_size),
        tokens=max(padded_length(chunk), chunk * 5 // 4),
        rows=rows,
        longest=model.max_model_len * 5 // 4 + config.cache.block_size,
    )


def trainer_bytes(linears: Mapping[str, LinearShape], rank: int) -> int:
    """Return what a trainer of these linears takes on the device for as long as it is open."""
    return _TRAINER * slot_bytes(linears, linears, 0, rank, 4)


def pass_bytes(
    config: EngineConfig, model: LoadedModel, layers: int, vocab_size: int, linears: Mapping[str, LinearShape]
) -> int:
    """Return what one micro-batch needs beside its trainers: the inputs of the layers, which its forward keeps, and two
    slices, as one is launched before the last is read: a layer backward, logits in pieces. Its sequences have at most
    1,024 tokens: scores grow with their length."""
    tokens = config.duty.micro_batch_tokens or MICRO_BATCH_TOKENS[device.kind()]
    size = model.dtype.size
    widths = Counter(s.inputs for s in linears.values())
    hidden = widths.most_common(1)[0][0] if widths else 1
    kept = tokens * hidden * layers * size
    scores = (12 if device.is_cpu() else 3) * tokens * min(tokens, model.max_model_len, 1024) * model.heads * 4
    layer = tokens * 4 * _flow(linears) * size + scores
    head = 4 * min(128 << 20, tokens * vocab_size * 4)
    return kept + 2 * max(layer, head)
