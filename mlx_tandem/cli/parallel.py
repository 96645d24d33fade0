"""Checks the settings of several ranks that compute one model, and refuses what they cannot serve before anything is
loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msgspec import structs

from mlx_tandem.cli.console import warn
from mlx_tandem.config import Config, ParallelConfig
from mlx_tandem.engine.ranks.launched import launched_count, launched_here, launched_rank, read_hosts
from mlx_tandem.errors import InvalidRequest

VARIABLES = {
    "hostfile": "MLX_HOSTFILE",
    "ibv_devices": "MLX_IBV_DEVICES",
    "jaccl_coordinator": "MLX_JACCL_COORDINATOR",
}
"""Environment variables of MLX that settings have as their defaults, by the setting."""

ONLY_SEVERAL = {
    "distributed_hostfile": "--distributed-hostfile",
    "distributed_ibv_devices": "--distributed-ibv-devices",
    "distributed_jaccl_coordinator": "--distributed-jaccl-coordinator",
}
"""Options that mean something only with several ranks, by the names of their parameters."""

_CUDA = ("mlx-cuda-12", "mlx-cuda-13")


def resolve(config: Config, options: Mapping[str, object]) -> Config:
    """Return the settings with the number of ranks and what carries their sums filled in; warn about options without
    effect.

    Raise InvalidRequest that names what several ranks cannot serve.
    """
    parallel = config.engine.parallel
    if parallel.sharding == "pipeline":
        raise InvalidRequest("--distributed-sharding pipeline is not served: each layer is divided (tensor)")
    given = {name: getattr(parallel, name) or os.environ.get(variable, "") for name, variable in VARIABLES.items()}
    ranks = _ranks(structs.replace(parallel, **given))
    if ranks == 1:
        for name, flag in ONLY_SEVERAL.items():
            if options.get(name):
                warn(f"{flag} has no effect with one rank (--tensor-parallel-size)")
        return structs.replace(config, engine=structs.replace(config.engine, parallel=ParallelConfig()))
    mode = parallel.mode if parallel.mode != "off" else "nccl" if _has_cuda() else "ring"
    own = ranks if launched_rank() is None and not parallel.hostfile else launched_here(mode)
    parallel = structs.replace(parallel, ranks=ranks, local_ranks=own, mode=mode, **given)
    for refused in _refused(config):
        raise InvalidRequest(f"{refused} is not served by several ranks (--tensor-parallel-size {ranks})")
    if launched_rank() is None and not parallel.hostfile and mode in ("jaccl", "mpi"):
        raise InvalidRequest(
            f"--distributed-mode {mode} connects machines: name them by --distributed-hostfile FILE, or start the same "
            "command on each by mlx.launch"
        )
    engine = structs.replace(
        config.engine,
        model=structs.replace(config.engine.model, images=False),
        parallel=parallel,
        duty=structs.replace(config.engine.duty, mode="inference_only"),
        lora=structs.replace(config.engine.lora, prepare=config.engine.lora.max_loras > 0),
    )
    return structs.replace(config, engine=engine)


def _ranks(parallel: ParallelConfig) -> int:
    """Return the number of ranks. Raise InvalidRequest where two settings differ or none says it."""
    mode = parallel.mode
    sizes = {
        "--tensor-parallel-size": parallel.ranks if parallel.ranks > 1 else 0,
        "--num-local-ranks": parallel.local_ranks if parallel.local_ranks > 1 else 0,
    }
    if launched_rank() is not None:
        sizes = {"--tensor-parallel-size": sizes["--tensor-parallel-size"]}
        if mode != "off":
            sizes["what mlx.launch has started"] = launched_count(mode)
    elif parallel.hostfile and (mode != "off" or sizes["--tensor-parallel-size"]):
        sizes["--distributed-hostfile"] = len(machines(parallel.hostfile))
    said = {name: size for name, size in sizes.items() if size > 0}
    if len(set(said.values())) > 1:
        texts = " and ".join(f"{size} by {name}" for name, size in said.items())
        raise InvalidRequest(f"the number of ranks is {texts}: they must be the same")
    if not said and mode == "jaccl":
        raise InvalidRequest(
            "--distributed-mode jaccl connects machines: name them by --distributed-hostfile FILE, or start the same "
            "command on each by mlx.launch"
        )
    if not said and mode != "off":
        raise InvalidRequest(f"--distributed-mode {mode} needs --num-local-ranks N of 2 or more")
    return next(iter(said.values()), 1)


def machines(hostfile: str) -> list[dict[str, Any]]:
    """Return the machines in a file of hosts. Raise InvalidRequest if `mlx.launch` could not read it."""
    listed: Any = read_hosts(hostfile)
    if isinstance(listed, dict):
        listed = listed.get("hosts")
    if not isinstance(listed, list) or not all(isinstance(row, dict) and "ssh" in row for row in listed):
        raise InvalidRequest(
            f"--distributed-hostfile: {hostfile} is no file of hosts as mlx.launch takes it, such as "
            '[{"ssh": "mac1", "ips": ["192.168.1.1"]}, {"ssh": "mac2", "ips": ["192.168.1.2"]}]'
        )
    return list(listed)


def _refused(config: Config) -> Iterator[str]:
    """Yield the options of these settings that several ranks do not serve."""
    engine = config.engine
    if config.rl_training.enabled:
        yield "--enable-rl-training"
    if config.tinker.enabled:
        yield "--enable-tinker"
    if config.feedback.learn:
        yield "--learn-from-feedback"
    if engine.duty.trainer_rank or engine.duty.mode == "training_only":
        yield "--mode training_only"
    if engine.deterministic:
        yield "--deterministic"
    if engine.speculation.method == "mtp":
        yield "--spec-decode mtp"


def _has_cuda() -> bool:
    """Return whether MLX is installed with its part for CUDA."""
    for package in _CUDA:
        try:
            version(package)
        except PackageNotFoundError:
            continue
        return True
    return False
