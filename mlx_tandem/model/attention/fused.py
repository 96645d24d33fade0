"""The back ends that read the pool themselves: nothing is gathered for the rows of a step with few queries each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_tandem.model.cache.kvcache import LayerKernels, LayerShape
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.division import Division, start
from mlx_tandem.model.kernels.paged_attention import PagedAttention, unreadable_rows
from mlx_tandem.model.kernels.rotary import Rotary


@dataclass(frozen=True, slots=True)
class Fused:
    """Kernels as `make` makes them."""

    name: str
    make: dialect.Make

    def kernels(self, shape: LayerShape, block_size: int, division: Division | None = None) -> LayerKernels:
        """Return the kernels for layers of this shape, which must be readable, with attention's work divided so."""
        return LayerKernels(
            PagedAttention(self.make, shape.keys, block_size, division or start(self.name, shape.keys)),
            Rotary(self.make, shape.keys, block_size),
        )


def available() -> Sequence[Fused]:
    """Those of the default device."""
    return [Fused(target, dialect.maker(target)) for target in dialect.available()]


def unreadable(shape: LayerShape) -> str:
    """Why kernels cannot read what such layers keep; empty: they can."""
    if shape.keys != shape.values:
        return "keys and values of different shapes"
    return unreadable_rows(shape.keys)
