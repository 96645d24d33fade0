"""The engine process put together, in this one: what it makes ready where it serves from a CUDA device."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem import demo
from mlx_tandem.adapters import formats
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.config import CacheConfig, DutyConfig, EngineConfig, ModelConfig, SpeculationConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.learning import AdamParams, Batch, Datum, LossConfig, TrainerSpec
from mlx_tandem.engine.wire import EngineChannel, FrameReader, WireError, decode_outbound
from mlx_tandem.engine_main import Notes, run, serve
from mlx_tandem.errors import ModelError
from mlx_tandem.model import build
from mlx_tandem.model.backend.cpu import CPU
from mlx_tandem.model.backend.cuda import CUDA
from mlx_tandem.model.step.prebuilt import Company
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.types import AdapterSource
from tests.backends import answer_as
from tests.waiting import until

BATCH = Batch("a", (Datum((1, 2, 3, 4, 5), 2, (1.0, -1.0, 0.5)),), LossConfig("cross_entropy"))
LESSON: list[m.Inbound] = [
    m.OpenTrainer(1, TrainerSpec("a", 4, 8.0)),
    m.ForwardBackward(2, (BATCH,)),
    m.OptimStep(3, "a", AdamParams(0.1)),
    m.PublishTrainer(4, "a"),
]


class Channel(EngineChannel):
    """Hands in a lesson and closes when all of it is answered."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._left = list(LESSON)

    def receive(self, wait: float) -> list[m.Inbound]:
        if any(isinstance(x, m.AdapterLoaded) for x in self.sent):
            raise WireError("over")
        handed, self._left = self._left, []
        return handed

    def send(self, messages: Sequence[m.Inbound | m.Outbound]) -> None:
        self.sent += messages


@pytest.fixture
def learn(tmp_path: Path) -> Callable[[], list[Any]]:
    """What an engine says that is given the lesson."""
    model = ModelConfig(path=str(write_model(tmp_path / "model", SHAPES["0.13m"])))
    config = EngineConfig(model, duty=DutyConfig(trainer_rank=4))

    def run() -> list[Any]:
        channel = Channel()

        def engine() -> None:
            with suppress(WireError):
                serve(channel, config, False)

        thread = Thread(target=engine)  # is done with the device after it
        thread.start()
        thread.join()
        return channel.sent

    return run


def answers(sent: list[Any]) -> tuple[Any, str]:
    (done,) = (x for x in sent if isinstance(x, m.PassDone))
    (published,) = (x for x in sent if isinstance(x, m.AdapterLoaded))
    return done.results, published.info.digest


def test_learning_is_warmed_up_where_it_would_keep_streams_waiting(
    learn: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And changes nothing of what is learned then."""
    plain = learn()
    answer_as(monkeypatch, learning=replace(CUDA.learning, micro_batch_tokens=CPU.learning.micro_batch_tokens))
    warm = learn()
    stages = [[x.stage for x in sent if isinstance(x, m.Progress)] for sent in (plain, warm)]
    assert "warming up learning" in stages[1] and "warming up learning" not in stages[0]
    assert answers(warm) == answers(plain)


def test_whatever_uses_the_device_beside_the_steps_does_so_in_company(
    learn: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may wait on the device for its plan, and would keep it waiting."""
    companies, evaluated, read, made = [], [], [], Company.__init__

    def kept(self: Company) -> None:
        made(self)
        companies.append(self)

    def looked(name: str) -> None:
        function = getattr(mx, name)

        def called(*arrays: Any) -> None:
            module = sys._getframe(1).f_globals["__name__"]
            if module.startswith("mlx_tandem.training.device"):
                evaluated.append((name, companies[-1]._number > 0))
            function(*arrays)

        monkeypatch.setattr(mx, name, called)

    def reads(*args: Any, **options: Any) -> None:
        read.append(companies[-1]._number > 0)
        raise ModelError("it is not there", param="path")

    monkeypatch.setattr(Company, "__init__", kept)
    monkeypatch.setattr(formats, "read", reads)
    looked("eval")
    looked("async_eval")
    monkeypatch.setattr(sys.modules[__name__], "LESSON", [m.LoadAdapter(9, AdapterSource("/nowhere")), *LESSON])
    answers(learn())
    until(lambda: bool(read))
    assert read == [True] and len(companies) == 1
    assert {name for name, _ in evaluated} == {"eval", "async_eval"} and all(within for _, within in evaluated)


def test_a_model_that_cannot_be_trained_is_served_all_the_same(
    learn: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: MLXTrainers, rank: int) -> None:
        raise ValueError("this model does not call its layers one after the other")

    answer_as(monkeypatch, learning=replace(CUDA.learning, micro_batch_tokens=CPU.learning.micro_batch_tokens))
    monkeypatch.setattr(MLXTrainers, "warm_up", fail)
    assert any(isinstance(x, m.Ready) for x in learn())
    assert "could not be warmed up" in caplog.text


def test_what_is_logged_in_the_block_goes_to_the_front_from_one_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("mlx_tandem"), "propagate", True)  # a command of another test may end it
    channel, elsewhere = Channel(), []
    log, root = logging.getLogger("mlx_tandem.test"), logging.getLogger()
    before = list(root.handlers)
    with Notes(channel):
        thread = Thread(target=lambda: (log.warning("of %s", "another"), elsewhere.extend(channel.sent)))
        thread.start()
        thread.join()
        assert not elsewhere
        try:
            raise ValueError("broken")
        except ValueError:
            log.warning("mine", exc_info=True)
        assert [note.text for note in channel.sent] == ["of another", "mine"]
        assert channel.sent[1].trace[-1] == "ValueError: broken"
        thread = Thread(target=lambda: log.error("late"))
        thread.start()
        thread.join()
    assert [(note.level, note.text) for note in channel.sent[2:]] == [(logging.ERROR, "late")]
    assert root.handlers == before


def test_what_nobody_expected_at_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one printable line, as the last thing that the engine says."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the driver\nis \ud800 gone")

    monkeypatch.setattr(build, "build", fail)
    # What a test logs goes to whoever runs it, who takes UTF-8 only.
    monkeypatch.setattr(logging.getLogger("mlx_tandem.engine"), "disabled", True)
    front, engine = socket.socketpair()
    with front:
        thread = Thread(target=run, args=(engine, EngineConfig(ModelConfig(str(tmp_path)))))
        thread.start()
        thread.join()
        said = [message for frame in FrameReader().feed(front.recv(1 << 16)) for message in decode_outbound(frame)]
    assert said[-1] == m.Fatal("engine_error", r"the engine could not be started: OSError: the driver\nis \ud800 gone")


def fatal(config: EngineConfig) -> m.Fatal:
    """Return the message with which an engine ends at its start."""
    front, engine = socket.socketpair()
    with front:
        thread = Thread(target=run, args=(engine, config))
        thread.start()
        thread.join()
        said = [message for frame in FrameReader().feed(front.recv(1 << 16)) for message in decode_outbound(frame)]
    assert isinstance(said[-1], m.Fatal)
    return said[-1]


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", SHAPES["0.13m"])
    given = EngineConfig(ModelConfig(str(demo.MODEL_PATH)), speculation=SpeculationConfig("draft", str(other)))
    assert f"{other} cannot draft for {demo.MODEL_PATH}" in fatal(given).message


class Started(Channel):
    """Closes when the engine has started."""

    def receive(self, wait: float) -> list[m.Inbound]:
        raise WireError("over")


@pytest.mark.parametrize("ends", [[0], [2, 0]])
def test_a_draft_model_with_other_ends_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: list[int]
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(demo.DRAFT_PATH, draft)
    (draft / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    model = ModelConfig(str(demo.MODEL_PATH), max_model_len=240)
    given = EngineConfig(model, CacheConfig(num_blocks=64), speculation=SpeculationConfig("draft", str(draft)))

    def engine() -> None:
        with suppress(WireError):
            serve(Started(), given, False)

    thread = Thread(target=engine)
    thread.start()
    thread.join()
    said = f"{draft} ends texts with the tokens [0], and the model with [0, 2]"
    assert (said in caplog.text) == (ends == [0])


def test_a_draft_model_has_to_be_named() -> None:
    given = EngineConfig(ModelConfig(str(demo.MODEL_PATH)), speculation=SpeculationConfig("draft"))
    assert "--draft-model-path" in fatal(given).message
