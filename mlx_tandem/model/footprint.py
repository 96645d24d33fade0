"""Bytes that the parts of a model will take, computed from shapes alone without using the device.

Weights, blocks and slots are exact. The needs of a step are an upper estimate: its factors were measured on the CPU
back end with every feature on, and doubled or more for other devices. tests/engine/test_memory.py compares it with
measured peaks.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.config import EngineConfig
from mlx_tandem.engine.budget import ACTIVATION_SHARE, Needs, StepCost
from mlx_tandem.engine.cost import padded_length
from mlx_tandem.errors import ModelError
from mlx_tandem.kv.pool import Window
from mlx_tandem.model import backend
from mlx_tandem.model.cache.pools import windows_of
from mlx_tandem.model.loader import LoadedModel, every_weight, weights
from mlx_tandem.model.ops.lora.slots import bucket
from mlx_tandem.model.probe import Examined
from mlx_tandem.model.targets import find_head, find_targets
from mlx_tandem.model.vision.embeddings import ROOM_BYTES

_SAMPLING = 24
"""Arrays float32 [rows, vocabulary] that are alive at once while sampling with every feature on."""

_STATE = 25
"""Bytes per row and vocabulary entry that seats keep: penalties, biases, banned tokens."""

_COPIES = 3
"""Copies of the states of a forward's rows that are alive at once: gathered, new, and in between."""

_SCORED = 4 << 26
"""Most bytes of the logits of a prompt's own tokens and of the arrays made from them."""
_TRAINER = 13
"""Number of float32 copies of an adapter that a trainer holds: its arrays, two moments, gradients, their sums, the
state before the last step, the arrays that slices multiply by, and versions being read or waiting for a slot."""
_STEP_BACK = 4
"""Number of copies more where the state before several steps is kept beside passes: weights, moments, and what slices
multiply by."""
_LAYER = re.compile(r"\.(\d+)\.")


def needs(
    config: EngineConfig,
    limit: int,
    model: LoadedModel,
    found: Examined,
    linears: Mapping[str, LinearShape],
    head: Mapping[str, LinearShape],
    lora_dtype: mx.Dtype,
) -> Needs:
    """Return the bytes that `model` needs on a device with `limit` bytes.

    `found` has the shapes in which keys and values lie in the pool. `head` is the output head if adapters may change
    it, which counts where trainers do.
    """
    lora, layers = config.lora, found.layers
    weight_bytes = sum(p.nbytes for p in every_weight(model)) + (ROOM_BYTES if model.encoder is not None else 0)
    learning = 0
    adapted = {**linears, **head} if config.duty.trains_head else linears
    if config.duty.trainer_rank:
        learning = config.duty.trainers * trainer_bytes(adapted, config.duty.trainer_rank)
        if config.duty.several_steps:
            learning += _STEP_BACK * slot_bytes(linears, linears, 0, config.duty.trainer_rank, 4)
        learning += pass_bytes(config, model, found, linears)
    share = (limit - weight_bytes - learning) // ACTIVATION_SHARE
    asked = config.scheduler.max_chunk_tokens
    sizes = (asked,) if asked else backend.current().memory.chunk_tokens
    steps = [_step(config, size, model, found, linears) for size in sizes]
    # A larger chunk may use as much as the smallest one needs anyway, which is mostly for sampling every row.
    allowed = max(share, steps[-1].least())
    chunk, step = next((size, step) for size, step in zip(sizes, steps, strict=True) if step.least() <= allowed)
    windows, size = windows_of(layers), config.cache.block_size
    windowed = sum(s.bytes_per_token() for s in layers if s.window is not None)
    others = sum(s.bytes_per_token() for s in layers) - windowed
    return Needs(
        weights=weight_bytes,
        step=step,
        learning=learning,
        adapter_slots=slot_bytes(adapted, adapted, lora.max_loras, bucket(lora.max_lora_rank), lora_dtype.size)
        if lora.max_loras
        else 0,
        block=(others or windowed) * size,
        max_model_len=model.max_model_len,
        parameters=model.parameters,
        chunk_tokens=chunk,
        state=sum(state.nbytes() for state in found.states),
        window=None if windows[-1] is None else Window(windows[-1], chunk),
        window_block=windowed * size if others else 0,
    )


def slot_bytes(linears: Mapping[str, LinearShape], paths: Iterable[str], slots: int, rank: int, itemsize: int) -> int:
    """Return the bytes of the stacked arrays of the linears `paths` with `slots` slots of this rank, and of the
    base's slot.
    """
    widths = sum((s.inputs + s.outputs) * max(s.experts, 1) for s in (linears[p] for p in paths))
    return (slots + 1) * rank * widths * itemsize


def adapter_bytes(model: nn.Module, rank: int, itemsize: int) -> int:
    """Return the bytes on the device of one adapter on every linear of the model."""
    own = linears(model)
    return slot_bytes(own, own, 0, bucket(rank), itemsize)


def linears(model: nn.Module) -> dict[str, LinearShape]:
    """Return every linear that an adapter may change, by path."""
    return {path: target.shape for path, target in find_targets(model).items()}


def head(model: nn.Module) -> dict[str, LinearShape]:
    """Return the output head by its path, if an adapter may change it."""
    found = find_head(model)
    return {} if found is None else {found.path: found.shape}


def read_by_a_step(model: nn.Module) -> int:
    """Return the bytes of weights that a step reads, however many rows it has.

    An embedding that is not the output head is left out, since only the rows' own lines of it are read. All experts
    count: rows that are many enough use each of them.
    """
    modules = model.named_modules()
    headed = any(path.rpartition(".")[2] == "lm_head" for path, _ in modules)
    looked_up = {id(m): m for _, m in modules if headed and isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))}
    return sum(p.nbytes for p in weights(model)) - sum(p.nbytes for m in looked_up.values() for p in weights(m))


class SlotRoom:
    """The memory into which the stacked arrays of adapters may grow. Thread-safe, since loader threads ask for it."""

    def __init__(self, linears: Mapping[str, LinearShape], slots: int, itemsize: int, most: int):
        self._linears, self._slots, self._itemsize, self._most = linears, slots, itemsize, most
        self._rank = 0
        self._paths: set[str] = set()
        self._lock = threading.Lock()

    def promise(self, rank: int, paths: Iterable[str]) -> None:
        """Reserve room for an adapter of this rank on these linears, beside all that was reserved before.

        Raises:
            ModelError: There is no room for it.
        """
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
    """Return how many numbers a token has as inputs and outputs of the linears of the widest layer.

    Experts count once: only a few of them are used, and each is narrow.
    """
    layers: defaultdict[str, int] = defaultdict(int)
    for path, shape in linears.items():
        found = _LAYER.search(path)
        layers[found[1] if found else ""] += shape.inputs + shape.outputs
    return max(layers.values(), default=1)


def _step(
    config: EngineConfig, chunk: int, model: LoadedModel, found: Examined, linears: Mapping[str, LinearShape]
) -> StepCost:
    """Return the memory cost of a step with prompt chunks of `chunk` tokens."""
    here = backend.current().memory
    copies = here.gathered
    if config.cache.kv_bits < 16:
        copies *= 2  # quantised codes beside the numbers that they become
    size, rows = model.dtype.size, config.scheduler.max_num_seqs
    pair = here.scores * model.heads * max(size, here.score_bytes) + 2  # 2 for the mask
    read = max((sum(half.heads * half.dim * half.dtype.size for half in s.halves) for s in found.layers), default=0)
    return StepCost(
        token=here.layers * _flow(linears) * size,
        pair=pair,
        position=int(copies * read) + pair,
        sampling=rows * found.vocab_size * (4 * _SAMPLING + _STATE) + min(_SCORED, 16 * chunk * found.vocab_size),
        tokens=max(padded_length(chunk), chunk * 5 // 4),
        rows=rows,
        longest=model.max_model_len * 5 // 4 + config.cache.block_size,
        state=_COPIES * sum(s.nbytes() for s in found.states),
    )


def trainer_bytes(linears: Mapping[str, LinearShape], rank: int) -> int:
    """Return the bytes that a trainer of these linears holds on the device while it is open."""
    return _TRAINER * slot_bytes(linears, linears, 0, rank, 4)


def activation_bytes(linears: Mapping[str, LinearShape], layers: int, tokens: int, size: int) -> int:
    """Return about how many bytes the activations of so many tokens in all layers take, in numbers of `size` bytes."""
    return 2 * _flow(linears) * layers * tokens * size


def pass_bytes(config: EngineConfig, model: LoadedModel, found: Examined, linears: Mapping[str, LinearShape]) -> int:
    """Return the bytes that one micro-batch needs besides its trainers.

    It keeps the inputs of all layers, or all activations if they are few. Two slices are in flight, as one is launched
    before the last is read; each is a layer of the backward or a piece of the logits. Its sequences have at most 1,024
    tokens, since scores grow with the square of their length.
    """
    here = backend.current().learning
    tokens = config.duty.micro_batch_tokens or here.micro_batch_tokens
    layers = len(found.layers) + len(found.states)
    size = model.dtype.size
    widths = Counter(s.inputs for s in linears.values())
    hidden = widths.most_common(1)[0][0] if widths else 1
    kept = tokens * hidden * layers * size
    kept += min(activation_bytes(linears, layers, tokens, size), here.kept_bytes)
    scores = here.scores * tokens * min(tokens, model.max_model_len, 1024) * model.heads * 4
    layer = tokens * 4 * _flow(linears) * size + scores
    head = 4 * min(128 << 20, tokens * found.vocab_size * 4)
    return kept + 2 * max(layer, head)
