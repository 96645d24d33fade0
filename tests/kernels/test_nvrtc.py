"""Kernels that are compiled ahead of MLX, in the files and under the names that MLX looks for."""

from __future__ import annotations

import importlib.util
import logging
import random
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem.config import DutyConfig, EngineConfig, LoraConfig, ModelConfig, SpeculationConfig
from mlx_tandem.model import kernel_checks
from mlx_tandem.model.kernels import dialect, nvrtc
from mlx_tandem.model.kernels.dialect import Source
from mlx_tandem.model.kernels.nvrtc import CompileError, Form, Modules, Nvrtc, Unit
from mlx_tandem.model.ops.all_sum import RowExchange
from mlx_tandem.model.ops.residual import AddNorm, Norm
from tests.kernels import shim

FORM = Form("double", (("x", mx.bfloat16, 1),), (("y", mx.float32),), (("N", 3), ("FAST", True), ("T", mx.bfloat16)))


class Compiler:
    """A compiler whose machine code is the text. It can refuse, and wait until several compile at once."""

    def __init__(self, recipe: str = "sm_90a", at_once: int = 1, refuses: bool = False):
        self.recipe = recipe
        self.texts: list[str] = []
        self._barrier = threading.Barrier(at_once)
        self._refuses = refuses

    def compile(self, unit: Unit) -> tuple[bytes, list[str]]:
        self._barrier.wait(60)
        self.texts.append(unit.text)
        if self._refuses:
            raise CompileError("error: expected a ';'")
        return unit.text.encode(), [instance.replace("<", "I") for instance in unit.instances]


def provide(folder: Path, compiler: Any, *forms: Form) -> Modules:
    modules = Modules(folder, compiler)
    with modules.together():
        for form in forms:
            modules.provide(form, "HEADER\n", "BODY", "#include <header>\n", "// x_shape\n#include <body>")
    return modules


@pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")
def test_modules_are_named_by_the_hash_of_gnu_s_library(tmp_path: Path) -> None:
    program = tmp_path / "hash.cpp"
    program.write_text(
        "#include <iostream>\n#include <string>\nint main() { std::string line; while (std::getline(std::cin, line)) "
        "std::cout << std::hash<std::string>{}(line) << '\\n'; }"
    )
    subprocess.run([str(shim.COMPILER), "-o", str(tmp_path / "hash"), str(program)], check=True)
    draw = random.Random(1)
    lines = [bytes(draw.choice(range(32, 256)) for _ in range(length)) for length in [*range(40), 999, 40_000]]
    done = subprocess.run([tmp_path / "hash"], input=b"\n".join(lines) + b"\n", capture_output=True, check=True)
    assert list(map(int, done.stdout.split())) == list(map(nvrtc.string_hash, lines))


def test_the_text_is_what_mlx_composes() -> None:
    """As `build_kernel` of MLX 0.32 does it, with the shapes that MLX would pass."""
    assert FORM.kernel == "custom_kernel_double_3_t_bfloat16_t"
    assert FORM.mlx_text("HEADER\n", "// x_shape\nBODY") == (
        '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\nHEADER\n'
        "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        "__global__ void custom_kernel_double_3_t_bfloat16_t(\n"
        "    const __nv_bfloat16* x,\n    const __grid_constant__ Shape x_shape,\n    float* y) {\n"
        "  constexpr int N = 3;\n  constexpr bool FAST = true;\n  using T = __nv_bfloat16;\n\n"
        "// x_shape\nBODY\n}\n\n} // namespace mlx::core::cu\n"
    )


def test_a_long_name_is_a_path_of_several_parts(tmp_path: Path) -> None:
    assert nvrtc.module_path(tmp_path, "k" * 245) == tmp_path / ("k" * 245 + ".ptx")
    assert nvrtc.module_path(tmp_path, "k" * 500) == tmp_path / ("k" * 245) / ("k" * 245) / ("k" * 10 + ".ptx")


def test_kernels_are_compiled_once_and_at_once(tmp_path: Path) -> None:
    forms = [Form(f"kernel{i}", FORM.inputs, FORM.outputs, ()) for i in range(2)]
    first = Compiler(at_once=2)
    assert provide(tmp_path, first, *forms, *forms).compiled == 2
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".ptx", ".ptx", ".sum", ".sum", ".txt", ".txt"]
    names = {file.read_text() for file in tmp_path.glob("*.txt")}
    assert names == {f"mlx::core::cu::custom_kernel_kernel{i}\tcustom_kernel_kernel{i}\n" for i in range(2)}
    assert {file.read_text() for file in tmp_path.glob("*.ptx")} == set(first.texts)
    assert provide(tmp_path, Compiler(), *forms).compiled == 0


def test_slow_modules_are_waited_for_only_where_they_are_needed(tmp_path: Path) -> None:
    class Slow(Compiler):
        may_end = threading.Event()

        def compile(self, unit: Unit) -> tuple[bytes, list[str]]:
            assert unit.name != "slow" or self.may_end.wait(60)
            return super().compile(unit)

    compiler = Slow()
    modules = Modules(tmp_path, compiler)
    modules.begin([Unit("quick", "quick")], [Unit("slow", "slow")])
    modules.wait()
    assert compiler.texts == ["quick"]
    compiler.may_end.set()
    modules.wait(slow=True)
    assert compiler.texts == ["quick", "slow"]


@pytest.mark.parametrize("suffix", [".ptx", ".txt", ".sum"])
@pytest.mark.parametrize("damage", [b"", b"\0", None])
def test_a_damaged_or_missing_file_is_made_again(tmp_path: Path, suffix: str, damage: bytes | None) -> None:
    provide(tmp_path, Compiler(), FORM)
    whole = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (file,) = tmp_path.glob(f"*{suffix}")
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    assert provide(tmp_path, Compiler(), FORM).compiled == 1
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == whole


def test_another_compiler_or_architecture_makes_it_again(tmp_path: Path) -> None:
    provide(tmp_path, Compiler("nvrtc 13.0 sm_90a"), FORM)
    assert provide(tmp_path, Compiler("nvrtc 13.1 sm_90a"), FORM).compiled == 1
    assert provide(tmp_path, Compiler("nvrtc 13.1 sm_100a"), FORM).compiled == 1


def test_what_cannot_be_compiled_or_written_is_left_to_mlx(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that may be damaged does not stay, since MLX would load it."""
    provide(tmp_path, Compiler(), FORM)
    (module,) = tmp_path.glob("*.ptx")
    module.write_bytes(b"damaged")
    provide(tmp_path, Compiler(refuses=True), FORM)
    assert not module.exists() and "expected a ';'" in caplog.text
    (tmp_path / "file").touch()
    provide(tmp_path / "file" / "folder", Compiler(), FORM)
    assert "Not a directory" in caplog.text


def test_many_at_once_leave_whole_files(tmp_path: Path) -> None:
    """As two servers that start together do."""
    everyone = [threading.Thread(target=provide, args=(tmp_path, Compiler(), FORM)) for _ in range(8)]
    for one in everyone:
        one.start()
    for one in everyone:
        one.join()
    assert len(list(tmp_path.iterdir())) == 3
    assert provide(tmp_path, Compiler(), FORM).compiled == 0


def test_modules_of_mlx_have_the_names_of_their_instances(tmp_path: Path) -> None:
    """The texts are told apart by their headers, too."""
    long = Unit("m" * 300, "text", (("a.h", "1"),), ("f<1>", "f<2>"))
    modules = Modules(tmp_path, Compiler(at_once=2))  # type: ignore[arg-type]
    modules.begin([long, Unit("other", "text", long.headers)])
    modules.wait()
    path = tmp_path / ("m" * 245) / ("m" * 55 + ".ptx")
    assert path.read_text() == "text" and path.with_suffix(".txt").read_text() == "f<1>\tfI1>\nf<2>\tfI2>\n"
    for headers, compiled in ((long.headers, 0), ((("a.h", "2"),), 1)):
        again = Modules(tmp_path, Compiler())  # type: ignore[arg-type]
        again.begin([Unit(long.name, long.text, headers, long.instances)])
        again.wait()
        assert again.compiled == compiled


def test_a_process_ends_while_kernels_are_compiled(tmp_path: Path) -> None:
    """As a server does that is stopped while it starts."""
    program = (
        "import sys, threading; from pathlib import Path; from mlx_tandem.model.kernels.nvrtc import Modules, Unit\n"
        "class Compiler:\n"
        "    recipe = ''\n"
        "    def compile(self, unit): threading.Event().wait()\n"
        "Modules(Path(sys.argv[1]), Compiler()).begin([Unit(f'unit{i}', '') for i in range(99)])"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)


_LIBRARY = r"""
#include <cstdlib>
#include <cstring>
#include <string>
static std::string text, log_, names;
extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }
int nvrtcCreateProgram(void**, const char* source, const char* name, int n, const char** texts, const char** headers) {
  text = std::string(name) + "|" + source;
  for (int i = 0; i < n; i++) text += std::string("|") + headers[i] + "=" + texts[i];
  return 0;
}
int nvrtcAddNameExpression(void*, const char* name) { names += name; return 0; }
int nvrtcCompileProgram(void*, int n, const char** options) {
  if (text.find("abort") != std::string::npos) abort();
  for (int i = 0; i < n; i++) text += std::string("|") + options[i];
  log_ = text.find("wrong") != std::string::npos ? "error: wrong" : "";
  return !log_.empty();
}
int nvrtcGetProgramLogSize(void*, size_t* size) { *size = log_.size(); return 0; }
int nvrtcGetProgramLog(void*, char* to) { memcpy(to, log_.data(), log_.size()); return 0; }
int nvrtcGetCUBINSize(void*, size_t* size) { *size = text.size(); return 0; }
int nvrtcGetCUBIN(void*, char* to) { memcpy(to, text.data(), text.size()); return 0; }
int nvrtcGetLoweredName(void*, const char* name, const char** to) {
  static std::string found;
  found = std::string("_Z") + name;
  *to = found.c_str();
  return names.find(name) == std::string::npos;
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with NVRTC's functions whose machine code says what it was given. One word ends its process."""
    if shim.COMPILER is None:
        pytest.skip("needs g++")
    file = tmp_path_factory.mktemp("nvrtc") / "libnvrtc.so.13"
    words = [str(shim.COMPILER), "-shared", "-fPIC", "-x", "c++", "-o", str(file), "-"]
    subprocess.run(words, input=_LIBRARY.encode(), check=True)
    return file


def test_each_text_is_compiled_in_a_process(library: Path, tmp_path: Path) -> None:
    compiler = Nvrtc(library, "sm_90a", [tmp_path])
    assert compiler.recipe == "nvrtc 13.0 --device-as-default-execution-space --gpu-architecture=sm_90a"
    options = f"--device-as-default-execution-space|--gpu-architecture=sm_90a|--include-path={tmp_path}"
    code, names = compiler.compile(Unit("unit", "te\nxt", (("a.h", "é"),), ("f<1>",)))
    assert code.decode() == f"unit.cu|te\nxt|a.h=é|{options}" and names == ["_Zf<1>"]
    with pytest.raises(CompileError, match="error: wrong"):
        compiler.compile(Unit("unit", "wrong"))
    with pytest.raises(CompileError, match="ended with -6"):
        compiler.compile(Unit("unit", "abort"))


def test_a_library_that_is_gone_is_said(library: Path, tmp_path: Path) -> None:
    copy = tmp_path / library.name
    copy.write_bytes(library.read_bytes())
    compiler = Nvrtc(copy, "sm_90a", [])
    copy.unlink()
    with pytest.raises(CompileError, match="No such file"):
        compiler.compile(Unit("unit", "text"))


def test_the_compiler_is_the_one_that_mlx_has_loaded(library: Path, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r--p 00000000 fe:00 12   /lib/libc.so.6\n7f02-7f03 r-xp 0 fe:00 13   {library}\n")
    found = Nvrtc.load("sm_90a", maps)
    assert found is not None and found._library == str(library)
    maps.write_text(f"7f00-7f01 r--p 00000000 fe:00 12   {library.with_name('libnvrtc-builtins.so.13')}\n")
    assert Nvrtc.load("sm_90a", maps) is None


def test_recorded_modules_are_those_of_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails after an update of MLX, the list has to be recorded anew on a GPU; until then starts are slower."""
    found = nvrtc.recorded()
    assert found is not None and {module.group for module in found.modules} == set(nvrtc.GROUPS)
    units = found.units(["serve"])
    assert [len(unit.text) for unit in units] == sorted((len(unit.text) for unit in units), reverse=True)
    assert 40 < len(units) < len(found.modules) == len({module.name for module in found.modules})
    assert found.units(["serve", "packed"])[0].name.startswith("qmm") and found.units(["packed", "serve"])[3:] == units
    assert all(unit.instances and "mlx::core::cu::" in unit.instances[0] for unit in units)
    included = {name for unit in units for name in re.findall(r'#include "(mlx/\S+)"', unit.text)}
    assert included <= found.headers.keys()
    monkeypatch.setattr(nvrtc, "version", lambda package: "0.99.0")
    assert nvrtc.recorded() is None


def test_a_start_begins_with_what_it_needs() -> None:
    config = EngineConfig(ModelConfig("model"), lora=LoraConfig(max_loras=4))
    assert nvrtc.groups_of(config, packed=False) == ["serve"]
    config = EngineConfig(
        ModelConfig("model"),
        lora=LoraConfig(prepare=True),
        duty=DutyConfig(trainer_rank=8),
        speculation=SpeculationConfig(method="ngram"),
    )
    assert nvrtc.groups_of(config, packed=True) == ["serve", "adapters", "learning", "drafts", "packed"]


def _real() -> Nvrtc | None:
    """Return NVRTC of the package nvidia-cuda-nvrtc, with CUDA's headers from their packages."""
    spec = importlib.util.find_spec("nvidia")
    for root in map(Path, (spec and spec.submodule_search_locations) or ()):
        for library in root.glob("cu13/lib/libnvrtc.so.13"):
            include = root / "cu13" / "include"
            return Nvrtc(library, "sm_90a", [*nvrtc.header_folders(13), include, include / "cccl"])
    return None


@pytest.mark.programs
def test_recorded_modules_compile_for_hopper() -> None:
    """One of each kind: a fused operation, and one that gathers."""
    compiler, found = _real(), nvrtc.recorded()
    if compiler is None or found is None:
        pytest.skip("needs nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl")
    units = found.units(["serve"])
    for kind in ("Ci4IBroadcast", "gather_int32"):
        unit = next(unit for unit in units if unit.name.startswith(kind))
        code, names = compiler.compile(unit)
        assert code.startswith(b"\x7fELF")
        assert all(name.startswith("_ZN3mlx4core2cu") and name.encode() in code for name in names)


@pytest.mark.programs
def test_every_kernel_compiles_for_hopper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By NVRTC itself, which needs no GPU, for the kernels of all models."""
    compiler = _real()
    if compiler is None:
        pytest.skip("needs nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl")
    modules = Modules(tmp_path, compiler)
    monkeypatch.setattr(dialect, "compiled_modules", lambda: modules)

    def declare(**_: Any) -> Any:
        def call(output_shapes: Sequence[Any], output_dtypes: Sequence[mx.Dtype], **_: Any) -> list[mx.array]:
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call

    monkeypatch.setattr(mx.fast, "cuda_kernel", declare)
    caplog.set_level(logging.WARNING)
    names = [tried.name for tried in kernel_checks.tried("cuda")]
    assert modules.compiled > len(names) > 10
    across = AddNorm(dialect.maker("cuda"), RowExchange(mx.zeros((4,), mx.uint64), 1))
    a, norm = mx.zeros((2, 64), mx.bfloat16), Norm(mx.zeros((64,), mx.bfloat16), 1e-6)
    for b in (a, mx.zeros((2, 2, 64))):
        before = modules.compiled
        across(a, b, norm)
        assert modules.compiled == before + 1
    assert not caplog.records
    bad = dialect.maker("cuda")(Source("bad", ["x"], ["y"], "y[0] = x[0]"))
    call: Mapping[str, Any] = {"template": {}, "groups": (1, 1, 1), "threads": 1, "outputs": [((1,), mx.float32)]}
    bad([mx.zeros(1)], **call)
    assert "expected a" in caplog.text
