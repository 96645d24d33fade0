"""A dialect of C++ for kernels: a body is written once, and a header for each target gives its words the same
meaning.

A body is the inside of a kernel function. It sees its inputs and outputs as pointers, template values as constants
and types, and these words:

- `THREAD` of `THREADS` in the block; `LANE` and `WARP` (32 lanes each); block `GROUP_X/Y/Z` of `GROUPS_X/Y/Z`;
- `SHARED(type, name, n)` declares memory of the block, at most SHARED_BYTES; `BARRIER()` waits for all its threads;
- `SHUFFLE_XOR(x, mask)`, `SHUFFLE(x, lane)` return another lane's x; every lane of the warp must take part;
- `LOAD16(pointer)` → uint4, `LOAD8(pointer)` → uint2, `STORE16(pointer, uint4)` access aligned device memory;
- `STREAM16(pointer)` is LOAD16 of memory that is read once and should push nothing out of the cache;
- `pair(word, T())` → float2: the two 16-bit numbers of type T in a word; `BYTE(word, i)` → float: its i-th byte;
  `FLOAT_BITS(word)`, `WORD_BITS(x)`; `FLOAT4(a, b, c, d)`, `WORDS4(a, b, c, d)`, `WORDS2(a, b)` make a float4, a
  uint4, a uint2;
- `float(x)` and `T(x)` convert; `EXP2`, `LOG2`, `TANH`, `RSQRT`, `min`, `max`; `UNROLL` before a loop of constant
  bounds, `ROLL` before a loop whose body must appear in the kernel once;
- `DEVICE` before a function, and `GLOBAL` before the type that a pointer to an input or output points to;
- `#define MOST_REGISTERS n` among the functions limits the registers of a thread. Without it CUDA's compiler takes as
  many as it likes, and a processor then holds fewer threads.

Metal lacks the following words. Tensor cores, with the layout of numbers over lanes that they require:

- `mma(sum, a, b, T())` adds to the float4 `sum` the product of 16 x 16 by 16 x 8 numbers of a 16-bit T, two per word.
  With g = LANE / 4 and t = LANE % 4, and two neighbouring k per word: uint4 `a` holds (row g, k = 2t), (g + 8, 2t),
  (g, 2t + 8), (g + 8, 2t + 8); uint2 `b` holds (column g, k = 2t), (g, 2t + 8); `sum` is (row g, columns 2t, 2t + 1),
  (g + 8, the same).

- `packed(a, b, T())` → uint: the floats a and b, rounded to the 16-bit type T, with a in the lower half. `pair` is its
  inverse.

MLX's exponential function on CUDA:

- `EXP(x)` returns e to the power of x; argument and result have the 16-bit type T.

Memory of the block that is filled while the thread does something else:

- `ROOM(type, name)`: memory of the size that the kernel's source asks for. It may be larger than SHARED_BYTES;
- `ASYNC16(to, from, there)` starts a copy of 16 bytes of device memory into shared memory, or of 16 zeros unless
  `there`; `ASYNC_CLOSE()` makes a group, possibly empty, of the copies that this thread started since the last group;
  `ASYNC_WAIT(n)` waits until all of its groups but the last n are done. Other threads see them after a BARRIER.

Memory that the host or another GPU reads and writes while a kernel runs, on CUDA only:

- `AWAIT(p)` waits until the int at p is not 0, for a second at most, and returns whether it is not 0; `AWAIT_FOR(p, s)`
  waits for s seconds at most;
- `LOAD_SHARED(p)` loads an int as the host has written it last, and `STORE_SHARED(p, x)` stores one for the host.

The time on CUDA: `NANOSECONDS()` returns it as a long long. It is exact to a microsecond or better.

Bodies may also use what every target has: structs, templates, `auto`, `uint`, `float4` and the like. They must not
use lambdas, pointers to shared memory in functions, or infinities or NaN as constants (Metal's fast arithmetic may
assume there are none). An input of fewer than eight elements lies in another address space on Metal and must be
indexed by its name. Nothing of this was ever run on Metal (docs/doctor.md).
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_tandem import files
from mlx_tandem.model import backend
from mlx_tandem.model.backend import Target as Target
from mlx_tandem.model.kernels import nvrtc

Constant = int | bool | mx.Dtype
"""Value of a template parameter."""

Shaped = tuple[Sequence[int], mx.Dtype]
"""Shape and type of an output."""


class Kernel(Protocol):
    """Function that launches a kernel: `groups` blocks of `threads` threads each.

    `outputs` are the (shape, type) of each output. The values of `template` are compiled in, so they must take few
    values. Inputs that are not contiguous are copied.
    """

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Mapping[str, Constant],
        groups: tuple[int, int, int],
        threads: int,
        outputs: Sequence[Shaped],
    ) -> list[mx.array]:
        """Return the outputs of the kernel for these inputs."""


@dataclass(frozen=True)
class Source:
    """The source of a kernel."""

    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    body: str
    functions: str = ""
    """Text that stands before the body."""

    writes: Sequence[str] = ()
    """Inputs that the body writes, by a cast. MLX does not know of that: nobody else may hold these arrays, and
    everything that reads them afterwards must also depend on an output of the kernel."""

    room: int = 0
    """Bytes of ROOM."""


Make = Callable[[Source], Kernel]
"""Function that makes a kernel from its source. Nothing is compiled before the kernel's first call."""


_CUDA = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned int uint;
#define DEVICE __device__ __forceinline__
#define GLOBAL
#define SHARED(type, name, n) __shared__ __align__(16) type name[n]
#define SHARED_BYTES 49152
#define BARRIER() __syncthreads()
#define SHUFFLE_XOR(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#define SHUFFLE(x, lane) __shfl_sync(0xffffffffu, x, lane)
#define LOAD16(p) __ldg((const uint4*)(p))
#define LOAD8(p) __ldg((const uint2*)(p))
#define STREAM16(p) stream16(p)
#define STORE16(p, v) (*(uint4*)(p) = (v))
#define FLOAT_BITS(w) __uint_as_float(w)
#define WORD_BITS(x) __float_as_uint(x)
#define LOG2(x) log2f(x)
#define TANH(x) tanhf(x)
#define RSQRT(x) rsqrtf(x)
#define EXP(x) hexp(x)
#define FLOAT4(a, b, c, d) make_float4(a, b, c, d)
#define WORDS4(a, b, c, d) make_uint4(a, b, c, d)
#define WORDS2(a, b) make_uint2(a, b)
#define BYTE(w, i) (__uint_as_float(__byte_perm(w, 0x4b000000u, 0x7540u | (i))) - 8388608.0f)
#define UNROLL _Pragma("unroll")
#define ROLL _Pragma("unroll 1")
#define ROOM(type, name) extern __shared__ __align__(16) type name[]
#define ASYNC16(to, from, there) async16(to, from, (there) ? 16 : 0)
#define ASYNC_CLOSE() asm volatile("cp.async.commit_group;" ::: "memory")
#define ASYNC_WAIT(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")
DEVICE void async16(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"((uint)__cvta_generic_to_shared(to)),
               "l"(from), "r"(bytes)
               : "memory");
}
DEVICE float EXP2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float2 pair(uint w, __nv_bfloat16) {
  return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
}
DEVICE float2 pair(uint w, __half) {
  __half2_raw halves;
  halves.x = (unsigned short)w;
  halves.y = (unsigned short)(w >> 16);
  return __half22float2(__half2(halves));
}
DEVICE float2 pair(uint w, float) { return make_float2(__uint_as_float(w), 0.0f); }
DEVICE uint4 stream16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
#define MMA(T, type)                                                                              \
  DEVICE void mma(float4& sum, uint4 a, uint2 b, T) {                                             \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                            \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                         \
        : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)                                      \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));                            \
  }
MMA(__nv_bfloat16, "bf16")
MMA(__half, "f16")
DEVICE int shared_number(const int* p) {
  int x;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
DEVICE void put_shared(const int* p, int x) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
DEVICE long long nanoseconds() {
  long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}
DEVICE bool await(const int* p, int seconds) {
  int x = 0;
  const long long start = nanoseconds();
  do {
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  } while (x == 0 && nanoseconds() - start < seconds * 1000000000ll);
  return x != 0;
}
DEVICE uint packed(float a, float b, __nv_bfloat16) {
  uint w;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(w) : "f"(a), "f"(b));
  return w;
}
DEVICE uint packed(float a, float b, __half) {
  uint w;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(w) : "f"(a), "f"(b));
  return w;
}
#define AWAIT(p) await(p, 1)
#define AWAIT_FOR(p, s) await(p, s)
#define NANOSECONDS() nanoseconds()
#define LOAD_SHARED(p) shared_number(p)
#define STORE_SHARED(p, x) put_shared(p, x)
"""

# MLX appends the declaration of the kernel itself to this text.
_CUDA_END = """
#if defined(MOST_REGISTERS) && defined(__maxnreg__)
#undef __global__
#define __global__ __attribute__((global)) __maxnreg__(MOST_REGISTERS)
#endif
"""

_CUDA_START = """
  const int THREAD = threadIdx.x, THREADS = blockDim.x, LANE = THREAD & 31, WARP = THREAD >> 5;
  const int GROUP_X = blockIdx.x, GROUP_Y = blockIdx.y, GROUP_Z = blockIdx.z;
  const int GROUPS_X = gridDim.x, GROUPS_Y = gridDim.y, GROUPS_Z = gridDim.z;
"""

_METAL = r"""
#define DEVICE static inline
#define GLOBAL device
#define SHARED(type, name, n) threadgroup type name[n]
#define SHARED_BYTES 32768
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE_XOR(x, mask) simd_shuffle_xor(x, (ushort)(mask))
#define SHUFFLE(x, lane) simd_shuffle(x, (ushort)(lane))
#define LOAD16(p) (*(const device uint4*)(p))
#define LOAD8(p) (*(const device uint2*)(p))
#define STREAM16(p) LOAD16(p)
#define STORE16(p, v) (*(device uint4*)(p) = (v))
#define FLOAT_BITS(w) as_type<float>((uint)(w))
#define WORD_BITS(x) as_type<uint>((float)(x))
#define EXP2(x) fast::exp2(x)
#define LOG2(x) precise::log2(x)
#define TANH(x) precise::tanh(x)
#define RSQRT(x) precise::rsqrt(x)
#define FLOAT4(a, b, c, d) float4(a, b, c, d)
#define WORDS4(a, b, c, d) uint4(a, b, c, d)
#define WORDS2(a, b) uint2(a, b)
#define BYTE(w, i) float(((w) >> (8 * (i))) & 255u)
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLL _Pragma("clang loop unroll(disable)")
DEVICE float2 pair(uint w, bfloat16_t) { return float2(as_type<float>(w << 16), as_type<float>(w & 0xffff0000u)); }
DEVICE float2 pair(uint w, half) { return float2(as_type<half2>(w)); }
DEVICE float2 pair(uint w, float) { return float2(as_type<float>(w), 0.0f); }
"""

# This stands in the body and not in the header, because MLX declares the attributes whose names it finds in the body.
_METAL_START = """
  const int THREAD = thread_position_in_threadgroup.x, THREADS = threads_per_threadgroup.x;
  const int LANE = thread_index_in_simdgroup, WARP = simdgroup_index_in_threadgroup;
  const int GROUP_X = threadgroup_position_in_grid.x, GROUPS_X = threadgroups_per_grid.x;
  const int GROUP_Y = threadgroup_position_in_grid.y, GROUPS_Y = threadgroups_per_grid.y;
  const int GROUP_Z = threadgroup_position_in_grid.z, GROUPS_Z = threadgroups_per_grid.z;
"""


def available() -> tuple[Target, ...]:
    """Return the targets that the default device can run."""
    target = backend.current().kernels.target
    return () if target is None else (target,)


def is_hopper() -> bool:
    """Return whether the default device is a CUDA device with the instruction `wgmma`."""
    return _capability() == 90


def _capability() -> int:
    """Return the compute capability of the CUDA device, times ten; 0 if there is none."""
    info: Mapping[str, Any] = mx.device_info()
    return 10 * int(info.get("compute_capability_major", 0)) + int(info.get("compute_capability_minor", 0))


def most_room() -> int:
    """Return the bytes of ROOM that a block may have on the CUDA device; 0 if it lacks ASYNC16.

    The sizes are from the table of compute capabilities in the CUDA programming guide.
    """
    capability = _capability()
    if capability < 80:
        return 0
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}.get(capability, 99) << 10


def maker(target: Target) -> Make:
    """Return the function that makes kernels for a target.

    A kernel that cannot be compiled raises when its result is evaluated.
    """

    def make(source: Source) -> Kernel:
        if not (source.functions + source.body).isascii():  # MLX hands Metal no other text (`build_library_` there)
            raise ValueError(f"the text of the kernel {source.name} is not ASCII")
        if target == "metal":
            return _declared(source, mx.fast.metal_kernel, _METAL + source.functions, _METAL_START + source.body)
        return _for_cuda(source)

    return make


def _for_cuda(source: Source) -> Kernel:
    header, body = _CUDA + source.functions + _CUDA_END, _CUDA_START + source.body
    parts = Included(header), Included(body)
    # MLX passes a kernel the shapes whose names it finds in the body.
    shapes = [name for name in (f"{one}_shape" for one in source.inputs) if name in body]
    mlx_header, mlx_body = parts[0].line, f"// {' '.join(shapes)}\n{parts[1].line}"
    kernel = _declared(source, mx.fast.cuda_kernel, mlx_header, mlx_body, shared_memory=source.room)
    modules = compiled_modules()
    provided: set[nvrtc.Form] = set()

    def call(
        inputs: Sequence[mx.array],
        template: Mapping[str, Constant],
        groups: tuple[int, int, int],
        threads: int,
        outputs: Sequence[Shaped],
    ) -> list[mx.array]:
        for part in parts:
            part.keep()
        if modules:
            form = nvrtc.Form(
                source.name,
                tuple((name, x.dtype, x.ndim) for name, x in zip(source.inputs, inputs, strict=True)),
                tuple((name, dtype) for name, (_, dtype) in zip(source.outputs, outputs, strict=True)),
                tuple(template.items()),
            )
            if form not in provided:
                modules.provide(form, header, body, mlx_header, mlx_body)
                provided.add(form)
        return kernel(inputs, template, groups, threads, outputs)

    return call


@functools.cache
def compiled_modules() -> nvrtc.Modules | None:
    """Return the compiled kernels in MLX's cache folder, or None if MLX keeps none or NVRTC is not to be found."""
    folder, capability = os.environ.get("MLX_PTX_CACHE_DIR"), _capability()
    # MLX asks for the instructions of the very architecture from Hopper on.
    compiler = nvrtc.Nvrtc.load(f"sm_{capability}{'a' if capability >= 90 else ''}") if folder else None
    return nvrtc.Modules(Path(folder), compiler) if folder and compiler else None


def compile_together(calls: Callable[[], None]) -> None:
    """Have the kernels that `calls` calls compiled at once if kernels are compiled ahead of MLX here; else do nothing.

    `calls` evaluates nothing, since MLX would compile a kernel by itself that is not there yet.
    """
    if modules := compiled_modules():
        with modules.together():
            calls()


def compile_ahead(groups: Collection[str]) -> None:
    """Begin to compile the modules of MLX's own that starts of these groups need."""
    if (modules := compiled_modules()) and (found := nvrtc.recorded()):
        packed = {nvrtc.PACKED}.intersection(groups)
        modules.begin(found.units(set(groups) - packed), found.units(packed))


def wait_for_compiled(*, packed: bool = True) -> None:
    """Wait for everything that is being compiled, since MLX would compile by itself what is not there yet.

    Without `packed` do not wait for the products of packed weights, which take the compiler longest.
    """
    if modules := compiled_modules():
        modules.wait(slow=packed)


def _declared(source: Source, declare: Any, header: str, body: str, **options: int) -> Kernel:
    """Return the kernel of a text, as MLX declares it."""
    kernel: Callable[..., list[mx.array]] = declare(
        name=source.name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=body,
        header=header,
        **options,
    )

    def call(
        inputs: Sequence[mx.array],
        template: Mapping[str, Constant],
        groups: tuple[int, int, int],
        threads: int,
        outputs: Sequence[Shaped],
    ) -> list[mx.array]:
        return kernel(
            inputs=list(inputs),
            template=list(template.items()),
            grid=(groups[0] * threads, groups[1], groups[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )

    return call


def bits_of(x: float) -> int:
    """Return the bits of a non-negative number as float32, to be compiled into a kernel."""
    return int(np.float32(x).view(np.int32))


# --- Texts in files --------------------------------------------------------------------------------------------------

LOOK_SECONDS = 1.0
"""Seconds for which a file is assumed to be there: a step that is not compiled asks a thousand times."""


class Included:
    """A text of a kernel in a file that the compiler includes.

    MLX hashes the whole source of a kernel whenever it launches it, which takes most of a microsecond for 6 kB, several
    hundred times a step. With an include it hashes the file's name only, and the name is a digest of the text. `line`
    is the line of source that includes the text, or the text itself if no file can be written.
    """

    def __init__(self, text: str, folder: Path | None = None):
        """Write `text` into `folder`, by default the user's cache folder."""
        self._data = text.encode()
        folder = files.cache_folder() / "sources" if folder is None else folder
        self._path = folder.absolute() / f"{hashlib.sha256(self._data).hexdigest()}.h"
        self._looked = -LOOK_SECONDS
        self._is_used = not any(c in str(self._path) for c in '"\\\n') and self._write()
        self.line = f'#include "{self._path}"\n' if self._is_used else text

    def keep(self) -> None:
        """Write the file again if it is gone; call it before anything is compiled, since a user may empty the cache."""
        now = time.monotonic()
        if self._is_used and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._write()

    def _write(self) -> bool:
        """Return whether the file exists with the right contents, after writing it if need be."""
        try:
            if not self._path.exists() or self._path.read_bytes() != self._data:
                files.make_folder(self._path.parent)
                files.replace(self._path, self._data)
        except OSError:
            return False
        return True
