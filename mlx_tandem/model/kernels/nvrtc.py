"""Compiles this package's kernels for CUDA and puts them where MLX looks for compiled kernels.

MLX compiles a custom kernel at its first launch: one kernel at a time, behind a header of its own that takes NVRTC more
than a second, and again in each process. But it first looks for the module's file in its cache folder (`JitModule` in
its mlx/backend/cuda/jit_module.cpp). `Modules` writes that file. It compiles the same body behind a header that takes a
tenth of the time, several kernels at once, and finds it again at the next start. It also compiles modules of MLX's own
(`Recorded`). Where the names of another version of MLX differ, MLX finds no file and compiles by itself, which takes
longer and gives the same results.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import hashlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from msgspec import Struct

from mlx_tandem.config import EngineConfig

log = logging.getLogger(__name__)

_TYPES = {
    mx.bool_: ("bool", "bool"),
    mx.int8: ("int8_t", "int8_t"),
    mx.int16: ("int16_t", "int16_t"),
    mx.int32: ("int32_t", "int32_t"),
    mx.int64: ("int64_t", "int64_t"),
    mx.uint8: ("uint8_t", "uint8_t"),
    mx.uint16: ("uint16_t", "uint16_t"),
    mx.uint32: ("uint32_t", "uint32_t"),
    mx.uint64: ("uint64_t", "uint64_t"),
    mx.float16: ("__half", "float16_t"),
    mx.bfloat16: ("__nv_bfloat16", "bfloat16_t"),
    mx.float32: ("float", "float"),
}
"""The type in CUDA, and in a kernel's name, as `dtype_to_cuda_type` and `get_type_string` of MLX give them."""

_MLX_HEADER = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""

_OWN_HEADER = """
#include "mlx/backend/cuda/device/config.h"
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
struct Shape {
  int32_t sizes[MAX_NDIM];
  __device__ int32_t operator[](int i) const { return sizes[i]; }
};
"""
"""The part of MLX's header that kernels use. MLX's own `Shape` is an array of as many numbers."""


COMPILE_SECONDS = 600.0
"""Seconds after which a text that is still being compiled is given up, so that MLX compiles it."""

MOST_AT_ONCE = 32
"""Most kernels that are compiled at once. Each needs a processor and 0.4 GB of memory, and MLX's products of packed
weights need 3 GB."""


@dataclass(frozen=True)
class Form:
    """A kernel for certain types and constants, which is what is compiled.

    `inputs` are the name, type and number of axes of each input, `outputs` the name and type of each output.
    """

    name: str
    inputs: tuple[tuple[str, mx.Dtype, int], ...]
    outputs: tuple[tuple[str, mx.Dtype], ...]
    template: tuple[tuple[str, int | bool | mx.Dtype], ...]

    @property
    def kernel(self) -> str:
        """The name of the kernel, as `template_arguments_hash` of MLX extends it."""
        return "custom_kernel_" + self.name + "".join(f"_{_in_a_name(value)}" for _, value in self.template)

    def signature(self, body: str) -> str:
        """Return the parameters and the constants. MLX passes the shapes whose names are in the body that it gets."""
        lines = list[str]()
        for name, dtype, axes in self.inputs:
            lines.append(f"    const {_TYPES[dtype][0]}* {name}")
            if axes and f"{name}_shape" in body:
                lines.append(f"    const __grid_constant__ Shape {name}_shape")
        lines += [f"    {_TYPES[dtype][0]}* {name}" for name, dtype in self.outputs]
        constants = "".join(map(_constant, self.template))
        return f"{self.kernel}(\n" + ",\n".join(lines) + ") {\n" + constants + ("\n" if self.template else "")

    def mlx_text(self, header: str, body: str) -> str:
        """Return the text that MLX would compile, which names the module (`build_kernel` of its custom_kernel.cpp)."""
        start = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n__global__ void "
        return f"{_MLX_HEADER}{header}{start}{self.signature(body)}{body}\n}}\n\n}} // namespace mlx::core::cu\n"

    def own_text(self, header: str, body: str, mlx_body: str) -> str:
        """Return the text that is compiled instead; `mlx_body` is the body that MLX gets."""
        return f'{_OWN_HEADER}{header}extern "C" __global__ void {self.signature(mlx_body)}{body}\n}}\n'


def _in_a_name(value: int | bool | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return _TYPES[value][1]
    return ("t" if value else "f") if isinstance(value, bool) else str(value)


def _constant(item: tuple[str, int | bool | mx.Dtype]) -> str:
    name, value = item
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_TYPES[value][0]};\n"
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {'true' if value else 'false'};\n"
    return f"  constexpr int {name} = {value};\n"


def string_hash(data: bytes) -> int:
    """Return `std::hash<std::string>` of GNU's C++ library on 64-bit machines, by which MLX names modules.

    It is MurmurHash64A with the seed of libstdc++'s hash_bytes.cc.
    """
    mask, multiplier = (1 << 64) - 1, 0xC6A4A7935BD1E995
    whole = len(data) & ~7
    result = 0xC70F6907 ^ (len(data) * multiplier & mask)
    for i in range(0, whole, 8):
        word = int.from_bytes(data[i : i + 8], "little") * multiplier & mask
        result = ((word ^ word >> 47) * multiplier & mask ^ result) * multiplier & mask
    if rest := data[whole:]:
        result = (result ^ int.from_bytes(rest, "little")) * multiplier & mask
    result = (result ^ result >> 47) * multiplier & mask
    return result ^ result >> 47


@dataclass(frozen=True)
class Unit:
    """A text that NVRTC compiles at once.

    Attributes:
        name: The name of the text in messages.
        text: The text.
        headers: Name and text of headers that it includes and that are in no file.
        instances: The instances of its templates that are compiled. Functions that are no templates need not be named.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()
    instances: tuple[str, ...] = ()


class CompileError(Exception):
    """Raised when NVRTC refuses a kernel; the message is its log."""


class Nvrtc:
    """NVRTC for one architecture, such as `sm_90a`. Each call compiles in a process of its own (`nvrtc_program.py`)."""

    def __init__(self, library: Path, architecture: str, includes: Sequence[Path]):
        self._library = str(library)
        # MLX's options. A folder of headers changes no result, so it is no part of what a compiled kernel depends on.
        options = ["--device-as-default-execution-space", f"--gpu-architecture={architecture}"]
        self._options = [*options, *(f"--include-path={folder}" for folder in includes)]
        major, minor = ctypes.c_int(), ctypes.c_int()
        ctypes.CDLL(self._library).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.recipe = " ".join([f"nvrtc {major.value}.{minor.value}", *options])
        """Everything beside the text that the machine code depends on."""

    @classmethod
    def load(cls, architecture: str, maps: Path = Path("/proc/self/maps")) -> Nvrtc | None:
        """Return the NVRTC that MLX has loaded, with the folders of headers that MLX gives it; None if it has none.

        maps: the list of files in this process's memory.
        """
        with contextlib.suppress(OSError):
            for major in (13, 12):
                if found := re.search(rf"/\S.*/libnvrtc\.so\.{major}\b.*$", maps.read_text(), re.MULTILINE):
                    return cls(Path(found[0]), architecture, list(header_folders(major)))
        return None

    def compile(self, unit: Unit) -> tuple[bytes, list[str]]:
        """Return the machine code of a unit in the form that CUDA's driver loads, and the names of its instances there.

        Raises:
            CompileError: NVRTC refuses the unit, or its process fails.
        """
        headers = dict(unit.headers)
        about = {"name": unit.name, "text": unit.text, "headers": headers, "instances": unit.instances}
        job = json.dumps(about | {"library": self._library, "options": self._options}).encode()
        program = Path(__file__).with_name("nvrtc_program.py")
        words = [sys.executable, "-I", "-S", str(program)]
        try:
            done = subprocess.run(words, input=job, capture_output=True, check=False, timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired as e:
            raise CompileError(f"NVRTC has not ended within {COMPILE_SECONDS:g} s") from e
        line, _, code = done.stdout.partition(b"\n")
        if done.returncode or not line:
            raise CompileError(f"NVRTC's process has ended with {done.returncode}: {done.stderr.decode()[-500:]}")
        found = json.loads(line)
        if "error" in found:
            raise CompileError(found["error"])
        return code, found["names"]


def header_folders(major: int) -> Iterator[Path]:
    """Yield the folders in which MLX has NVRTC look for headers (`include_path_args` of its jit_module.cpp)."""
    spec = importlib.util.find_spec("mlx")
    for root in map(Path, spec.submodule_search_locations or () if spec else ()):
        yield root / "include"
        yield root / "include" / "cccl"
        packaged = root.parent / "nvidia" / ("cu13" if major == 13 else "cuda_runtime") / "include"
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        yield packaged if packaged.exists() else Path(home) / "include"


class Modules:
    """The compiled kernels in MLX's cache folder.

    Beside each module lies a file `.sum` with digests, by which a damaged or outdated module is noticed and made again.
    """

    def __init__(self, folder: Path, compiler: Nvrtc):
        self._folder = folder
        self._compiler = compiler
        self._lock = threading.Lock()
        self._work: dict[str, threading.Thread] = {}
        self._slow = set[str]()
        self._room = threading.Semaphore(min(os.cpu_count() or 1, MOST_AT_ONCE))
        self._together = 0
        self.compiled = 0
        """Kernels that this process has compiled; all others were found."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Compile the kernels that are called inside the block at once, and wait for them and others at its end.

        Nothing may be evaluated inside: MLX would compile a kernel by itself that is not there yet.
        """
        self._together += 1
        try:
            yield
        finally:
            self._together -= 1
            self.wait()

    def provide(self, form: Form, header: str, body: str, mlx_header: str, mlx_body: str) -> None:
        """See to it that MLX finds the kernel at its first launch. Errors are logged: MLX then compiles it."""
        module = f"{form.kernel}_{string_hash(form.mlx_text(mlx_header, mlx_body).encode()):x}"
        unit = Unit(form.kernel, form.own_text(header, body, mlx_body))
        work = self._begin(module, unit, (f"mlx::core::cu::{form.kernel}\t{form.kernel}",))
        if not self._together:
            work.join()

    def begin(self, units: Iterable[Unit], slow: Collection[Unit] = ()) -> None:
        """Begin to compile modules of MLX's own, whose names are those of the units, first those that are `slow`."""
        self._slow.update(unit.name for unit in slow)
        for unit in (*slow, *units):
            self._begin(unit.name, unit, ())

    def wait(self, *, slow: bool = False) -> None:
        """Wait until everything that was begun is done, modules that are slow only if told to."""
        for name, work in list(self._work.items()):
            if slow or name not in self._slow:
                work.join()

    def _begin(self, module: str, unit: Unit, names: tuple[str, ...]) -> threading.Thread:
        """Return the thread that makes a module. A process that ends does not wait for it."""
        with self._lock:
            if (work := self._work.get(module)) is None:
                work = threading.Thread(target=self._in_turn, args=(module, unit, names), name="nvrtc", daemon=True)
                self._work[module] = work
                work.start()
            return work

    def _in_turn(self, *about: Any) -> None:
        with self._room:
            self._make(*about)

    def _make(self, module: str, unit: Unit, names: tuple[str, ...]) -> None:
        """Write a module unless it is there; `names`: lines with the names of functions that are no instances."""
        path = module_path(self._folder, module)
        recipe = hashlib.sha256(f"{self._compiler.recipe}\n{unit.text}\n{unit.headers}".encode()).hexdigest()
        try:
            if path.exists() and path.with_suffix(".sum").read_text() == _sums(path, recipe):
                return
        except OSError:
            pass
        try:
            code, lowered = self._compiler.compile(unit)
            with self._lock:
                self.compiled += 1
            lines = *names, *map("\t".join, zip(unit.instances, lowered, strict=True))
            path.parent.mkdir(parents=True, exist_ok=True)
            # MLX looks for the second, so that it never finds a module without its names.
            _put(path.with_suffix(".txt"), "".join(f"{line}\n" for line in lines).encode())
            _put(path, code)
            _put(path.with_suffix(".sum"), _sums(path, recipe).encode())
        except (CompileError, OSError) as e:
            log.warning("the kernel %s is left to MLX's compiler: %s", unit.name, str(e)[:500])
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # it may be damaged


def module_path(folder: Path, module: str) -> Path:
    """Return the file of a module, as `get_ptx_path` of MLX does: a long name is a path of several parts."""
    parts = [module[i : i + 245] for i in range(0, len(module), 245)]
    return folder.joinpath(*parts[:-1], f"{parts[-1]}.ptx")


def _put(path: Path, data: bytes) -> None:
    """Write a file that is never seen in part, also when several processes write it. After a power loss it may be
    damaged, which its digest tells.
    """
    new = path.with_name(f".{os.getpid()}-{threading.get_ident()}")
    new.write_bytes(data)
    os.replace(new, path)


def _sums(path: Path, recipe: str) -> str:
    found = (hashlib.sha256(file.read_bytes()).hexdigest() for file in (path, path.with_suffix(".txt")))
    return " ".join([recipe, *found])


# --- MLX's own modules ---------------------------------------------------------------------------------------------
#
# MLX compiles a fused or indexing operation at its first use, one at a time, and each takes NVRTC seconds. The name and
# the text of such a module depend on the operations and types of a model and not on its dimensions, so that one list,
# recorded on a GPU, serves all models whose operations are alike. What is not in the list, MLX compiles as before. The
# list is of use to one version of MLX only. `scripts/record_modules.py` makes it. Its texts are MLX's, whose licence is
# in `recorded.LICENSE`.

FILE = "recorded.json.gz"

SERVE, ADAPTERS, LEARNING, DRAFTS, PACKED = GROUPS = ("serve", "adapters", "learning", "drafts", "packed")
"""The features whose starts need modules; a module belongs to the first group whose start needed it."""


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
        """Return what is compiled for these groups, the longest texts first, which take the compiler longest."""
        headers = tuple(self.headers.items())
        ordered = sorted(self.modules, key=lambda one: len(one.text), reverse=True)
        return [Unit(one.name, one.text, headers, one.instances) for one in ordered if one.group in groups]


def recorded() -> Recorded | None:
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
