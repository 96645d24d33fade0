"""BLAS's threads on a CPU: each kind of work has a number of its own, which changes while nothing is computed.

The tests' own process holds the number still where tests run side by side, and reads that when BLAS is loaded. So these
programs run in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.model import device

pytestmark = pytest.mark.skipif(
    device.OPENBLAS is None or (os.cpu_count() or 1) < 2, reason="the number of BLAS threads never changes here"
)

UPDATES = """
import ctypes, hashlib, json, sys
from pathlib import Path
from mlx_tandem.api import Engine
from mlx_tandem.engine.learning import Datum
from mlx_tandem.model import device

threads = ctypes.CDLL(device.OPENBLAS).openblas_get_num_threads
data = [Datum(tuple(range(300 + i, 340 + i)), 12, (1.0,) * 28) for i in range(4)]
found = []
with Engine(max_model_len=256, num_blocks=64, max_num_seqs=4) as engine:
    for prompt, answer in ((list(range(300, 500)), 1), ([300, 301], 4)):
        engine.generate(prompt, max_tokens=answer, ignore_eos=True)
        before = threads()
        trainer = engine.trainer("learner", rank=4, seed=3)
        trainer.forward_backward(data, "cross_entropy")
        trainer.step(1e-3)
        folder = Path(sys.argv[1]) / str(answer)
        trainer.save(folder)
        trainer.close()
        weights = (folder / "adapter_model.safetensors").read_bytes()
        found.append((before, threads(), hashlib.sha256(weights).hexdigest()))
print(json.dumps(found))
"""
"""Prints the number of BLAS threads before and after an update, and the digest of the update's weights: after a prompt,
and after tokens that were drawn one by one.
"""

IN_FLIGHT = """
import hashlib, json
from mlx_tandem.model import device  # before MLX: it loads OpenBLAS
import mlx.core as mx
import numpy as np

def products(change):
    device.blas_threads(every_core=True)
    first, x, w = (mx.random.normal(shape, key=mx.random.key(1)) for shape in ((1500, 1500), (96, 300), (300, 300)))
    mx.eval(first, x, w)
    x = (x + (first @ first)[:96, :300]) @ w
    mx.async_eval(x)
    if change:
        device.blas_threads(every_core=False)
    return hashlib.sha256(np.array(x).tobytes()).hexdigest()

print(json.dumps([products(False), products(True)]))
"""
"""Prints the digest of products that were launched with one number of threads: left alone, and with another number set
behind them.
"""


def printed(program: str, *args: str) -> Any:
    """What a program prints in a process where nobody has chosen the number of threads."""
    given = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_updates_bits_do_not_depend_on_the_traffic_before_it(tmp_path: Path) -> None:
    (prompt, own, after_a_prompt), (decoded, same, after_decoding) = printed(UPDATES, str(tmp_path))
    assert prompt != decoded, "the traffic has not set two numbers of threads"
    assert own == same
    assert after_a_prompt == after_decoding


def test_work_in_flight_keeps_its_number_of_threads() -> None:
    alone, followed = printed(IN_FLIGHT)
    assert alone == followed
