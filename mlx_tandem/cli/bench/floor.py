"""The least that a step of decoding has to move, and how long this device needs to move it."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_tandem.config import EngineConfig
from mlx_tandem.types import EngineInfo


@dataclass(frozen=True)
class Floor:
    """Bytes, and bytes a second as measured by copying on this device in this run."""

    weights: int  # that every step reads
    token: int  # keys and values
    adapter: int
    bandwidth: float

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo, rank: int) -> Floor:
        """For adapters of this rank on all linears, in the model's precision. Call it where the engine runs."""
        from mlx_tandem.model import footprint, loader
        from mlx_tandem.model.kernel_checks.machine import copy_bandwidth

        model = loader.load_unread(config.model, lambda stage, fraction: None)
        return cls(
            footprint.read_by_a_step(model.module),
            info.kv_bytes_per_token,
            footprint.adapter_bytes(model.module, rank, model.dtype.size),
            copy_bandwidth(),
        )

    def of_step(self, rows: int, context: float, adapters: int, milliseconds: float) -> dict[str, float]:
        """A step in which so many rows decode at `context` tokens each: the weights once, every row's keys and values
        (of its last token they are written, of the others read), and the arrays of the adapters in use.
        `bandwidth_share` is of the copying bandwidth, over the milliseconds that the step took."""
        cache = rows * context * self.token
        moved = self.weights + cache + adapters * self.adapter
        floor = moved / self.bandwidth * 1e3
        return {
            "weight_bytes": self.weights,
            "cache_bytes": round(cache),
            "adapter_bytes": adapters * self.adapter,
            "floor_ms": round(floor, 3),
            "bandwidth_share": round(floor / milliseconds, 3) if milliseconds else 0.0,
        }
