"""The protocol of a back end of MLX, by subject. Each device answers once, with its reason beside the answer.

Code outside of this package asks for the answer that it needs (`current().steps.one_at_a_time`) and never which device
computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlx_tandem.model.device import Limit

Target = Literal["cuda", "metal"]
"""The back ends of MLX for which this package has kernels."""

_ANY = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of this package that the device can run."""

    target: Target | None  # what their texts are made for; None: MLX's own operations compute and write everything
    tested_to_write: bool = False  # whether the kernel that writes in place is tested before its first use in a process
    # Whether kernels are ordered by their outputs alone. Then every user of an array that kernels write has to depend
    # on an output of each earlier user (`model/kernels/inplace.py`).
    ordered_by_outputs: bool = False
    joins_operations: bool = False  # whether small operations between products are worth a kernel that joins them
    has_matrix_words: bool = False  # whether the dialect's words for tensor cores have a meaning
    # Whether MLX and mlx-lm have kernels for gated delta nets and depthwise convolutions, which have to be beaten.
    mlx_has_its_own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LongForward:
    """The forwards whose layers are too much work, or need too much memory, to be handed to the device at once."""

    tokens: int  # fewest tokens of such a forward
    group: int = 1  # most layers that are handed over together
    # Whether only forwards are meant that gather keys and values, and shorter ones, too, if they gather more than there
    # is room for.
    gathers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Properties of how steps and their numbers reach the device."""

    one_at_a_time: bool = False  # whether a part of a step is dispatched only when the part before it is done
    lets_go_late: bool = True  # whether the inputs of operations are held for some time after these are done
    numbers_as_one: bool = False  # whether a forward's numbers are one array, which kernels copy and write back to
    may_wait_for_numbers: bool = False  # whether a step that was dispatched can wait on the device for its numbers
    tracing_is_cheap: bool = False  # whether a kind of step is worth tracing at its first use
    long_forward: LongForward | None = None  # the forwards that wait for the device while they are built
    drive_bytes: int  # that a step reads for the drive and writes from it, at least one record


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Properties of the device's products of matrices."""

    only_float32_is_fast: bool = False  # whether it is many times faster than every other type, packed weights included
    one_by_one: bool = False  # whether a batch of products is computed one after the other, each like a product alone
    windows_beat_gathers: bool = False  # whether adapters of mixed rows are faster in windows of rows than row by row
    worth_timing: bool = True  # whether the time of a product depends on more than its size
    timed_apart: bool = False  # whether the device's time and the host's are measured apart
    # Relative difference up to which two measured costs count as equal; it is multiplied by the ratio of row counts.
    alike: float = 0.25
    dequantised_layers: int | None = None  # most layers whose weights are dequantised in memory at once; None: all
    dequantised_tokens: int = 0  # fewest tokens of a forward that may dequantise weights
    tile_sizes: tuple[int, ...]  # sizes of tiles that are tried for `--deterministic`, ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Properties of MLX's operations other than products."""

    masks_are_slow: bool = True  # whether a mask keeps MLX from its fused attention
    angles_are_slow: bool = False  # whether the cosines and sines of a rope are worth keeping for other layers
    fusing_keeps_bits: bool = False  # whether fused operations give the same bits as separate ones
    compiled_by_the_host: bool = False  # whether MLX fuses operations with the host's C++ compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Limits and needs of memory, for a step and for the pool."""

    # Candidates for the most prompt tokens of one step, largest first. The first is taken whose activations fit into
    # their share of the memory, or into what the last candidate needs.
    chunk_tokens: tuple[int, ...]
    layers: int = 8  # whose activations are in memory at once
    scores: int = 3  # arrays of the size of attention's scores that are in memory at once
    score_bytes: int = 2  # fewest bytes of a score
    gathered: float = 3.0  # copies of gathered keys and values that are in memory at once
    most_pool: int = _ANY  # largest KV pool in bytes, unless a size is configured
    most_activations: int = _ANY  # bytes that steps are cut down to, unless no step would fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Sizes into which learning's work is cut, so that streams wait for none of it long."""

    micro_batch_tokens: int  # of one forward and backward; a slice is one or a few layers of it
    times_slices: bool = False  # whether the start times a slice and takes fewer tokens where it is slow
    # Layers in one slice of the forward. A layer of the backward, which computes the layer again and two gradients,
    # takes as long as three of the forward.
    forward_layers: int = 1
    kept_bytes: int = 0  # activations of a micro-batch up to which they are kept and not computed again
    step_chunks: int = 1  # chunks of parameters that one slice of an optimiser's step updates
    scores: int = 3  # arrays of attention's scores in float32 that a layer of the backward needs
    attention_has_gradient: bool = False  # whether MLX has a fused attention with one, which makes no array of scores
    few_shapes: bool = False  # whether sequences are padded so that few shapes occur
    masks_are_slow: bool = False  # whether attention with masks of one's own is slow with a gradient
    compiles_for_long: bool = False  # whether kernels of a first pass compile for so long that the start runs one


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Sizes of the work by which the device is measured."""

    copied_numbers: int = 128 << 20  # in float32, to measure bandwidth
    only_small_models: bool = False  # whether the models of `tandem doctor` have to be small


@dataclass(frozen=True, kw_only=True)
class Backend(ABC):
    """A back end of MLX on this machine."""

    name: Literal["cpu", "cuda", "metal"]
    kernels: Kernels
    steps: Steps
    products: Products
    arithmetic: Arithmetic
    memory: Memory
    learning: Learning
    measuring: Measuring

    # the machine

    def describe(self) -> str:
        """Return one line for people that says what computes here."""
        info = mx.device_info()
        return str(info.get("device_name") or info.get("architecture") or "GPU")

    @abstractmethod
    def driver(self) -> str:
        """Return the version of what compiles kernels besides MLX; empty where nothing does or it does not say."""

    def sizes(self) -> dict[str, int | str]:
        """Return the architecture and the sizes of the device's own memory in bytes, as MLX reports them."""
        names = ("architecture", "memory_size", "max_recommended_working_set_size", "max_buffer_length", "free_memory")
        return {name: value for name in names if (value := mx.device_info().get(name)) is not None}

    def advice(self, dtype: str) -> str:
        """Return a sentence for the user where this device computes slowly in `dtype`; empty where it does not."""
        return ""

    # the host's cores

    def share_cores(self, every_core: bool) -> None:
        """Compute what is dispatched from now on with every core, or with half of them, where cores compute.

        Whoever dispatches products of matrices calls this first, since their bits may depend on it. What was dispatched
        before is waited for if it had another number of cores.
        """
        return

    # memory

    def memory_limit(self, chosen_gb: float = 0.0) -> Limit:
        """Return how many bytes this process may use on the device: `chosen_gb` gigabytes if the user chose, else what
        fits.
        """
        if chosen_gb:
            return Limit(int(chosen_gb * 1e9), "as --memory-limit-gb allows", shared=False)
        return self.free_memory()

    @abstractmethod
    def free_memory(self) -> Limit:
        """Return how many bytes this process may use on the device beside everything else that runs."""

    def shared_memory(self, group: mx.distributed.Group, nbytes: int) -> list[int] | None:
        """Reserve `nbytes` of zeros on the device of each rank of a group, which all ranks may write into from kernels,
        and return the addresses in this process, by rank; None where devices have no such memory.

        Every rank has to call it, and each is answered alike.
        """
        return None

    def bound_memory(self, resident: int, most: int) -> None:
        """Keep up to `resident` bytes mapped between steps, and have MLX wait for work in flight before it takes more
        than `most`, where the device needs to be told.
        """
        return

    def keep_freed_memory(self, most: int) -> bool:
        """Have the driver keep what MLX frees, up to `most` bytes in use and freed; return whether it does."""
        return True

    # functions that a device may compute in a way of its own

    def exp(self, x: mx.array) -> mx.array:
        """Return e to the x, for a function that is compiled as a whole. It need not have a gradient."""
        return mx.exp(x)

    def exp_alone(self, x: mx.array) -> mx.array:
        """Return e to the x, for x in float32 outside of compiled functions."""
        return mx.exp(x)

    def log_sum_exp(self, x: mx.array) -> mx.array:
        """Return the logarithm [n] of the sum of e to the x, for x [n, numbers] in float32 outside of compiled
        functions.
        """
        return mx.logsumexp(x, axis=-1)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Return attention [rows, heads, length, dim] over keys and values [rows, kv heads, positions, dim]."""
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    def install_functions(self) -> None:
        """Replace mlx-lm's functions, in the modules imported so far, for which this device has better ones."""
        return
