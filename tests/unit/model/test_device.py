"""What is set before MLX is loaded, in processes of their own."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_tandem.model import device
from mlx_tandem.model.backend.cuda import keep_freed_memory

NAME, FOLDER, CHECK = "MLX_MAX_MB_PER_BUFFER", "MLX_PTX_CACHE_DIR", "MLX_ENABLE_CACHE_THRASHING_CHECK"
OPERATIONS, PATIENCE = "MLX_MAX_OPS_PER_BUFFER", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
NAMES = (NAME, FOLDER, CHECK, OPERATIONS, PATIENCE)
MACOS = (
    "import subprocess, platform, asyncio, multiprocessing, ctypes.util, urllib.request, sys; sys.platform = 'darwin'"
)


def settings(
    packages: Path, *, before: str = "", module: str = "mlx_tandem.model.device", **env: str
) -> dict[str, str]:
    """What MLX finds in its environment when this program has been imported beside the packages."""
    code = f"{before}\nimport json, os, {module}\nprint(json.dumps(dict(os.environ)))"
    own = {k: v for k, v in os.environ.items() if k not in NAMES}
    own["XDG_CACHE_HOME"] = str(packages / "cache")
    own["PYTHONPATH"] = os.pathsep.join([str(packages), own.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], env=own | env, capture_output=True, text=True, check=True)
    return {k: v for k, v in json.loads(done.stdout).items() if k in NAMES}


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """A place in which a CUDA build of MLX is installed, as far as the packages' records say."""
    record = tmp_path / "mlx_cuda_13-0.32.4.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\nVersion: 0.32.4\n", encoding="utf-8")
    return tmp_path


def test_the_pool_s_size_does_not_cut_graphs_on_cuda(cuda: Path) -> None:
    assert int(settings(cuda)[NAME]) >= 100_000


def test_the_number_of_shapes_met_is_no_error_on_cuda(cuda: Path) -> None:
    """MLX would raise one at the 801st new kind of graph in a row."""
    assert settings(cuda)[CHECK] == "0"


def test_compiled_kernels_are_kept_where_nobody_else_writes(cuda: Path) -> None:
    folder = Path(settings(cuda)[FOLDER])
    assert folder.is_relative_to(cuda / "cache")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_kinds_of_gpus_have_folders_of_their_own(tmp_path: Path) -> None:
    """What MLX keeps is machine code of one, and machines may share a home folder."""
    assert device.gpus(tmp_path / "none") == []
    for slot, kind in enumerate(["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA H200"]):
        (tmp_path / f"0000:0{slot}:00.0").mkdir()
        said = f"Model: \t\t {kind}\nIRQ:   \t\t 40{slot}\nGPU UUID: \t GPU-{slot}\n"
        (tmp_path / f"0000:0{slot}:00.0" / "information").write_text(said, encoding="utf-8")
    assert device.gpus(tmp_path) == ["NVIDIA-A100-SXM4-80GB", "NVIDIA-H200"]


def test_a_cache_that_cannot_be_made_is_done_without(cuda: Path) -> None:
    (cuda / "cache").write_text("", encoding="utf-8")
    assert FOLDER not in settings(cuda)


def test_what_is_set_already_stays(cuda: Path) -> None:
    own = {NAME: "7", FOLDER: "/own", CHECK: "1"}
    assert settings(cuda, **own) == own


def test_nothing_is_set_without_cuda_or_too_late(cuda: Path, tmp_path: Path) -> None:
    assert settings(tmp_path / "empty") == {}
    assert settings(cuda, before="import mlx.core") == {}


def test_the_pool_s_size_does_not_cut_command_buffers_on_macos(tmp_path: Path) -> None:
    """An array of the pool may have 10^9 elements, and MLX begins a new one behind 40 or 50 Mi."""
    found = settings(tmp_path, before=MACOS)
    assert int(found[NAME]) >= 100_000
    assert int(found[OPERATIONS]) == 100
    assert set(found) == {NAME, OPERATIONS, PATIENCE}


@pytest.mark.parametrize("module", ["mlx_tandem.model.cache.kvformat", "mlx_tandem.training.device.adamw"])
def test_macos_is_asked_for_patience_before_mlx_is_loaded(tmp_path: Path, module: str) -> None:
    """By every module that imports MLX, whichever is the first."""
    assert settings(tmp_path, before=MACOS, module=module)[PATIENCE] == "1"
    assert settings(tmp_path, before=MACOS, module=module, **{PATIENCE: "0"})[PATIENCE] == "0"


def test_the_user_s_own_command_buffers_stay_on_macos(tmp_path: Path) -> None:
    assert settings(tmp_path, before=MACOS, **{NAME: "7"}) == {NAME: "7", OPERATIONS: "100", PATIENCE: "1"}
    assert settings(tmp_path, before=MACOS, **{OPERATIONS: "9"})[OPERATIONS] == "9"


def test_command_buffers_are_left_alone_where_mlx_is_loaded_already(tmp_path: Path) -> None:
    assert settings(tmp_path, before=f"import mlx.core\n{MACOS}") == {}


DRIVER = """
int pool;
unsigned long long threshold = 0;
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7; return ordinal; }
int cuDeviceGetDefaultMemPool(void **found, int device) { *found = &pool; return device != 7; }
int cuMemPoolSetAttribute(void *of, int attribute, void *value) {
  if (of != &pool || attribute != 4) return 1;
  threshold = *(unsigned long long *)value;
  return REFUSED;
}
"""


@pytest.mark.parametrize("refused", [0, 801])
def test_the_driver_is_asked_to_keep_what_is_freed(tmp_path: Path, refused: int) -> None:
    """A driver of its own, with the signatures of CUDA's."""
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(DRIVER, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", f"-DREFUSED={refused}", "-o", library, source], check=True)
    assert keep_freed_memory(7 << 40, str(library)) is not bool(refused)
    assert ctypes.c_uint64.in_dll(ctypes.CDLL(str(library)), "threshold").value == 7 << 40


def test_without_a_driver_nothing_is_asked(tmp_path: Path) -> None:
    assert not keep_freed_memory(1, str(tmp_path / "none.so"))
