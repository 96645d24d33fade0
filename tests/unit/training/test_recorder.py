"""What becomes of each choice of a request that learning asks for, in every combination of what it may ask."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_tandem.errors import EngineUnavailable
from mlx_tandem.files import StorageError
from mlx_tandem.generation.answers import Answer
from mlx_tandem.generation.events import Finish
from mlx_tandem.training.draws import truncation
from mlx_tandem.training.live.learning import Learning
from mlx_tandem.training.live.recorder import Collect, Continued, Outcome, Recorder, Talk
from mlx_tandem.training.online.arms import Pair
from mlx_tandem.training.online.prompts import Prompt
from mlx_tandem.training.open_trajectories import Beginning, Exchange
from mlx_tandem.training.rewards import Sample, Scoring
from mlx_tandem.training.trajectories import ACROSS, Trajectory
from mlx_tandem.types import SamplingParams, TokenLogprob

PARAMS = SamplingParams(4, temperature=0.7, top_p=0.9)
SCORING = Scoring("f", ())
PAIR = cast(Pair, object())
OLD = 1
"""A version that is too old. One that is too old when the scores have come is LATE."""
LATE = 2
NEW = 3


class Learner:
    """The learner's end of a recorder. What it is told is kept; what it takes is on the drive unless that `fails`."""

    def __init__(self, scores: Sequence[float | None], fails: bool) -> None:
        self._scores, self._fails = scores, fails
        self.rewards = self.later = self
        self.prompts: list[tuple[tuple[int, ...], str, bool]] = []
        self.samples: list[Sample] = []
        self.added: list[tuple[list[Trajectory], int]] = []
        self.kept: list[tuple[str, Beginning | None, Exchange]] = []
        self.asked: list[tuple[Prompt, list[float], int]] = []
        self.open = SimpleNamespace(pieces=[b"first"])
        self.given: list[tuple[str, float | None]] = []

    def record_prompt(
        self, prompt: tuple[int, ...], scoring: Scoring, params: SamplingParams, text: str, *, alone: bool
    ) -> None:
        assert (scoring, params) == (SCORING, PARAMS)
        self.prompts.append((prompt, text, alone))

    def is_stale(self, versions: Sequence[int]) -> bool:
        return OLD in versions

    async def score(self, scoring: Sequence[Scoring], samples: Sequence[Sample]) -> list[float | None]:
        assert list(scoring) == [SCORING] * len(samples)
        self.samples += samples
        return list(self._scores[: len(samples)])

    async def add(self, trajectories: Sequence[Trajectory], size: int) -> frozenset[str]:
        await asyncio.sleep(0)
        if self._fails:
            raise StorageError("the drive is full")
        self.added.append((list(trajectories), size))
        return frozenset(t.id for t in trajectories if min(t.versions) <= LATE)

    async def keep(self, answers: Sequence[tuple[str, Beginning | None, Exchange]]) -> None:
        if self._fails:
            raise EngineUnavailable("learning has not started yet")
        self.kept += answers

    def get(self, id: str) -> Any:
        assert id == "going"
        return self.open

    async def reward(self, id: str, score: float | None) -> bool:
        self.given.append((id, score))
        return score != 0.25

    def wait(self, prompt: Prompt, rewards: Sequence[float], n: int, pair: Pair) -> None:
        assert pair is PAIR
        self.asked.append((prompt, list(rewards), n))


async def recorded(learner: Learner, collect: Collect, prompts: Any, n: int, said: Any) -> list[Outcome]:
    """What a recorder reports. All scores, and no others, are handed on in the background."""
    tasks: list[Coroutine[Any, Any, Any]] = []
    handed: list[list[float | None]] = []

    async def scored(scores: Sequence[float | None]) -> None:
        handed.append(list(scores))

    async def later(work: Coroutine[Any, Any, Any]) -> None:
        tasks.append(work)

    learning = SimpleNamespace(learner=learner, later=later, clock=lambda: 5.0, text_of=lambda tokens: f"<{tokens}>")
    outcomes = await Recorder(cast(Learning, learning), collect, prompts, n, scored).record(said)
    for work in tasks:
        await work
    assert handed == ([list(learner._scores[: len(said)])] if learner.samples else [])
    assert len(tasks) - len(handed) == (not collect.shown and not collect.later and collect.going is None)
    return outcomes


ANSWERS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 2, 2]),  # tokens
        st.sampled_from([OLD, LATE, NEW, NEW]),
        st.sampled_from(["text", "thoughts"]),
        st.sampled_from([None, 0.0, 1.0, 1.0]),  # its score
    ),
    min_size=9,
    max_size=9,
)


def answer(number: int, length: int, version: int, kind: str) -> Answer:
    tokens = [10 * number + i for i in range(length)]
    return Answer(
        texts=[f"text {number}"],
        places=[range(length)],
        thoughts=["so"] if kind == "thoughts" else [],
        tokens=tokens,
        logprobs=[TokenLogprob(-0.1 * t, -0.2 * t) for t in tokens],
        versions=[version] * length,
        finish=Finish(0, "length" if number % 2 else "stop"),
    )


@settings(max_examples=250)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    answers=ANSWERS,
    way=st.sampled_from(["kept", "kept and shown", "shown", "later"]),
    shared=st.booleans(),
    across=st.booleans(),
    paired=st.booleans(),
    fails=st.sampled_from([False, False, False, True]),
)
@example(  # single answers, whose groups are of no known size
    shape=(2, 1), answers=[(2, NEW, "text", 1.0)] * 9, way="kept and shown", shared=False, across=False, paired=False,
    fails=False,
)  # fmt: skip
def test_each_choice_is_collected_or_its_reason_told(
    shape: tuple[int, int], answers: list[Any], way: str, shared: bool, across: bool, paired: bool, fails: bool
) -> None:
    count, n = shape
    prompts = [(k, k + 1) for k in range(count)]
    texts = tuple(f"prompt {k}" for k in range(count))
    groups = tuple(ACROSS + "f" if across else f"g{k}" for k in range(count))
    keep, later = way != "shown", way == "later"
    pair = PAIR if paired and keep and not later else None
    collect = Collect(
        "policy",
        keep,
        "shown" in way,
        SCORING,
        {"a": 1},
        groups,
        shared or across,
        texts,
        PARAMS,
        later=later,
        pair=pair,
    )
    said = [answer(i, *what) for i, (*what, _) in enumerate(answers[: count * n])]
    scores = [score for *_, score in answers]
    learner = Learner(scores, fails)
    outcomes = asyncio.run(recorded(learner, collect, prompts, n, said))

    known = n > 1 and not collect.shared  # a group's size
    of = [i // n for i in range(len(said))]
    empty = [not a.tokens for a in said]
    stale = [OLD in a.versions for a in said]
    assert len(outcomes) == len(said)
    ids = [o.get("trajectory_id") for o in outcomes]
    assert len({id for id in ids if id}) == sum(map(bool, ids))
    alone = n == 1 and not collect.shared
    assert learner.prompts == [(p, t, alone) for p, t in zip(prompts, texts, strict=True)] * collect.compared
    assert collect.compared == (keep and not later)

    if later:
        wanted = [
            "storage_error" if fails else "empty" if e else "stale" if s else None
            for e, s in zip(empty, stale, strict=True)
        ]
        assert [o.get("dropped") for o in outcomes] == wanted
        kept = [] if fails else [i for i in range(len(said)) if not empty[i] and not stale[i]]
        assert [id for id, _, _ in learner.kept] == [ids[i] for i in kept]
        for i, (_, begun, exchange) in zip(kept, learner.kept, strict=True):
            size = sum(of[j] == of[i] for j in kept) if known else 0
            assert begun == Beginning(groups[of[i]], size, 0.7, {"a": 1}, truncation(PARAMS))
            assert (exchange.given, exchange.tokens) == (prompts[of[i]], tuple(said[i].tokens))
            assert (exchange.messages, exchange.rendered) == (0, b""), "it is no conversation"
            assert exchange.logprobs == tuple(lp.sampled for lp in said[i].logprobs)
            assert exchange.model_logprobs == tuple(lp.model for lp in said[i].logprobs)
            assert (exchange.versions, exchange.finish_reason) == (tuple(said[i].versions), said[i].reason)
        assert not learner.samples and not learner.added
        return

    assert [(s.prompt, s.metadata, s.tokens, s.finish_reason) for s in learner.samples] == [
        (texts[of[i]], {"a": 1}, len(a.tokens), a.reason) for i, a in enumerate(said)
    ]
    assert [s.completion for s in learner.samples] == [f"<{a.tokens}>" if a.thoughts else a.text for a in said]
    if "shown" in way:
        assert [o["score"] for o in outcomes] == scores[: len(said)]
    taken = [i for i in range(len(said)) if keep and not empty[i] and scores[i] is not None]
    if way == "kept":  # what is known before the scores are
        assert [o.get("dropped") for o in outcomes] == [
            "empty" if e else "stale" if s else None for e, s in zip(empty, stale, strict=True)
        ]
    elif way == "kept and shown":
        assert [o.get("dropped") for o in outcomes] == [
            "empty" if empty[i]
            else "no_score" if i not in taken
            else "storage_error" if fails
            else "stale" if min(said[i].versions) <= LATE
            else None
            for i in range(len(said))
        ]  # fmt: skip
    else:
        assert all(set(o) == {"score"} for o in outcomes)
    wanted_groups = [[i for i in taken if of[i] == k] for k in range(count)]
    if fails:
        assert not learner.added
    else:
        assert [size for _, size in learner.added] == [len(g) if known else 0 for g in wanted_groups if g]
        made = [t for group, _ in learner.added for t in group]
        for i, t in zip(taken, made, strict=True):
            assert t.id == ids[i] or ids[i] is None
            assert (t.group, t.prompt, t.tokens) == (groups[of[i]], prompts[of[i]], tuple(said[i].tokens))
            assert (t.reward, t.temperature, t.created, t.metadata) == (scores[i], 0.7, 5.0, {"a": 1})
            assert t.logprobs == tuple(lp.sampled for lp in said[i].logprobs)
            assert t.model_logprobs == tuple(lp.model for lp in said[i].logprobs)
            assert (t.versions, t.finish_reason) == (tuple(said[i].versions), said[i].reason)
            assert t.truncation == truncation(PARAMS) and not t.external
    assert [(p.tokens, p.text, p.group, rewards, m) for p, rewards, m in learner.asked] == [
        (prompts[k], texts[k], groups[k] if across else "", [scores[i] for i in wanted_groups[k]], n)
        for k in range(count)
    ] * (pair is not None)


@given(
    what=st.tuples(st.integers(0, 2), st.sampled_from([OLD, LATE, NEW])),
    score=st.sampled_from([None, 0.25, 1.0]),
    later=st.booleans(),
    superseded=st.booleans(),
    fails=st.booleans(),
)
def test_a_request_that_goes_on_with_a_trajectory_adds_to_it_or_ends_it(
    what: tuple[int, int], score: float | None, later: bool, superseded: bool, fails: bool
) -> None:
    """The outcome names the trajectory that it goes on with; its answer is scored only where it is the last one."""
    going = Continued("going", 2 if superseded else 1, 3, 0.7, truncation(PARAMS))
    talk = Talk(5, b"digest", going)
    collect = Collect("policy", True, False, SCORING, {}, ("g",), False, ("text",), PARAMS, later=later, talk=talk)
    learner = Learner([score], fails)
    said = answer(1, *what, "text")
    (outcome,) = asyncio.run(recorded(learner, collect, [(1, 2, 3, 4, 5)], 1, [said]))
    assert not learner.prompts and not learner.added
    doomed = "empty" if not said.tokens else "stale" if OLD in said.versions else None
    reason = "superseded" if superseded else "storage_error" if fails else doomed
    if reason is not None:
        assert outcome == {"trajectory_id": None, "dropped": reason}
        assert not learner.kept and not learner.samples
        return
    ((id, begun, exchange),) = learner.kept
    assert (id, begun, exchange.given, exchange.tokens) == ("going", None, (4, 5), tuple(said.tokens))
    assert (exchange.messages, exchange.rendered) == (5, b"digest")
    if later:
        assert outcome == {"trajectory_id": "going"} and not learner.samples
    else:
        assert learner.given == ([] if score is None else [("going", score)])
        fresh = {"trajectory_id": None, "dropped": "stale"} if score == 0.25 else {"trajectory_id": "going"}
        assert outcome == fresh | {"score": score}
