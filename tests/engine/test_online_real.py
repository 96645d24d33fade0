"""The online loop on a real engine: what it has learned survives the end of engine and process, bit for bit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlx_tandem.config import CheckpointingConfig, Config, DutyConfig, EngineConfig, ModelConfig, RLTrainingConfig
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.client.process import EngineProcess, process_launch
from mlx_tandem.model.loader import load_unread
from mlx_tandem.model.targets import find_targets
from mlx_tandem.training.online.online import OnlineLearner
from mlx_tandem.training.online.update import Pending
from mlx_tandem.training.store.records import Began
from mlx_tandem.training.trajectories import Trajectory
from tests import tiny_models
from tests.api.learns import collect, learning_config
from tests.serving import serving
from tests.unit.learning_fakes import Points, Server

UPDATES = 4


def settings(folder: Path, checkpoints: Path) -> Config:
    model = ModelConfig(path=str(tiny_models.make(folder / "model", "qwen3")))
    return Config(
        EngineConfig(model, duty=DutyConfig(micro_batch_tokens=64), heartbeat_seconds=0.1),
        rl_training=RLTrainingConfig(
            enabled=True, lora_rank=4, lora_alpha=8.0, update_frequency=8, learning_rate=1e-3, max_staleness=100
        ),
        checkpointing=CheckpointingConfig(str(checkpoints), interval=2),
    )


def batch(number: int) -> list[Trajectory]:
    """Two groups of four."""
    g = random.Random(number)

    def one(i: int) -> Trajectory:
        tokens = tuple(g.randrange(3, tiny_models.VOCAB) for _ in range(g.randint(1, 12)))
        logprobs = tuple(-5.0 - g.random() for _ in tokens)
        versions = (0,) * len(tokens)
        group = f"{number}-{i // 4}"
        return Trajectory(f"{number}.{i}", group, (5, 6), tokens, logprobs, logprobs, versions, 0.7, g.random())

    return [one(i) for i in range(8)]


class Process:
    """A learner and its engine. The engine is killed while call number `kill_at` of the learner is under way."""

    def __init__(self, config: Config, kill_at: int) -> None:
        self.calls, self.kill_at = 0, kill_at
        self._launch = process_launch(config.engine)
        self._engine: EngineProcess | None = None
        self.client = EngineClient(self._started, on_ready=self._bring_up)
        server = Server(self.client)  # type: ignore[arg-type]  # samples nothing here
        self.client.points = Points()  # type: ignore[attr-defined]
        self.learner = OnlineLearner(config, self.client, server)
        original = self.client._call

        async def call(message):  # type: ignore[no-untyped-def]
            self.calls += 1
            answer = asyncio.ensure_future(original(message))
            if self.calls == self.kill_at and self._engine is not None:
                await asyncio.sleep(0)
                self._engine.kill()
            return await answer

        self.client._call = call  # type: ignore[method-assign]

    def _started(self):  # type: ignore[no-untyped-def]
        launched = self._launch()
        self._engine = launched[1]
        return launched

    async def _bring_up(self) -> None:
        await self.learner.bring_up()

    async def learn(self, updates: int) -> str:
        """From the batches up to number `updates`; the digest of what is served then."""
        await self.client.start()
        await self.client.wait_ready()
        self.learner.start()
        for i in range(updates):
            await self.learner.add(batch(i), 4)
            while self.learner.status().updates <= i or self.learner.status().recovering:
                await asyncio.sleep(0.005)
        ref = self.learner._serving.current()
        assert ref is not None and ref.version == updates + 1
        return ref.digest

    async def end(self, *, suddenly: bool = False) -> None:
        if suddenly:
            ledger = self.learner._learner.ledger
            self.learner.stop()
            ledger.checkpoints.close()
            ledger.shared.close()
        else:
            await self.learner.close()
        await self.client.close()


def run(folder: Path, checkpoints: Path, kill_at: int = 0) -> tuple[str, int]:
    async def go() -> tuple[str, int]:
        process = Process(settings(folder, checkpoints), kill_at)
        try:
            return await process.learn(UPDATES), process.calls
        finally:
            await process.end()

    return asyncio.run(go())


@pytest.mark.slow
def test_an_engine_that_is_killed_during_an_update_changes_nothing(tmp_path: Path) -> None:
    whole, calls = run(tmp_path, tmp_path / "whole")
    assert calls > 20
    for kill_at in random.Random(calls).sample(range(3, calls - 1), 4):
        assert run(tmp_path, tmp_path / str(kill_at), kill_at)[0] == whole, f"killed during call {kill_at} of {calls}"


@pytest.mark.slow
def test_the_next_process_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    """From the newest state of the trainer, after which the third update is computed again if it is not in it."""
    whole, _ = run(tmp_path, tmp_path / "whole")

    async def go() -> str:
        config = settings(tmp_path, tmp_path / "parts")
        first = Process(config, 0)
        await first.learn(3)
        await first.end(suddenly=True)
        second = Process(config, 0)
        try:
            return await second.learn(UPDATES)
        finally:
            await second.end()

    assert asyncio.run(go()) == whole


def test_live_completions_are_learned_under_the_distribution_that_drew_them(tmp_path: Path) -> None:
    """Sampler and trainer agree on the same tokens, and a version that was learned differs from the one before."""
    with serving(learning_config(tmp_path)) as server:
        for seed in range(4):
            collect(server, seed=seed, temperature=1.2)
        reply = server.client.post("/v1/training/update", json={"wait": True})
        assert reply.status_code == 200, reply.text
        report = reply.json()["report"]
        assert (report["outcome"], report["verdict"], report["version"]) == ("published", "ok", 2)
        assert 0 <= report["mismatch_k3"] < 1e-8
        assert report["kl"] > 0
        for seed in range(4):
            collect(server, seed=seed, temperature=1.2)
        report = server.client.post("/v1/training/update", json={"wait": True}).json()["report"]
        assert (report["verdict"], report["version"]) == ("ok", 3)
        assert 0 < report["mismatch_k3"] < 1e-8, "measured on tokens of version 2"


@pytest.mark.parametrize("kind", ["base", "init", "accepted"])
def test_the_divergence_is_from_the_reference_that_was_chosen(kind: str, tmp_path: Path) -> None:
    """An update's record has the logprobs of a reference that is not the base, so that it can be computed again.

    With "init" learning begins with an adapter that is far from the base.
    """

    async def go() -> None:
        whole = settings(tmp_path, tmp_path / kind)
        training = replace(whole.rl_training, kl_coef=0.1, kl_reference=kind)
        if kind == "init":
            model = load_unread(whole.engine.model, lambda stage, fraction: None).module
            linears = {path: target.shape for path, target in find_targets(model).items()}
            tiny_models.make_adapter(tmp_path / "begun", linears, "peft", rank=4, seed=1)
            training = replace(training, init_from="begun")
            whole = replace(whole, adapters=(("begun", str(tmp_path / "begun")),))
        process = Process(replace(whole, rl_training=training), 0)
        began: list[Began] = []
        learner = process.learner._learner
        try:
            begin = learner.ledger.begin

            def note(pending: Pending, *, write: bool = True) -> None:
                begin(pending, write=write)
                if pending.written:
                    began.append(pending.began)

            learner.ledger.begin = note  # type: ignore[method-assign]
            await process.learn(UPDATES)
            given = [bool(d.reference) for record in began for b in record.batches for d in b.data]
            assert given and all(found == (kind != "base") for found in given)
            moved = [report.kl_reference for report in learner.history]
            assert moved[0] < 1e-9 < moved[-1], "the first version is the reference"
        finally:
            await process.end()

    asyncio.run(go())
