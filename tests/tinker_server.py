"""Servers with Tinker's API, for tests of its SDK and of what they say over HTTP."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from mlx_tandem.cli import learning
from mlx_tandem.config import Config, TinkerConfig
from tests.serving import demo_config


def tinker_config(
    folder: Path, *, trainers: int = 4, rank: int = 16, lease_s: float = 60.0, **server: object
) -> Config:
    """The demo server with Tinker's API; checkpoints are in `folder`."""
    tinker = TinkerConfig(enabled=True, trainers=trainers, rank=rank, dir=str(folder / "tinker"), lease_s=lease_s)
    return learning.resolve(structs.replace(demo_config(**server), tinker=tinker), {})
