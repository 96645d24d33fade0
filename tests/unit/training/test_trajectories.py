"""The buffer is bounded, hands nothing out twice and nothing too old; what comes from outside is checked by field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlx_tandem import limits
from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.dialects.training.bodies import UpdateBody
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.strict_json import convert
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.training.external import check_external
from mlx_tandem.training.online.advantages import RECIPES, batches
from mlx_tandem.training.trajectories import ACROSS, Buffer, Trajectory, staleness

CAPACITY = 10
MAX_STALENESS = 2
ENDLESS = ACROSS + "exact_match"


def trajectory(id: str, group: str, reward: float = 0.0, version: int = 1) -> Trajectory:
    return Trajectory(id, group, (1, 2), (3, 4), (-1.0, -0.5), (-1.0, -0.5), (version, version), 1.0, reward)


class BufferMachine(RuleBasedStateMachine):
    """Groups of known and unknown size and one across prompts arrive in pieces, the version moves, updates take, and
    now and then everything is made again from what was held and seen, as after a restart."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = Buffer(CAPACITY)
        self.ids = 0
        self.version = 1
        self.taken: set[str] = set()
        self.gone: set[str] = set()
        self.forgotten = 0

    def groups(self) -> dict[str, list[str]]:
        """The ids that wait, by group, in order."""
        found: dict[str, list[str]] = {}
        for t, _ in self.buffer.held:
            found.setdefault(t.group, []).append(t.id)
        return found

    @rule(
        group=st.sampled_from(["a", "b", "c", ENDLESS]),
        reward=st.sampled_from([0.0, 1.0]),
        size=st.sampled_from([0, 0, 1, 3]),
    )
    def arrive(self, group: str, reward: float, size: int) -> None:
        self.ids += 1
        left, overflow = self.groups(), self.buffer.counts.dropped_overflow
        came = trajectory(f"t{self.ids}", group, reward, self.version)
        assert self.buffer.add(came, 0 if group == ENDLESS else size)
        gone = 0
        while sum(map(len, left.values())) == CAPACITY:
            oldest = next((name for name in left if name != group), group)
            ids = left.pop(oldest)
            gone += 1 if oldest == ENDLESS else len(ids)
            if oldest == ENDLESS and len(ids) > 1:
                left[oldest] = ids[1:]  # the others have their turn before it loses another one
        left.setdefault(group, []).append(came.id)
        if group not in (now := self.groups()):
            del left[group]  # it is complete and does not vary
        assert list(now.items()) == list(left.items())
        assert self.buffer.counts.dropped_overflow == overflow + gone

    @rule(group=st.sampled_from("de"), rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4))
    def arrive_at_once(self, group: str, rewards: list[float]) -> None:
        self.ids += 1
        for i, reward in enumerate(rewards):
            self.buffer.add(trajectory(f"t{self.ids}.{i}", f"{group}{self.ids}", reward, self.version), len(rewards))
        held = [t for t, _ in self.buffer.held if t.group == f"{group}{self.ids}"]
        assert len(held) == (len(rewards) if len(set(rewards)) > 1 else 0), "whole, or there is nothing to learn"

    @rule()
    def arrive_again(self) -> None:
        before, counted = self.buffer.held, self.buffer.counts.dropped_duplicate
        again = [t.id for t, _ in before] + list(self.taken)
        for id in again:
            assert not self.buffer.add(trajectory(id, "a", 0.5, self.version))
        assert self.buffer.held == before
        assert self.buffer.counts.dropped_duplicate == counted + len(again)

    @rule(group=st.sampled_from(["a", "b", "c", ENDLESS]))
    def lose(self, group: str) -> None:
        self.buffer.shrink(group)

    @rule(index=st.integers(0, CAPACITY - 1))
    def forget(self, index: int) -> None:
        """Its siblings stay, unless they are all and do not vary."""
        held = [t for t, _ in self.buffer.held][index:][:1]
        self.buffer.remove([t.id for t in held])
        for t in held:
            assert t.id not in self.groups().get(t.group, [])
        self.forgotten += len(held)
        self.gone |= {t.id for t in held}

    @rule()
    def publish(self) -> None:
        self.version += 1

    @rule(count=st.integers(1, 12))
    def take(self, count: int) -> None:
        usable = self.buffer.usable
        waited = self.groups()
        taken = self.buffer.take(count, self.version, MAX_STALENESS)
        for g in taken.groups:
            ids = [t.id for t in g]
            assert ids == [id for id in waited[g[0].group] if id not in taken.stale][: len(ids)], "the oldest first"
            if g[0].group != ENDLESS:
                assert g[0].group not in self.groups(), "whole"
            elif len(ids) > count:
                assert len({t.reward for t in g[:-1]}) == 1, "no more than it takes until they vary"
        got = [t for g in taken.groups for t in g]
        assert not {t.id for t in got} & (self.taken | self.gone), "twice"
        assert all(staleness(t.versions, self.version) <= MAX_STALENESS for t in got)
        assert all(len({t.reward for t in g}) > 1 and len({t.group for t in g}) == 1 for g in taken.groups)
        assert sum(len(g) for g in taken.groups[:-1]) < count, "no more groups than were asked for"
        assert len(got) >= min(count, usable if not taken.stale else 0), "progress"
        self.taken |= {t.id for t in got}
        self.gone |= set(taken.stale)

    @rule()
    def restart(self) -> None:
        again = Buffer(CAPACITY)
        for t, size in self.buffer.held:
            assert again.add(t, size)
        again.remember(self.buffer.seen)
        assert again.held == self.buffer.held
        assert again.seen == self.buffer.seen
        assert again.usable == self.buffer.usable
        again.counts = self.buffer.counts
        self.buffer = again

    @invariant()
    def bounded_and_fresh(self) -> None:
        ids = {t.id for t, _ in self.buffer.held}
        assert len(ids) == len(self.buffer) <= CAPACITY
        assert not ids & (self.taken | self.gone)
        groups: dict[str, list[Trajectory]] = {}
        sizes: dict[str, int] = {}
        for t, size in self.buffer.held:
            groups.setdefault(t.group, []).append(t)
            sizes[t.group] = size
        ready = [
            g for n, g in groups.items() if len({t.reward for t in g}) > 1 and (not sizes[n] or len(g) >= sizes[n])
        ]
        assert self.buffer.usable == sum(map(len, ready))
        endless = groups.get(ENDLESS, [])
        assert self.buffer.alike == (len(endless) if len({t.reward for t in endless}) == 1 else 0)
        assert not any(len(g) >= sizes[n] > 0 and g not in ready for n, g in groups.items()), "it will never vary"

    @invariant()
    def every_one_is_counted(self) -> None:
        counts = self.buffer.counts
        skipped = counts.collected - counts.taken - counts.dropped_stale - counts.dropped_overflow - len(self.buffer)
        skipped -= self.forgotten
        assert counts.taken == len(self.taken) and counts.dropped_stale == len(self.gone) - self.forgotten
        assert counts.skipped_groups <= skipped <= CAPACITY * counts.skipped_groups


BufferMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestBuffer = pytest.mark.promise("I2", "PRP-5")(BufferMachine.TestCase)


def test_oldest_groups_go_first_and_whole():
    buffer = Buffer(5)
    for i, (group, reward) in enumerate([("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1)]):
        buffer.add(trajectory(str(i), group, reward))
    assert [t.group for t, _ in buffer.held] == ["b", "b", "c", "c"]
    assert buffer.counts.dropped_overflow == 2
    assert [[t.id for t in g] for g in buffer.take(1, 1, 0).groups] == [["2", "3"]]
    assert [[t.id for t in g] for g in buffer.take(9, 1, 0).groups] == [["4", "5"]]
    assert buffer.counts.taken == 4 and buffer.counts.collected == 6


def test_a_group_of_known_size_waits_for_its_last():
    buffer = Buffer(10)
    for i, reward in enumerate([0, 1, 1]):
        assert not buffer.take(9, 1, 9).groups
        buffer.add(trajectory(str(i), "g", reward), 3)
    assert len(buffer.take(9, 1, 9).groups[0]) == 3


def test_a_group_that_lost_a_member_is_complete_without_it_after_a_restart_too():
    buffer, again = Buffer(10), Buffer(10)
    for i in range(2):
        buffer.add(trajectory(str(i), "g", i), 3)
    buffer.remove(["0"])
    for t, size in buffer.held:
        again.add(t, size)
    for each in (buffer, again):
        each.add(trajectory("2", "g", 0), 3)
        assert [[t.id for t in g] for g in each.take(9, 1, 9).groups] == [["1", "2"]]


@pytest.mark.parametrize("rewards", [(0, 1, 0, 1), (0, 0, 1, 0, 0), (0, 0, 1, 1)])
@pytest.mark.parametrize("gone", [("0",), ("1",), ("2",), ("0", "1"), ("1", "2")])
def test_a_group_that_more_came_to_than_it_was_to_have_is_the_same_after_a_restart(
    rewards: tuple[int, ...], gone: tuple[str, ...]
):
    """What waits of it is made again whole: no member completes it before those that make its rewards vary."""
    buffer, again = Buffer(10), Buffer(10)
    for i, reward in enumerate(rewards):
        buffer.add(trajectory(str(i), "g", reward), 3)
    buffer.add(trajectory("9", "later", 0), 2)
    buffer.remove(gone)
    for t, size in buffer.held:
        again.add(t, size)
    assert (again.held, again.usable) == (buffer.held, buffer.usable)


def test_groups_across_prompts_take_turns_in_the_order_of_the_update_when_it_is_replayed():
    names = [f"{ACROSS}{i}" for i in range(7)]
    one, two = Buffer(30), Buffer(30)
    for buffer in (one, two):
        for i in range(21):
            buffer.add(trajectory(str(i), names[i % 7], float(i // 7 % 2)))
    taken = one.take(14, 1, 9)
    two.remove(t.id for g in taken.groups for t in g)
    assert one.held == two.held


def test_a_group_without_variance_is_skipped_once_it_is_complete():
    buffer = Buffer(10)
    buffer.add(trajectory("alone", "one", 1.0), 1)
    assert (len(buffer), buffer.counts.skipped_groups) == (0, 1)
    buffer.add(trajectory("0", "filling", 1.0))
    buffer.add(trajectory("1", "filling", 1.0))
    assert not buffer.take(9, 1, 9).groups and len(buffer) == 2, "it may still vary"
    buffer.add(trajectory("2", "filling", 0.0))
    assert len(buffer.take(9, 1, 9).groups[0]) == 3


@pytest.mark.parametrize(("size", "other"), [(3, 1.0), (2, 0.0)])
def test_a_group_that_loses_what_made_it_vary_is_skipped(size: int, other: float):
    """Its last member will never come, or one of two goes."""
    buffer = Buffer(10)
    buffer.add(trajectory("0", "g", 1.0), size)
    buffer.add(trajectory("1", "g", other), size)
    assert (len(buffer), buffer.counts.skipped_groups) == (2, 0)
    if size == 3:
        buffer.shrink("g")
    else:
        buffer.remove(["1"])
    assert (len(buffer), buffer.usable, buffer.counts.skipped_groups) == (0, 0, 1)


def test_a_group_of_unknown_size_loses_nobody_who_was_to_come():
    buffer = Buffer(10)
    buffer.add(trajectory("0", "g", 1.0))
    buffer.shrink("g")
    buffer.shrink("nobody's")
    buffer.add(trajectory("1", "g", 0.0))
    assert [len(g) for g in buffer.take(9, 1, 9).groups] == [2]


@pytest.mark.promise("I3")
def test_the_stale_are_dropped_and_their_fresh_siblings_stay():
    buffer = Buffer(10)
    for i, version in enumerate([1, 2, 5, 5, 9]):
        buffer.add(trajectory(str(i), "g", i % 2, version))
    taken = buffer.take(9, 5, 3)
    assert taken.stale == ("0", "4"), "4 is of a version that was rolled back"
    assert [t.id for t in taken.groups[0]] == ["1", "2", "3"]
    assert buffer.counts.dropped_stale == 2
    assert not buffer.add(trajectory("0", "g", 0, 5)), "dropped ids are known, too"


@given(st.permutations(range(6)), st.integers(0, 6))
def test_removing_what_was_taken_is_as_good_as_taking_it(order: list[int], count: int):
    """Replaying a journal: `remove` with the ids of an update leaves the buffer as `take` has."""
    one, two = Buffer(10), Buffer(10)
    for buffer in (one, two):
        for i in order:
            buffer.add(trajectory(str(i), f"g{i // 2}", float(i % 2)), 2)
    taken = one.take(count, 1, 9)
    two.remove(t.id for g in taken.groups for t in g)
    assert (one.held, one.seen, one.usable) == (two.held, two.seen, two.usable)


GOOD: dict[str, Any] = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "reward": 0.5}


def encode_prompt(prompt: str | list[dict[str, Any]]) -> list[int]:
    """A template that takes one message of a user, and begins with a token of its own."""
    if isinstance(prompt, str):
        return [9] + [5] * len(prompt)
    for i, message in enumerate(prompt):
        if message["role"] != "user":
            raise InvalidRequest("only users speak", param=f"messages[{i}].role")
    if len(prompt) > 1:
        raise InvalidRequest("the template refuses it", param="messages")
    return [9] + [5] * len(prompt[0]["content"])


def check(*items: dict[str, Any]) -> Sequence[Trajectory]:
    return check_external(
        convert({"trajectories": list(items)}, UpdateBody).trajectories,
        vocab_size=10,
        max_tokens=6,
        newest_version=3,
        encode_prompt=encode_prompt,
        encode_completion=lambda text: [6] * len(text),
    ).made


def test_external_trajectories_of_several_turns():
    """What is between two turns is not trained on, and each turn may have a reward."""
    several = GOOD | {"token_ids": [3, 4, 5, 6], "mask": [1, 0, 0, 1]}
    whole, by_turn = check(several, several | {"reward": None, "turn_rewards": [0.25, 1]})
    assert (whole.reward, whole.turn_rewards, whole.mask) == (0.5, (), (1, 0, 0, 1))
    assert (by_turn.reward, by_turn.turn_rewards) == (1.25, (0.25, 1.0))
    (batch,) = batches([[whole, by_turn]], RLTrainingConfig(algorithm="dr_grpo"))
    assert [d.weights for d in batch.data] == [(-0.375, 0, 0, -0.25), (0.375, 0, 0, 0.25)]
    assert all(d.mask == (1, 0, 0, 1) for d in batch.data)


def test_external_trajectories():
    a, b, c = check(
        GOOD | {"id": "mine", "logprobs": [-1, -0.5], "versions": [0, 3], "temperature": 0.7},
        GOOD | {"reward": -2},
        {"prompt": "ab", "completion": "xy", "reward": 1, "group": "g/1"},
    )
    assert (a.id, a.prompt, a.tokens, a.versions, a.temperature, a.reward) == ("mine", (1, 2), (3, 4), (0, 3), 0.7, 0.5)
    assert a.external and a.logprobs == () == a.model_logprobs, "never believed"
    assert a.group == b.group != c.group, "the same prompt is one group unless it says otherwise"
    assert b.id.startswith("traj-") and b.id != c.id and b.reward == -2.0
    assert (c.prompt, c.tokens) == ((9, 5, 5), (6, 6))


def test_a_named_group_belongs_to_one_prompt():
    """Answers to another prompt are no siblings, whatever their group is called."""
    same, again, other = check(
        GOOD | {"group": "g"}, GOOD | {"group": "g"}, {"prompt": "ab", "completion": "xy", "reward": 1, "group": "g"}
    )
    assert same.group == again.group != other.group


def test_the_number_of_the_base_or_a_checkpoint_says_nothing_of_its_age():
    assert staleness((0, 0), 99) == 0 and staleness((0, 97), 99) == 2
    assert staleness((3, 97), 99) == 96 and staleness((3, 97), 99, {0, 3}) == 2


@pytest.mark.promise("I1")
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"reward": math.nan}, "trajectories[1].reward"),
        ({"reward": math.inf}, "trajectories[1].reward"),
        ({"reward": None}, "trajectories[1].reward"),
        ({"mask": [1]}, "trajectories[1].mask"),
        ({"mask": [0, 0]}, "trajectories[1].mask"),
        ({"mask": [1, 2]}, "trajectories[1].mask[1]"),
        ({"mask": [1, 0], "token_ids": None, "completion": "xy"}, "trajectories[1].mask"),
        ({"mask": [1, 0], "turn_rewards": [1.0, 0.0]}, "trajectories[1].turn_rewards"),
        ({"turn_rewards": [math.nan]}, "trajectories[1].turn_rewards[0]"),
        ({"reward": -1.1e6}, "trajectories[1].reward"),
        ({"temperature": 0.0}, "trajectories[1].temperature"),
        ({"temperature": 0.0001}, "trajectories[1].temperature"),
        ({"temperature": 0.0099}, "trajectories[1].temperature"),
        ({"temperature": math.nan}, "trajectories[1].temperature"),
        ({"temperature": 2.1}, "trajectories[1].temperature"),
        ({"logprobs": [-1.0]}, "trajectories[1].logprobs"),
        ({"logprobs": [-1.0, 0.1]}, "trajectories[1].logprobs[1]"),
        ({"logprobs": [-math.inf, -1.0]}, "trajectories[1].logprobs[0]"),
        ({"versions": [1]}, "trajectories[1].versions"),
        ({"versions": [1, -1]}, "trajectories[1].versions[1]"),
        ({"versions": [2**54, 1]}, "trajectories[1].versions[0]"),
        ({"versions": [3, 4]}, "trajectories[1].versions[1]"),
        ({"versions": [999, 999]}, "trajectories[1].versions[0]"),
        ({"id": "../x"}, "trajectories[1].id"),
        ({"id": ""}, "trajectories[1].id"),
        ({"group": "a b"}, "trajectories[1].group"),
        ({"group": "a" * 129}, "trajectories[1].group"),
        ({"token_ids": []}, "trajectories[1].token_ids"),
        ({"token_ids": [10]}, "trajectories[1].token_ids[0]"),
        ({"prompt_token_ids": [1, -1]}, "trajectories[1].prompt_token_ids[1]"),
        ({"prompt_token_ids": [1] * 5}, "trajectories[1]"),
        ({"prompt": "both"}, "trajectories[1].prompt_token_ids"),
        ({"token_ids": None}, "trajectories[1].completion"),
        ({"token_ids": None, "completion": ""}, "trajectories[1].completion"),
        ({"prompt_token_ids": []}, "trajectories[1].prompt_token_ids"),
        ({"prompt_token_ids": None, "prompt": ""}, "trajectories[1].prompt"),
        ({"prompt_token_ids": None, "prompt": []}, "trajectories[1].prompt"),
        ({"prompt_token_ids": None, "prompt": [{"role": "evil", "content": "x"}]}, "trajectories[1].prompt[0].role"),
        ({"prompt_token_ids": None, "prompt": [{"content": "x"}]}, "trajectories[1].prompt[0].role"),
        ({"prompt_token_ids": None, "prompt": [{"role": "user"}]}, "trajectories[1].prompt[0].content"),
        ({"prompt_token_ids": None, "prompt": [{"role": "user", "content": 3}]}, "trajectories[1].prompt[0].content"),
        ({"prompt_token_ids": None, "prompt": [{"role": "tool", "content": "x"}]}, "trajectories[1].prompt[0].role"),
        ({"prompt_token_ids": None, "prompt": [{"role": "user", "content": "x"}] * 2}, "trajectories[1].prompt"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as e:
        check(GOOD, GOOD | change)
    assert e.value.param == (param.rsplit("[", 1)[0] if "ids[" in param else param)
    assert e.value.message.startswith((param, "give either", e.value.param))


def test_an_id_that_comes_twice_in_one_post_is_refused():
    with pytest.raises(InvalidRequest, match=r"trajectories\[2\]\.id is also the id of trajectories\[0\]") as e:
        check(GOOD | {"id": "a"}, GOOD | {"id": "b"}, GOOD | {"id": "a"})
    assert e.value.param == "trajectories[2].id"


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "prompt_token_ids": st.none() | st.lists(st.integers(-1, 11), max_size=7),
    "token_ids": st.none() | st.lists(st.integers(-1, 11), max_size=7),
    "prompt": st.none() | st.text("ab", max_size=6) | st.just([{"role": "user", "content": "a"}]),
    "completion": st.none() | st.text("ab", max_size=6),
    "temperature": st.floats(-1, 3) | st.floats(0, 0.02),
    "reward": st.floats(-2e6, 2e6) | st.sampled_from([math.nan, math.inf, 0.5]),
    "versions": st.none() | st.lists(st.integers(-1, 5), max_size=3),
    "logprobs": st.none() | st.lists(st.floats(-9, 0.1), max_size=3),
}


@pytest.mark.promise("I1")
@settings(max_examples=400)
@given(st.lists(st.fixed_dictionaries({}, optional=VALUES), min_size=1, max_size=3), st.sampled_from(list(RECIPES)))
def test_whatever_is_accepted_the_trainer_takes(changes: list[dict[str, Any]], algorithm: str):
    """A post is refused with a name or passes the engine's own check: one trajectory cannot cost all their update."""
    accepted: Sequence[Trajectory] = ()
    refused: InvalidRequest | None = None
    try:
        accepted = check(*(GOOD | change for change in changes))
    except InvalidRequest as e:
        refused = e
    if refused is not None:
        assert refused.param is not None
        assert refused.param.startswith("trajectories[") and refused.param in refused.message
        return
    device: Any = SimpleNamespace(_most_tokens=6, _vocab_size=10)
    for batch in batches([accepted], RLTrainingConfig(algorithm=algorithm)):  # type: ignore[arg-type]
        for datum in batch.data:
            MLXTrainers._check(device, datum, batch, "datum")


def test_how_many_may_come_at_once():
    for items in ([], [GOOD] * 4097):
        with pytest.raises(InvalidRequest) as e:
            check(*items)
        assert e.value.param == "trajectories"


@pytest.mark.promise("E8")
def test_how_many_messages_a_prompt_may_have():
    prompt = [{"role": "user", "content": "x"}] * (limits.MAX_MESSAGES + 1)
    with pytest.raises(InvalidRequest, match="at most 4096 messages") as e:
        check(GOOD, GOOD | {"prompt_token_ids": None, "prompt": prompt})
    assert e.value.param == "trajectories[1].prompt"
