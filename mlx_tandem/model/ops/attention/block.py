"""A fused path through attention blocks of a known kind: one product for q, k and v, one kernel from there to the
pool, attention.

A block's own code is kept and runs whenever the fused path cannot. The known kinds are those whose code was read:
query, key and value linears, an optional norm over each head, rotation of each head or a part of it, attention, an
optional gate of its output, an output linear, and nothing else. The gates are a part of the queries' product.

At start the path is checked: it must give the model's own logits and not be slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3, qwen3_moe, qwen3_next

from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.checking import Rejected, checked
from mlx_tandem.model.modules import mix_in, unmix
from mlx_tandem.model.ops.attention.cache import PagedCache, Rotation
from mlx_tandem.model.ops.attention.paged import MOST_QUERIES
from mlx_tandem.model.ops.attention.rotary import Norms
from mlx_tandem.model.ops.products.merged import joined_product, whole_of

GATED = (qwen3_next.Qwen3NextAttention,)
"""The attention classes of mlx-lm with a gated output that the fused path may replace."""

KINDS = (llama.Attention, qwen2.Attention, qwen3.Attention, qwen3_moe.Attention, *GATED)
"""The attention classes of mlx-lm that the fused path may replace."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a block that the fused path needs."""

    rotation: Rotation
    norms: Norms | None
    """The norms of queries' and keys' heads; None: the block has none."""

    gated: tuple[int, int] | None
    """Number and width of the queries' heads if each head is followed by a gate of its width; else None."""


def fusable_blocks(model: nn.Module) -> list[tuple[nn.Module, Parts]]:
    """Return the model's blocks of known kinds that can take the fused path, with what it needs of them."""
    found = [(module, _parts(module)) for module in model.modules() if type(module) in KINDS]
    return [(module, parts) for module, parts in found if parts is not None]


def use_fused_path(blocks: Iterable[tuple[nn.Module, Parts]]) -> None:
    """Let these blocks take the fused path from here on whenever their cache offers it."""
    for module, parts in blocks:
        own: Any = module
        own._parts = parts
        mix_in(module, FusedBlock)


@contextmanager
def products_apart(blocks: Iterable[tuple[nn.Module, Parts]]) -> Iterator[None]:
    """Let these blocks, which take the fused path, compute q, k and v apart within the context."""
    own: list[Any] = [module for module, _ in blocks]
    for block in own:
        block._products_apart = True
    try:
        yield
    finally:
        for block in own:
            block._products_apart = False


def _parts(block: Any) -> Parts | None:
    """Return what the fused path needs of a block; None if it computes something that the path does not know."""
    rope, linears = block.rope, (block.q_proj, block.k_proj, block.v_proj)
    gated = type(block) in GATED
    heads = block.num_attention_heads if gated else block.n_heads
    dim = linears[0]["weight"].shape[0] // heads // (2 if gated else 1)
    if type(rope) is not nn.RoPE or rope.traditional or rope.dims > dim or (rope.dims < dim and rope.dims % 4):
        return None
    norms = None
    if "q_norm" in block:
        q, k = block.q_norm, block.k_norm
        if type(q) is not nn.RMSNorm or type(k) is not nn.RMSNorm or q.weight.shape != (dim,) or q.eps != k.eps:
            return None
        norms = Norms(mx.stack([q.weight, k.weight]), float(q.eps))
        mx.eval(norms.weights)
    if whole_of(linears) is None:
        return None
    rotation = Rotation(rope.dims, float(rope.base), float(rope.scale))
    return Parts(rotation, norms, (heads, dim) if gated else None)


class FusedBlock:
    """Mixin of an attention block that takes the fused path when its cache offers it."""

    _parts: Parts
    _products_apart = False
    """Whether q, k and v are always computed apart; only a check sets this."""

    def takes_tokens(self, x: mx.array, length: int, mask: Any, cache: Any) -> bool:
        """Return whether the block takes x as [tokens, dim] in a step whose rows have this length."""
        return length <= MOST_QUERIES and isinstance(cache, PagedCache) and cache.offers(x, mask)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Return the block's output, by the fused path if the cache offers it.

        x: [rows, length, inputs], or [rows · length, inputs] where `takes_tokens` says so. The output has the same
        leading axes.
        """
        block: Any = self
        if isinstance(cache, PagedCache) and cache.offers(x, mask):
            own, linears = self._parts, (block.q_proj, block.k_proj, block.v_proj)
            product = None if self._products_apart else joined_product(linears, x)
            products = [linear(x) for linear in linears] if product is None else [product]
            gated = own.gated is not None
            out = cache.attend_products(products, own.rotation, own.norms, scale=block.scale, mask=mask, gated=gated)
            if own.gated is not None:
                out = out * mx.sigmoid(_gates(products[0], *own.gated))
            output: mx.array = block.o_proj(out)
            return output
        output = super().__call__(x, mask, cache)  # type: ignore[misc]
        return output


def _gates(product: mx.array, heads: int, dim: int) -> mx.array:
    """Return the gates [..., heads · dim] in a product that begins with the queries' heads, each before its gate."""
    lead = product.shape[:-1]
    both = product[..., : 2 * heads * dim].reshape(*lead, heads, 2 * dim)
    return both[..., dim:].reshape(*lead, heads * dim)


# --- The choice at start ---------------------------------------------------------------------------------------------

ROWS = 16
"""Rows of the forward that is timed."""

MOST = 1.1
"""Longest time of a forward on the fused path, as a multiple of the time by the blocks' own code.

Most of that time is spent in matrix products, whose duration varies by a few per cent.
"""


def use(model: nn.Module) -> None:
    """Switch a model's attention blocks to the fused path, which another process has checked."""
    use_fused_path(fusable_blocks(model))


def choose(
    model: nn.Module, seconds: Callable[[int], float] | None, error: Callable[[], float], *, adapters: bool
) -> str:
    """Switch the model's attention blocks to the fused path where it is right and not slower.

    A block computes q, k and v apart if an adapter changes only some of its linears or is not computed by the fused
    kernels, and for many tokens if its linears are quantised. If either can happen, that path is checked too.

    Return why the blocks run their own code; empty if they are on the fused path or no block is of a known kind.

    Args:
        model: The model.
        seconds: Measures a decode step of so many rows; None: the path may be slower.
        error: Returns the error of the model's logits, as a multiple of what is allowed.
        adapters: Whether adapters may be loaded.
    """
    blocks = fusable_blocks(model)
    if not blocks:
        return ""
    if inplace.writing().store is None:
        # The pool may have one kind of writer only: MLX orders nothing behind a kernel's write to its input.
        return "their kernel writes the KV pool, which MLX's own operations do on this device"

    before = seconds(ROWS) if seconds is not None else 0.0
    use_fused_path(blocks)

    def check() -> str:
        apart = adapters or not all(isinstance(block["q_proj"], nn.Linear) for block, _ in blocks)
        for path in (nullcontext(), products_apart(blocks)) if apart else (nullcontext(),):
            with path:
                off = error()
            if not off <= 1:
                raise Rejected(f"on the fused path their logits are off by {off:.1e}")
        if seconds is not None and (now := seconds(ROWS)) > MOST * before:
            times = f"{now * 1e3:.1f} ms on the fused path, and {before * 1e3:.1f} without it"
            raise Rejected(f"a step of {ROWS} rows takes {times}")
        return ""

    def own_code(reason: str) -> str:
        for module, _ in blocks:
            unmix(module)
        return reason

    return checked("the fused path through attention blocks", check, own_code)
