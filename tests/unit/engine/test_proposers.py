"""Drafts from a sequence's own tokens: where they come from, how many there are, and when there are none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.config import SpeculationConfig
from mlx_tandem.engine.drafting import Drafting, predicted_of
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan, StepResult
from mlx_tandem.engine.proposers import Asked, ngram
from mlx_tandem.engine.proposers.draft_model import DraftModel
from mlx_tandem.engine.proposers.ngram import NgramIndex
from mlx_tandem.engine.proposers.payoff import FIRST, LONGEST, PROBE, SHORTEST, SKIPPED, Payoff
from mlx_tandem.engine.proposers.speculation import MOST_DRAFTS, SURE, WITHOUT_MODEL, Speculation
from mlx_tandem.types import Request, SamplingParams

PARAMS = SamplingParams(max_tokens=1000)


def brute(tokens: list[int], shortest: int, longest: int) -> tuple[int, int]:
    """The place after the longest earlier match of the end among the latest places, the latest of equals."""
    places = [p for p in range(shortest, len(tokens)) if tokens[p - shortest : p] == tokens[-shortest:]]
    best, length = -1, 0
    for place in places[::-1][: ngram.CANDIDATES]:
        agrees = next(
            n for n in range(longest, 0, -1) if n <= place and tokens[place - n : place] == tokens[len(tokens) - n :]
        )
        if agrees > length:
            best, length = place, agrees
    return best, length


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 4), st.data())
def test_the_longest_match_is_found_however_the_tokens_came(
    tokens: list[int], shortest: int, more: int, data: st.DataObject
) -> None:
    index, longest = NgramIndex(shortest, shortest + more), shortest + more
    for end in sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=6)) | {len(tokens)}):
        known = tokens[:end]
        index.extend(known)
        want = brute(known, shortest, longest) if end >= shortest else (-1, 0)
        assert index.find(known, known) == want


def test_a_long_prompt_is_indexed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INDEXED_AT_ONCE", 10)
    tokens = [*range(100), 98, 99]
    index = NgramIndex(2, 4)
    found = []
    for _ in range(12):
        index.extend(tokens)
        found.append(index.find(tokens, [7, 8])[0])
    assert found[0] == 9 and index.find(tokens, tokens) == (100, 2)


def test_one_call_indexes_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INDEXED_AT_ONCE", 10)
    tokens = list(range(100))
    index = NgramIndex(2, 4)
    found = []
    for _ in range(3):
        index.extend(tokens)
        found.append([n for n in range(2, 50) if index.find(tokens, tokens[n - 2 : n])[0] == n])
    assert found == [list(range(2, 12)), list(range(2, 22)), list(range(2, 32))]


def test_tokens_before_the_first_are_not_looked_at() -> None:
    tokens = [1, 2, 3, 9, 9, 1, 2]
    index = NgramIndex(2, 4, first=3)
    index.extend(tokens)
    assert index.find(tokens, tokens) == (-1, 0)
    tokens += [3, 1, 2]
    index.extend(tokens)
    assert index.find(tokens, tokens) == (7, 2)


def test_what_lies_behind_the_end_repeats() -> None:
    assert NgramIndex.copy([7, 1, 2, 3], 1, 0, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert NgramIndex.copy([7, 1, 2, 3], 1, 4, 3) == [2, 3, 1]


def speculation(**options: object) -> Speculation:
    config = SpeculationConfig(**{"method": "ngram", **options})  # type: ignore[arg-type]
    return Speculation(config, clock=lambda: 0.0)


def settle(proposer: Speculation, request: Request, drafts: int, accepted: int) -> None:
    """A row with the drafts that were proposed last."""
    proposer.settle(request, 0, drafts, accepted, proposer.source(request, 0))


def test_a_copy_gets_more_drafts_until_one_is_rejected() -> None:
    request, proposer = Request(0, (1, 2, 3, 4, 5, 6, 7, 8, 9) * 2, PARAMS), speculation()
    tokens = list(request.prompt)
    numbers = []
    for _ in range(5):
        drafts = proposer.propose(request, 0, tokens, 0, 100)
        numbers.append(len(drafts))
        settle(proposer, request, len(drafts), len(drafts))
    assert numbers == [3, 7, 15, 31, MOST_DRAFTS]
    settle(proposer, request, 63, 2)
    assert len(proposer.propose(request, 0, tokens, 0, 100)) == 3
    assert list(proposer.propose(request, 0, tokens, 0, 2)) == [1]
    counts = proposer.counts.all
    assert (counts.rows, counts.drafted, counts.accepted) == (6, 182, 121)
    assert proposer.counts.by_position == [6] * 2 + [5] + [4] * 4 + [3] * 8 + [2] * 16 + [1] * 32


def test_drafts_behind_drafts_go_on_only_while_all_are_accepted() -> None:
    request, proposer = Request(0, (1, 2, 3, 4, 5, 6, 7, 8, 9) * 2, PARAMS), speculation()
    assert list(proposer.propose(request, 0, request.prompt, 1, 100)) == [2, 3, 4]  # a decode is on the device
    assert not proposer.propose(request, 0, request.prompt, 4, 100)
    settle(proposer, request, 3, 3)
    assert list(proposer.propose(request, 0, request.prompt, 4, 100)) == [5, 6, 7, 8, 9, 1, 2]


def test_whoever_misses_pauses_for_longer_each_time() -> None:
    request, proposer = Request(0, (1, 2, 3, 4) * 4, PARAMS), speculation()
    tokens, pauses = list(request.prompt), []
    for _ in range(8):
        pause = 0
        while not proposer.propose(request, 0, tokens, 0, 100):
            tokens += [1 + len(tokens) % 4]
            pause += 1
        pauses.append(pause)
        settle(proposer, request, 1, 0)
    assert pauses == [0, 2, 4, 8, 16, 32, 64, 64]


def test_a_fixed_number_of_drafts_stays() -> None:
    request, proposer = Request(0, (1, 2, 3, 4) * 4, PARAMS), speculation(dynamic=False, num_tokens=5)
    for accepted in (5, 0, 0, 3):
        assert len(proposer.propose(request, 0, request.prompt, 0, 100)) == 5
        settle(proposer, request, 5, accepted)
    assert proposer.is_on(1000)


PREDICTED = tuple(range(20, 60))


def answered(request: Request, said: Sequence[int], *, proposer: Speculation, most: int = 100) -> tuple[int, int]:
    """Steps until a sequence has said `said`, and drafts that were rejected."""
    tokens, end, steps, rejected = list(request.prompt), len(request.prompt) + len(said), 0, 0
    whole = [*request.prompt, *said]
    while len(tokens) < end:
        drafts = proposer.propose(request, 0, tokens, 0, min(most, end - len(tokens) - 1))
        right = next((n for n, d in enumerate(drafts) if d != whole[len(tokens) + n]), len(drafts))
        if drafts:
            settle(proposer, request, len(drafts), right)
        tokens, steps, rejected = whole[: len(tokens) + right + 1], steps + 1, rejected + len(drafts) - right
    return steps, rejected


def test_a_prediction_is_copied_from_the_first_token_on() -> None:
    request, proposer = Request(0, (1, 2, 3), PARAMS, prediction=PREDICTED), speculation(method="none")
    assert list(proposer.propose(request, 0, request.prompt, 0, 3)) == [20, 21, 22]
    assert proposer.source(request, 0) == "prediction"
    assert list(proposer.propose(request, 0, [1, 2, 3, *PREDICTED[:38]], 0, 9)) == [58, 59]
    assert not proposer.propose(request, 0, [1, 2, 3, *PREDICTED], 0, 9)


@pytest.mark.parametrize(
    "said",
    [
        PREDICTED,
        (*PREDICTED[:9], 7, *PREDICTED[10:]),  # another token
        (*PREDICTED[:9], 7, 8, 9, *PREDICTED[9:]),  # more tokens
        PREDICTED[:9] + PREDICTED[17:],  # fewer
        (7, 8, 9, *PREDICTED),  # something before
    ],
)
def test_where_the_answer_differs_it_is_found_again(said: tuple[int, ...]) -> None:
    request = Request(0, (1, 2, 3), PARAMS, prediction=PREDICTED)
    steps, rejected = answered(request, said, proposer=speculation(method="none"))
    assert steps <= 14 and rejected <= 24 < len(said)


def test_a_text_that_repeats_itself_is_followed_where_it_is() -> None:
    """The newest tokens stand in more places than are compared, and the answer is at the first of them."""
    lines = tuple(token for n in range(20) for token in (5, 5, 5, 5, 5, 5, 5, 5, 5, 30 + n))
    request = Request(0, (1, 2, 3), PARAMS, prediction=lines)
    assert answered(request, lines, proposer=speculation(method="none")) == (8, 0)


def test_what_repeats_itself_is_followed_where_it_is_after_a_token_more() -> None:
    """Once the answer has been found again, its next tokens are expected there, and not where they stand later."""
    line = (5, 5, 5, 5, 5, 5, 5, 5, 5)
    said = (20, 21, 22, *line, 30, 31, 32, *line, 40, 41, 42, *line, 50, 51, 52)
    request = Request(0, (1, 2, 3), PARAMS, prediction=said)
    proposer = speculation(method="none")
    tokens = [*request.prompt, 9, *said[:3]]
    assert list(proposer.propose(request, 0, tokens, 0, 3)) == list(said[3:6])
    tokens += said[3:12]
    assert list(proposer.propose(request, 0, tokens, 0, 3)) == [30, 31, 32]


def test_without_look_up_nothing_is_copied_from_the_prompt() -> None:
    request, proposer = Request(0, (1, 2, 3, 4) * 4, PARAMS), speculation(prompt_lookup=False)
    assert not proposer.propose(request, 0, request.prompt, 0, 9)
    assert not proposer.propose(request, 0, [*request.prompt, 1, 2], 0, 9)
    assert list(proposer.propose(request, 0, [*request.prompt, 1, 2, 3, 1, 2], 0, 1)) == [3]


def test_a_sequence_waits_for_its_newest_token_while_its_drafts_are_accepted_on_average() -> None:
    request, proposer = Request(0, (1, 2, 3, 4) * 4, PARAMS), speculation()
    proposer.propose(request, 0, request.prompt, 0, 3)
    for _ in range(20):
        settle(proposer, request, 3, 3)
    assert not proposer.needs_newest(request, 0), "all were accepted, so drafts follow the drafts"
    waits = []
    for _ in range(5):
        settle(proposer, request, 3, 0)
        waits.append(proposer.needs_newest(request, 0))
    assert waits == [True, True, True, False, False], "3 · 0.7³ > 1 > 3 · 0.7⁴"


class Small:
    """A draft model that makes as many drafts as it is asked for, or none, and notes what it is asked."""

    def __init__(self) -> None:
        self.first_use, self.has_drafts = False, True
        self.most: list[int] = []

    def draft(self, asked: Sequence[Asked]) -> dict[tuple[int, int], tuple[int, ...]]:
        self.most += [a.most for a in asked]
        return {(a.request.id, a.choice): (7,) * a.most for a in asked if a.most} if self.has_drafts else {}

    def forget(self, key: tuple[int, int]) -> None:
        self.most.clear()


def with_model(num_tokens: int = 5) -> tuple[Speculation, Small]:
    model = Small()
    config = SpeculationConfig(method="draft", num_tokens=num_tokens)
    return Speculation(config, cast(DraftModel, model), clock=lambda: 0.0), model


def asked_for(rounds: Sequence[int], num_tokens: int = 5) -> list[int]:
    """Return how many drafts the model is asked for in each round, of which `rounds` has the accepted ones."""
    request, (proposer, model) = Request(0, (1, 2, 3), PARAMS), with_model(num_tokens)
    tokens = list(request.prompt)
    for accepted in rounds:
        proposer.prepare([Asked(request, 0, tokens, 0, 100)])
        drafts = proposer.propose(request, 0, tokens, 0, 100)
        assert list(drafts) == [7] * model.most[-1]
        settle(proposer, request, len(drafts), accepted)
        tokens += range(len(tokens), len(tokens) + 40)  # nothing that was said comes again
    for room, most in ((num_tokens - 1, num_tokens // 2), (1, 1), (0, 0)):
        proposer.prepare([Asked(request, 0, tokens, 0, room)])
        assert model.most[-1] == most, "few numbers, each of which is traced"
    return model.most[: len(rounds)]


def test_a_draft_model_is_asked_for_fewer_while_it_is_wrong_for_long() -> None:
    most = asked_for((5, 1, 1, 1, 1, 2, 5, 4, 1, 2, 5))
    assert most == [5, 5, 5, 2, 2, 2, 5, 5, 2, 2, 5], "the second time, one wrong row is enough"


def test_a_draft_model_with_single_wrong_drafts_is_asked_for_as_many_as_before() -> None:
    assert asked_for((5, 3, 5, 4, 5, 2, 5, 4, 5)) == [5] * 9


def test_a_new_sequence_is_trusted_after_its_first_wrong_draft_only() -> None:
    assert asked_for((1, 1, 2)) == [5, 5, 2]


@pytest.mark.parametrize(("num_tokens", "most"), [(5, 5), (16, 8)])
def test_many_drafts_need_more_of_them_accepted(num_tokens: int, most: int) -> None:
    """Each retry accepts five drafts, which are all of five and a part of sixteen."""
    assert asked_for((1, 5, 1, 5, 1, 5, 1, 5), num_tokens)[-1] == most


def test_a_draft_model_forgets_a_sequence_that_has_ended() -> None:
    request, (proposer, model) = Request(0, (1, 2, 3), PARAMS), with_model()
    proposer.prepare([Asked(request, 0, [1, 2, 3], 0, 100)])
    proposer.forget(request, 0)
    assert not model.most


@pytest.mark.parametrize(("sure", "most"), [(0, 2), (1, 2), (2, 2), (3, 5), (4, 5)])
def test_all_sequences_of_a_plan_get_as_many_drafts_of_a_model_as_most_of_them_accept(sure: int, most: int) -> None:
    proposer, model = with_model()
    asked = [Asked(Request(i, (1, 2, 3), PARAMS), 0, [1, 2, 3], 0, 100) for i in range(5)]
    for _ in range(2):
        proposer.prepare(asked)
        for i, a in enumerate(asked[:4]):
            proposer.settle(a.request, 0, 5, 5 if i < sure else 1, "draft")
    model.most.clear()
    proposer.prepare([*asked[:4], asked[4]._replace(unread=1)])
    assert model.most == [most] * 4 + [0], "a sequence with unread tokens does not draft yet"


def test_nobody_waits_for_a_draft_model_that_has_nothing() -> None:
    request, (proposer, model) = Request(0, (1, 2, 3), PARAMS), with_model()
    model.has_drafts = False
    waits = []
    for length in range(3, 22):
        proposer.prepare([Asked(request, 0, range(length), 0, 100)])
        waits.append(proposer.needs_newest(request, 0))
    assert not any(waits)
    assert [n for n, most in enumerate(model.most) if most] == [0, WITHOUT_MODEL, 2 * WITHOUT_MODEL]
    model.has_drafts = True
    proposer.prepare([Asked(request, 0, range(40), 0, 100)])
    assert proposer.needs_newest(request, 0)


def test_what_a_sequence_repeats_is_copied_and_no_draft_model_asked() -> None:
    """From SURE equal tokens on. Rows follow one another without a wait until a draft is rejected."""
    request, (proposer, model) = Request(0, (1, 2, 3), PARAMS), with_model()
    said = list(range(10, 30))
    tokens = [*said, *said[: SURE - 1]]
    proposer.prepare([Asked(request, 0, tokens, 0, 100)])
    assert model.most == [5] and proposer.needs_newest(request, 0), "a short match is the model's"
    proposer.settle(request, 0, 5, 5, "draft")
    tokens = [*said, *said[:SURE]]
    for unread in (0, 4):
        proposer.prepare([Asked(request, 0, tokens, unread, 100)])
        assert model.most[-1] == 0 and not proposer.needs_newest(request, 0)
        drafts = list(proposer.propose(request, 0, tokens, unread, 3))
        assert drafts == said[SURE + unread :][:3]
    settle(proposer, request, 3, 1)
    proposer.prepare([Asked(request, 0, tokens, 4, 100)])
    assert proposer.needs_newest(request, 0), "the copy is not that of the newest token any more"


def test_copies_do_not_decide_how_many_drafts_a_model_makes_nor_it_how_many_are_copied() -> None:
    request, (proposer, model) = Request(0, (1, 2, 3), PARAMS), with_model()
    tokens = list(range(10))
    for _ in range(4):
        proposer.prepare([Asked(request, 0, tokens, 0, 100)])
        settle(proposer, request, len(proposer.propose(request, 0, tokens, 0, 100)), model.most[-1])
        tokens += range(len(tokens), len(tokens) + 6)
    tokens += tokens[:SURE]
    proposer.prepare([Asked(request, 0, tokens, 0, 100)])
    assert list(proposer.propose(request, 0, tokens, 0, 100)) == [8, 9, 10], "as a first copy"
    settle(proposer, request, 3, 3)
    tokens += [8, 9, 10, 11]
    proposer.prepare([Asked(request, 0, tokens, 0, 100)])
    assert len(proposer.propose(request, 0, tokens, 0, 100)) == 7


def test_a_new_step_of_the_draft_model_leaves_out_one_measurement() -> None:
    request, (proposer, model) = Request(0, (1, 2, 3), PARAMS), with_model()
    noted: list[bool] = []
    proposer.payoff.note = lambda now, tokens, *, usual, new: noted.append(new)  # type: ignore[method-assign]
    for first_use in (False, True, False, False):
        model.first_use = first_use
        proposer.prepare([Asked(request, 0, [1, 2, 3], 0, 100)])
        proposer.observe(StepPlan((Row(RowKind.DECODE, 0, 0, 0, 5, (1,), (), True),)), StepResult([(1,)]))
    assert noted == [False, True, False, False]


def test_the_time_before_a_sequence_begins_is_not_measured() -> None:
    """A sequence whose whole prompt is cached begins with a row that decodes, when there was nothing to do before."""
    proposer, _ = with_model()
    noted: list[bool] = []
    proposer.payoff.note = lambda now, tokens, *, usual, new: noted.append(usual)  # type: ignore[method-assign]
    row = Row(RowKind.DECODE, 0, 0, 0, 5, (1,), (), True)
    for seatings in ((Seating(0, PARAMS, 0, 1, (1,)),), ()):
        proposer.observe(StepPlan((row,), seatings=seatings), StepResult([(1,)]))
    assert noted == [False, True]


def test_a_longer_match_with_its_own_tokens_wins() -> None:
    request, proposer = Request(0, (1, 2, 3, 4, 5, 1), PARAMS, prediction=(4, 5, 6)), speculation()
    assert list(proposer.propose(request, 0, [*request.prompt, 3, 4, 5], 0, 1)) == [1]
    assert proposer.source(request, 0) == "ngram"


def test_without_a_method_only_predictions_are_copied() -> None:
    request, proposer = Request(0, (1, 2, 3, 4) * 4, PARAMS), speculation(method="none")
    assert not proposer.for_all and proposer.stats() is None
    assert not proposer.propose(request, 0, request.prompt, 0, 9)


def test_sequences_that_ended_are_forgotten() -> None:
    request, proposer = Request(0, (1, 2) * 4, PARAMS), speculation()
    assert proposer.propose(request, 0, request.prompt, 0, 9)
    proposer.forget(request, 0)
    proposer.forget(request, 1)
    assert not proposer._drafters


@pytest.mark.parametrize(("rows", "on"), [(1, True), (8, True), (9, False)])
def test_a_large_batch_does_not_draft(rows: int, on: bool) -> None:
    assert speculation(disable_batch_size=8).is_on(rows) == on


@pytest.mark.parametrize("rows", [8, 32])
def test_a_short_match_is_tried_where_few_sequences_run(rows: int) -> None:
    """A longer one is tried in any batch, and so is the beginning of a prediction."""
    short, long = Request(0, (1, 2, 3, 4, 1, 2), PARAMS), Request(1, (1, 2, 3, 4, 5, 1, 2, 3, 4), PARAMS)
    proposer, fixed = speculation(), speculation(dynamic=False)
    for each in (proposer, fixed):
        assert each.is_on(rows)
        assert each.propose(long, 0, long.prompt, 0, 3)
    assert bool(proposer.propose(short, 0, short.prompt, 0, 3)) == (rows == 8)
    assert fixed.propose(short, 0, short.prompt, 0, 3)
    assert proposer.propose(Request(2, (7, 8), PARAMS, prediction=PREDICTED), 0, (7, 8), 0, 3)


def run(payoff: Payoff, steps: int, gain: float, rows: int = 4) -> list[bool]:
    """Steps of a millisecond that bring `gain` tokens a row with drafts; without them a token each."""
    now, used = 0.0, []
    for _ in range(steps):
        drafts = payoff.uses_drafts(rows)
        now += 1.0
        payoff.note(now, round(rows * gain) if drafts else rows, usual=True)
        used.append(drafts)
    return used


def test_drafts_are_used_where_they_bring_more() -> None:
    used = run(Payoff(), 20_000, 1.5)
    assert used.count(False) < 0.02 * len(used) and False in used


def test_drafts_are_off_where_they_bring_less_and_probed_again() -> None:
    used = run(Payoff(), 20_000, 0.75)
    assert used.count(True) < 0.02 * len(used)
    assert any(used[10 * SHORTEST :])
    assert used[FIRST + 2 * SKIPPED + PROBE + 5 :][:SHORTEST].count(True) < PROBE
    assert max(len(part) for part in "".join("x" if u else "." for u in used).split("x")) <= LONGEST + 2 * PROBE


def test_a_change_is_noticed() -> None:
    payoff = Payoff()
    run(payoff, 1000, 0.5)
    assert run(payoff, 10_000, 2.0)[-1]


@pytest.mark.parametrize("pays", [False, True])
def test_probes_become_rarer_until_one_changes_something(pays: bool) -> None:
    """The stretches in the way that pays double up to the longest, and are the shortest again after a change."""
    payoff, near = Payoff(), PROBE + 2 * SKIPPED + 2
    used = run(payoff, 16_000, 2.0 if pays else 0.25)
    stretches = [
        n for n in (len(list(steps)) for way, steps in groupby(used) if way == pays) if n > 2 * SHORTEST - near
    ]
    assert stretches[:6] == [pytest.approx(min(SHORTEST << i, LONGEST), abs=near) for i in range(1, 7)]
    used = run(payoff, 8_000, 0.25 if pays else 2.0)
    stretches = [n for n in (len(list(steps)) for way, steps in groupby(used) if way != pays) if n > SHORTEST - near]
    assert stretches[:3] == [pytest.approx(SHORTEST << i, abs=near) for i in range(3)]


@pytest.mark.parametrize("waits", [False, True])
def test_the_first_use_of_a_shape_does_not_count(waits: bool) -> None:
    """Drafts bring more once their shapes are known. The host traces a step in the time of the step before it, unless
    that one was read first."""
    payoff, now, shapes = Payoff(), 0.0, 12
    for step in range(200):
        assert payoff.uses_drafts(1), step
        new = step % 2 == 1 and step < 2 * shapes
        traced = step % 2 == waits and step < 2 * shapes
        now += 50.0 if traced else 1.0
        payoff.note(now, 2, usual=True, new=new)
        if payoff.state["tokens_per_s_with"]:
            break
    assert payoff.state["tokens_per_s_with"] == pytest.approx(2000)


def test_new_shapes_without_an_end_count() -> None:
    payoff, now, used = Payoff(), 0.0, []
    for _ in range(3000):
        used.append(payoff.uses_drafts(1))
        now += 3.0 if used[-1] else 1.0
        payoff.note(now, 2 if used[-1] else 1, usual=True, new=used[-1])
    assert used[500:].count(True) < 100


def test_rates_are_those_of_either_way_without_the_steps_of_a_change() -> None:
    payoff, now, before = Payoff(), 0.0, True
    for _ in range(1000):
        drafts = payoff.uses_drafts(4)
        now += 1.0 if drafts == before else 50.0
        before = drafts
        payoff.note(now, 6 if drafts else 4, usual=True)
    assert payoff.state["uses_drafts"]
    assert payoff.state["tokens_per_s_with"] == pytest.approx(1500)
    assert payoff.state["tokens_per_s_without"] == pytest.approx(1000)


def test_a_step_counts_for_the_size_of_its_own_batch() -> None:
    """Every fourth step is one of a large batch. Two of these never follow each other, so their rate stays unknown."""
    payoff = Payoff()
    for now in range(600):
        payoff.uses_drafts(32 if now % 4 == 3 else 4)
        payoff.note(float(now), 9, usual=True)
    assert not payoff.state["tokens_per_s_with"] and not payoff.state["tokens_per_s_without"]
    payoff.uses_drafts(4)
    assert payoff.state["tokens_per_s_with"]


def test_a_step_in_which_nothing_may_draft_is_not_measured() -> None:
    now = [0.0]
    proposer = Speculation(SpeculationConfig(method="ngram", disable_batch_size=8), clock=lambda: now[0])
    step = StepPlan(tuple(Row(RowKind.DECODE, n, n, 0, 5, (1,), (), True) for n in range(4)))
    for _ in range(60):
        for rows, seconds in ((4, 0.001), (9, 0.05)):
            proposer.is_on(rows)
            now[0] += seconds
            proposer.observe(step, StepResult([(1,)] * 4))
    stats = proposer.stats()
    assert stats is not None and stats.tokens_per_s_with == pytest.approx(1000)


def test_only_usual_steps_are_measured() -> None:
    payoff = Payoff()
    for now in range(0, 10_000, 2):
        payoff.uses_drafts(2)
        payoff.note(float(now), 9, usual=True)
        payoff.note(now + 1.0, 9, usual=False)
    assert not payoff.state["tokens_per_s_with"]


def test_steps_with_prompts_or_saves_are_not_usual() -> None:
    proposer = speculation()
    decode = Row(RowKind.DECODE, 0, 0, 0, 5, (1,), (), True)
    noted: list[tuple[bool, bool]] = []
    proposer.payoff.note = lambda now, tokens, *, usual, new: noted.append((usual, new))  # type: ignore[method-assign]
    for plan, result in (
        (StepPlan((decode,)), StepResult([(1,)])),
        (StepPlan((decode, Row(RowKind.PROMPT, 1, 1, 0, 0, (1, 2), (), False))), StepResult([(1,), ()])),
        (StepPlan((decode,), saves=(1,)), StepResult([(1,)])),
        (StepPlan((decode,)), StepResult([(1,)], first_use=True)),
    ):
        proposer.observe(plan, result)
    assert noted == [(True, False), (False, False), (False, False), (True, True)]


def test_random_tokens_are_hardly_drafted() -> None:
    rng, proposer = Random(1), speculation()
    request = Request(0, tuple(rng.randrange(300) for _ in range(500)), PARAMS)
    tokens, drafted = list(request.prompt), 0
    for _ in range(1000):
        drafts = proposer.propose(request, 0, tokens, 0, 100)
        if drafts:
            settle(proposer, request, len(drafts), 0)
        drafted += len(drafts)
        tokens.append(rng.randrange(300))
    assert drafted < 60


def test_a_draft_of_the_head_is_used_where_it_was_made_for() -> None:
    request, proposer = Request(0, (1, 2, 3), PARAMS), speculation(method="mtp")
    assert not proposer.needs_newest(request, 0)
    proposer.offer(request, 0, 4, 9)
    assert proposer.in_steps and proposer.needs_newest(request, 0)
    assert not proposer.propose(request, 0, [1, 2, 3], 0, 5), "the token before it is not there yet"
    assert not proposer.propose(request, 0, [1, 2, 3], 1, 5)
    assert proposer.propose(request, 0, [1, 2, 3, 4], 0, 5) == (9,)
    assert not proposer.propose(request, 0, [1, 2, 3, 4, 5], 0, 5), "it was for the token before"


def test_a_head_that_is_never_right_is_asked_less_and_less() -> None:
    request, proposer = Request(0, (1,), PARAMS), speculation(method="mtp")
    drafted = 0
    for n in range(1, 500):
        proposer.offer(request, 0, n, 9)
        if proposer.propose(request, 0, [1] * n, 0, 5):
            drafted += 1
            settle(proposer, request, 1, 0)
    assert 3 < drafted < 20


@pytest.mark.parametrize(
    ("drawn", "said", "counts"),
    [
        ((5, 6, 7, 8), (5, 6, 7, 8), (3, 0)),
        ((5, 6, 9), (5, 6, 9), (2, 1)),
        ((9,), (9,), (0, 3)),
        ((5, 6, 7, 8), (5, 6), (2, 1)),
        ((5, 6, 9), (5,), (1, 2)),
    ],
)
def test_drafts_behind_the_end_of_an_answer_do_not_count_as_accepted(
    drawn: tuple[int, ...], said: tuple[int, ...], counts: tuple[int, int]
) -> None:
    """Each of the last two answers ends at a draft, so the accepted drafts after it are no part of the answer."""
    assert predicted_of(Row(RowKind.VERIFY, 1, 0, 0, 9, (4, 5, 6, 7), ((1,),), True), drawn, said) == counts


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("prediction", [None, PREDICTED])
@pytest.mark.parametrize("for_all", [False, True])
def test_who_wants_no_drafts_gets_none(speculate: bool, prediction: Any, for_all: bool) -> None:
    """Others get them where all do, or where they say what they expect."""
    request = Request(1, (1, 2, 3), PARAMS, prediction=prediction, speculate=speculate)
    by = SimpleNamespace(for_all=for_all)
    assert Drafting._may_draft(request, cast(Any, by)) == (speculate and (for_all or prediction is not None))
