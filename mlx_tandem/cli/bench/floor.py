"""The least number of bytes that a decode step has to move, and how long this device needs to move them."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_tandem.config import EngineConfig
from mlx_tandem.types import EngineInfo


@dataclass(frozen=True)
class Floor:
    """Bytes that a step moves, and the bytes per second that this device copies, measured in this run."""

    weights: int  # bytes of weights that every step reads
    token: int  # bytes of the keys and values of one token
    state: int  # bytes of the states of one sequence
    adapter: int  # bytes of one adapter
    bandwidth: float  # bytes per second

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo, rank: int) -> Floor:
        """Measure the floor for adapters of this rank on all linears in the model's type. Call it in the engine's
        process.
        """
        from mlx_tandem.model import footprint, loader
        from mlx_tandem.model.kernels.checking import copy_bandwidth

        model = loader.load_unread(config.model, lambda stage, fraction: None)
        return cls(
            footprint.read_by_a_step(model.module),
            info.kv_bytes_per_token,
            sum(pool.block_bytes for pool in info.memory.pools if pool.state),
            footprint.adapter_bytes(model.module, rank, model.dtype.size),
            copy_bandwidth(),
        )

    def of_step(self, rows: int, context: float, adapters: int, milliseconds: float) -> dict[str, float]:
        """Return the bytes and least time of a step in which `rows` rows decode at `context` tokens each.

        It reads the weights once, every row's keys and values (the last token's are written), and the arrays of the
        adapters in use. It reads and writes every row's states. `bandwidth_share` is the share of the copying bandwidth
        that the step reached in `milliseconds`.
        """
        cache = rows * (context * self.token + 2 * self.state)
        moved = self.weights + cache + adapters * self.adapter
        floor = moved / self.bandwidth * 1e3
        return {
            "weight_bytes": self.weights,
            "cache_bytes": round(cache),
            "adapter_bytes": adapters * self.adapter,
            "floor_ms": round(floor, 3),
            "bandwidth_share": round(floor / milliseconds, 3) if milliseconds else 0.0,
        }
