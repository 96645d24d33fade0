"""The list of checks, in the order in which they run; docs/doctor.md has a paragraph for each."""

from __future__ import annotations

from mlx_tandem.cli.doctor.result import Check

_HERE = "mlx_tandem.cli.doctor"

CHECKS = (  # in the order in which they run
    Check("python", "whether this Python can load MLX at all", f"{_HERE}.host:python", 20),
    Check("system", "whether the system is new enough for MLX", f"{_HERE}.host:system", 20),
    Check("packages", "whether the packages are of versions that belong together", f"{_HERE}.host:packages", 20),
    Check("memory", "whether there is room for a model", f"{_HERE}.host:memory", 20),
    Check("starts", "what the last start of a server here spent its time on", f"{_HERE}.host:starts", 20),
    Check("device", "whether MLX opens a device and computes rightly on it", f"{_HERE}.device:opens", 60),
    Check("compile", "whether fused functions compile and are right", f"{_HERE}.device:compiles", 60, "device"),
    Check(
        "attention",
        "whether every back end of attention gives what plain float32 gives",
        f"{_HERE}.device:attention",
        120,
        "device",
    ),
    Check("pool", "whether keys and values are written in place, not copied", f"{_HERE}.device:pool", 60, "device"),
    Check("engine", "whether the engine starts with the built-in model", f"{_HERE}.served:starts", 120, "device"),
    Check("adapters", "whether adapters are swapped while serving", f"{_HERE}.served:swaps", 60, "engine"),
    Check(
        "equivalence",
        "whether answers are mlx-lm's, alone, batched, in chunks, beside other adapters and from the cache",
        f"{_HERE}.served:equal",
        120,
        "engine",
    ),
    Check("learning", "whether training works and agrees with serving", f"{_HERE}.served:learns", 120, "engine"),
    Check("speed", "how fast it is; nothing is judged", f"{_HERE}.served:speed", 120, "engine"),
)


def chosen(names: str) -> tuple[Check, ...]:
    """Return the checks named in a list separated by commas and those that they need; all if it is empty.

    Raise KeyError with an unknown name.
    """
    known = {check.name: check for check in CHECKS}
    todo, wanted = names.split(",") if names else [], set[str]()
    while todo:
        check = known[todo.pop()]
        wanted.add(check.name)
        todo += [check.needs] * bool(check.needs)
    return tuple(check for check in CHECKS if not wanted or check.name in wanted)
