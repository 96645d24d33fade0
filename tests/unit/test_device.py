"""What is set before MLX is loaded, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAME = "MLX_MAX_MB_PER_BUFFER"


def settings(packages: Path, *, before: str = "", **env: str) -> dict[str, str]:
    """What MLX finds in its environment when this program has been imported beside the packages."""
    code = f"{before}\nimport json, os, mlx_tandem.model.device\nprint(json.dumps(dict(os.environ)))"
    own = {k: v for k, v in os.environ.items() if k != NAME}
    own["PYTHONPATH"] = os.pathsep.join([str(packages), own.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], env=own | env, capture_output=True, text=True, check=True)
    return {k: v for k, v in json.loads(done.stdout).items() if k == NAME}


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """A place in which a CUDA build of MLX is installed, as far as the packages' records say."""
    record = tmp_path / "mlx_cuda_13-0.32.4.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\nVersion: 0.32.4\n", encoding="utf-8")
    return tmp_path


def test_the_pool_s_size_does_not_cut_graphs_on_cuda(cuda: Path) -> None:
    assert int(settings(cuda)[NAME]) >= 100_000


def test_what_is_set_already_stays(cuda: Path) -> None:
    assert settings(cuda, MLX_MAX_MB_PER_BUFFER="7")[NAME] == "7"


def test_nothing_is_set_without_cuda_or_too_late(cuda: Path, tmp_path: Path) -> None:
    assert settings(tmp_path / "empty") == {}
    assert settings(cuda, before="import mlx.core") == {}
