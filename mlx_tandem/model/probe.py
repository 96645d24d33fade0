"""Examines a model before it is served: what it caches, and whether the paged cache gives it the right answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mlx_tandem.errors import ModelError
from mlx_tandem.model.cache.kvformat import LayerShape
from mlx_tandem.model.cache.pools import KVPools, windows_of
from mlx_tandem.model.cache.states import (
    StateArray,
    StateCache,
    StateShape,
    StateView,
    arranged,
    keeps_state,
    leaves,
)
from mlx_tandem.model.kernels import checking
from mlx_tandem.model.loader import UNSERVED, LoadedModel, blamed_on, first_line, not_finite, suspects
from mlx_tandem.model.ops.attention.cache import LayerKernels, PagedCache, PoolLayout, ProbeCache, StepView
from mlx_tandem.model_folder import CONFIG

_TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}
"""Largest error of logits by type, relative to the largest logit. Wrong masks and mixed-up rows are off by far more."""


class Examined(NamedTuple):
    """The results of examining a model."""

    layers: list[LayerShape]
    """What each layer with attention caches, and behind these what the head for multi-token prediction does."""

    vocab_size: int
    mask_axes: int
    """Axes of a mask between rows and queries; 0 if nothing was evaluated."""

    states: list[StateShape]
    """What each recurrent layer keeps."""


def examine(model: LoadedModel, *, evaluate: bool = True) -> Examined:
    """Return what a model caches and the width of its logits; with `evaluate`, also check its logits with the paged
    cache.

    Raises:
        ModelError: The model cannot be served.
    """
    if model.model_type in UNSERVED:
        raise _unsupported(model, UNSERVED[model.model_type])
    with blamed_on(model.folder / CONFIG, "the model cannot be run", model.settings):
        layers, states = layer_shapes(model)
        found = Examined(layers, vocabulary(model), 0, states)
        axes = mask_axes(model, found) if evaluate else 0
        return found._replace(layers=[*layers, *_head_shapes(model)], mask_axes=axes)


def layer_shapes(model: LoadedModel) -> tuple[list[LayerShape], list[StateShape]]:
    """Return what each layer with attention writes into its cache, and what each recurrent layer keeps.

    Raise ModelError for families whose caches are of another kind.
    """
    module: Any = model.module
    caches = []
    for cache in leaves(make_prompt_cache(module)):
        if keeps_state(cache):
            continue
        if type(cache) not in (KVCache, RotatingKVCache) or (isinstance(cache, RotatingKVCache) and cache.keep):
            raise _unsupported(
                model,
                f"it uses a {type(cache).__name__}; only models whose layers all keep the keys and values of all "
                "positions or of a window, or a state, are",
            )
        caches.append(cache)
    probes = [ProbeCache() for _ in caches]
    states: list[ArraysCache] = [c for c in leaves(make_prompt_cache(module)) if keeps_state(c)]
    try:
        module(mx.zeros((1, 1), mx.int32), cache=arranged(module, probes, states))
        kept = [_state_of(state) for state in states]
        if states:
            module(mx.zeros((1, 2), mx.int32), cache=arranged(module, [ProbeCache() for _ in caches], states))
    except Exception as e:
        raise _unsupported(model, f"its cache cannot be probed ({first_line(e)})") from e
    if kept != [_state_of(state) for state in states]:
        raise _unsupported(model, "the size of its state depends on the number of tokens")
    shapes = []
    for own, cache in zip(probes, caches, strict=True):
        if own.shape is None:
            raise _unsupported(model, "a layer writes no keys and values")
        # A window that holds the longest sequence hides nothing.
        window = getattr(cache, "max_size", None)
        shapes.append(replace(own.shape, window=window if window and window < model.max_model_len else None))
    return shapes, kept


def _state_of(cache: ArraysCache) -> StateShape:
    """Return the form of the state of one sequence in a cache that a forward has filled."""
    made: Any = cache.cache
    return StateShape(tuple(StateArray(tuple(array.shape[1:]), array.dtype) for array in made))


def count_layers(model: LoadedModel) -> int:
    """Return the number of layers, as adapters' configurations count them."""
    layers = getattr(model.module, "layers", None)
    return len(make_prompt_cache(model.module) if layers is None else layers)


def _head_shapes(model: LoadedModel) -> list[LayerShape]:
    """Return what the model's head for multi-token prediction writes into its cache, if the model has one."""
    if model.mtp is None:
        return []
    cache = ProbeCache()
    hidden = mx.zeros((1, 1, model.mtp.width), model.dtype)
    model.mtp(hidden, mx.zeros((1, 1), mx.int32), cache)
    assert cache.shape is not None, "a head's layer keeps keys and values"
    return [cache.shape]


def windows(model: LoadedModel) -> list[int]:
    """Return the attention windows of the masks that the model asks its caches for, in ascending order."""
    module: Any = model.module
    caches = list(leaves(make_prompt_cache(module)))
    probes = [ProbeCache() for cache in caches if not keeps_state(cache)]
    module(mx.zeros((1, 2), mx.int32), cache=arranged(module, probes, [c for c in caches if keeps_state(c)]))
    return sorted(set[int]().union(*(p.windows for p in probes)))


def vocabulary(model: LoadedModel) -> int:
    """Return the width of the logits, against which token ids are checked."""
    module: Any = model.module
    return int(module(mx.zeros((1, 1), mx.int32)).shape[-1])


def mask_axes(model: LoadedModel, found: Examined) -> int:
    """Return how many axes the masks of this family have between rows and queries: 1, or 2 where its softmax groups
    queries.

    It is found by running as many rows as there are KV heads (where a mask of the wrong rank is silently wrong)
    through the paged cache, in chunks, and comparing with the model's own cache. Raise ModelError if neither number
    is right.
    """
    rng = np.random.default_rng(0)
    rows = max(2, min(found.layers[0].keys.heads if found.layers else 0, 8))
    prompts = [rng.integers(0, found.vocab_size, 9 if found.states else 9 + 2 * i).tolist() for i in range(rows)]
    module: Any = model.module
    expected = [
        np.array(module(mx.array([p]), cache=make_prompt_cache(module))[0, -1].astype(mx.float32)) for p in prompts
    ]
    if not all(np.isfinite(logits).all() for logits in expected):
        raise _not_numbers(model)
    worst, problem = float("inf"), ""
    for axes in (1, 2):
        try:
            got = _paged_logits(module, found._replace(mask_axes=axes), prompts)
        except Exception as e:
            problem = first_line(e)
            continue
        scale = max(float(np.abs(x).max()) for x in expected)
        error = max(float(np.abs(a - b).max()) for a, b in zip(got, expected, strict=True)) / scale
        if error <= _TOLERANCE.get(model.dtype, 1e-1):
            return axes
        worst = min(worst, error)
    changes = f"the paged cache changes its logits by {worst:.1e} of the largest"
    raise _unsupported(model, changes if worst < float("inf") else problem)


def fused_error(model: LoadedModel, found: Examined, kernels: Sequence[LayerKernels | None], block: int) -> float:
    """Return the largest difference of the model's logits with and without these kernels, as a multiple of what is
    allowed.
    """
    prompts = _prompts(found, 2)
    ours = _paged_logits(model.module, found, prompts, kernels, block)
    return _error(model, ours, _paged_logits(model.module, found, prompts, (), block))


def served_error(
    model: LoadedModel, twin: Any, found: Examined, kernels: Sequence[LayerKernels | None], block: int
) -> float:
    """Return the largest difference between the logits of the model as it is served and those of `twin`, the unchanged
    modules, as a multiple of the allowed difference.

    Raise ModelError if the twin's logits are not finite.
    """
    prompts = _prompts(found, 3)
    theirs = _paged_logits(twin, found, prompts, (), block)
    if not all(np.isfinite(logits).all() for logits in theirs):
        raise _not_numbers(model)
    return _error(model, _paged_logits(model.module, found, prompts, kernels, block), theirs)


def _prompts(found: Examined, seed: int) -> list[list[int]]:
    """Return three random prompts, of one length if the model keeps states."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, found.vocab_size, n).tolist() for n in ((9, 9, 9) if found.states else (9, 3, 14))]


def _error(model: LoadedModel, ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Return the largest relative difference of two lists of logits, as a multiple of what is allowed."""
    errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True)]
    return max(errors) / _TOLERANCE.get(model.dtype, 1e-1)


def decode_seconds(
    model: LoadedModel, found: Examined, kernels: Sequence[LayerKernels | None], block: int, rows: int
) -> float:
    """Return the seconds of a compiled forward of `rows` rows with one token each."""
    paged = _Paged(model.module, found, [[0] * 9] * rows, kernels, block)
    step = mx.compile(paged.step)
    return checking.seconds(lambda: step(*paged.step_arguments()), 1)


def _paged_logits(
    module: Any,
    found: Examined,
    prompts: list[list[int]],
    kernels: Sequence[LayerKernels | None] = (),
    block: int = 4,
) -> list[Any]:
    """Return each prompt's last logits [vocabulary] by the paged cache.

    All tokens but the last go in one padded batch, then the last tokens of all rows decode in one step. With kernels
    the rows of the batch have a common offset, as prompts that kernels read do.
    """
    paged = _Paged(module, found, prompts, kernels, block)
    mx.eval(paged.read())
    output = paged.decode()
    return [np.array(output[i, -1].astype(mx.float32)) for i in range(len(prompts))]


class _Paged:
    """Prompts of up to 32 tokens in a pool of their own; all have the same length if the model keeps states."""

    def __init__(
        self,
        module: Any,
        found: Examined,
        prompts: Sequence[Sequence[int]],
        kernels: Sequence[LayerKernels | None],
        block: int,
    ):
        shapes, states = found.layers, found.states
        self._module, self._prompts, self._axes, self._block = module, prompts, found.mask_axes, block
        self._common_offset = 0 if kernels and kernels[0] is not None else None
        self._width = -(-32 // block)
        self._blocks = 1 + len(prompts) * self._width
        self._caches = [PagedCache(*each) for each in zip(shapes, kernels or [None] * len(shapes), strict=True)]
        self._states = [StateCache(shape) for shape in states]
        self._windows = windows_of(shapes)
        self._pool = KVPools(shapes, [self._blocks] * (len(self._windows) + bool(states)), block, states=states)
        tables = 1 + np.arange(self._blocks - 1).reshape(len(prompts), self._width)
        self._tables = np.random.default_rng(1).permuted(tables.reshape(-1)).reshape(tables.shape)
        self._lengths = np.array([len(p) - 1 for p in prompts])

    def read(self) -> mx.array:
        """Return the logits of all tokens but the last of each prompt, and write their keys and values into the
        pool.
        """
        tokens, slots = (np.zeros((len(self._prompts), self._lengths.max()), np.int32) for _ in range(2))
        for i, p in enumerate(self._prompts):
            at = np.arange(len(p) - 1)
            tokens[i, : len(at)] = p[:-1]
            slots[i, : len(at)] = self._tables[i, at // self._block] * self._block + at % self._block
        return self._forward(tokens, np.zeros(len(tokens)), slots, self._common_offset)

    def decode(self) -> mx.array:
        """Return the logits of each prompt's last token."""
        return self._forward(*self._last_tokens(), None)

    def step_arguments(self) -> tuple[list[mx.array], list[list[mx.array]]]:
        """Return the arguments of `step` that compute the logits of each prompt's last token."""
        return self._numbers(*self._last_tokens()), self._pool.layers

    def step(self, numbers: list[mx.array], layers: list[list[mx.array]]) -> list[mx.array]:
        """Return the logits of each prompt's last token and the state of the pool, as a pure function of arrays."""
        output, states, written = self._run_module(numbers, layers, None, decodes=True)
        return [output, *states.lines, *states.written, *(array for own in written for array in own)]

    def _last_tokens(self) -> tuple[Any, Any, Any]:
        """Return each prompt's last token [rows, 1], its position [rows] and its slot [rows, 1]."""
        tokens = np.array([[p[-1]] for p in self._prompts], np.int32)
        rows, at = np.arange(len(tokens)), self._lengths
        slots = (self._tables[rows, at // self._block] * self._block + at % self._block)[:, None]
        return tokens, at, slots

    def _numbers(self, tokens: Any, offset: Any, slots: Any) -> list[mx.array]:
        """Return the tokens, the offsets, the slots, and for each pool the blocks that its layers see."""
        numbers = [tokens, offset, slots]
        for i, window in enumerate(self._windows):
            # The table's width differs between pools, so that a mask made for one pool does not fit a layer of another.
            seen = np.pad(self._tables, ((0, 0), (0, i + self._width)))
            first = np.maximum(offset + 1 - (window or self._lengths.max() + 2), 0) // self._block
            numbers.append(np.take_along_axis(seen, first[:, None].astype(int) + np.arange(self._width + i), 1))
        return [mx.array(each.astype(np.int32)) for each in numbers]

    def _run_module(
        self, numbers: list[mx.array], layers: list[list[mx.array]], common_offset: int | None, *, decodes: bool
    ) -> tuple[mx.array, StateView, list[list[mx.array]]]:
        """Return the model's output, the view of the states, and the arrays of the pool after a forward.

        decodes: whether rows go on from a state.
        """
        tokens, offset, slots, *tables = numbers
        views: list[Any] = [
            StepView(
                offset,
                slots,
                seen,
                PoolLayout(self._blocks, self._block, self._axes, window),
                common_offset=common_offset,
            )
            for seen, window in zip(tables, self._windows, strict=True)
        ]
        rows = mx.arange(1, 1 + len(self._prompts))
        states = StateView(rows if decodes else None, rows)
        views.append(states)
        caches: list[Any] = [*self._caches, *self._states]
        for cache, arrays, own in zip(caches, layers, self._pool.pool_of, strict=True):
            cache.bind(arrays, views[own])
        try:
            output: mx.array = self._module(tokens, cache=arranged(self._module, self._caches, self._states))
        finally:
            written = [cache.release() for cache in caches]
        return output, states, written

    def _forward(self, tokens: Any, offset: Any, slots: Any, common_offset: int | None) -> mx.array:
        numbers, decodes = self._numbers(tokens, offset, slots), bool(offset.any())
        output, states, self._pool.layers = self._run_module(numbers, self._pool.layers, common_offset, decodes=decodes)
        if states.lines:
            self._pool.put_states(mx.arange(1, 1 + len(tokens)), states.lines)
        mx.eval(output, states.written)  # the logits do not depend on all writes of new states
        return output


def _unsupported(model: LoadedModel, why: str) -> ModelError:
    what = f"{model.folder / CONFIG}: model_type {model.model_type!r} is not supported yet: {why}"
    return ModelError(what + suspects(model.settings), param="model_type")


def _not_numbers(model: LoadedModel) -> ModelError:
    """Return the error about a model whose logits are NaN or infinite, which names a weight that is the cause, if
    one is.
    """
    name = not_finite(model.module)
    if name is None:
        what = f"{model.folder / CONFIG}: the model's logits are not finite numbers"
        return ModelError(what + suspects(model.settings), param=CONFIG)
    return ModelError(f"{model.folder / '*.safetensors'}: the weight {name} holds NaN or infinity", param=name)
