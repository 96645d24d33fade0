"""Playing environments of verifiers: what becomes of their episodes, and the life of the program that plays them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from mlx_tandem.config import Config, EngineConfig, ModelConfig, RLTrainingConfig, ServerConfig
from mlx_tandem.errors import EngineUnavailable, InvalidRequest
from mlx_tandem.files import StorageError
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.training.verifiers import environment, player
from mlx_tandem.training.verifiers.environment import Environment, check
from mlx_tandem.types import AdapterRef
from tests.serving import ROOT
from tests.unit.training.test_atropos import Learner
from tests.verifiers_double import Taskset, branch, episode, installed, node, trace

POLICY = AdapterRef("policy", 3, "digest")


# -- what becomes of episodes -----------------------------------------------------------------------------------------


def test_what_two_branches_share_is_learned_once():
    asked, answered = node([3, 4]), node([5, 6], [-0.1, -0.2])
    found = player.answers(
        trace(
            branch(asked, answered, node([7]), node([8], [-0.3])),
            branch(asked, answered, node([9]), node([8, 2], [-0.4, -0.5])),
            branch(asked, answered),
            branch(node([1]), node([2], [-0.6]), trainable=False),
            reward=0.5,
        )
    )
    assert [answer["tokens"] for answer in found] == [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 9, 8, 2]]
    assert [answer["masks"] for answer in found] == [
        [-100, -100, 5, 6, -100, 8],
        [-100, -100, -100, -100, -100, 8, 2],
    ]
    assert [answer["logprobs"] for answer in found] == [
        [1.0, 1.0, -0.1, -0.2, 1.0, -0.3],
        [1.0, 1.0, 1.0, 1.0, 1.0, -0.4, -0.5],
    ]
    assert [answer["score"] for answer in found] == [0.5, 0.5]


def test_logprobs_that_are_not_told_are_not_taken_for_certainty():
    drawn = node([5, 6], [-0.1, -0.2])
    drawn.logprobs = [-0.1]
    lacking = branch(node([3]), drawn)
    lacking.logprobs = [0.0, -0.1, 0.0]  # what verifiers fills in
    (found,) = player.answers(trace(lacking, reward=1.0))
    assert (found["masks"], found["logprobs"]) == ([-100, 5, 6], [])


def test_agents_are_compared_with_themselves_and_others_models_teach_nothing():
    def played(reward: float) -> Any:
        own = branch(node([3]), node([5], [-0.5]))
        judge = trace(own, reward=9.0, model="judge")
        shown = trace(own, reward=8.0)
        shown.agent.trainable = False
        left = trace(own, reward=reward, name="left", sampling={"temperature": 0.7, "top_p": None, "max_tokens": 5})
        return episode(left, trace(own, reward=-reward, name="right"), judge, shown)

    left, right = player.groups([played(1.0), played(2.0)], "policy@1")
    assert (left["scores"], right["scores"]) == ([1.0, 2.0], [-1.0, -2.0])
    assert left["overrides"] == [{"temperature": 0.7}] * 2


def test_tasks_come_again_in_another_order():
    drawn = list(itertools.islice(player.tasks(Taskset([1, 2, 3, 4, 5]), SimpleNamespace(limit=4)), 12))
    rounds = [drawn[:4], drawn[4:8], drawn[8:]]
    assert all(sorted(each) == [1, 2, 3, 4] for each in rounds) and len({tuple(each) for each in rounds}) > 1
    with pytest.raises(ValueError, match="no task"):
        next(player.tasks(Taskset([]), SimpleNamespace(limit=None)))


# -- the program ------------------------------------------------------------------------------------------------------


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, for a Python that has the double of verifiers."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(installed(tmp_path / "packages")), str(ROOT))))
    return tmp_path


def settings(folder: Path, **taskset: object) -> Config:
    lines = "\n".join(f"{name} = {value!r}" for name, value in ({"id": "sorting"} | taskset).items())
    (folder / "sorting.toml").write_text(f"num_rollouts = 2\n[env.taskset]\n{lines}\n")
    training = RLTrainingConfig(enabled=True, verifiers=str(folder / "sorting.toml"))
    return Config(EngineConfig(ModelConfig(path=str(folder))), rl_training=training)


def played(config: Config, learner: Learner, done: Callable[[Environment], object]) -> Environment:
    """An environment that has been played until it is `done`."""
    info = SimpleNamespace(vocab_size=10, max_model_len=6)
    engine: Any = SimpleNamespace(check_ready=lambda: info, info=info)
    made = Environment(config, engine, cast(Any, learner), lambda: POLICY, lambda: 5.0)

    async def run() -> None:
        task = asyncio.create_task(made.run("http://127.0.0.1:9"))
        try:
            async with asyncio.timeout(60):
                while not done(made):
                    await asyncio.sleep(0.005)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(environment, "PAUSES", (0.01, 0.05))


def test_rounds_are_as_large_as_what_is_lacking(double: Path):
    learner = Learner(5, 0)
    made = played(settings(double, answers=[5, 6]), learner, lambda made: made.status.state == "learning")
    kept: list[list[Trajectory]] = learner.kept
    assert [len(group) for group in kept] == [2, 2, 2], "three tasks of two episodes each"
    assert {(t.tokens, t.logprobs, t.versions, t.external) for g in kept for t in g} == {
        ((5, 6), (-0.5, -0.5), (3, 3), False)
    }
    status = made.status
    assert (status.rounds, status.episodes, status.failed_episodes, status.trajectories) == (1, 6, 0, 6)
    assert (status.verifiers, status.reward, status.error) == ("0.4.0", 0.5, "")


def test_an_error_that_nobody_expected_ends_nothing(double: Path, caplog: pytest.LogCaptureFixture):
    learner = Learner(2, 2, 0)
    learner.failing = [KeyError("x")]
    played(settings(double, answers=[5, 6]), learner, lambda made: made.status.rounds)
    assert len(learner.kept) == 1 and "playing the environment failed" in caplog.text


def test_failed_episodes_and_groups_of_no_use_are_counted(double: Path):
    learner = Learner(8, 0)
    learner.failing = [InvalidRequest("a token is out of range")]
    made = played(settings(double, answers=[5, 6], fails=1), learner, lambda made: made.status.rounds)
    status = made.status
    assert (status.episodes, status.failed_episodes, status.trajectories, status.refused_groups) == (8, 2, 4, 1)
    assert status.error == "EnvError: the server said 503"


def test_a_reward_that_is_no_number_is_a_failed_episode(double: Path):
    learner = Learner(8, 0)
    made = played(settings(double, answers=[5, 6], worth="nan"), learner, lambda made: made.status.rounds)
    assert (made.status.episodes, made.status.failed_episodes, made.status.trajectories) == (8, 4, 4)
    assert made.status.error == "a reward is no finite number"


def test_a_group_waits_while_it_cannot_be_kept(double: Path):
    learner = Learner(2, 0)
    learner.failing = [EngineUnavailable("the engine is not there"), StorageError("the drive is full")]
    played(settings(double, answers=[5, 6]), learner, lambda made: made.status.rounds)
    assert [len(group) for group in learner.kept] == [2]


def test_the_program_is_started_again_and_its_last_words_are_said(double: Path, caplog: pytest.LogCaptureFixture):
    learner = Learner(2)
    made = played(settings(double, answers=[5, 6], ends=3), learner, lambda made: caplog.text.count("has ended") >= 1)
    assert made.status.error.startswith("it ended with the status 3")
    wrong = settings(double, id="shorting", answers=[5])
    made = played(wrong, learner, lambda made: made.status.error)
    assert made.status.error.endswith("1; it said last: ModuleNotFoundError: taskset 'shorting' not found")
    assert made.status.state == "failed"


def test_the_program_ends_in_the_middle_of_a_round_when_its_server_is_gone(double: Path):
    config = settings(double, answers=[5, 6], hangs=1)
    told = {"environment": config.rl_training.verifiers, "url": "http://127.0.0.1:9", "tokenizer": "x", "rollouts": 2}
    with subprocess.Popen(
        [sys.executable, "-P", player.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        print(json.dumps(told), file=program.stdin, flush=True)
        assert json.loads(program.stdout.readline()) == {"ready": "0.4.0"}
        print(json.dumps({"model": "policy@1", "episodes": 8}), file=program.stdin, flush=True)
        for _ in range(3):
            assert "group" in json.loads(program.stdout.readline())
        program.stdin.close()
        try:
            assert program.wait(60) == 0
        finally:
            program.kill()


@pytest.mark.parametrize("lacking", [None, 0, -5])
def test_nothing_is_played_while_there_is_enough_or_learning_is_stopped(double: Path, lacking: int | None):
    made = played(settings(double, answers=[5]), Learner(lacking), lambda made: made.status.state != "starting")
    assert (made.status.state, made.status.rounds) == ("stopped" if lacking is None else "learning", 0)


def test_the_program_gets_no_other_variables_than_it_needs(double: Path, monkeypatch: pytest.MonkeyPatch):
    secrets = {"AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "TANDEM_API_KEY_FILE", "VLLM_API_KEY"}
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    for name in ("JUDGE_KEY", "HEADER_KEY", "ASKED_FOR", "HF_HOME", "LC_TIME", "https_proxy"):
        monkeypatch.setenv(name, "wanted")
    monkeypatch.setenv("TANDEM_API_KEY", "of the shell")
    told = double / "variables.json"
    config = settings(double, answers=[5], tells=str(told), api_key_var="JUDGE_KEY", forward_env=["HEADER_KEY"])
    training = replace(config.rl_training, verifiers_variables=("ASKED_FOR",))

    def variables(key: str) -> dict[str, str]:
        own = replace(config, server=ServerConfig(api_key=key), rl_training=training)
        played(own, Learner(2), lambda made: made.status.verifiers)
        found: dict[str, str] = json.loads(told.read_text())
        return found

    found = variables("the-key")
    assert found["TANDEM_API_KEY"] == "the-key"
    assert {name for name, value in found.items() if value == "wanted"} == {
        "JUDGE_KEY", "HEADER_KEY", "ASKED_FOR", "HF_HOME", "LC_TIME", "https_proxy"
    }  # fmt: skip
    assert {"PATH", "PYTHONPATH"} <= set(found)
    assert not secrets & set(found)
    assert "TANDEM_API_KEY" not in variables("")


# -- the settings -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_played_is_refused_before_anything_is_loaded(double: Path, monkeypatch: pytest.MonkeyPatch):
    config = settings(double, answers=[5])
    check(config)

    def refused(server: ServerConfig = config.server, **training: Any) -> str:
        with pytest.raises(InvalidRequest) as raised:
            check(replace(config, server=server, rl_training=replace(config.rl_training, **training)))
        return raised.value.message

    assert "there is no such file" in refused(verifiers="other.toml")
    assert "cannot be run" in refused(verifiers_python=str(double / "python"))
    assert "server.ssl_certfile" in refused(server=ServerConfig(ssl_certfile="x.pem"))
    monkeypatch.setenv("PYTHONPATH", str(installed(double / "old", "0.1.14")))
    assert "has verifiers 0.1.14, which 'rl_training.verifiers' needs: install it with" in refused()
    monkeypatch.delenv("PYTHONPATH")
    assert f"{sys.executable} has no verifiers" in refused() and "--environment-python" in refused()
