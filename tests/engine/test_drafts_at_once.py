"""Steps that draw several tokens a row, and steps that verify them, whose keys are gathered once for each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import mlx.core as mx
import pytest

from mlx_tandem.engine.plan import NOT_A_NUMBER, Row, RowKind, Seating, StepPlan
from mlx_tandem.engine.proposers import Asked
from mlx_tandem.engine.proposers.draft_model import DraftModel
from mlx_tandem.kv.groups import open_groups
from mlx_tandem.model.warm_up import GREEDY
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_families, tiny_models
from tests.engine.guessing import RowByRow
from tests.engine.harness import Loop
from tests.engine.mlx_engine import Engine, make_engine
from tests.engine.test_verify import PARAMS, assert_same, serve

FAMILIES = (*tiny_families.DISTINCT, "gemma3n")
"""The last one has layers that read the keys and values of others."""

LENGTHS = (30, 3, 17, 9)
"""Of the prompts. A window of these families is shorter than the first."""


@pytest.fixture(autouse=True)
def _compile_some(request: pytest.FixtureRequest) -> Iterator[None]:
    family = request.node.callspec.params.get("family") if hasattr(request.node, "callspec") else None
    if family not in (None, "llama"):
        mx.disable_compile()
    yield
    mx.enable_compile()


def prompts() -> list[tuple[int, ...]]:
    rng = Random(7)
    return [tuple(rng.randrange(3, tiny_models.VOCAB) for _ in range(n)) for n in LENGTHS]


def make(tmp_path: Path, family: str, kv_bits: Literal[4, 8, 16] = 16, **changes: Any) -> Engine:
    folder = tiny_models.make(tmp_path / "model", family, seed=1, **changes)
    return make_engine(folder, num_blocks=60, max_num_seqs=8, max_loras=0, kv_bits=kv_bits, kv_group_size=16)


def rounds(engine: Engine, params: Sequence[SamplingParams], number: int) -> list[dict[Any, tuple[int, ...]]]:
    """The drafts of a few rounds, in which the sequences accept some of them and go on in their own way."""
    info, rng = engine.built.info, Random(3)
    groups = open_groups(info.memory, info.block_size)
    model = DraftModel(engine.built.runner, groups, seats=8, vocab_size=info.vocab_size, longest=1000)
    asked = [
        Asked(Request(i, prompt, own), 0, list(prompt), 0, number)
        for i, (prompt, own) in enumerate(zip(prompts(), params, strict=True))
    ]
    found = []
    for _ in range(4):
        found.append(model.draft(asked))
        for a in asked:
            assert isinstance(a.tokens, list)
            own = found[-1][a.request.id, 0]
            assert len(own) == number
            a.tokens.extend([*own[: rng.randint(0, number)], *(rng.randrange(3, info.vocab_size) for _ in range(2))])
    return found


def check(engine: Engine, params: Sequence[SamplingParams], patch: pytest.MonkeyPatch, number: int = 5) -> None:
    """The drafts of one step are those of as many steps."""
    assert engine.built.runner.drafting_positions > 0
    at_once = rounds(engine, params, number)
    for positions in (0, 2 * len(LENGTHS) * (LENGTHS[0] + 8)):  # steps for all rounds, and from some round on
        patch.setattr(engine.built.runner, "drafting_positions", positions)
        assert rounds(engine, params, number) == at_once
    assert len({token for found in at_once for own in found.values() for token in own}) > 20, "little is shown"


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_one_step_are_those_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    hot = SamplingParams(max_tokens=99, temperature=1.0, seed=5)
    check(make(tmp_path, family), [SamplingParams(max_tokens=99, temperature=0.0), hot, hot, hot], monkeypatch)


@pytest.mark.parametrize("kv_bits", [4, 16])
def test_drafts_of_one_step_are_drawn_by_all_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_bits: Literal[4, 16]
) -> None:
    """Penalties count the drafts before a draft, and no others; a window of penalties and a pool in few bits, too."""
    params = [
        SamplingParams(max_tokens=99, seed=11, **{**PARAMS[name], "logprobs": None})
        for name in ("penalties", "a window of penalties", "hot", "nothing ends it before")
    ]
    check(make(tmp_path, "llama", kv_bits), params, monkeypatch)


@pytest.mark.parametrize("worth", [0, 1 << 20])
def test_a_window_of_fewer_tokens_than_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worth: int) -> None:
    """However attention is computed, it leaves out drafts that are before the window, too."""
    monkeypatch.setattr("mlx_tandem.model.backend.cpu_functions.WORTH", worth)
    engine = make(tmp_path, "llama", **{**tiny_families.WINDOW, "sliding_window": 3})
    check(engine, [SamplingParams(max_tokens=99, temperature=1.0, seed=5)] * len(LENGTHS), monkeypatch)


@pytest.mark.parametrize("positions", [60, 300])
def test_long_contexts_are_not_copied_for_each_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: int
) -> None:
    """Attention in two parts, which many positions have, and over joined keys give the same drafts."""
    engine, rng = make(tmp_path, "llama"), Random(4)
    prompt = tuple(rng.randrange(3, tiny_models.VOCAB) for _ in range(positions))
    runner = engine.built.runner
    tables = (tuple(range(1, 2 + positions // 8)),)

    def drafts(worth: int) -> list[tuple[int, ...]]:
        monkeypatch.setattr("mlx_tandem.model.backend.cpu_functions.WORTH", worth)
        runner.compiled.clear()
        read = Row(RowKind.PROMPT, 0, 0, 0, 0, prompt[:-1], tables, False)
        runner.wait(runner.launch(StepPlan((read,), seatings=(Seating(0, GREEDY, 0, positions, prompt),))))
        row = Row(RowKind.PROMPT, 0, 0, 0, positions - 1, prompt[-1:], tables, True)
        return runner.wait(runner.launch(StepPlan((row,), drafts=6))).tokens

    assert drafts(0) == drafts(1 << 20)


def test_a_row_that_is_not_finite_drafts_nothing_and_spoils_no_other(tmp_path: Path) -> None:
    engine = make(tmp_path, "llama")
    runner = engine.built.runner
    seatings = tuple(Seating(seat, GREEDY, 0, 1, (5,)) for seat in (0, 1))
    rows = tuple(Row(RowKind.PROMPT, seat, seat, 0, 0, (5, 6), ((1 + seat,),), True) for seat in (0, 1))
    before = runner.wait(runner.launch(StepPlan(rows, seatings=seatings, drafts=4))).tokens
    assert before[0] == before[1] and len(before[0]) == 4
    loads = tuple((1, bytes([255]) * engine.built.info.memory.pools[0].block_bytes) for _ in range(1))
    rows = (rows[0], Row(RowKind.PROMPT, 0, 0, 0, 2, (7,), ((1,),), True))
    other = Row(RowKind.PROMPT, 1, 1, 0, 0, (5, 6), ((2,),), True)
    drawn = runner.wait(runner.launch(StepPlan((rows[1], other), loads=loads, drafts=4))).tokens
    assert drawn == [(NOT_A_NUMBER,) * 4, before[1]]


class Even(RowByRow):
    """A proposer that knows what each choice will say; of the drafts of each row, as many for all, some are wrong."""

    def __init__(self, said: Loop, number: int):
        self._said, self._rng, self._number = said.tokens, Random(5), number

    def needs_newest(self, request: Request, choice: int) -> bool:
        return self._rng.random() < 0.2

    def propose(self, request: Request, choice: int, tokens: Sequence[int], unread: int, most: int) -> Sequence[int]:
        begun = len(tokens) - len(request.prompt) + unread
        right = self._said[request.id, choice][begun : begun + self._number - self._rng.randrange(2)]
        return [t if self._rng.random() < 0.8 else (t + 1) % tiny_models.VOCAB for t in right]


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_are_gathered_once_for_several_rows_change_nothing(tmp_path: Path, family: str) -> None:
    engine = make(tmp_path, family)
    params = SamplingParams(max_tokens=14, temperature=1.0, seed=11, logprobs=3)
    asked = [Request(i, prompt, params) for i, prompt in enumerate(prompts())]
    free = serve(engine, asked)
    shared: list[int] = []
    original = engine.built.runner._builder._rows_of_each

    def rows_of_each(rows: Sequence[Row]) -> int:
        shared.append(original(rows))
        return shared[-1]

    engine.built.runner._builder._rows_of_each = rows_of_each  # type: ignore[method-assign]
    loop = serve(engine, asked, Even(free, 3))
    assert_same(loop, free)
    assert loop.accepted > 0 and loop.floated > 0
    assert sum(each > 1 for each in shared) > 3, "rows of one sequence rarely share its keys"


def test_few_drafts_of_many_sequences_are_not_padded_to_the_most_of_one(tmp_path: Path) -> None:
    builder = make(tmp_path, "llama").built.runner._builder

    def each(*tokens: int) -> int:
        rows = [Row(RowKind.VERIFY, i, i, 0, 5, (1,) * n, ((1, 2),), True) for i, n in enumerate(tokens)]
        return builder._rows_of_each(rows)

    assert (each(4, 4, 4, 4), each(4, 4, 4, 2), each(8), each(6, 3, 6, 6)) == (4, 4, 8, 6)
    assert (each(8, 1, 1, 1), each(4, 1, 1)) == (1, 1)
    rectangles = builder._rectangles
    rectangles.fused_length, rectangles._row_counts = 4, (1, 2, 4, 6, 8, 16, 24, 32, 48)  # where kernels read the pool
    assert each(5, 5, 5, 5) == 1
    rectangles.groups = True
    assert (each(5), each(4, 4, 4, 4), each(6), each(8), each(5, 5, 5, 5, 5, 5, 5, 5)) == (5, 1, 8, 8, 5)
    assert (each(4, 1, 1), each(6, 1, 1, 1)) == (1, 1)
