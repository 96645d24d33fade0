"""Two ranks that compute one model by MLX's ring say what mlx-lm says of the whole model.

In float32, beside mlx-lm's own forward of one sequence at a time: batched, chunked, preempted, forked, with adapters in
one batch with the base, from a prefix that was there, and with drafts and masks. Near-ties are recorded.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mlx_tandem.engine.ranks.local import environment, hostfile_text, unused_ports
from tests.parallel.program import CASES

SECONDS = 120.0


def test_two_ranks_say_what_mlx_lm_says(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """All cases in one pair of processes, since MLX's start takes longer than a case."""
    ports = unused_ports(2)
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(hostfile_text(ports))
    pairs = {name: socket.socketpair() for name in CASES}
    ranks = []
    for rank in range(2):
        ends = {name: pair[rank].fileno() for name, pair in pairs.items()}
        own = environment("ring", rank, 2, ports, str(hostfile)) | {"OPENBLAS_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "tests.parallel.program", str(rank), str(tmp_path)]
        words += [f"{name}:{fd}" for name, fd in ends.items()]
        ranks.append(
            subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if rank else subprocess.PIPE,
                text=True,
                pass_fds=tuple(ends.values()),
                env=os.environ | own,
            )
        )
    for pair in pairs.values():
        for end in pair:
            end.close()
    try:
        said, problems = ranks[0].communicate(timeout=SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
    told = ranks[1].communicate()[0]
    results = [json.loads(line) for line in said.splitlines()]
    assert [result["case"] for result in results] == list(CASES), f"{problems}\nrank 1: {told}"
    for result in results:
        record_property(result["case"], result)
