"""What becomes of Atropos' groups, and how a trainer asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import convert

from mlx_tandem.config import Config, EngineConfig, ModelConfig, RLTrainingConfig
from mlx_tandem.errors import EngineUnavailable, InvalidRequest
from mlx_tandem.files import StorageError
from mlx_tandem.training.atropos.client import MOST_BYTES, Client, NotRegistered, Unreachable, check_url
from mlx_tandem.training.atropos.feed import Feed, batch_size
from mlx_tandem.training.atropos.scored import ScoredData, trajectories
from mlx_tandem.training.online import advantages
from mlx_tandem.training.trajectories import Trajectory
from tests.atropos_api import atropos_api, scored

GROUP = scored([3, 4], [[5, 6], [7, 8], [5, 8]], [1.0, 0.0, 0.5])


def made(change: dict[str, Any] | None = None) -> list[Trajectory]:
    group = convert(GROUP | (change or {}), ScoredData)
    return trajectories(group, vocab_size=10, most_tokens=6, created=5.0)


def test_a_group_becomes_siblings_with_their_logprobs():
    found = made()
    assert len({t.group for t in found}) == 1 and len({t.id for t in found}) == 3
    assert [t.reward for t in found] == [1.0, 0.0, 0.5]
    for t in found:
        assert (t.prompt, t.logprobs, t.external, t.mask, t.temperature) == ((3, 4), (-0.5, -0.5), False, (), 1.0)
        assert t.metadata == {"env_id": 0}
    assert {t.group for t in made()} != {found[0].group}, "another group has another name"


def test_what_lies_between_trained_tokens_is_not_trained_on():
    several = {"tokens": [[3, 5, 4, 6, 4]], "masks": [[-100, 5, -100, 6, -100]], "scores": [1.0]}
    (t,) = made(several | {"inference_logprobs": [[1.0, -0.1, 1.0, -0.3, 1.0]]})
    assert (t.prompt, t.tokens, t.mask, t.logprobs) == ((3,), (5, 4, 6), (1, 0, 1), (-0.1, 0.0, -0.3))
    assert len(t.turns) == 2


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        [],
        [[1.0, 1.0, -0.5]] * 3,
        [[1.0, 1.0, 1.0, -0.5]] * 3,
        [[1.0, 1.0, float("nan"), -0.5]] * 3,
    ],
)
def test_logprobs_that_nobody_told_are_computed_again(logprobs):
    assert [(t.external, t.logprobs) for t in made({"inference_logprobs": logprobs})] == [(True, ())] * 3


def test_a_sequence_without_advantage_counts_in_the_mean_and_teaches_nothing():
    found = made({"overrides": [{}, {"set_advantage_to_zero": True}, None]})
    assert [t.mask for t in found] == [(), (0, 0), ()]
    own = [advantages.datum(t, (a,)) for t, a in zip(found, advantages.advantages([1.0, 0.0, 0.5]), strict=True)]
    assert [any(d.trained) for d in own] == [True, False, True]
    assert own[0].weights == (0.5, 0.5), "the mean is 0.5, the second score included"


@pytest.mark.parametrize(
    ("change", "temperature", "top_p"),
    [
        ({"generation_params": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 5}}, [0.7] * 3, 0.9),
        ({"group_overrides": {"temperature": 0.6}}, [0.6] * 3, 1.0),
        ({"generation_params": {"temperature": 0.7}, "group_overrides": {"temperature": 0.6}}, [0.7] * 3, 1.0),
        (
            {"generation_params": {"temperature": 0.7}, "overrides": [{"temperature": 1.2}, {}, {}]},
            [1.2, 0.7, 0.7],
            1.0,
        ),
    ],
)
def test_the_temperature_of_each_sequence(change, temperature, top_p):
    found = made(change)
    assert [t.temperature for t in found] == temperature
    assert [t.truncation.top_p for t in found] == [top_p] * 3


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"masks": [[0, 0, 1, 1]] * 3}, "masks[0]"),
        ({"masks": [[-100] * 4] * 3}, "masks[0]"),
        ({"masks": [[-100, -100, 5]] * 3}, "masks[0]"),
        ({"masks": [[-100] * 4]}, "masks"),
        ({"tokens": [[3, 4, 5, 60]] * 3}, "tokens[0]"),
        ({"tokens": [[3, 4, 5, 6, 6, 6, 6]] * 3, "masks": [[-100, 4, 5, 6, 6, 6, 6]] * 3}, "tokens[0]"),
        ({"tokens": [[5, 6]] * 3, "masks": [[5, 6]] * 3}, "masks[0]"),
        ({"scores": [1.0]}, "scores"),
        ({"scores": [1.0, float("nan"), 0.0]}, "scores[1]"),
        ({"images": [["data:"]]}, "images"),
        ({"generation_params": {"temperature": 0}}, "temperature"),
        ({"generation_params": {"top_p": "x"}}, "top_p"),
    ],
)
def test_what_cannot_be_learned_from_is_named(change, param):
    with pytest.raises(InvalidRequest) as raised:
        made(change)
    assert raised.value.param == param


def test_batches_that_groups_of_powers_of_two_fill():
    sizes = {100: 96, 32: 32, 31: 16, 8: 8, 5: 4, 1: 1, 1000: 992}
    assert {n: batch_size(n) for n in sizes} == sizes


@pytest.mark.parametrize(
    "url", ["", "localhost:8001", "ftp://x", "http://", "http://x:port", "http://x/?a=1", "http://a@b"]
)
def test_addresses_that_are_none(url):
    with pytest.raises(InvalidRequest, match="atropos_url"):
        check_url(url)


def test_a_trainer_s_conversation():
    registration = {
        "wandb_group": "", "wandb_project": "", "batch_size": 6, "max_token_len": 64, "checkpoint_dir": "x",
        "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 9,
    }  # fmt: skip

    async def talk(client: Client) -> None:
        with pytest.raises(NotRegistered):
            await client.batch()
        with pytest.raises(Unreachable, match="422"):
            await client.register(batch_size=6)
        assert await client.register(**registration) == 6
        assert await client.register(**registration | {"batch_size": 8}) == 6, "the first trainer decides"
        assert await client.batch() is None
        api.put(GROUP)
        assert await client.batch() is None, "half of a batch"
        api.put(GROUP)
        batch = await client.batch()
        assert batch is not None and [group.scores for group in batch] == [GROUP["scores"]] * 2
        assert await client.batch() is None

    with atropos_api() as api:
        asyncio.run(talk(Client(api.url)))
        gone = Client(api.url)
    with pytest.raises(Unreachable, match="refused"):
        asyncio.run(gone.batch())


@pytest.mark.parametrize("reply", [{"batch": [{"tokens": 3}]}, [], {"batch": [GROUP | {"scores": ["x"]}]}])
def test_replies_of_another_form(reply, monkeypatch):
    with atropos_api() as api:
        monkeypatch.setattr(api, "_get_batch", lambda body: (200, reply), raising=False)
        with pytest.raises(Unreachable, match="form"):
            asyncio.run(Client(api.url).batch())


def test_a_reply_is_bounded(monkeypatch):
    monkeypatch.setattr("mlx_tandem.training.atropos.client.MOST_BYTES", 10)
    assert MOST_BYTES > 1 << 20
    with atropos_api() as api, pytest.raises(Unreachable, match="over 10 bytes"):
        asyncio.run(Client(api.url).batch())


class Learner:
    """What the feed asks of a learner."""

    def __init__(self, *lacking: int | None) -> None:
        self.kept: list[list[Trajectory]] = []
        self.failing: list[Exception] = []
        self._lacking = list(lacking)

    def lacking(self) -> int | None:
        return self._lacking.pop(0) if len(self._lacking) > 1 else self._lacking[0]

    def status(self) -> Any:
        return SimpleNamespace(step=7)

    async def add(self, group: list[Trajectory], size: int) -> frozenset[str]:
        assert size == len(group)
        if self.failing:
            raise self.failing.pop(0)
        self.kept.append(group)
        return frozenset()


def fed(api: Any, learner: Learner, done: Callable[[Feed], object], monkeypatch: pytest.MonkeyPatch) -> Feed:
    """A feed that has run until it is `done`."""
    monkeypatch.setattr("mlx_tandem.training.atropos.feed.POLL_SECONDS", 0.002)
    training = RLTrainingConfig(enabled=True, update_frequency=6, atropos_url=f"{api.url}/")
    config = Config(EngineConfig(ModelConfig(path="")), rl_training=training)
    engine: Any = SimpleNamespace(check_ready=lambda: SimpleNamespace(vocab_size=10, max_model_len=6))
    feed = Feed(config, engine, cast(Any, learner), Client(f"{api.url}/"), lambda: 5.0)

    async def run() -> None:
        task = asyncio.create_task(feed.run())
        try:
            async with asyncio.timeout(30):
                while not done(feed):
                    await asyncio.sleep(0.001)
        finally:
            task.cancel()

    asyncio.run(run())
    return feed


FOUR = scored([3, 4], [[5, 6], [7, 8], [5, 8], [5, 5]], [1.0, 0.0, 0.5, 0.0])


def test_nothing_is_asked_for_while_there_is_enough_or_learning_is_stopped(monkeypatch):
    with atropos_api() as api:
        states = {
            lacking: fed(
                api, Learner(lacking), lambda feed: feed.status.state != "connecting", monkeypatch
            ).status.state
            for lacking in (None, 0, -5)
        }
        assert states == {None: "stopped", 0: "learning", -5: "learning"}
        assert api.asked == []


def test_a_batch_waits_while_it_cannot_be_kept(monkeypatch):
    with atropos_api() as api:
        learner = Learner(4)
        learner.failing = [EngineUnavailable("the engine is not there"), StorageError("the drive is full")]
        api.put(FOUR)
        feed = fed(api, learner, lambda feed: learner.kept, monkeypatch)
        assert api.registration is not None and api.registration["starting_step"] == 7
        assert [len(group) for group in learner.kept] == [4]
        assert (feed.status.batches, feed.status.trajectories) == (1, 4)


def test_an_error_that_nobody_expected_ends_nothing(monkeypatch):
    with atropos_api() as api:
        learner = Learner(4)
        learner.failing = [KeyError("x")]
        api.put(FOUR, FOUR)
        feed = fed(api, learner, lambda feed: learner.kept, monkeypatch)
        assert (feed.status.batches, len(learner.kept)) == (2, 1)


def test_what_may_be_wrong_is_said_after_a_while(monkeypatch, caplog):
    with atropos_api() as api:
        fed(api, Learner(4), lambda feed: caplog.records and "no batch yet" in caplog.text, monkeypatch)
        assert api.asked.count("/batch") >= 60
