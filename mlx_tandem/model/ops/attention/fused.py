"""Attention back ends whose kernels read the KV pool in place, so that nothing is gathered for rows with few
queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_tandem.model.cache.kvformat import LayerShape
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.ops.attention.cache import LayerKernels
from mlx_tandem.model.ops.attention.division import Division, start
from mlx_tandem.model.ops.attention.grouped import GroupedAttention, unreadable_groups
from mlx_tandem.model.ops.attention.paged import PagedAttention, unreadable_rows
from mlx_tandem.model.ops.attention.rotary import Rotary


@dataclass(frozen=True, slots=True)
class Fused:
    """A back end whose kernels `make` makes."""

    name: str
    make: dialect.Make

    def kernels(self, shape: LayerShape, block_size: int, division: Division | None = None) -> LayerKernels:
        """Return the kernels for layers of this shape, which must be readable.

        `division` says how attention's work is divided; by default as it starts on this target.
        """
        division = division or start(self.name, shape.keys)
        asks = shape.asks
        plain = shape.window is None and (asks is None or not (asks.sinks or asks.casts))
        groups = division.grouped and plain and not unreadable_groups(shape.keys, block_size)
        return LayerKernels(
            PagedAttention(self.make, shape.keys, block_size, division),
            Rotary(self.make, shape.keys, block_size),
            GroupedAttention(self.make, shape.keys, block_size, division) if groups else None,
        )


def available() -> Sequence[Fused]:
    """Return the fused back ends of the default device."""
    return [Fused(target, dialect.maker(target)) for target in dialect.available()]


def unreadable(shape: LayerShape) -> str:
    """Return why kernels cannot read the cache of such layers; empty if they can."""
    if shape.keys != shape.values:
        return "keys and values of different shapes"
    return unreadable_rows(shape.keys)
