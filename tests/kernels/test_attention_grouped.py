"""The kernel for adjacent rows of one sequence on the CPU, compared with the textbook formula."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.ops.attention.division import Division
from mlx_tandem.model.ops.attention.grouped import GroupedAttention
from tests.kernels import shim
from tests.kernels.test_attention_paged import EVERYTHING, TOLERANCE, plain

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

KINDS = [  # type, numbers of a head, queries' heads for each KV head, rows of a sequence, block size
    (mx.bfloat16, 128, 4, 5, 16),
    (mx.bfloat16, 128, 8, 2, 32),
    (mx.float16, 64, 7, 3, 16),
    (mx.bfloat16, 64, 1, 4, 48),
]


def attended(
    make: shim.Make,
    kind: tuple[mx.Dtype, int, int, int, int],
    *,
    seed: int,
    sequences: int,
    longest: int,
    splits: int,
) -> tuple[float, float]:
    """Return the error of the kernel for random rows, and the largest one that is allowed.

    Each sequence has up to `each` rows, and padding behind them.
    """
    dtype, dim, group, each, block = kind
    rng = np.random.default_rng(seed)
    kv_heads = 2
    form = RowFormat(kv_heads, dim, dtype)
    starts = rng.integers(0, longest, sequences)
    real = rng.integers(1, each + 1, sequences)
    width = -(-int((starts + real).max()) // block) + int(rng.integers(0, 3))
    own = 1 + rng.permutation(sequences * width).reshape(sequences, width).astype(np.int32)
    at, blocks = np.arange(width * block), 1 + sequences * width
    written = np.zeros((blocks, block), bool)  # all of the pool is NaN but the sequences' own keys and values
    offsets, tables = np.zeros((sequences, each), np.int32), np.zeros((sequences, each, width), np.int32)
    for n in range(sequences):
        seen = at < starts[n] + real[n]
        written[own[n, at // block], at % block] = seen
        offsets[n, : real[n]] = starts[n] + np.arange(real[n])
        tables[n, : real[n]] = own[n]
    pool, halves = [], []
    for _ in range(2):
        numbers = rng.standard_normal((kv_heads, blocks, block, dim)).astype(np.float32)
        numbers[:, ~written] = np.nan
        lines = mx.array(numbers.reshape(-1, dim)).astype(dtype)
        pool.append(lines)
        halves.append(np.array(lines.astype(mx.float32)).reshape(numbers.shape))
    # The last sequence may be cut off behind its rows.
    rows, heads = sequences * each - int(rng.integers(0, each - real[-1] + 1)), kv_heads * group
    queries = mx.array(rng.standard_normal((rows, heads, 1, dim)).astype(np.float32)).astype(dtype)
    got = GroupedAttention(make, form, block, Division(396))(
        queries,
        pool,
        mx.array(tables.reshape(-1, width)[:rows]),
        mx.array(offsets.reshape(-1)[:rows]),
        dim**-0.5,
        each=each,
        splits=splits,
    )
    answer = np.array(got.swapaxes(1, 2).astype(mx.float32))
    real_rows = (np.arange(each) < real[:, None]).reshape(-1)[:rows]
    for half in halves:  # `plain` multiplies hidden values by 0, and 0 times NaN is NaN
        np.nan_to_num(half, copy=False)
    expected = plain(
        np.array(queries.astype(mx.float32)),
        halves,
        np.repeat(own, each, 0)[:rows],
        offsets.reshape(-1)[:rows],
        EVERYTHING,
        None,
        0.0,
    )
    error = float(np.linalg.norm((answer - expected)[real_rows]) / np.linalg.norm(expected[real_rows]))
    return error, TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 30),
    sequences=st.integers(1, 3),
    longest=st.sampled_from([1, 20, 60, 300]),
    splits=st.sampled_from([0, 1, 2, 5]),
    order=st.sampled_from(shim.ORDERS),
)
# The border of a split lies between two rows of one sequence.
@example(seed=28, sequences=2, longest=300, splits=3, order="together")
def test_it_is_attention(
    kind: tuple[mx.Dtype, int, int, int, int],
    seed: int,
    sequences: int,
    longest: int,
    splits: int,
    order: shim.Order,
) -> None:
    error, allowed = attended(shim.maker(order), kind, seed=seed, sequences=sequences, longest=longest, splits=splits)
    assert error <= allowed
