"""A leader and three trainers whose versions are averaged in rounds."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.machines import Machine, closing
from tests.waiting import until

TANDEM = [sys.executable, "-m", "mlx_tandem"]
KEY = ("--api-key-file", "tandem.key")
TRAINS = """
cluster: {round_updates: 2}
rl_training: {lora_rank: 4, learning_rate: 3.0e-5, update_frequency: 16, guard_prompts: 0}
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, list[Machine]]]:
    folder = tmp_path_factory.mktemp("federation")
    leader = Machine(folder / "leader", [*TANDEM, "serve", "--share-model", "--federate", "3", *KEY])
    words = ["train", "rl", "--connect-to", f"127.0.0.1:{leader.port}", "--config", "trains.yaml", *KEY]
    trainers = [Machine(folder / f"trainer{i}", [*TANDEM, *words]) for i in range(3)]
    with closing(leader, *trainers):
        leader.start()
        for trainer in trainers:
            (trainer.folder / "trains.yaml").write_text(TRAINS, encoding="utf-8")
            trainer.start()
        yield leader, trainers


def all_have(machines: tuple[Machine, list[Machine]], version: int) -> None:
    """All come to serve this version, and it is the same for all."""
    leader, trainers = machines
    until(lambda: leader.version() == version)
    for trainer in trainers:
        until(lambda trainer=trainer: trainer.status()["version"] == version)
    answers = [machine.answer(f"policy@{version}")["choices"] for machine in (leader, *trainers)]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.restarts
@pytest.mark.timeout(300)
def test_rounds(machines: tuple[Machine, list[Machine]]) -> None:
    leader, trainers = machines
    all_have(machines, 1)
    for trainer, right in zip(trainers, "579", strict=True):
        trainer.learn(right)
        assert trainer.learn(right) == 3
    all_have(machines, 4)
    status = leader.status()
    assert (status["rounds"], status["contributions"], len(status["trainers"])) == (1, 0, 3)

    for trainer in trainers[:2]:
        trainer.learn("1")
        trainer.learn("1")
    until(lambda: leader.status()["contributions"] == 2)
    leader.kill()  # which forgets the contributions
    leader.start()
    until(lambda: leader.status()["contributions"] == 2)
    trainers[2].learn("1")
    trainers[2].kill()
    trainers[2].start()  # begins the round again
    until(lambda: trainers[2].status()["version"] == 4)
    trainers[2].learn("2")
    assert leader.version() == 4
    trainers[2].learn("2")
    until(lambda: leader.version() > 4)
    all_have(machines, leader.version())
