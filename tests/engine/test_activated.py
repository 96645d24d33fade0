"""Activated LoRA through the real runner: an adapter applies from where a prompt invokes it, the base before that.

What is right is said by mlx-lm: the base reads a prompt up to the invocation, and the model with the adapter's weights
merged goes on over the same cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mlx_tandem.adapters import formats
from mlx_tandem.config import SpeculationConfig
from mlx_tandem.engine.plan import Row, RowKind
from mlx_tandem.engine.proposers.speculation import Speculation
from mlx_tandem.engine.sequence import NEVER, adapter_start_of
from mlx_tandem.types import AdapterRef, Request
from tests import tiny_families, tiny_models
from tests.engine.agreement import PROMPTS, Oracles, ask, cached
from tests.engine.mlx_engine import Engine, Oracle, assert_agrees, make_engine
from tests.engine.toy_model import begins_in

CALLS = {"one": (5, 6, 7), "other": (9,)}
BEFORE = tuple(t for t in PROMPTS[1] if t > 9)
"""Blocks have 8 tokens: the fourth is the first that an adapter can change."""
LONG = (*BEFORE[:27], *CALLS["one"], *CALLS["other"], *BEFORE[:9])
TWICE = (*CALLS["other"], *CALLS["one"], *BEFORE[:13], *CALLS["one"], *BEFORE[13:16], *CALLS["other"])
"""Each is invoked twice; of the first time nothing is to be seen."""
UNCALLED = BEFORE[:19]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Tracing would take longer than the steps."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@dataclass
class Activated(Oracle):
    """mlx-lm's model with an adapter merged, behind the base model, which reads what comes before the invocation."""

    base: Any = None
    ref: AdapterRef | None = None

    def _rows(self, text: tuple[int, ...], at: int) -> np.ndarray[Any, Any]:
        """[tokens, vocabulary], each row of the token after it: by the base up to position `at`, then by the other."""
        cache, parts = self.cache(), []
        for model, part in ((self.base, text[:at]), (self.model, text[at:])):
            if part:
                logits = model(mx.array([part]), cache=cache)[0].astype(mx.float32)
                parts.append(np.array(logits - mx.logsumexp(logits, -1, keepdims=True)))
        return np.concatenate(parts)

    def prompt_logprobs(self, prompt: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return self._rows(prompt, begins_in(prompt, self.ref))

    def logprobs(self, prompt: tuple[int, ...], said: Sequence[int]) -> np.ndarray[Any, Any]:
        return self._rows((*prompt, *said[:-1]), begins_in(prompt, self.ref))[len(prompt) - 1 :]


def serve(folder: Path, family: str) -> tuple[Engine, Oracles, dict[str, AdapterRef]]:
    """Return an engine with two adapters of CALLS, the models that say what is right, and the adapters' references."""
    model = tiny_models.make(folder / "model", family)
    engine = make_engine(model, num_blocks=96)
    base = Oracle.load(model)
    oracles: Oracles = {None: base}
    refs = {}
    for seed, (name, call) in enumerate(CALLS.items()):
        deltas = tiny_models.make_adapter(folder / name, engine.built.linears, "peft", rank=4, seed=seed)
        config = folder / name / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": call}))
        weights = formats.read(folder / name, engine.built.linears, max_rank=16, base_layers=engine.built.layers)
        digest = weights.info.digest
        engine.weights[digest] = weights
        refs[name] = AdapterRef(name, 1, digest, weights.info.invocation)
        merged = tiny_models.merge(Oracle.load(model).model, deltas)
        oracles[digest] = Activated(merged, base=base.model, ref=refs[name])
    return engine, oracles, refs


def under(request: Request, ref: AdapterRef | None) -> Request:
    return structs.replace(request, adapter=ref)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3", "qwen3_5", "falcon_h1"])
def test_adapters_apply_from_where_they_are_invoked(family: str, tmp_path: Path) -> None:
    """Attention, windows, latent keys and states: in one batch with the base, in chunks, preempted and forked; then
    from prefixes that the base or another adapter has computed."""
    engine, oracles, refs = serve(tmp_path, family)
    kinds = (None, refs["one"], refs["other"])
    prompts = (LONG, TWICE, UNCALLED)
    crowd = [
        under(ask(10 * p + k, prompt, max_tokens=12, n=1 + (p + k == 3)), ref)
        for p, prompt in enumerate(prompts)
        for k, ref in enumerate(kinds)
    ]
    loop = engine.run(crowd, blocks=16, chunks=11, stagger=1)
    assert loop.scheduler.queue.preemptions > 0
    assert_agrees(loop, oracles, "all at once")
    answers = [[loop.tokens[10 * p + k, 0] for k in range(3)] for p in range(3)]
    assert all(len({tuple(a) for a in own}) == 3 for own in answers[:2]), "an adapter changes nothing"
    assert answers[2][0] == answers[2][1] == answers[2][2], "the base answers where nothing is invoked"
    for order in ((1, 2, 0), (0, 1, 2)):
        engine.built.runner.reset()
        loop = engine.loop(chunks=11)
        found = cached(loop, *(under(ask(3 * i + 1, LONG), kinds[k]) for i, k in enumerate(order)))
        # The base keeps no snapshot of its state in the middle of a prompt; the first adapter invoked there does.
        first = 0 if order[0] == 0 and family in tiny_families.RECURRENT else 24
        assert [n // 8 * 8 for n in found if n is not None] == [0, first, 24]
        assert_agrees(loop, oracles, f"a prefix of {order[0]}")


def test_drafts_follow_an_invocation(tmp_path: Path) -> None:
    """Answers that repeat themselves have drafts, which are verified under the adapter."""
    engine, oracles, refs = serve(tmp_path, "qwen3_5")
    loop = engine.loop(chunks=11)
    config = SpeculationConfig("ngram", dynamic=False, ngram_min=1)
    loop.scheduler.drafting.proposer = Speculation(config, None)
    prompt = (*LONG, *LONG[-9:])
    for number, ref in enumerate((None, refs["one"], refs["other"]), 1):
        loop.add(under(ask(number + number // 3, prompt, max_tokens=24), ref))
    loop.run()
    assert_agrees(loop, oracles, "drafts")


def test_no_row_has_positions_of_both_sorts(tmp_path: Path) -> None:
    """Every row before the invocation has the base's slot, so that no kernel has to know of it."""
    engine, _, refs = serve(tmp_path, "qwen3")
    rows: list[Row] = []
    launch = engine.built.runner.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.built.runner, "launch", lambda plan: (rows.extend(plan.rows), launch(plan))[1])
        engine.run([under(ask(1, LONG), refs["one"])])
    prompt = [(row.lora_slot > 0, row.start, row.start + len(row.tokens)) for row in rows if row.kind is RowKind.PROMPT]
    assert prompt == [(False, 0, 27), (True, 27, len(LONG))]
    assert all(row.lora_slot for row in rows if row.kind is not RowKind.PROMPT)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.lists(st.integers(1, 3), max_size=40))
def test_the_last_invocation_counts(call: list[int], prompt: list[int]) -> None:
    ref = AdapterRef("a", 1, "digest", tuple(call))
    starts = [at for at in range(len(prompt)) if prompt[at : at + len(call)] == call]
    assert adapter_start_of(ref, tuple(prompt)) == max(starts, default=NEVER)


@pytest.mark.parametrize(
    ("call", "prompt", "start"),
    [
        ((1, 1, 2), (1, 1, 1, 2), 1),
        ((2, 1, 1), (2, 1, 1, 1), 0),
        ((1, 2, 1), (1, 2, 1, 2, 1), 2),  # two of them share a token
        ((1, 2, 1, 2), (3, 1, 2, 1, 2, 1, 2, 3), 3),
        ((1, 2, 1), (1, 2, 1, 2, 2, 1), 0),  # the last one breaks off, and so does what it shares with another
        ((2, 2, 1, 2, 2), (2, 2, 1, 2, 2, 2, 1, 2), 0),
    ],
)
def test_invocations_that_overlap(call: tuple[int, ...], prompt: tuple[int, ...], start: int) -> None:
    assert adapter_start_of(AdapterRef("a", 1, "digest", call), prompt) == start


def test_every_overlap_of_two_tokens() -> None:
    """All invocations of up to six tokens in all prompts of nine, found as a plain search finds them."""
    prompts = ["".join(p) for p in product("ab", repeat=9)]
    for length in range(1, 7):
        for call in map("".join, product("ab", repeat=length)):
            ref = AdapterRef("a", 1, "digest", tuple(map(ord, call)))
            for prompt in prompts:
                found = prompt.rfind(call)
                assert adapter_start_of(ref, tuple(map(ord, prompt))) == (found if found >= 0 else NEVER)
