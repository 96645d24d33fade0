"""The settings of several ranks: how many there are, and what they refuse by name before anything is loaded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import structs

from mlx_tandem.cli.app import app
from mlx_tandem.cli.launching import go
from mlx_tandem.cli.settings import SettingsError, build
from mlx_tandem.config import ParallelConfig

HOSTS = Path(__file__).parents[2] / "parallel" / "hosts.json"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mlx_tandem.cli.parallel._has_cuda", lambda: False)


def parallel(**options: object) -> ParallelConfig:
    return build(None, {"model": "m", **options}).engine.parallel


@pytest.mark.parametrize(
    ("options", "ranks", "mode", "here"),
    [
        ({}, 1, "off", 0),
        ({"distributed_mode": "off", "num_local_ranks": 1}, 1, "off", 0),
        ({"tensor_parallel_size": 2}, 2, "ring", 2),
        ({"distributed_mode": "ring", "num_local_ranks": 2}, 2, "ring", 2),
        ({"distributed_mode": "nccl", "tensor_parallel_size": 4, "num_local_ranks": 4}, 4, "nccl", 4),
        ({"distributed_mode": "jaccl", "distributed_hostfile": str(HOSTS)}, 2, "jaccl", 1),
        ({"distributed_mode": "ring", "distributed_hostfile": str(HOSTS), "tensor_parallel_size": 2}, 2, "ring", 1),
    ],
)
def test_ranks_are_counted(options: Mapping[str, object], ranks: int, mode: str, here: int) -> None:
    found = parallel(**options)
    assert (found.ranks, found.mode, found.local_ranks) == (ranks, mode, here)


def test_what_mlx_launch_has_started_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three ranks are on this rank's machine and share its memory."""
    file = tmp_path / "ring.json"
    file.write_text(json.dumps([["10.0.0.1:1"], ["10.0.0.2:2"], ["10.0.0.1:3"]]))
    monkeypatch.setenv("MLX_RANK", "2")
    monkeypatch.setenv("MLX_HOSTFILE", str(file))
    found = parallel(distributed_mode="ring")
    assert (found.ranks, found.mode, found.local_ranks) == (3, "ring", 2)
    assert parallel().ranks == 1, "another program of MLX may have set the variable"
    with pytest.raises(SettingsError, match="2 by --tensor-parallel-size and 3 by what mlx"):
        parallel(distributed_mode="ring", tensor_parallel_size=2)


def test_settings_that_follow() -> None:
    engine = build(None, {"model": "m", "tensor_parallel_size": 2}).engine
    assert engine.duty.mode == "inference_only" and engine.lora.prepare and not engine.model.images
    assert structs.asdict(build(None, {"model": "m"}).engine.parallel) == structs.asdict(ParallelConfig())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"distributed_sharding": "pipeline"}, "--distributed-sharding pipeline is not served"),
        ({"enable_rl_training": True}, "--enable-rl-training is not served by several ranks"),
        ({"enable_tinker": True}, "--enable-tinker is not served by several ranks"),
        ({"learn_from_feedback": "sql"}, "--enable-rl-training is not served by several ranks"),
        ({"deterministic": True}, "--deterministic is not served by several ranks"),
        ({"spec_decode": "mtp"}, "--spec-decode mtp is not served by several ranks"),
        ({"num_local_ranks": 3}, "2 by --tensor-parallel-size and 3 by --num-local-ranks: they must be the same"),
        ({"distributed_mode": "jaccl"}, "--distributed-mode jaccl connects machines"),
        ({"distributed_mode": "mpi"}, "--distributed-mode mpi connects machines"),
        ({"distributed_hostfile": "/nowhere"}, "/nowhere is no file of hosts as mlx.launch takes it"),
    ],
)
def test_what_several_ranks_refuse(options: Mapping[str, object], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parallel(tensor_parallel_size=2, **options)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("options", "variable"),
    [({"api_key": "k"}, ""), ({}, "TANDEM_API_KEY"), ({}, "VLLM_API_KEY"), ({}, "TANDEM_KEYS_FILE")],
)
def test_keys_that_would_not_reach_the_first_machine_are_refused(
    options: Mapping[str, object], variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the server there would ask for no key."""
    ran: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, words: ran.extend(words))
    asked = {"model": "m", "distributed_mode": "ring", "distributed_hostfile": str(HOSTS)}
    if variable:
        monkeypatch.setenv(variable, "k")
    with pytest.raises(SystemExit):
        go(None, {**asked, **options}, "tandem", None, ["serve", "m"])
    assert not ran and "do not reach them: use --api-key-file or --keys" in capsys.readouterr().err


def test_a_mode_alone_says_no_number() -> None:
    with pytest.raises(SettingsError, match="--distributed-mode ring needs --num-local-ranks N"):
        parallel(distributed_mode="ring")
    with pytest.raises(SettingsError, match="jaccl connects machines: name them by --distributed-hostfile"):
        parallel(distributed_mode="jaccl", distributed_ibv_devices="/dev/infiniband/rdma_cm")


def test_options_of_several_ranks_warn_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    parallel(distributed_hostfile="h", distributed_mode="off")
    assert "--distributed-hostfile has no effect with one rank" in capsys.readouterr().err


@pytest.mark.parametrize("named_by", ["option", "variable", "settings"])
def test_a_file_of_hosts_launches_the_command_wherever_it_is_named(
    named_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is run: the command that would replace the process is recorded."""
    words, settings, ran = ["serve", "m"], tmp_path / "settings.yaml", list[list[str]]()
    settings.write_text(json.dumps({"parallel": {"mode": "ring", "hostfile": str(HOSTS)}}))
    monkeypatch.setattr("mlx_tandem.cli.serve.serve", lambda *_, **__: sys.exit("one machine serves"))
    monkeypatch.setattr("mlx_tandem.cli.launching.os.execv", lambda _, command: ran.append(command) or sys.exit(0))
    if named_by == "variable":
        monkeypatch.setenv("MLX_HOSTFILE", str(HOSTS))
    words += {
        "option": ["--distributed-mode", "ring", "--distributed-hostfile", str(HOSTS)],
        "variable": ["--distributed-mode", "ring"],
        "settings": ["--config", str(settings)],
    }[named_by]
    with pytest.raises(SystemExit) as end:
        app(args=words, prog_name="tandem")
    assert end.value.code == 0
    ((_, *launched),) = ran
    assert launched[:2] == ["--hostfile", str(HOSTS)] and launched[-len(words) :] == words
