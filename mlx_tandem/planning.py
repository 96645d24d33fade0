"""Computes what a model would take on a machine, and reads what its folder holds, without an engine.

The thread that asks cannot use MLX afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from mlx_tandem.capacity.machines import Machine, recognised
from mlx_tandem.capacity.plan import Capacity
from mlx_tandem.config import EngineConfig
from mlx_tandem.errors import TandemError
from mlx_tandem.types import MemoryBudget, ModelSummary


def plan(config: EngineConfig) -> tuple[MemoryBudget, int, str]:
    """Return how an engine with these settings would divide this device's memory, its longest sequence, and the
    device's name.

    No weight is read. The calling thread cannot use MLX afterwards. Raise ModelError if the model cannot be served.
    """
    from mlx_tandem.model import backend, device
    from mlx_tandem.model.build import plan as planned

    try:
        return *planned(config), backend.current().describe()
    finally:
        device.leave_thread()


def plans(configs: Sequence[EngineConfig]) -> tuple[int, str, list[tuple[MemoryBudget, int] | TandemError]]:
    """Return the bytes that an engine may use on this device, the reason in words, and for each of these settings how
    it would divide them and its longest sequence, or why the model cannot be served.

    No weight is read. The calling thread cannot use MLX afterwards.
    """
    from mlx_tandem.model import backend, device
    from mlx_tandem.model.build import plan as planned

    found: list[tuple[MemoryBudget, int] | TandemError] = []
    try:
        for config in configs:
            try:
                found.append(planned(config))
            except TandemError as e:
                found.append(e)
        limit = backend.current().memory_limit()
        return limit.size, limit.reason, found
    finally:
        device.leave_thread()


def summary(config: EngineConfig, *, check: bool) -> tuple[ModelSummary, MemoryBudget, int, str]:
    """Return what the model's folder holds, and what `plan` returns, with the same errors.

    Weights are read only to `check` the model's answers. The calling thread cannot use MLX afterwards.
    """
    from mlx_tandem.model import backend, device
    from mlx_tandem.model.build import plan as planned
    from mlx_tandem.model.summary import summarise

    try:
        return summarise(config, check=check), *planned(config), backend.current().describe()
    finally:
        device.leave_thread()


def capacity(config: EngineConfig, rank: int, machine: Machine | None, devices: int) -> Capacity:
    """Return what `devices` machines of a kind would do with the model of `config`; None: this machine.

    No weight is read. The calling thread cannot use MLX afterwards. Raise ModelError if the model cannot be served.
    """
    from mlx_tandem.model import backend, device
    from mlx_tandem.model.backend.elsewhere import elsewhere
    from mlx_tandem.model.build import plan as planned
    from mlx_tandem.model.workload import workload

    try:
        here = backend.current()
        known = recognised(here.describe(), int(here.sizes().get("memory_size", 0))) if machine is None else machine
        with nullcontext() if machine is None else backend.planning_for(elsewhere(machine, devices)):
            memory, longest = planned(config)
            work = workload(config, rank)
        return Capacity(work, memory, longest, known, known.title if known else here.describe())
    finally:
        device.leave_thread()
