"""Three machines as docs/machines.md starts them: versions and trajectories arrive, whatever is cut, killed or
changed."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_tandem import demo
from tests.machines import Machine, Network, closing
from tests.waiting import until

ROOT = Path(__file__).parents[2]
TANDEM = [sys.executable, "-m", "mlx_tandem"]
PAGE = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
LEARNS = ("--learning-rate", "3e-5", "--update-frequency", "16", "--lora-rank", "4")


def printed(*words: str, leader: int) -> list[str]:
    """The page's command that has these words, for a leader on a port of this machine."""
    commands = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
    (command,) = (line for line in commands if f" {' '.join(words)} " in f"{line} ")
    return [*TANDEM, *shlex.split(command.replace("node1:8000", f"127.0.0.1:{leader}"))[1:]]


@dataclass
class Three:
    leader: Machine
    trainer: Machine
    follower: Machine
    network: Network
    """The follower's way to the leader."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    folder = tmp_path_factory.mktemp("machines")
    for name in ("sums", "own"):
        shutil.copytree(demo.ADAPTER_PATHS["shout"], folder / "node1" / "adapters" / name)
    leader = Machine(folder / "node1", [*printed("--share-model", leader=0), "--adapter-root", "adapters"])
    network = Network(leader.port)
    trainer = Machine(folder / "node2", [*printed("train", "rl", leader=leader.port), *LEARNS])
    longer = ("--max-model-len", "512", "--num-blocks", "512")
    own = ("--adapter", f"own={demo.ADAPTER_PATHS['json']}")
    follower = Machine(folder / "node3", [*printed("serve", "--connect-to", leader=network.port), *own], small=longer)
    with closing(network, leader, trainer, follower):
        leader.start()
        trainer.start()
        follower.start()
        yield Three(leader, trainer, follower, network)


def is_the_same(three: Three, version: int) -> None:
    """The follower comes to serve this version, and answers as the leader and the trainer do."""
    until(lambda: three.follower.version() == version)
    assert three.leader.version() == version
    answers = [m.answer() for m in (three.leader, three.follower, three.trainer)]
    assert [a["model"] for a in answers] == [f"policy@{version}"] * 3
    assert answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]  # to the last bit of each logprob


@pytest.mark.restarts
@pytest.mark.timeout(300)
def test_a_publish_is_served_by_the_follower_and_answers_identically(three: Three) -> None:
    until(lambda: three.follower.version() == 1)
    assert (three.leader.status()["role"], three.trainer.status()["role"]) == ("leader", "trainer")
    version = three.trainer.learn("5")
    assert version == 2
    is_the_same(three, version)
    for machine in (three.leader, three.follower):
        assert machine.answer("policy@1")["model"] == "policy@1"  # is there, too


@pytest.mark.restarts
@pytest.mark.timeout(300)
def test_a_cut_network_heals(three: Three) -> None:
    before = three.follower.version()
    three.network.cut()
    first, second = three.trainer.learn("6"), three.trainer.learn("7")
    until(lambda: three.leader.version() == second)
    assert three.follower.answer()["model"] == f"policy@{before}"
    collected = three.follower.collect("What is 3 + 4?")
    until(lambda: three.follower.status()["error"])
    assert three.follower.status()["waiting"] == len(collected)
    taken = three.trainer.status()["trajectories"]
    three.network.heal()
    is_the_same(three, second)
    assert second == first + 1
    until(lambda: three.trainer.status()["trajectories"] == taken + len(collected))
    until(lambda: three.follower.status()["error"] == "")
    assert three.follower.status()["waiting"] == three.leader.status()["waiting"] == 0


@pytest.mark.restarts
@pytest.mark.timeout(300)
def test_what_the_leader_refuses_holds_up_nothing(three: Three) -> None:
    before, taken = three.follower.status(), three.trainer.status()["trajectories"]
    three.network.cut()
    three.follower.collect("What is 1 + 1?")
    three.follower.collect("What is " + "1 + " * 150 + "1?")  # longer than the leader's context
    three.follower.collect("What is 1 + 2?")
    three.network.heal()
    until(lambda: three.follower.status()["waiting"] == 0)
    after = three.follower.status()
    assert (after["sent"] - before["sent"], after["refused"] - before["refused"]) == (8, 4)
    until(lambda: three.trainer.status()["trajectories"] == taken + 8)


@pytest.mark.restarts
@pytest.mark.timeout(300)
def test_a_changed_file_is_not_served(three: Three) -> None:
    before = three.follower.version()
    three.network.change()
    version = three.trainer.learn("8")
    until(lambda: "bytes were changed" in three.follower.status()["error"])
    assert three.leader.version() == version
    assert three.follower.answer()["model"] == f"policy@{before}"
    three.network.heal()
    is_the_same(three, version)


@pytest.mark.restarts
@pytest.mark.timeout(300)
def test_a_trainer_that_goes_back_takes_everybody_with_it(three: Three) -> None:
    version = three.trainer.learn("2")
    is_the_same(three, version)
    three.trainer.ask("/model/switch-lora", {"version": version - 1})
    is_the_same(three, version - 1)
    three.trainer.ask("/model/switch-lora", {"version": "latest"})
    is_the_same(three, version)


@pytest.mark.restarts
@pytest.mark.timeout(300)
def test_adapters_of_the_leader_come_and_go(three: Three) -> None:
    three.leader.ask("/v1/adapters", {"name": "sums"})
    until(lambda: "sums" in three.follower.adapters())
    assert three.follower.answer("sums")["choices"] == three.leader.answer("sums")["choices"]
    three.leader.ask("/v1/adapters/sums", method="DELETE")
    until(lambda: "sums" not in three.follower.adapters())
    assert "policy" in three.follower.adapters()
    before = three.follower.answer("own")["choices"]
    three.leader.ask("/v1/adapters", {"name": "own"})  # a name that the follower uses itself
    until(lambda: "'own' is the name of an adapter of this server" in three.follower.status()["error"])
    assert three.follower.answer("own")["choices"] == before != three.leader.answer("own")["choices"]
    three.leader.ask("/v1/adapters/own", method="DELETE")
    until(lambda: three.follower.status()["error"] == "")


@pytest.mark.restarts
@pytest.mark.timeout(300)
def test_each_machine_may_be_killed_at_any_time(three: Three) -> None:
    version = three.trainer.version()
    three.network.cut()
    kept = three.follower.collect("What is 2 + 2?")
    three.follower.kill()
    three.follower.start()  # without its leader
    assert three.follower.answer()["model"] == f"policy@{version}"
    assert three.follower.status()["waiting"] == len(kept)

    three.leader.kill()
    three.network.heal()
    version = three.trainer.learn("9")  # while there is no leader
    assert three.follower.answer()["model"] == f"policy@{version - 1}"
    three.leader.start()
    is_the_same(three, version)

    until(lambda: three.trainer.status()["trajectories"] >= len(kept))
    more = three.leader.collect("What is 2 + 3?")
    three.trainer.kill()
    more += three.follower.collect("What is 2 + 4?")
    until(lambda: three.leader.status()["waiting"] >= 4)
    three.trainer.start()
    until(lambda: three.leader.status()["waiting"] == 0)
    status = three.trainer.ask("/v1/training/status")
    assert status["version"] == version
    is_the_same(three, three.trainer.learn("1"))


@pytest.mark.restarts
@pytest.mark.timeout(300)
def test_a_trainer_without_its_folders_begins_with_what_the_leader_serves(three: Three) -> None:
    version = three.leader.version()
    three.trainer.kill()
    for name in ("checkpoints", "cluster"):
        shutil.rmtree(three.trainer.folder / name)
    three.trainer.start()
    assert three.trainer.version() == version
    is_the_same(three, version)
    for more in range(1, 7):
        assert three.trainer.learn("3") == version + more
    is_the_same(three, version + 6)
    going_back = f'"adapter published", "adapter": "policy@{version}"'
    before = three.leader.log.count(going_back)
    three.trainer.kill()
    three.trainer.start()  # computes the last updates again, and serves an earlier version until then
    until(lambda: three.trainer.version() == version + 6)
    is_the_same(three, version + 6)
    assert three.leader.log.count(going_back) == before
