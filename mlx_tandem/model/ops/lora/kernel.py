"""Two kernels that add LoRA adapters to the outputs of linears with a common input, for any mixture of slots.

Tokens come in tiles of at most TILE neighbours of one slot (`routes.py`), and a block of threads does one tile, so that
everything it loads of an adapter serves all of them. *Shrink* multiplies by A and leaves sums over _SPAN inputs each;
*expand* adds these up, multiplies by B and adds the linears' own outputs. Sums are float32, and their order depends on
the linear alone, so that a token gets the same bits in any batch. Slot 0 costs a copy.

`GroupedDeltas` runs both when the first of the linears is called, and computes the own outputs of all of them. Each of
the others is then given its own result if it is called with the same input.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Kernel, Make, Shaped, Source
from mlx_tandem.model.ops.products.merged import home_of, whole_of
from mlx_tandem.model.targets import Group, Target

MOST_MEMBERS = 7
"""Most linears of one call. Metal gives a kernel 31 buffers; expand needs two, and four for each linear: B, its
shape, the linear's own outputs and the sums."""

_SPAN = 512
"""Inputs that a block takes at once: 64 threads with 8 each."""

_MOST_PARTS = 12
"""Most sums per output that expand has to add up, whatever the number of inputs."""

_WIDE = 8192
"""Number of outputs from which expand has blocks of twice as many threads."""


def fits(inputs: int, outputs: int) -> bool:
    """Return whether the kernels can compute a linear of this shape; they load rows 16 bytes at a time."""
    return inputs % 8 == 0 and outputs % 8 == 0


Form = Literal["apart", "joined", "whole"]
"""The form of the linears' own outputs and of the results. "apart": an array of outputs and a result for each linear.
"joined": one array with all outputs side by side, and a result for each linear. "whole": one array with all outputs
side by side, and one such array as the result."""


class LoraKernels:
    """Both kernels for one target. All arrays but the sums and the tiles have one type.

    Shapes: `x` [..., inputs] with as many tokens as the tiles cover; `tiles` int32 [tiles, 3]; `a` [slots, inputs,
    rank] and `b` [slots, rank, outputs] of each member. The rank is a multiple of 8 and the same for all members.
    """

    def __init__(self, make: Make):
        self._shrink = cache(lambda members: _shrink(make, members))
        self._expand = cache(lambda members, form: _expand(make, members, form))

    def add(
        self,
        x: mx.array,
        tiles: mx.array,
        a: Sequence[mx.array],
        b: Sequence[mx.array],
        y: Sequence[mx.array],
        places: tuple[int, ...] | None = None,
    ) -> list[mx.array]:
        """Return y[m] + x @ a[m][slot] @ b[m][slot] for each member m, each of shape [*x.shape[:-1], outputs].

        `y` holds an array for each member, or one array whose rows hold the outputs of all. `places` says where each
        member begins in such a row and how long a row is, in multiples of 8; without it the members follow each
        other.
        """
        return self.expand(self.shrink(x, tiles, a), tiles, b, y, x.shape[:-1], places)

    def add_joined(
        self, x: mx.array, tiles: mx.array, a: Sequence[mx.array], b: Sequence[mx.array], y: mx.array
    ) -> mx.array:
        """Return what `add` returns as one array of the shape of `y`, whose rows hold the outputs of all members."""
        (z,) = self._launch("whole", [self.shrink(x, tiles, a), tiles, *b, y], b, [(y.shape, y.dtype)])
        return z

    def shrink(self, x: mx.array, tiles: mx.array, a: Sequence[mx.array]) -> mx.array:
        """Return parts of x @ a[m][slot]: float32 [tokens, members, parts, rank]. Nothing is written for slot 0."""
        _, inputs, rank = a[0].shape
        lanes = 2 if rank % 16 == 0 else 1
        passes = -(-inputs // (_SPAN * _MOST_PARTS))
        parts = -(-inputs // (_SPAN * passes))
        (sums,) = self._shrink(len(a))(
            [x, tiles, *a],
            {"T": x.dtype, "LANES": lanes, "PASSES": passes},
            (parts, len(a) * rank // (8 * lanes), tiles.shape[0]),
            64 * lanes,
            [((x.size // inputs, len(a), parts, rank), mx.float32)],
        )
        return sums

    def expand(
        self,
        sums: mx.array,
        tiles: mx.array,
        b: Sequence[mx.array],
        y: Sequence[mx.array],
        lead: Sequence[int],
        places: tuple[int, ...] | None = None,
    ) -> list[mx.array]:
        """Return y[m] + sums' @ b[m][slot] for each member m, in the shape [*lead, outputs]."""
        outputs = [((*lead, one.shape[2]), y[0].dtype) for one in b]
        if places is None and len(y) == len(b):
            return self._launch("apart", [sums, tiles, *b, *y], b, outputs)
        return self._launch("joined", [sums, tiles, *b, *y, _places(places or _ends(b))], b, outputs)

    def _launch(
        self, form: Form, inputs: Sequence[mx.array], b: Sequence[mx.array], outputs: Sequence[Shaped]
    ) -> list[mx.array]:
        _, rank, _ = b[0].shape
        widths = [one.shape[2] for one in b]
        threads = 128 if sum(widths) >= _WIDE else 64
        groups = sum(-(-n // (4 * threads)) for n in widths), inputs[1].shape[0], 1
        template = {"T": b[0].dtype, "DEPTH": 16 if rank % 16 == 0 else 8}
        return self._expand(len(b), form)(inputs, template, groups, threads, outputs)


def _ends(b: Sequence[mx.array]) -> tuple[int, ...]:
    return (0, *accumulate(one.shape[2] for one in b))


@cache
def _places(places: tuple[int, ...]) -> mx.array:
    return mx.array(places, mx.int32)


def _shrink(make: Make, members: int) -> Kernel:
    a = _names("a", members)
    body = _choices(A=a) + _SHRINK
    return make(Source(f"lora_shrink_{members}", ["x", "tiles", *a], ["sums"], body, _FUNCTIONS))


def _expand(make: Make, members: int, form: Form) -> Kernel:
    b, y, z = (_names(letter, members) for letter in "byz")
    widths = [f"{name}_shape[2]" for name in b]
    if form == "apart":
        given, choices = y, _choices(Y=y, Z=z, Y_STRIDE=["N"], Z_STRIDE=["N"])
    elif form == "joined":
        given, row = ["y", "places"], [f"places[{members}]"]
        choices = _choices(Y=["y + places[m]"], Z=z, Y_STRIDE=row, Z_STRIDE=["N"])
    else:
        given, z, row = ["y"], ["z"], [" + ".join(widths)]
        choices = _choices(Y=["y + before"], Z=["z + before"], Y_STRIDE=row, Z_STRIDE=row)
    body = choices + _choices(OUTPUTS=widths) + f"#define MOST_PARTS {_MOST_PARTS}\n" + _EXPAND
    name, inputs = f"lora_expand_{members}_{form}", ["sums", "tiles", *b, *given]
    return make(Source(name, inputs, z, _choices(B=b) + body, _FUNCTIONS))


def _names(letter: str, count: int) -> list[str]:
    return [f"{letter}{i}" for i in range(count)]


def _choices(**words: Sequence[str]) -> str:
    """Return macros that take a member's number: WORD(m) is the m-th expression, or the only one."""
    text = ""
    for word, (*others, last) in words.items():
        chosen = "".join(f"(m) == {i} ? {one} : " for i, one in enumerate(others))
        text += f"#define {word}(m) ({chosen}{last})\n"
    return text


_FUNCTIONS = """
template <typename T, int n>
struct alignas(n * sizeof(T) < 16 ? n * sizeof(T) : 16) Pack {
  T at[n];
};
template <int n, typename T>
DEVICE Pack<T, n> load(const GLOBAL T* from) {
  return *(const GLOBAL Pack<T, n>*)from;
}
typedef Pack<float, 4> Four;
"""

# GROUP_X is the part of the inputs, GROUP_Y a slice of 8 * LANES columns of a member's A, GROUP_Z the tile. There are
# 64 * LANES threads: each multiplies 8 tokens by 8 columns over 8 inputs, then threads with the same columns add up
# their sums.
_SHRINK = """
  const int first = tiles[3 * GROUP_Z], count = tiles[3 * GROUP_Z + 1], slot = tiles[3 * GROUP_Z + 2];
  if (count == 0 || slot == 0) return;
  const int K = a0_shape[1], R = a0_shape[2], width = 8 * LANES;
  const int slices = R / width, m = GROUP_Y / slices, column = GROUP_Y % slices * width, mine = THREAD % LANES * 8;
  const GLOBAL T* a = A(m) + (size_t)slot * K * R + column + mine;
  float sum[64];
  UNROLL for (int i = 0; i < 64; i++) sum[i] = 0.0f;
  for (int pass = 0; pass < PASSES; pass++) {
    const int k = ((GROUP_X * PASSES + pass) * 64 + THREAD / LANES) * 8;
    if (k < K) {
      Pack<T, 8> xs[8], as[8];
      UNROLL for (int j = 0; j < 8; j++) as[j] = load<8>(a + (size_t)(k + j) * R);
      UNROLL for (int i = 0; i < 8; i++) xs[i] = load<8>(x + (size_t)(first + min(i, count - 1)) * K + k);
      UNROLL for (int h = 0; h < 8; h += 4) {
        float wide[4][8];
        UNROLL for (int j = 0; j < 4; j++) {
          UNROLL for (int e = 0; e < 8; e++) wide[j][e] = float(as[h + j].at[e]);
        }
        UNROLL for (int i = 0; i < 8; i++) if (i < count) {
          UNROLL for (int j = 0; j < 4; j++) {
            UNROLL for (int e = 0; e < 8; e++) sum[8 * i + e] += float(xs[i].at[h + j]) * wide[j][e];
          }
        }
      }
    }
  }
  // Each lane gives half of its sums away and keeps the other half, until a few are left, whole for the warp.
  #define HALVE(rest, mask) UNROLL for (int i = 0; i < rest; i++) { \\
    const bool upper = LANE & mask; \\
    const float kept = upper ? sum[i + rest] : sum[i], given = upper ? sum[i] : sum[i + rest]; \\
    sum[i] = kept + SHUFFLE_XOR(given, mask); \\
  }
  HALVE(32, 16) HALVE(16, 8) HALVE(8, 4) HALVE(4, 2)
  if (LANES == 1) { HALVE(2, 1) }
  SHARED(float, warps, 16 * LANES * 8 * LANES);
  const int left = LANE / LANES * 2 * LANES;
  UNROLL for (int i = 0; i < 2 * LANES; i++) warps[(WARP * 8 + left / 8) * width + mine + left % 8 + i] = sum[i];
  BARRIER();
  float total = warps[THREAD];
  UNROLL for (int w = 1; w < 2 * LANES; w++) total += warps[w * 8 * width + THREAD];
  const int i = THREAD / width;
  if (i < count) {
    sums[((size_t)((first + i) * (GROUPS_Y / slices) + m) * GROUPS_X + GROUP_X) * R + column + THREAD % width] = total;
  }
"""

# GROUP_X is a slice of 4 * THREADS outputs of a member, GROUP_Y the tile. A thread computes 4 outputs of all tokens.
_EXPAND = """
  const int first = tiles[3 * GROUP_Y], count = tiles[3 * GROUP_Y + 1], slot = tiles[3 * GROUP_Y + 2];
  if (count == 0) return;
  const int parts = sums_shape[2], R = sums_shape[3];
  int m = 0, group = GROUP_X, N = OUTPUTS(0), before = 0;  // outputs of the members before this one
  while (group * THREADS * 4 >= N) {
    group -= (N + THREADS * 4 - 1) / (THREADS * 4);
    before += N;
    m++;
    N = OUTPUTS(m);
  }
  const int o = (group * THREADS + THREAD) * 4;
  const bool inside = o < N;
  const GLOBAL T* b = B(m) + (size_t)slot * R * N + o;
  const GLOBAL T* own = Y(m) + (size_t)first * Y_STRIDE(m) + o;
  GLOBAL T* to = Z(m) + (size_t)first * Z_STRIDE(m) + o;
  Pack<T, 4> ys[8];
  float out[8][4];
  if (inside) {
    UNROLL for (int i = 0; i < 8; i++) ys[i] = load<4>(own + (size_t)min(i, count - 1) * Y_STRIDE(m));
  }
  UNROLL for (int i = 0; i < 8; i++) {
    UNROLL for (int e = 0; e < 4; e++) out[i][e] = 0.0f;
  }
  SHARED(Four, shrunk, 64 * 2);  // of each rank: four tokens, then four more
  for (int r = 0; r < R && slot; r += DEPTH) {
    Pack<T, 4> bs[DEPTH];
    if (inside) {
      UNROLL for (int j = 0; j < DEPTH; j++) bs[j] = load<4>(b + (size_t)(r + j) * N);
    }
    if (r % 64 == 0) {
      if (r) BARRIER();
      for (int q = THREAD; q < min(64, R - r) * 2; q += THREADS) {
        const int token = first + min(q % 8, count - 1);
        const GLOBAL float* part = sums + (size_t)(token * sums_shape[1] + m) * parts * R + r + q / 8 * 4;
        Four all[MOST_PARTS];
        UNROLL for (int s = 0; s < MOST_PARTS; s++) all[s] = load<4>(part + min(s, parts - 1) * R);
        UNROLL for (int s = 1; s < MOST_PARTS; s++) if (s < parts) {
          UNROLL for (int e = 0; e < 4; e++) all[0].at[e] += all[s].at[e];
        }
        UNROLL for (int e = 0; e < 4; e++) shrunk[(q / 8 * 4 + e) * 2 + q % 8 / 4].at[q % 4] = all[0].at[e];
      }
      BARRIER();
    }
    UNROLL for (int h = 0; h < 2; h++) if (4 * h < count) {
      UNROLL for (int j = 0; j < DEPTH; j++) {
        const Four u = shrunk[(r % 64 + j) * 2 + h];
        UNROLL for (int i = 0; i < 4; i++) {
          UNROLL for (int e = 0; e < 4; e++) out[4 * h + i][e] += u.at[i] * float(bs[j].at[e]);
        }
      }
    }
  }
  if (!inside) return;
  UNROLL for (int i = 0; i < 8; i++) {
    if (i < count) {
      Pack<T, 4> all;
      UNROLL for (int e = 0; e < 4; e++) all.at[e] = T(float(ys[i].at[e]) + out[i][e]);
      *(GLOBAL Pack<T, 4>*)(to + (size_t)i * Z_STRIDE(m)) = all;
    }
  }
"""


# --- Their use by the model's linears --------------------------------------------------------------------------------

Stacked = Mapping[str, tuple[mx.array, mx.array]]
"""The stacked arrays by path: A [slots, inputs, rank] and B [slots, rank, outputs]."""


class GroupedDeltas:
    """Fused deltas of adapted linears: between `start` and `stop`, `give` returns the sums for one trace of a step.

    `same` and `mixed` are the numbers of tokens up to which a step with one adapter, or with several, uses the
    kernels.
    """

    def __init__(self, kernels: LoraKernels, groups: Iterable[Group], *, same: int, mixed: int):
        self.same, self.mixed = same, mixed
        self.kernels = kernels
        self._groups = list(groups)
        self._members: dict[str, Group] = {}
        self._tiles: mx.array | None = None
        self._tokens = 0
        self._stacked: Stacked = {}
        self._ready: dict[str, tuple[mx.array, mx.array]] = {}  # by path: an input, and the linear's output for it

    def adapted(self, paths: Container[str]) -> None:
        """Set which linears have adapters from here on."""
        self._members = {}
        for group in self._groups:
            own = [
                t for t in group if t.path in paths and not t.shape.experts and fits(t.shape.inputs, t.shape.outputs)
            ]
            for at in range(0, len(own), MOST_MEMBERS):
                members = tuple(own[at : at + MOST_MEMBERS])
                self._members |= {member.path: members for member in members}

    def start(self, tiles: mx.array, tokens: int, stacked: Stacked) -> None:
        """Begin a trace whose inputs have `tokens` tokens, cut into `tiles`."""
        self._tiles, self._tokens, self._stacked = tiles, tokens, stacked

    def stop(self) -> None:
        """End the trace and forget its arrays."""
        self._tiles, self._stacked = None, {}
        self._ready.clear()

    def give(self, target: Target, x: mx.array) -> mx.array | None:
        """Return the output of the linear for x with its adapters; None if these kernels do not compute it."""
        given_for, given = self._ready.pop(target.path, (None, None))
        if given is not None and given_for is x:
            return given
        members = self._members.get(target.path)
        if members is None or self._tiles is None or not self._covers(target, x):
            return None
        if given is not None:
            members = (target,)  # this forward calls the members with different inputs
        modules: list[Any] = [member.module for member in members]
        own, places = _own(modules, x)
        a, b = self._pairs(members)
        if any(array.dtype != x.dtype for array in (*a, *b, *own)):
            return None
        added = self.kernels.add(x, self._tiles, a, b, own, places)
        self._ready |= {member.path: (x, z) for member, z in zip(members, added, strict=True)}
        return self._ready.pop(target.path)[1]

    def joined(self, target: Target, x: mx.array) -> mx.array | None:
        """Return the outputs for x, with their adapters, of all linears that were merged with this one, side by side.

        None if these kernels do not compute all of them, for example because some have no adapter in any slot.
        """
        members = self._members.get(target.path)
        if members is None or self._tiles is None or not self._covers(target, x):
            return None
        merged = whole_of([member.module for member in members])
        if merged is None:
            return None
        own = merged.whole(x)
        a, b = self._pairs(members)
        if any(array.dtype != x.dtype for array in (*a, *b, own)):
            return None
        return self.kernels.add_joined(x, self._tiles, a, b, own)

    def _covers(self, target: Target, x: mx.array) -> bool:
        """Return whether x has as many tokens as the tiles of this trace cover."""
        return x.size == self._tokens * target.shape.inputs

    def _pairs(self, members: Group) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """Return the stacked A of these linears, and their stacked B."""
        a, b = zip(*(self._stacked[member.path] for member in members), strict=True)
        return a, b


def _own(modules: list[Any], x: mx.array) -> tuple[list[mx.array], tuple[int, ...] | None]:
    """Return the linears' own outputs: an array each and None, or one array that holds all and their places in it."""
    merged = home_of(modules)
    if merged is not None and merged.joins(x) and _aligned(places := merged.places(modules)):
        return [merged.whole(x)], tuple(places)
    return [module.plain(x) for module in modules], None


def _aligned(places: Iterable[int]) -> bool:
    return all(place % 8 == 0 for place in places)


def forms_of(members: Group, count: int) -> set[Form]:
    """Return the forms in which the kernels may compute so many of these linears, the first members of a group."""
    modules = [member.module for member in members]
    merged = home_of(modules)
    if merged is None:
        return {"apart"}
    found: set[Form] = {"joined"}
    if not (merged.always_joins and _aligned(merged.places(modules))):
        found.add("apart")
    return found if whole_of(modules[:count]) is None else {*found, "whole"}
