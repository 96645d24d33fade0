"""Fine-tuning on the demo model: what is held out is predicted better, and mlx-lm computes the same with the export."""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mlx_tandem import Engine, demo
from mlx_tandem.adapters.convert import convert, inspect
from mlx_tandem.api.data import ServedCodec
from mlx_tandem.cli import main
from mlx_tandem.config import ModelConfig
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, Datum, LossConfig, StepDone, TrainerSpec
from mlx_tandem.errors import Conflict, InvalidRequest
from mlx_tandem.files import StorageError
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.model import backend  # before anything imports MLX: it puts a fast BLAS in front of it
from mlx_tandem.model.loader import load
from mlx_tandem.model.modules import clone
from mlx_tandem.server.sockets import unused_port
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.training.examples import parse
from mlx_tandem.training.fit import Course, Evaluation, Event, Likelihood, Step
from mlx_tandem.training.fit import fit as fit_course
from mlx_tandem.training.sft import (
    LEAST_FALL,
    MOST_EPOCHS,
    PATIENCE_EPOCHS,
    SftConfig,
    encode,
    read,
    split,
)
from mlx_tandem.training.sft_runs import RunFolder, RunState, digest
from tests.commands import curl, running
from tests.engine.learning import finish
from tests.unit.cli_tools import tandem
from tests.unit.text_tools import render_with

CONFIG = SftConfig(epochs=1, batch_size=8, learning_rate=2e-3, eval_every=5)


def fit(learner: Any, train: Sequence[Datum], valid: Sequence[Datum], config: SftConfig) -> Iterator[Event]:
    return fit_course(learner, Course(config, train, valid))


class Direct:
    """A learner without an engine around it."""

    names = (f"t{i}" for i in itertools.count())

    def __init__(self, trainers: MLXTrainers):
        self.trainers, self.name = trainers, next(self.names)
        trainers.open(TrainerSpec(self.name, 8, 16.0), "", None)

    def _run(self, data: Sequence[Datum], loss: LossConfig, forward_only: bool) -> BatchResult:
        return finish(self.trainers.run([Batch(self.name, tuple(data), loss)], forward_only, 0))[0]

    def forward_backward(self, data: Sequence[Datum], loss: LossConfig) -> BatchResult:
        return self._run(data, loss, False)

    def forward(self, data: Sequence[Datum], loss: LossConfig) -> BatchResult:
        return self._run(data, loss, True)

    def step(self, learning_rate: float, *, weight_decay: float, grad_norm: float) -> StepDone:
        adam = AdamParams(learning_rate, weight_decay=weight_decay, grad_norm=grad_norm)
        return finish(self.trainers.step(self.name, adam))

    def arrays(self) -> dict[str, np.ndarray]:
        tensors = self.trainers.publish(self.name)().tensors
        return {f"{path}.{i}": part for path, pair in tensors.items() for i, part in enumerate(pair)}


@pytest.fixture(scope="module")
def trainers() -> MLXTrainers:
    import mlx.core as mx

    backend.current().install_functions()
    module = load(ModelConfig(str(demo.MODEL_PATH), "float32"), lambda *_: None).module
    return MLXTrainers(clone(module), mx.float32, vocab_size=1024, micro_batch_tokens=1024, most_tokens=512)


def lessons(folder: Path, count: int) -> Path:
    """The demo model's weak skill."""
    rng = random.Random(0)
    lines = []
    for _ in range(count):
        digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 7))]
        question = "Sort down: " + " ".join(map(str, digits))
        lines.append({"prompt": question, "completion": " ".join(map(str, sorted(digits, reverse=True)))})
    path = folder / "down.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Datum], list[Datum]]:
    path = lessons(tmp_path_factory.mktemp("sft"), 110)
    tokenizer = Tokenizer.load(demo.MODEL_PATH)
    render = render_with((demo.MODEL_PATH / "chat_template.jinja").read_text(), tokenizer)
    codec = ServedCodec(tokenizer, render, vocab_size=1024, longest=512, eos_token_ids=(2, 0))
    return split(encode(read(path, parse), codec, max_length=512).data, 0.2, 0)


@pytest.fixture(scope="module")
def learned(trainers, examples) -> tuple[Direct, list[Any]]:
    learner = Direct(trainers)
    return learner, list(fit(learner, *examples, CONFIG))


def test_what_is_held_out_is_predicted_better(learned, examples):
    learner, events = learned
    judged = [e for e in events if isinstance(e, Evaluation)]
    steps = [e for e in events if isinstance(e, Step)]
    assert [s.step for s in steps] == list(range(1, 12)) and {s.steps for s in steps} == {11}
    assert [e.step for e in judged] == [0, 5, 10, 11]
    assert judged[-1].loss < 0.5 * judged[0].loss
    assert judged[-1].loss == pytest.approx(Likelihood().judge(learner, examples[1], CONFIG.batch_size).loss, abs=1e-6)
    assert [e.best for e in judged] == [False] + [
        e.loss < min([j.loss for j in judged[1:i]], default=np.inf) for i, e in enumerate(judged) if i
    ]


def test_nothing_is_learned_at_rate_0(trainers, examples):
    judged = [
        e.loss
        for e in fit(Direct(trainers), examples[0][:16], examples[1], SftConfig(epochs=1, learning_rate=0.0))
        if isinstance(e, Evaluation)
    ]
    assert judged[0] == judged[1]


def test_mlx_lm_has_the_same_logits_with_the_exported_adapter(learned, examples, tmp_path):
    import mlx.core as mx
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    learner, events = learned
    (tmp_path / "peft").mkdir()
    learner.trainers.snapshot(learner.name)(str(tmp_path / "peft"))
    convert(tmp_path / "peft", tmp_path / "mlx", "mlx-lm")
    model, _ = load_model(demo.MODEL_PATH)
    model.set_dtype(mx.float32)
    load_adapters(model, str(tmp_path / "mlx"))
    held = examples[1]
    ours = learner.forward(held, LossConfig("cross_entropy")).logprobs
    nats, taught = 0.0, 0
    for datum, own in zip(held, ours, strict=True):
        logits = model(mx.array([datum.tokens[:-1]]))[0]
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        theirs = np.array(scores)[np.arange(len(datum.tokens) - 1), list(datum.tokens[1:])][datum.prompt_length - 1 :]
        assert np.abs(theirs - own).max() <= 1e-4
        nats -= float(theirs @ np.array(datum.weights))
        taught += int(sum(datum.weights))
    assert nats / taught == pytest.approx(events[-1].loss, abs=1e-4)
    assert nats / taught < 0.5 * events[0].loss  # the adapter was really there


@pytest.mark.parametrize("batch", [{"batch_size": 4, "accumulate": 4}, {"batch_size": 5, "accumulate": 4}])
def test_a_step_is_the_same_however_its_examples_are_batched(trainers, examples, batch):
    few = examples[0][:16]
    found = []
    for sizes in ({"batch_size": 16}, batch):
        learner = Direct(trainers)
        (step,) = fit(learner, few, [], SftConfig(epochs=1, learning_rate=1e-3, warmup_share=0.0, **sizes))
        found.append((step.loss, step.grad_norm, learner.arrays()))
    (loss, norm, whole), (other_loss, other_norm, parts) = found
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert other_norm == pytest.approx(norm, rel=1e-4)
    a, b = (np.concatenate([np.sign(p.round(7)).ravel() for p in arrays.values()]) for arrays in (whole, parts))
    assert (a != b).mean() < 1e-3  # of Adam's first step: the direction of each parameter


def test_gradients_that_are_not_finite_end_it(trainers, examples):
    class Broken(Direct):
        def step(self, learning_rate: float, *, weight_decay: float, grad_norm: float) -> StepDone:
            return StepDone("t", 0, float("nan"), False)

    with pytest.raises(InvalidRequest, match="at step 1"):
        list(fit(Broken(trainers), examples[0], [], CONFIG))


class Scripted:
    """A learner whose held-out loss is what a script says it is after each epoch."""

    def __init__(self, losses: Sequence[float], epoch: int):
        self._losses, self._epoch, self.steps = losses, epoch, 0
        self.rates: list[float] = []

    def forward_backward(self, data: Sequence[Datum], loss: LossConfig) -> BatchResult:
        return self.forward(data, loss)

    def forward(self, data: Sequence[Datum], loss: LossConfig) -> BatchResult:
        epoch = self.steps // self._epoch
        now = self._losses[min(epoch, len(self._losses) - 1)]
        logprobs = tuple((-now,) for _ in data)
        return BatchResult("t", now, len(data), logprobs, logprobs)

    def step(self, learning_rate: float, *, weight_decay: float, grad_norm: float) -> StepDone:
        self.steps += 1
        self.rates.append(learning_rate)
        return StepDone("t", self.steps, 1.0, True)


ONE = Datum((1, 2), 1, (1.0,))


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(st.integers(0, 40).map(lambda n: n * LEAST_FALL / 4), min_size=2, max_size=30),
    st.integers(1, 20),
    st.sampled_from([0, 1, 3]),
)
def test_open_epochs_end_once_the_held_out_loss_no_longer_falls(losses, examples, every):
    config = SftConfig(batch_size=4, learning_rate=1.0, eval_every=every)
    epoch = -(-examples // 4)
    learner = Scripted(losses, epoch)
    events = list(fit(learner, [ONE] * examples, [ONE], config))
    judged = [e for e in events if isinstance(e, Evaluation)]
    assert {e.steps for e in events if isinstance(e, Step)} == {None}
    assert learner.steps % epoch == 0 and learner.steps == judged[-1].step
    assert learner.rates == [1.0] * learner.steps
    fallen_to, fell_at = judged[0].loss, 0
    for e in judged[1:]:
        assert e.fell == (e.loss <= fallen_to - LEAST_FALL)
        if e.fell:
            fallen_to, fell_at = e.loss, e.step
        assert e.step <= fell_at + PATIENCE_EPOCHS * epoch + epoch - 1, "it went on although the loss no longer fell"
    assert learner.steps >= fell_at + PATIENCE_EPOCHS * epoch, "it ended although the loss had just fallen"


def test_open_epochs_have_an_end_and_known_ones_are_obeyed():
    falling = Scripted([10.0 - i / 100 for i in range(500)], 1)
    events = list(fit(falling, [ONE], [ONE], SftConfig()))
    assert falling.steps == MOST_EPOCHS
    assert events[-1].fell
    flat = Scripted([1.0], 1)
    steps = [e for e in fit(flat, [ONE], [ONE], SftConfig(epochs=9)) if isinstance(e, Step)]
    assert [s.steps for s in steps] == [9] * 9
    unseen = Scripted([1.0], 1)
    assert [e.steps for e in fit(unseen, [ONE], [], SftConfig())] == [3] * 3


@pytest.mark.promise("FLT-33")
@settings(max_examples=200, derandomize=True)
@given(
    st.lists(st.integers(0, 12).map(lambda n: n * LEAST_FALL / 2), min_size=2, max_size=12),
    st.integers(1, 14),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([None, 1, 4]),
    st.integers(0, 3),
    st.booleans(),
    st.data(),
)
def test_a_run_that_stopped_after_any_event_goes_on_as_if_it_had_not(losses, n, every, epochs, patience, held, data):
    config = SftConfig(epochs=epochs, batch_size=3, eval_every=every, patience=patience if held else 0)
    course = Course(config, [ONE] * n, [ONE] if held else [])
    whole = Scripted(losses, -(-n // 3))
    events = [*timeless(fit_course(whole, course))]
    stop = data.draw(st.integers(0, len(events)))
    learner = Scripted(losses, -(-n // 3))
    learner.steps = sum(isinstance(e, Step) for e in events[:stop])
    assert [*timeless(fit_course(learner, course, events[:stop]))] == events[stop:]
    assert learner.rates == whole.rates[learner.steps - len(learner.rates) :] or not learner.rates


def timeless(events: Iterator[Event]) -> Iterator[Event]:
    return (structs.replace(e, seconds=0.0) if isinstance(e, Step) else e for e in events)


def test_patience_ends_training_with_any_number_of_epochs():
    for epochs in (None, 50):
        learner = Scripted([5.0, 4.0, 3.0, 3.0 - LEAST_FALL / 2], 1)
        judged = [
            e for e in fit(learner, [ONE], [ONE], SftConfig(epochs=epochs, patience=2)) if isinstance(e, Evaluation)
        ]
        assert [e.fell for e in judged] == [False, True, True, False, False]
    strict = Scripted([5.0, 4.9, 4.8, 4.7], 1)
    list(fit(strict, [ONE], [ONE], SftConfig(epochs=50, patience=1, least_fall=0.5)))
    assert strict.steps == 1


def test_the_learning_rate_follows_the_schedule_that_is_asked_for():
    learner = Scripted([1.0], 1)
    config = SftConfig(epochs=10, learning_rate=1.0, schedule="linear", rate_floor=0.5, warmup_share=0.2)
    list(fit(learner, [ONE], [], config))
    assert learner.rates == pytest.approx([0.5, 1.0, *(1.0 - 0.5 * i / 8 for i in range(8))])


@pytest.mark.parametrize(
    ("config", "held", "param"),
    [(SftConfig(patience=1), [], "patience"), (SftConfig(schedule="linear"), [ONE], "schedule")],
)
def test_a_course_that_cannot_be_is_refused(config, held, param):
    with pytest.raises(InvalidRequest) as refused:
        Course(config, [ONE], held)
    assert refused.value.param == param


# -- the command ------------------------------------------------------------------------------------------------------


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "mlx_tandem", "train", "sft", "down.jsonl", *words)
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_keeps_the_best_adapter_and_says_what_it_found(tmp_path):
    lessons(tmp_path, 60)
    done = command(
        tmp_path, *"--rank 4 --lr 1.2e-3 --epochs 2 --eval-every 8 --json-out out.json --plot out.svg".split()
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    manifest = json.loads((tmp_path / "down-adapter" / "manifest.json").read_text())
    before, *judged = found["evaluations"]
    best = min(judged, key=lambda e: e["loss"])
    assert (manifest["step"], manifest["held_out_loss"]) == (best["step"], best["loss"])
    assert manifest["held_out_loss_before"] == before["loss"] > 2 * best["loss"]
    assert f"held-out loss {before['loss']:.4f} → {best['loss']:.4f}" in done.stdout
    assert "step 8 " in done.stderr
    assert [s["steps"] for s in found["steps"]] == [14] * 14, "epochs that are given are obeyed"
    said = "the held-out loss was still falling at the end: more epochs (--epochs) would teach more"
    assert f"tandem: warning: {said}\n" in done.stderr
    made = inspect(tmp_path / "down-adapter")
    assert (made.ranks, made.problems, made.digest) == ((4,), (), manifest["digest"])
    assert (manifest["data"]["learned"], manifest["data"]["held_out"]) == (54, 6)
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")
    assert {p.name for p in tmp_path.iterdir()} == {"down.jsonl", "down-adapter", "out.json", "out.svg"}
    rows = [json.loads(line) for line in (tmp_path / "down-adapter" / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in rows if r["kind"] == "step"] == [s["loss"] for s in found["steps"]]
    assert [r["loss"] for r in rows if r["kind"] == "evaluation"] == [e["loss"] for e in found["evaluations"]]


def test_the_command_without_anything_held_out_keeps_the_last_state(tmp_path):
    lessons(tmp_path, 6)
    done = command(tmp_path, *"--epochs 2 --batch-size 4 --valid-share 0 --adapter-out made/it --max-length 64".split())
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "made" / "it" / "manifest.json").read_text())
    assert (manifest["step"], manifest["held_out_loss"]) == (4, None)
    assert "held-out" not in done.stdout


@pytest.mark.slow
def test_the_defaults_teach_a_simple_skill_from_60_examples(tmp_path):
    taught = set(lessons(tmp_path, 60).read_text().splitlines())
    exam = [json.loads(line) for line in lessons(tmp_path, 120).read_text().splitlines()[60:] if line not in taught]
    lessons(tmp_path, 60)
    done = command(tmp_path, "--json-out", "out.json")
    assert done.returncode == 0, done.stderr
    assert "still falling" not in done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert PATIENCE_EPOCHS * 7 < len(found["steps"]) < MOST_EPOCHS * 7  # an epoch of 54 examples has 7 steps
    with Engine(adapters={"taught": tmp_path / "down-adapter"}, num_blocks=600, max_model_len=512) as engine:
        prompts = [engine.codec.chat([{"role": "user", "content": e["prompt"]}], asks=True) for e in exam]
        right = {
            adapter: sum(
                answer.text == e["completion"]
                for answer, e in zip(engine.generate(prompts, adapter=adapter, temperature=0), exam, strict=True)
            )
            for adapter in (None, "taught")
        }
    assert right[None] < 0.2 * len(exam)
    assert right["taught"] > 0.9 * len(exam)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--adapter-out .", "is not an empty folder"),
        ("--adapter-out down.jsonl/below", "down.jsonl/below cannot be used"),
        ("--valid none.jsonl", "none.jsonl cannot be read"),
        ("--valid bad.jsonl", "bad.jsonl, line 2: "),
        ("--epochs 0", "epochs must be"),
        ("--rank 0", "rank must be"),
        ("--max-length 1", "max_length must be"),
        ("--valid-share 0.9", "valid_share must be"),
        ("--model nowhere", "there is no model folder nowhere"),
        ("--dropout 1", "dropout must be"),
        ("--plus-ratio 0", "plus_ratio must be"),
        ("--rate-floor 2", "rate_floor must be"),
        ("--samples 1000", "samples must be"),
        ("--report-to paper", "there is no tracker 'paper'"),
        ("--init-from nowhere", "nowhere cannot be used"),
        ("--resume", "there is no unfinished run in "),
        ("--schedule linear", "needs a number of epochs"),
        ("--patience 2 --valid-share 0", "patience needs examples that are held out"),
        ("--batch-size 9", "batch_size is 9, but there are 2 examples to learn"),
        ("--batch-size 1 --accumulate 3", "an epoch of 2 examples has 2 batches"),
        ("--epochs 2 --eval-every 3", "the training has at most 2 steps"),
        ("--epochs 2 --save-every 3", "the training has at most 2 steps"),
        ("--max-length 9000", "the model sees 8192 tokens at most"),
        ("--adapter-out base", "'base' is the name of the base model"),
        ("--adapter-out .hidden", "must be 1 to 64 letters"),
        ("--adapter-out 'my skill'", "must be 1 to 64 letters"),
        ("--model made --adapter-out taught/made", "'made' is the name of the base model"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, words, said):
    lessons(tmp_path, 3)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    (tmp_path / "made").mkdir()
    for file in demo.MODEL_PATH.iterdir():
        (tmp_path / "made" / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlx_tandem.cli.finetune.Engine", lambda *_, **options: pytest.fail("the model is loaded"))
    with pytest.raises(SystemExit) as ended:
        main(["train", "sft", "down.jsonl", *shlex.split(words)])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (1, "")
    assert printed.err.startswith("tandem: ") and printed.err.count("\n") == 1
    assert said in printed.err
    assert any(word in printed.err for word in words.split() if word[:2] == "--" or "." in word), "names no option"
    assert {p.name for p in tmp_path.iterdir()} == {"down.jsonl", "bad.jsonl", "made"}


def inside(words: str) -> int:
    """Run the command in this process, whose folder is the test's; return its status."""
    try:
        main(["train", "sft", "down.jsonl", *words.split()])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


COURSE = "--rank 4 --targets q_proj,v_proj --lr 2e-3 --epochs 2 --eval-every 3 --dropout 0.1 --plus-ratio 4 --rslora"
RECORDS = "--samples 1 --save-every 2"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder with a run from beginning to end, of 8 steps."""
    folder = tmp_path_factory.mktemp("whole")
    lessons(folder, 36)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert inside(f"{COURSE} {RECORDS} --adapter-out whole --json-out whole.json") == 0
    return folder


def test_a_killed_run_goes_on_to_the_same_losses_and_weights(whole, monkeypatch, capsys):
    """SIGKILL at whatever the process is doing when it says that step 3 is judged."""
    monkeypatch.chdir(whole)
    words = f"train sft down.jsonl {COURSE} {RECORDS} --adapter-out cut".split()
    start = [sys.executable, "-m", "mlx_tandem", *words]
    with subprocess.Popen(start, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
        assert run.stderr is not None
        assert any(line.startswith("tandem: step 3 ") for line in run.stderr)
        run.kill()
    assert inside(f"{COURSE} --adapter-out cut") == 1
    assert "--resume" in capsys.readouterr().err
    assert inside(f"{COURSE} {RECORDS} --adapter-out cut --json-out cut.json --resume") == 0
    assert re.search("resuming after step [2-8]", capsys.readouterr().err)
    found = [json.loads(Path(f"{name}.json").read_text()) for name in ("whole", "cut")]
    courses = [[(s["loss"], s["grad_norm"], s["learning_rate"]) for s in each["steps"]] for each in found]
    assert courses[0] == courses[1] and len(courses[0]) == 8
    assert found[0]["evaluations"] == found[1]["evaluations"]
    assert found[0]["digest"] == found[1]["digest"]
    assert not Path("cut.run").exists()
    rows = [json.loads(line) for line in Path("cut/metrics.jsonl").read_text().splitlines()]
    last = {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}
    assert [last[n] for n in range(1, 9)] == [loss for loss, *_ in courses[0]]
    samples = [row for row in rows if row["kind"] == "sample"]
    assert {row["step"] for row in samples} == {0, 3, 6, 8} and all(row["expected"] for row in samples)


@contextmanager
def training(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A training of up to 360 steps in a process of its own, and what it says."""
    start = [sys.executable, "-m", "mlx_tandem", "train", "sft", "down.jsonl", "--adapter-out", "cut", *words]
    with subprocess.Popen(start, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
        assert run.stderr is not None
        yield run, run.stderr
        run.kill()


@pytest.mark.parametrize(
    ("words", "when", "said"),
    [
        ("--save-every 300", "tandem: loading ", "stopped before a state was saved; the same command begins anew"),
        ("--save-every 300", "tandem: step 8 ", "stopped before a state was saved that could be continued; cut has "),
        ("", "tandem: step 8 ", "stopped; the same command with --resume continues after step "),
    ],
)
def test_ctrl_c_says_what_holds(tmp_path, words, when, said):
    lessons(tmp_path, 36)
    command = ["--epochs", "90", *words.split()]
    with training(tmp_path, *command) as (run, lines):
        assert any(line.startswith(when) for line in lines)
        run.send_signal(signal.SIGINT)
        # Python may mention, behind the last line, a coroutine that Ctrl-C met before its start.
        last = [line for line in lines if line.startswith("tandem: ")][-1]
        assert run.wait() == 130
    assert last.startswith(f"tandem: {said}")
    if "cut has" in said:
        assert inspect(tmp_path / "cut").problems == ()
        return
    with training(tmp_path, *command, *["--resume"] * ("--resume" in said)) as (run, lines):
        assert any(("resuming after step " if "--resume" in said else "examples to learn") in line for line in lines)


@pytest.mark.parametrize("words", ["--adapter-out 'my runs/it' --rank 80", "--model 'the model'"])
def test_the_command_that_is_hinted_at_runs(tmp_path, monkeypatch, words):
    """Its paths are quoted, its name is legal, and the server takes an adapter of this rank."""
    lessons(tmp_path, 3).rename(tmp_path / "my 1st lessons.jsonl")
    (tmp_path / "the model").symlink_to(demo.MODEL_PATH)
    monkeypatch.chdir(tmp_path)
    done = tandem("train", "sft", "my 1st lessons.jsonl", "--epochs", "1", *shlex.split(words))
    assert done.returncode == 0, done.stderr
    program, *hint = shlex.split(done.stdout.splitlines()[-1].partition("try it: ")[2])
    assert program == "tandem" and ("my 1st lessons" in words or "my-1st-lessons-adapter" in hint or "it" in hint)
    port = unused_port()
    command = [sys.executable, "-m", "mlx_tandem", *hint, "--port", str(port), "--max-model-len", "240"]
    with running([*command, "--num-blocks", "64"], port, tmp_path) as server:
        name = hint[hint.index("--adapter") + 1]
        ask = {"model": name, "prompt": "a", "max_tokens": 1}
        words = ["curl", "http://localhost:8000/v1/completions", "-H", "Content-Type: application/json"]
        assert json.loads(curl([*words, "-d", json.dumps(ask)], port))["model"].startswith(name)
        assert server.stop() == 0


def test_training_begins_with_an_adapter(whole, monkeypatch):
    """Its rank, scale and modules; the held-out loss before learning is the one that it ended with."""
    monkeypatch.chdir(whole)
    assert inside("--init-from whole --lr 1e-3 --epochs 1 --adapter-out two --json-out two.json") == 0
    one, two = (json.loads(Path(f"{name}.json").read_text()) for name in ("whole", "two"))
    assert two["held_out_loss_before"] == pytest.approx(one["held_out_loss"], abs=1e-4)
    assert two["held_out_loss_before"] < 0.9 * one["held_out_loss_before"]
    assert (two["adapter"]["rank"], two["adapter"]["targets"]) == (4, ["q_proj", "v_proj"])


def test_a_state_that_belongs_to_another_run_is_refused(tmp_path):
    folder = RunFolder(tmp_path / "out")
    folder.begin()
    about = {"data": digest([ONE], []), "settings": msgspec.to_builtins(SftConfig(epochs=2))}
    folder.save(lambda new: new.mkdir(), RunState(about, [Step(1, 2, 0.5, 3, 1.0, 1.0, 0.1)]))
    half = folder.path / "state-9-9"
    half.mkdir()  # what a kill leaves of a state that was being written
    with pytest.raises(StorageError, match="in use by process"):
        RunFolder(tmp_path / "out").begin()
    folder.release()
    again = RunFolder(tmp_path / "out")
    with pytest.raises(Conflict, match="--resume"):
        again.check(False)
    again.begin()
    found = again.load(about)
    assert found is not None and found[0].name == "state-1-1" and found[1].events[0].loss == 0.5
    for other, said in (
        (about | {"data": digest([ONE], [ONE])}, "begun with data "),
        (about | {"settings": SftConfig(epochs=3)}, "begun with settings epochs 2, not 3"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            again.load(other)
    (tmp_path / "out").mkdir()
    (folder.path / "metrics.jsonl").write_text("{}")
    again.end(tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["metrics.jsonl"] and not folder.path.exists()
