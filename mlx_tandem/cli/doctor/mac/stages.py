"""The stages of `tandem doctor --mac` that run after the ordinary checks, in their order. The table in docs/doctor.md
has a row for each.
"""

from __future__ import annotations

from msgspec.structs import replace

from mlx_tandem.cli.doctor.checks import CHECKS
from mlx_tandem.cli.doctor.result import Check

_HERE = "mlx_tandem.cli.doctor.mac"
_LAUNCHED = "whether steps launched while the one before runs disturb it"


def _overlap(operations: int) -> Check:
    return Check(
        f"overlap-{operations:,}",
        f"{_LAUNCHED}, with {operations:,} operation{'s' * (operations > 1)} in a command buffer",
        f"{_HERE}.engine:overlap_on_gpu",
        240,
        usual=35,
        alone=True,
        environment={"MLX_MAX_OPS_PER_BUFFER": str(operations), "MLX_MAX_MB_PER_BUFFER": "1000000"},
    )


def _decode(name: str, meaning: str, function: str, usual: float, seconds: float) -> Check:
    return Check(name, meaning, f"{_HERE}.decode:{function}", seconds, usual=usual, alone=True)


_BESIDE = "in turn with mlx-lm in the same process, 1 and 8 rows behind a context of"

MEMORY = Check("memory-before", "the memory limits, and what the system says of them", f"{_HERE}.machine:memory", 30)

STAGES = (
    MEMORY,
    Check("wheel", "which wheels MLX was installed from", f"{_HERE}.machine:wheel", 20),
    Check("accelerators", "whether MLX uses the neural accelerators of M5", f"{_HERE}.machine:accelerators", 30),
    Check(
        "kernels",
        "how long each kernel takes to compile, and whether it is right",
        f"{_HERE}.engine:kernels",
        240,
        usual=40,
        alone=True,
    ),
    Check("start", "what a start decides here, and how long it takes", f"{_HERE}.engine:start", 180, usual=30),
    Check("overlap", _LAUNCHED, f"{_HERE}.engine:overlap", 180, usual=20),
    Check("prompt", "the longest step and the memory of a long prompt", f"{_HERE}.engine:prompt", 180, usual=25),
    _overlap(1),
    _overlap(1000),
    _decode("decode-short", f"tokens a second {_BESIDE} 128", "short", 30, 180),
    _decode("decode-medium", f"tokens a second {_BESIDE} 1,024", "medium", 35, 240),
    _decode("decode-long", f"tokens a second {_BESIDE} 16,384", "long", 75, 360),
    _decode("hybrid", "the same for a model with recurrent layers, behind a context of 1,024", "hybrid", 45, 240),
    Check(
        "idle",
        "whether a server outlives two minutes without a request, asleep or awake",
        f"{_HERE}.idle:waits",
        300,
        usual=130,
        hint="let the Mac sleep now if you like (close the lid, or Sleep in the Apple menu): this command does not",
        alone=True,
    ),
    replace(MEMORY, name="memory-after"),
)

ALL = CHECKS + STAGES
