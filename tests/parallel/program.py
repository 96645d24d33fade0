"""One of two ranks that serve one model after the other: `python -m tests.parallel.program RANK FOLDER CASE:FD …`.

Rank 0 checks each case and prints a line of JSON with what came of it; rank 1 is led. Both are processes of their own,
since MLX connects a process with a group once, and since a rank without the other one waits for ever.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tandem.adapters import formats
from mlx_tandem.config import ParallelConfig
from mlx_tandem.engine.kv_offload import reads
from mlx_tandem.engine.ranks import messages as g
from mlx_tandem.engine.ranks.channel import RankChannel
from mlx_tandem.engine.ranks.leader import LedRank, RankLeader
from mlx_tandem.engine.ranks.local import KEY
from mlx_tandem.rank_main import serve
from mlx_tandem.types import AdapterRef, Request
from tests import tiny_models
from tests.engine.agreement import Oracles, cached, check_all_at_once, pairs
from tests.engine.mlx_engine import Engine, assert_agrees, make_engine
from tests.engine.test_masks import Turns as Masks
from tests.engine.test_recurrent import drive
from tests.engine.test_verify import PROMPTS, Oracle, assert_same, few

RANKS = ParallelConfig(ranks=2, mode="ring")


class Case(NamedTuple):
    """A model that is served by two ranks."""

    family: str
    model: Mapping[str, Any] = MappingProxyType({})
    compiles: bool = False
    drafts: bool = False  # verify drafts, also beside rows that draw by masks
    drive: bool = False  # find prefixes on the drive after a restart


CASES = {
    "llama": Case("llama", compiles=True, drafts=True, drive=True),
    "qwen2": Case("qwen2", {"attention_bias": True}),  # biases
    "qwen3": Case("qwen3", {"tie_word_embeddings": False}),
    "qwen3_moe": Case("qwen3_moe"),
    "gpt_oss": Case("gpt_oss"),  # windows, sinks, and biases of experts
    "qwen3_5": Case("qwen3_5", {"tie_word_embeddings": False}, drive=True),  # a hybrid, whose head is divided
    "packed": Case("llama", {"bits": 4, "intermediate_size": 128}),
}


def lead(case: Case, folder: Path, sock: socket.socket) -> list[str]:
    """Check a case; return the near-ties."""
    channel: RankChannel[g.Answer] = RankChannel(sock, KEY, g.Answer)
    leader = RankLeader([LedRank(1, channel)], silence_seconds=30.0)
    ties: list[str] = []
    make = partial(make_engine, parallel=RANKS, leader=leader)
    record = partial(_extend, ties)
    engine, oracles, adapter = check_all_at_once(folder, case.family, record, make, **case.model)
    if case.drafts:
        check_drafts(engine, adapter, folder)
    if case.drive:
        check_drive(engine, oracles, adapter, folder)
    leader.check()
    leader.close()
    return ties


def _extend(ties: list[str], name: str, found: Any) -> None:
    ties.extend(found)


def check_drive(engine: Engine, oracles: Oracles, adapter: str, folder: Path) -> None:
    """What one engine has saved the next one finds, both ranks' parts of it, for the base and an adapter."""
    asked = pairs(adapter)
    with drive(folder / "kv") as first:
        assert cached(engine.loop(chunks=20, drive=first), *asked, drive=first) == [0, 32, 0, 32]
    engine.built.runner.reset()
    with drive(folder / "kv") as second:
        loop = engine.loop(chunks=20, drive=second)
        assert cached(loop, asked[0], asked[2], drive=second) == [32, 32]
        assert loop.scheduler.offload is not None and loop.scheduler.offload.reads.hit_tokens == 2 * 32
        assert_agrees(loop, oracles, "from the drive")


def check_drafts(engine: Engine, adapter: str, folder: Path) -> None:
    """Rows with drafts, rows of two adapters, of which one is loaded now, and rows that draw by masks share steps."""
    tiny_models.make_adapter(folder / "b", engine.built.linears, "peft", rank=6, seed=2)
    other = formats.read(folder / "b", engine.built.linears, max_rank=16, base_layers=engine.built.layers)
    engine.weights[other.info.digest] = other
    refs = [None, AdapterRef("a", 1, adapter), AdapterRef("b", 1, other.info.digest)]
    asked = [Request(i, PROMPTS[1 + i % 2], few("greedy"), refs[i % 3]) for i in range(6)]
    said = []
    for masks in (None, Masks()):
        loops: list[Any] = []
        for drafts in (False, True):
            loop = engine.loop()
            loop.scheduler.drafting.proposer = Oracle(loops[0], 4) if drafts else None
            loop.scheduler.mask_maker = masks
            for request in asked:
                loop.add(request)
            loop.run()
            loop.assert_idle()
            loops.append(loop)
        assert_same(loops[1], loops[0])
        assert loops[1].accepted > 0
        said.append({tuple(tokens) for tokens in loops[0].tokens.values()})
    assert len(said[0]) > 4 and said[0] != said[1]


def main(rank: int, folder: Path, cases: dict[str, int]) -> None:
    """Serve the cases, each over the connection that comes with it."""
    reads.WORTH_READING = 1
    for name, fd in cases.items():
        case, sock = CASES[name], socket.socket(fileno=fd)
        (mx.enable_compile if case.compiles else mx.disable_compile)()
        began = time.monotonic()
        if rank:
            serve(RankChannel(sock, KEY, g.Order), rank, end=lambda status: None)
            continue
        ties = lead(case, folder / name, sock)
        print(json.dumps({"case": name, "ties": ties, "seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    words = [word.split(":") for word in sys.argv[3:]]
    main(int(sys.argv[1]), Path(sys.argv[2]), {name: int(fd) for name, fd in words})
