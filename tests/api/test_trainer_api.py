"""`Trainer` beside `mlx_tandem.Engine`: learning on the model that answers meanwhile."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlx_tandem import Engine, demo
from mlx_tandem.adapters.convert import inspect
from mlx_tandem.api.calls import begin
from mlx_tandem.api.conversations import _said
from mlx_tandem.api.data import check_data
from mlx_tandem.api.generation import Completion, FunctionCall
from mlx_tandem.api.trainer import Trainer
from mlx_tandem.engine.learning import Datum, LossConfig, Truncation
from mlx_tandem.errors import Conflict, EngineError, InvalidRequest, ModelError, NotFound
from mlx_tandem.files import StorageError

QUESTION = [{"role": "user", "content": "Sort down: 5 3 9 1"}]
LESSON = [{"messages": [*QUESTION, {"role": "assistant", "content": "9 5 3 1"}]}]
OTHER = [{"prompt": "Once", "completion": " there was"}, {"text": "Count from 3 to 5"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(num_blocks=257, max_model_len=512, max_num_seqs=8) as made:
        yield made


def test_it_learns_and_is_served(engine):
    before = engine.chat(QUESTION, temperature=0).text
    trainer = engine.trainer("mine", rank=8, alpha=16, seed=1)
    assert (trainer.info.rank, trainer.info.alpha, trainer.info.step) == (8, 16.0, 0)
    first = trainer.forward_backward(LESSON).loss
    for expected in range(1, 9):
        assert trainer.step(learning_rate=2e-3).step == expected
        last = trainer.forward_backward(LESSON)
    assert last.loss < 0.2 * first
    assert last.loss == pytest.approx(-sum(last.logprobs[0]), abs=1e-4)
    assert trainer.publish() == "mine@1"
    taught = engine.chat(QUESTION, adapter="mine", temperature=0)
    assert (taught.text, taught.adapter) == ("9 5 3 1", "mine@1")
    assert engine.chat(QUESTION, temperature=0).text == before
    trainer.close()
    assert engine.chat(QUESTION, adapter="mine", temperature=0).text == "9 5 3 1"
    with pytest.raises(InvalidRequest, match="no trainer 'mine'"):
        trainer.forward(LESSON)


def test_a_conversation_is_trained_on_as_it_was_drawn(engine):
    """With a tool's result between its answers, which has no weight."""
    function = {"name": "get_score", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    trainer = engine.trainer("agent", rank=4)
    trainer.publish()
    talk = engine.conversation(adapter="agent", tools=[{"type": "function", "function": function}])
    call = talk.ask("What is the score in Oslo?", temperature=0.9, top_p=0.95, seed=1, max_tokens=40)
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "3 to 1"}
    with pytest.raises(InvalidRequest, match="temperature must be"):
        talk.ask(result, temperature=1)
    with pytest.raises(InvalidRequest, match="top_p must be"):
        talk.ask(result, top_p=0.9)
    answer = talk.ask(result, seed=2, max_tokens=20)
    assert [m["role"] for m in talk.messages] == ["user", "assistant", "tool", "assistant"]
    datum = talk.datum([1.0, -0.5])
    assert datum.tokens == talk.tokens and datum.temperature == 0.9 and datum.truncation == Truncation(0.95)
    own = [t for t, m in zip(datum.tokens[datum.prompt_length :], datum.mask, strict=True) if m]
    assert own == [*call.token_ids, *answer.token_ids]
    assert {w for w, m in zip(datum.weights, datum.mask, strict=True) if not m} == {0.0}
    assert sorted(set(datum.weights)) == [-0.5, 0.0, 1.0]
    found = trainer.forward_backward([datum], "ppo")
    assert found.tokens == len(own)
    apart = np.abs(np.array(found.logprobs[0]) - datum.logprobs)[np.array(datum.mask) == 1].max()
    assert apart < 1e-4, "the trainer agrees with the sampler about every answer"
    with pytest.raises(InvalidRequest) as e:
        talk.datum([1.0, 2.0, 3.0])
    assert e.value.param == "advantages"
    talk.ask("Again", repetition_penalty=1.5, max_tokens=2)
    with pytest.raises(InvalidRequest, match="repetition_penalty"):
        talk.datum(1.0)
    talk.ask("And again", max_tokens=2)
    with pytest.raises(InvalidRequest, match="repetition_penalty"):  # a later turn without it changes nothing
        talk.datum(1.0)
    with pytest.raises(InvalidRequest, match="no option"):
        engine.conversation(colour="red")
    trainer.close()


def test_what_is_served_is_what_was_trained(engine):
    trainer = engine.trainer("agree", rank=4)
    trainer.forward_backward(LESSON)
    trainer.step(learning_rate=5e-3)
    trainer.publish()
    for adapter, logprobs in (("agree", trainer.forward(LESSON).logprobs), (None, None)):
        drawn = engine.chat(QUESTION, adapter=adapter, temperature=1.0, seed=3, max_tokens=12, logprobs=0)
        prompt = engine.codec.chat(QUESTION, asks=True)
        data = [{"prompt": prompt, "completion": list(drawn.token_ids)}]
        own = trainer.forward(data).logprobs[0]
        apart = np.abs(np.array(own) - [step.model for step in drawn.logprobs]).max()
        assert apart <= 1e-4 if logprobs else apart > 1e-3


def test_versions_follow_each_other(engine):
    trainer = engine.trainer("steps", rank=2)
    labels = []
    for _ in range(4):
        trainer.forward_backward(LESSON)
        trainer.step(1e-3)
        labels.append(trainer.publish())
    assert labels == ["steps@1", "steps@2", "steps@3", "steps@4"]
    assert trainer.publish() == "steps@4"  # nothing has changed
    assert "steps@4" in engine.adapters
    assert engine.chat(QUESTION, adapter="steps@2", temperature=0).adapter == "steps@2"
    with pytest.raises(NotFound):
        engine.chat(QUESTION, adapter="steps@1")
    engine.unload_adapter("steps")


def test_versions_in_folders_are_kept_however_many_follow(engine, tmp_path: Path):
    trainer = engine.trainer("filed", rank=2)
    trainer.forward_backward(LESSON)
    trainer.step(1e-3)
    trainer.save(tmp_path / "first")
    trainer.close()
    assert engine.load_adapter("filed", tmp_path / "first") == "filed@1"
    trainer = engine.trainer("filed", rank=2, seed=1)
    for number in range(2, 6):
        trainer.forward_backward(LESSON)
        trainer.step(1e-3)
        assert trainer.publish() == f"filed@{number}"
    assert engine.chat(QUESTION, adapter="filed@1", max_tokens=1).adapter == "filed@1"
    with pytest.raises(NotFound):
        engine.chat(QUESTION, adapter="filed@2")
    trainer.close()
    engine.unload_adapter("filed")


def test_several_trainers_in_one_pass_are_each_as_alone(engine):
    ranks = {"a": 4, "b": 8, "c": 16}
    work = {
        engine.trainer(name, rank=rank, seed=rank): data
        for (name, rank), data in zip(ranks.items(), (LESSON, OTHER, LESSON), strict=True)
    }
    together = engine.forward_backward(work)
    norms = {trainer.name: trainer.step(1e-3).grad_norm for trainer in work}
    for trainer, data in work.items():
        alone = engine.trainer("alone", rank=trainer.info.rank, seed=trainer.info.rank)
        result = alone.forward_backward(data)
        assert together[trainer].loss == pytest.approx(result.loss, abs=1e-4)
        assert norms[trainer.name] == pytest.approx(alone.step(1e-3).grad_norm, rel=1e-3)
        alone.close()
    assert engine.forward_backward({}) == {}


def test_a_step_can_be_taken_back(engine):
    trainer = engine.trainer("back", rank=4)
    start = trainer.forward_backward(LESSON).loss
    trainer.step(1e-2)
    assert trainer.forward(LESSON).loss != start
    trainer.undo()
    assert trainer.forward(LESSON).loss == start


def test_forward_leaves_no_gradient(engine):
    trainer = engine.trainer("looks", rank=4)
    start = trainer.forward(LESSON).loss
    assert trainer.step(1e-2).grad_norm == 0.0
    assert trainer.forward(LESSON).loss == start


def test_saving_and_going_on_is_not_stopping(engine, tmp_path: Path):
    def learn(trainer, steps):
        for _ in range(steps):
            trainer.forward_backward(LESSON)
            trainer.step(2e-3, weight_decay=0.1, grad_norm=0.5)
        return trainer.forward(LESSON).logprobs

    whole = engine.trainer("whole", rank=4, seed=7, targets=("q_proj", "down_proj"))
    learn(whole, 2)
    whole.save(tmp_path / "saved")
    found = inspect(tmp_path / "saved")
    assert (found.format, found.ranks, found.problems) == ("peft", (4,), ())
    again = engine.trainer("again", resume=tmp_path / "saved")
    assert (again.info.rank, again.info.step, again.info.targets) == (4, 2, ("down_proj", "q_proj"))
    assert learn(again, 2) == learn(whole, 2)
    with pytest.raises(Conflict):
        whole.save(tmp_path / "saved")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    label = engine.load_adapter("loaded", tmp_path / "saved")
    assert engine.chat(QUESTION, adapter=label, temperature=0).adapter == "loaded@1"


def test_beginning_with_an_adapter(engine):
    trainer = engine.trainer("from-down", init_from="down")
    found = inspect(demo.ADAPTER_PATHS["down"])
    assert (trainer.info.rank, trainer.info.alpha / trainer.info.rank) == (found.ranks[0], found.scales[0])
    served = engine.chat(QUESTION, adapter="down", temperature=0, logprobs=0)
    data = [{"prompt": engine.codec.chat(QUESTION, asks=True), "completion": list(served.token_ids)}]
    own = trainer.forward(data).logprobs[0]
    assert own == pytest.approx([step.model for step in served.logprobs], abs=1e-4)


def test_beginning_with_an_adapter_under_another_rule_of_scale(engine):
    trainer = engine.trainer("rs-down", init_from="down", rslora=True)
    found = inspect(demo.ADAPTER_PATHS["down"])
    assert trainer.info.alpha / math.sqrt(trainer.info.rank) == pytest.approx(found.scales[0])
    served = engine.chat(QUESTION, adapter="down", temperature=0, logprobs=0)
    data = [{"prompt": engine.codec.chat(QUESTION, asks=True), "completion": list(served.token_ids)}]
    own = trainer.forward(data).logprobs[0]
    assert own == pytest.approx([step.model for step in served.logprobs], abs=1e-4)
    trainer.close()


def test_a_trainer_that_cannot_be_saved_leaves_nothing_behind(engine, tmp_path: Path, monkeypatch):
    trainer = engine.trainer("unsaved", rank=2)

    async def fails(name: str, folder: str) -> None:
        (Path(folder) / "half").write_text("x")
        raise StorageError("the drive is full")

    with monkeypatch.context() as patch:
        patch.setattr(engine._front.client, "save_trainer", fails)
        with pytest.raises(StorageError):
            trainer.save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    (tmp_path / "saved").mkdir()  # an empty folder may be there
    trainer.save(tmp_path / "saved")
    assert inspect(tmp_path / "saved").ranks == (2,)
    trainer.close()


def test_an_example_may_be_as_long_as_the_context(engine):
    loss = LossConfig("cross_entropy")
    (datum,) = check_data([{"prompt": [300] * 500, "completion": [300] * 12}], engine.codec, loss)
    assert len(datum.tokens) == 512
    with pytest.raises(InvalidRequest) as e:
        check_data([LESSON[0], {"prompt": [300] * 500, "completion": [300] * 13}], engine.codec, loss)
    assert (e.value.param, e.value.code) == ("data[1]", "context_length_exceeded")


def test_only_a_prompt_that_is_text_gets_the_tokens_that_begin_one() -> None:
    codec: Any = SimpleNamespace(text=lambda text, begins: [1, 2] if begins else [2], vocab_size=9, longest=9)
    loss = LossConfig("cross_entropy")
    begun, plain = check_data(
        [{"prompt": "a", "completion": [5, 6]}, {"prompt": [5, 6], "completion": "a"}], codec, loss
    )
    assert (begun.tokens, begun.prompt_length) == ((1, 2, 5, 6), 2)
    assert (plain.tokens, plain.prompt_length) == ((5, 6, 2), 2)


def test_an_answer_is_a_message_with_its_thoughts_and_calls() -> None:
    answer = Completion("said", (5,), None, "stop", None, 3)
    assert _said(answer) == {"role": "assistant", "content": "said"}
    answer = replace(answer, reasoning="so", tool_calls=(FunctionCall("id", "add", "{}"),))
    assert _said(answer) == {
        "role": "assistant",
        "content": "said",
        "reasoning_content": "so",
        "tool_calls": [{"id": "id", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
    }


def test_requests_run_while_it_learns(engine):
    trainer = engine.trainer("busy", rank=8)
    stop, texts = threading.Event(), []

    def ask():
        while not stop.is_set():
            texts.append(engine.chat(QUESTION, adapter="down", temperature=0).text)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(3):
            trainer.forward_backward(LESSON)
            trainer.step(1e-3)
    finally:
        stop.set()
        asking.join()
    assert set(texts) == {"9 5 3 1"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"name": "../x"}, "name"),
        ({"name": "base"}, "name"),
        ({"rank": 0}, "rank"),
        ({"rank": 2.5}, "rank"),
        ({"alpha": float("nan")}, "alpha"),
        ({"seed": -1}, "seed"),
        ({"targets": "q_proj"}, "targets"),
        ({"targets": ("lm_tail",)}, "targets"),
        ({"init_from": "base"}, "init_from"),
        ({"init_from": "nobody"}, "init_from"),
        ({"resume": "/does/not/exist", "rank": 8}, "rank"),
    ],
)
def test_trainers_that_cannot_be(engine, options, param):
    with pytest.raises(InvalidRequest) as e:
        engine.trainer(**{"name": "wrong", **options})
    assert e.value.param == param


def test_a_name_has_one_open_trainer(engine):
    first = engine.trainer("up", rank=2)
    first.forward_backward(LESSON)
    first.step(learning_rate=1e-3)
    for options in ({}, {"rank": 4}, {"resume": "/does/not/exist"}):
        with pytest.raises(Conflict, match="'up' is open") as e:
            engine.trainer("up", **options)
        assert e.value.param == "name"
    first.forward_backward(LESSON)
    assert first.step(learning_rate=1e-3).step == 2, "the refused ones have left it alone"
    first.publish()
    first.close()
    again = engine.trainer("up", rank=4)
    assert (again.info.rank, again.info.step) == (4, 0)
    again.close()
    with pytest.raises(InvalidRequest):
        engine.trainer("up", rank=0)
    engine.trainer("up", rank=2).close()


def test_a_folder_that_holds_no_trainer(engine):
    for folder in ("/does/not/exist", demo.ADAPTER_PATHS["down"]):
        with pytest.raises((InvalidRequest, ModelError)):
            engine.trainer("wrong", resume=folder)


def test_errors_name_the_argument(engine, tmp_path: Path):
    trainer = engine.trainer("strict", rank=2)
    for call, param in [
        (lambda: trainer.forward_backward([]), "data"),
        (lambda: trainer.forward_backward([{"text": "x", "speed": 1}]), "data[0].speed"),
        (lambda: trainer.forward_backward([Datum((1, 2000), 1, (1.0,))]), "data[0].tokens"),
        (lambda: trainer.forward_backward(LESSON, "hinge"), "loss"),
        (lambda: trainer.forward_backward(LESSON, "ppo"), "data[0].logprobs"),
        (lambda: trainer.forward_backward(LESSON, clip=3), "clip"),
        (lambda: trainer.step(-1.0), "learning_rate"),
        (lambda: trainer.step(1e-3, beta1=1.0), "beta1"),
    ]:
        with pytest.raises(InvalidRequest) as e:
            call()
        assert e.value.param == param
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequest):
        trainer.save(tmp_path / "file")
    with pytest.raises(InvalidRequest):
        trainer.save(tmp_path / "file" / "below")


INTERRUPTED: dict[str, Callable[[Engine, Trainer], object]] = {
    "generate": lambda engine, trainer: engine.generate("Once", max_tokens=1),
    "chat": lambda engine, trainer: engine.chat("Hello"),
    "stream": lambda engine, trainer: list(engine.stream("Once", max_tokens=1)),
    "embed": lambda engine, trainer: engine.embed("Once"),
    "conversation": lambda engine, trainer: engine.conversation().ask("Hello", max_tokens=1),
    "load_adapter": lambda engine, trainer: engine.load_adapter("shout", demo.ADAPTER_PATHS["shout"]),
    "unload_adapter": lambda engine, trainer: engine.unload_adapter("shout"),
    "stats": lambda engine, trainer: engine.stats,
    "trainer": lambda engine, trainer: engine.trainer("another"),
    "together": lambda engine, trainer: engine.forward_backward({trainer: LESSON}),
    "forward": lambda engine, trainer: trainer.forward(LESSON),
    "forward_backward": lambda engine, trainer: trainer.forward_backward(LESSON),
    "step": lambda engine, trainer: trainer.step(1e-3),
    "undo": lambda engine, trainer: trainer.undo(),
    "publish": lambda engine, trainer: trainer.publish(),
}


@pytest.mark.parametrize("call", INTERRUPTED)
def test_ctrl_c_before_a_call_has_begun_leaves_nothing_that_is_not_awaited(engine, monkeypatch, call):
    with closing(engine.trainer("interrupted", rank=2)) as trainer, monkeypatch.context() as patch:

        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(engine._loop, "call_soon_threadsafe", interrupt)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with pytest.raises(KeyboardInterrupt):
                INTERRUPTED[call](engine, trainer)
            gc.collect()
    assert [str(warning.message) for warning in said] == []


def test_ctrl_c_during_a_call_cancels_its_work(engine):
    """As `_call` does it: by its future."""
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = begin(engine._loop, work)
    assert begun.wait(30) and future.cancel() and ended.wait(30)


def test_a_closed_engine_says_so():
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(EngineError, match="this engine was closed"):
        begin(loop, asyncio.Event().wait)
