"""Back ends of other machines, under which `tandem plan` divides memory by the code that a start there would run."""

from __future__ import annotations

from dataclasses import fields

from mlx_tandem.capacity.machines import SYSTEM, Machine
from mlx_tandem.model.backend.base import Backend
from mlx_tandem.model.backend.cpu import CPU
from mlx_tandem.model.backend.cuda import CUDA, Cuda
from mlx_tandem.model.backend.metal import METAL, Metal
from mlx_tandem.model.device import Limit, UnifiedMemory


def unified_memory(mac: Machine, available: int) -> UnifiedMemory:
    """Return the memory of a Mac on which other programs leave `available` bytes."""
    return UnifiedMemory(mac.total, mac.working_set, available)


def elsewhere(machine: Machine, devices: int = 1) -> Backend:
    """Return the back end of a machine, with the memory of `devices` such machines together.

    A Mac is taken to run nothing but macOS and a browser, and an NVIDIA card nothing at all.
    """
    if machine.chip.maker == "apple":
        one = unified_memory(machine, machine.total - SYSTEM).limit()
    else:
        one = Limit(machine.free, f"what an {machine.chip.title} has free", shared=False)
    limit = one._replace(size=one.size * devices)

    class OtherMac(Metal):
        def free_memory(self) -> Limit:
            return limit

    class OtherCard(Cuda):
        def free_memory(self) -> Limit:
            return limit

    there: Backend = METAL if machine.chip.maker == "apple" else CUDA
    kind = OtherMac if machine.chip.maker == "apple" else OtherCard
    # Kernels for a device that is not here could not even be declared, and a plan runs none.
    return kind(**{field.name: getattr(there, field.name) for field in fields(there)} | {"kernels": CPU.kernels})
