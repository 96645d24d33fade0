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
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from mlx_tandem.model import backend, device
from mlx_tandem.model.vision.embeddings import Embeddings

pytestmark = pytest.mark.skipif(
    backend.current().name != "cpu" or device.OPENBLAS is None or (os.cpu_count() or 1) < 2,
    reason="the number of BLAS threads never changes here",
)

UPDATES = """
import ctypes, hashlib, json, sys
from pathlib import Path
from threading import Event, Thread
from mlx_tandem.api import Engine
from mlx_tandem.engine.learning import Datum
from mlx_tandem.model import device

threads = ctypes.CDLL(device.OPENBLAS).openblas_get_num_threads
data = [Datum(tuple(range(300 + i, 340 + i)), 12, (1.0,) * 28) for i in range(4)]
prompt = list(range(300, 500))

def updated(folder):
    trainer = engine.trainer("learner", rank=4, seed=3)
    trainer.forward_backward(data, "cross_entropy")
    trainer.step(1e-3)
    trainer.save(folder)
    trainer.close()
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()

def serve():
    while not done.is_set():
        engine.generate(prompt[served[0] % 100 :], max_tokens=3, ignore_eos=True)
        served[0] += 1

done, served = Event(), [0]
found = []
with Engine(max_model_len=256, num_blocks=64, max_num_seqs=4) as engine:
    for asked, answer in ((prompt, 1), ([300, 301], 4)):
        engine.generate(asked, max_tokens=answer, ignore_eos=True)
        found.append((threads(), updated(Path(sys.argv[1]) / str(answer))))
    serving = Thread(target=serve)
    serving.start()
    found.append((0, updated(Path(sys.argv[1]) / "beside")))
    done.set()
    serving.join()
print(json.dumps([*found, served[0]]))
"""
"""Prints the digest of an update's weights after a prompt and after tokens that were drawn one by one, each with the
number of BLAS threads before the update, then the digest of one beside requests, and how many requests there were.
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


def test_an_updates_bits_do_not_depend_on_the_traffic(tmp_path: Path) -> None:
    (prompt, after_a_prompt), (decoded, after_decoding), (_, beside), requests = printed(UPDATES, str(tmp_path))
    assert prompt != decoded, "the traffic has not set two numbers of threads"
    assert requests > 1
    assert after_a_prompt == after_decoding == beside


def test_images_are_encoded_with_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the step before had: the bits of an answer about an image depend on it."""
    chosen = [1]
    blas = SimpleNamespace(openblas_get_num_threads=lambda: chosen[-1], openblas_set_num_threads=chosen.append)
    monkeypatch.setattr(device, "_blas", blas)
    monkeypatch.setattr(device, "_CORES", 4)
    monkeypatch.setattr(device, "_every_core_always", False)
    embeddings: Any = Embeddings(cast(Any, lambda arrays, tokens: mx.zeros((len(arrays), tokens))))
    embeddings.encode(SimpleNamespace(digest=b"a", arrays=[1], tokens=2))
    assert chosen == [1, 4]


def test_work_in_flight_keeps_its_number_of_threads() -> None:
    alone, followed = printed(IN_FLIGHT)
    assert alone == followed
