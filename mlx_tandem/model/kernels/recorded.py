"""Modules that MLX compiles by itself during a start, as recorded on a GPU, so that they are compiled at once.

MLX compiles a fused or indexing operation at its first use, one at a time, and each takes NVRTC seconds. The name and
the text of such a module depend on the operations and types of a model and not on its dimensions, so that one list
serves all models whose operations are alike. What is not in the list, MLX compiles as before. The list is of use to one
version of MLX only. `scripts/record_modules.py` makes it. Its texts are MLX's, whose licence is in `recorded.LICENSE`.
"""

from __future__ import annotations

import gzip
from collections.abc import Collection
from importlib import resources
from importlib.metadata import version

import msgspec
from msgspec import Struct

from mlx_tandem.config import EngineConfig
from mlx_tandem.model.kernels.nvrtc import Unit

FILE = "recorded.json.gz"

SERVE, ADAPTERS, LEARNING, DRAFTS, PACKED = GROUPS = ("serve", "adapters", "learning", "drafts", "packed")
"""What starts need modules for; a module belongs to the first group whose start needed it."""


class Module(Struct, frozen=True, forbid_unknown_fields=True):
    """A module of MLX's: its name, the group it belongs to, its text, and the instances of templates in it."""

    name: str
    group: str
    text: str
    instances: tuple[str, ...]


class Recorded(Struct, frozen=True, forbid_unknown_fields=True):
    """The modules of a version of MLX in the order of their first use, and the headers that they include."""

    mlx: str
    headers: dict[str, str]
    modules: tuple[Module, ...]

    def units(self, groups: Collection[str]) -> list[Unit]:
        """Return what is compiled for these groups, the last group first: its modules take the compiler longest."""
        headers = tuple(self.headers.items())
        ordered = sorted(self.modules, key=lambda one: GROUPS.index(one.group), reverse=True)
        return [Unit(one.name, one.text, headers, one.instances) for one in ordered if one.group in groups]


def read() -> Recorded | None:
    """Return the list, or None if it was recorded with another version of MLX than the installed one."""
    found = msgspec.json.decode(
        gzip.decompress(resources.files(__package__).joinpath(FILE).read_bytes()), type=Recorded
    )
    return found if found.mlx == version("mlx") else None


def groups_of(config: EngineConfig, *, packed: bool) -> list[str]:
    """Return the groups of a start with these settings; packed: whether weights are quantised."""
    needed = {
        SERVE: True,
        ADAPTERS: config.lora.max_loras > 0 and config.lora.prepare,
        LEARNING: config.duty.trainer_rank > 0,
        DRAFTS: config.speculation.method != "none",
        PACKED: packed,
    }
    return [group for group, is_needed in needed.items() if is_needed]
