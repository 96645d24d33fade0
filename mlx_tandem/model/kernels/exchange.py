"""Kernels between a step and the host: one waits for the step's numbers, one writes the drawn tokens beside them.

A step that begins with the gate can be dispatched before its numbers are known, and waits there. As soon as the host
has written the numbers, the device goes on. Otherwise the device would idle while MLX dispatches the step, which takes
milliseconds.

To read an array that lies in the device's memory, MLX copies it into memory that both sides share. The driver may let
this copy wait for everything that was dispatched. If that includes a step that waits at the gate, host and device wait
for each other. So a step reports its tokens in the array by which its numbers came.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Make, Source

_GATE_THREADS = 512

OPEN, TOLD = -1, -2
"""Indices of two places among the numbers. The kernel waits until the first is not 0, and writes into the second
whether the host had opened the gate in time."""

RESERVED = 2
"""Number of places at the end of the numbers that hold these two."""

IN_TIME, TOO_LATE = 1, 2
"""The kernel writes the first value if the host opened the gate, and the second if the kernel gave up and read the
numbers anyway."""

_DEFINED = f"#define IN_TIME {IN_TIME}\n#define TOO_LATE {TOO_LATE}\n"

_GATE = r"""
  const int count = numbers_shape[0];
  if (THREAD == 0) {
    const bool opened = AWAIT(numbers + count - 1);
    STORE_SHARED(numbers + count - 2, opened ? IN_TIME : TOO_LATE);
  }
  BARRIER();
  // Each load takes as long as a way over the bus, so several are under way at once.
  for (int first = THREAD; first < count; first += 8 * THREADS) {
    int loaded[8];
    UNROLL
    for (int u = 0; u < 8; u++) loaded[u] = LOAD_SHARED(numbers + min(first + u * THREADS, count - 1));
    UNROLL
    for (int u = 0; u < 8; u++) {
      if (first + u * THREADS < count) copy[first + u * THREADS] = loaded[u];
    }
  }
"""


class Gate:
    """The kernel that copies a step's numbers to the device once the host has written them, for CUDA."""

    def __init__(self, make: Make):
        self._kernel = make(Source("gate", ["numbers"], ["copy"], _GATE, _DEFINED, writes=["numbers"]))

    def __call__(self, numbers: mx.array) -> mx.array:
        """Return a copy of `numbers`, int32 [count].

        The kernel copies them as soon as the last of them is not 0, or after a second. It then writes IN_TIME or
        TOO_LATE into the last place but one of `numbers`.
        """
        (copy,) = self._kernel([numbers], {}, (1, 1, 1), _GATE_THREADS, [(numbers.shape, mx.int32)])
        return copy


_REPORT_THREADS = 128

_REPORT = f"""
  const int count = tokens_shape[0], to = numbers_shape[0] - {RESERVED} - count;
  for (int i = THREAD; i < count; i += THREADS) {{
    const int token = tokens[i];
    copy[i] = token;
    STORE_SHARED(numbers + to + i, token);
  }}
"""


class Report:
    """The kernel that writes drawn tokens into the host's memory, for CUDA."""

    def __init__(self, make: Make):
        self._kernel = make(Source("report", ["tokens", "numbers"], ["copy"], _REPORT, writes=["numbers"]))

    def __call__(self, tokens: mx.array, numbers: mx.array) -> mx.array:
        """Write `tokens`, int32 [count], into `numbers`, in front of the last RESERVED of them; return a copy.

        Once the copy has been computed, the tokens are in `numbers`.
        """
        (copy,) = self._kernel([tokens, numbers], {}, (1, 1, 1), _REPORT_THREADS, [(tokens.shape, mx.int32)])
        return copy
