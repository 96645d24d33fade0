"""The runs of `tandem train sft` and `reward`: they train an adapter on a file, with progress, a report and curves."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from mlx_tandem import demo, files, limits
from mlx_tandem.adapters.convert import inspect
from mlx_tandem.api import Engine, Trainer
from mlx_tandem.cli import hub
from mlx_tandem.cli.bench.plot import save
from mlx_tandem.cli.console import say, warn
from mlx_tandem.config import Config, EngineConfig, LoraConfig, ModelConfig, ServerConfig
from mlx_tandem.engine.learning import Datum
from mlx_tandem.errors import Conflict, InvalidRequest, TandemError
from mlx_tandem.generation.adapters.name_rules import check_settings
from mlx_tandem.model_folder import CONFIG, text_settings
from mlx_tandem.printable import printable
from mlx_tandem.small_files import read_object
from mlx_tandem.training import examples, preferences, sft
from mlx_tandem.training.fit import Course, Evaluation, Event, Likelihood, Objective, Step, check_plan, fit
from mlx_tandem.training.metrics.recorder import Recorder, openers
from mlx_tandem.training.metrics.writer import Sample, Tracker, require
from mlx_tandem.training.preferences import BradleyTerry
from mlx_tandem.training.sft import Encoded, Line, SftConfig, count_split, split
from mlx_tandem.training.sft_runs import RunFolder, RunState, digest

MANIFEST = "manifest.json"
"""File in the adapter's folder that says how it was made."""

BLOCK = 16
"""Positions per block of the pool, which only has to hold one sequence here."""

RANK = 16
"""Rank of an adapter if none is asked for."""

MAX_LENGTH = 2048
"""Most tokens of an example by default, if the model's context is as long."""

TAUGHT = "taught"
"""Name in the engine of the adapter that was trained."""

START = "start"
"""Name in the engine of the adapter that training begins with."""

SHOWN = 2
"""Examples whose answers before and after the training are shown on a terminal."""

SHOWN_TOKENS = 32
"""Most tokens of an answer that is shown."""

SAMPLE_TOKENS = 128
"""Most tokens of an answer to a held-out example."""

STEP_METRICS = ("loss", "learning_rate", "grad_norm", "tokens", "tokens_per_s")
"""Numbers of a step that are recorded."""


@dataclass(frozen=True)
class Kind:
    """A kind of training: its objective, and the form of the lines that it learns from."""

    name: str
    parse: Callable[[Mapping[str, Any]], Any]  # a line's plain data into an example
    encode: Callable[..., Encoded[Any]]
    objective: Objective
    arguments: dict[str, Any]  # of `Engine.trainer`, besides those that are asked for
    left_out: str  # which examples are left out


SFT = Kind("sft", examples.parse, sft.encode, Likelihood(), {}, "of which nothing to teach would have been left")
REWARD = Kind(
    "reward",
    preferences.parse,
    preferences.encode,
    BradleyTerry(),
    {"scores": True},
    "which are longer, or pairs of equal answers",
)


@dataclass(frozen=True)
class Data:
    """The examples of a run, and how they become tokens."""

    file: Path
    valid: Path | None
    valid_share: float
    max_length: int | None  # None: MAX_LENGTH, or what the model sees if that is less
    raw: bool

    @property
    def longest(self) -> int:
        """The most tokens of an example, as far as is known without the model."""
        return MAX_LENGTH if self.max_length is None else self.max_length


@dataclass(frozen=True)
class Adapter:
    """The adapter to train: its shape where something else than the default is asked for, and what it begins as.

    `asked` are arguments of `Engine.trainer`.
    """

    asked: dict[str, Any]
    init_from: Path | None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Engine.trainer`. Raises InvalidRequest for an adapter that nothing can begin as.

        What is not asked for is that of the adapter that it begins as: the rank, the scale and the modules.
        """
        given = {name: value for name, value in self.asked.items() if value is not None}
        if self.init_from is None:
            return {"rank": RANK} | given
        found = inspect(self.init_from)
        if found.problems:
            raise InvalidRequest(f"{self.init_from} cannot be used: {found.problems[0]}", param="init_from")
        return {"rank": max(found.ranks), "targets": found.targets, "init_from": START} | given


@dataclass(frozen=True)
class Records:
    """The records of a run and where they go."""

    file: Path | None  # None: metrics.jsonl in the adapter's folder
    trackers: tuple[Tracker, ...]
    samples: int  # held-out examples that are answered at every evaluation


class Log:
    """What has happened in a run so far."""

    def __init__(self, events: Sequence[Event] = ()):
        self.events: list[Event] = []
        self.steps: list[Step] = []
        self.evaluations: list[Evaluation] = []
        self.tokens = 0
        self.seconds = 0.0
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)
        if isinstance(event, Step):
            self.steps.append(event)
            self.tokens += event.tokens
            self.seconds += event.seconds
        else:
            self.evaluations.append(event)

    @property
    def rate(self) -> float:
        """Tokens per second, over all steps."""
        return self.tokens / max(self.seconds, 1e-9)


def find_data(data: Path) -> Path:
    """Return the file of examples that a path, or the name of one in the package, stands for."""
    return data if data.exists() else demo.EXAMPLES.get(str(data), data)


def default_out(data: Path) -> Path:
    """Return the default folder of the adapter that a file of examples trains. Its name can be an adapter's name.

    That of the package's examples is where a server of the built-in model finds it.
    """
    if find_data(data) != data:
        return files.own_adapters() / data
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", data.stem).lstrip("._-")[:48].rstrip("-")
    return Path(f"{stem}-adapter" if stem else "adapter")


@dataclass
class Job:
    """One run, with everything checked that can be before the model is loaded."""

    kind: Kind
    data: Data
    model: str | None  # a folder or a hub id; None: the built-in model
    out: Path
    adapter: Adapter
    dtype: str
    config: SftConfig
    records: Records
    resume: bool = False
    save_every: int = 0  # steps between saved states; 0: a state is saved at each evaluation
    log: Log = field(default_factory=Log)

    def __post_init__(self) -> None:
        self._run_folder = RunFolder(self.out)
        self._folder = str(demo.MODEL_PATH)  # the model's folder, once it has been found
        self._is_done = False

    def run(self) -> dict[str, Any]:
        """Train the adapter, and return all figures as plain data. Raise TandemError or HubError if that is
        impossible.
        """
        arguments = self._check()
        data = self.data
        lines = sft.read(data.file, self.kind.parse)
        held_lines = sft.read(data.valid, self.kind.parse) if data.valid else []
        self._check_plan(lines, held_lines)
        if not self.out.exists():  # checked now, so that a failure does not show only after hours
            files.check_usable(self.out)
        files.check_usable(self._run_folder.path)
        self._find_model()
        self._run_folder.begin()
        try:
            say(f"loading {self.model or 'the built-in model'} …")
            with self._engine(arguments) as engine:
                found, course = self._encoded(engine, lines, held_lines)
                self._learn(engine, arguments, found, course)
        finally:
            self._run_folder.release()
        return self._report()

    def stopped(self) -> str:
        """Return a text that says what an interrupted run leaves on the drive, and how it can be continued."""
        if self._is_done:
            return f"stopped; the adapter in {self.out} is complete"
        if (step := self._run_folder.saved_step()) is not None:
            return f"stopped; the same command with --resume continues after step {step}"
        if self.out.exists() and any(self.out.iterdir()):
            return f"stopped before a state was saved that could be continued; {self.out} has the best adapter so far"
        return "stopped before a state was saved; the same command begins anew"

    def _check(self) -> dict[str, Any]:
        """Return the trainer's arguments. Raise TandemError for settings that cannot be used."""
        limits.check("max_length", self.data.longest)
        limits.check("valid_share", self.data.valid_share)
        limits.check("samples", self.records.samples)
        limits.check("save_every", self.save_every)
        name = self.out.absolute().name
        limits.check_name(name, f"the name '{name}' of the folder of --adapter-out, under which it would be served,")
        arguments = self.adapter.arguments()
        for option in ("rank", "plus_ratio", "dropout"):
            if option in arguments:
                limits.check(option, arguments[option])
        require(self.records.trackers)
        self._run_folder.check(self.resume)
        if not self.resume and self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise Conflict(f"{self.out} exists and is not an empty folder: choose another with --adapter-out")
        return arguments

    def _check_plan(self, lines: Sequence[Line[Any]], held_lines: Sequence[Line[Any]]) -> None:
        """Raise InvalidRequest for settings of the course that do not fit these examples."""
        learned, held = count_split(lines, self.data.valid_share)
        steps = check_plan(self.config, learned, len(held_lines) or held)
        if steps is not None and self.save_every > steps:
            raise InvalidRequest(
                f"save_every is {self.save_every}, but the training has at most {steps} steps", param="save_every"
            )

    def _find_model(self) -> None:
        """Find the model's folder, and check what can be checked without weights. Raise TandemError or HubError."""
        names: tuple[str, ...] = ()
        if self.model is not None:
            found = hub.find(self.model, "model")
            self._folder, names = str(found.folder), (found.id,) if found.id else ()
        served = Config(
            EngineConfig(ModelConfig(self._folder)),
            ServerConfig(served_model_names=names),
            ((self.out.absolute().name, str(self.out)),),
        )
        try:
            check_settings(served)
        except TandemError as e:
            e.param = "adapter_out"
            raise
        settings = read_object(Path(self._folder) / CONFIG) or {}
        positions = text_settings(settings).get("max_position_embeddings")
        if self.data.max_length is not None and isinstance(positions, int) and self.data.max_length > positions:
            raise InvalidRequest(
                f"max_length is {self.data.max_length}, but the model sees {positions} tokens at most",
                param="max_length",
            )

    def _engine(self, arguments: dict[str, Any]) -> Engine:
        """Load the model with room for one sequence and, where it is answered for samples, for the adapter."""
        start = self.adapter.init_from
        answers = self.records.samples > 0 or self._shown() > 0
        most = self.data.longest + (SAMPLE_TOKENS if answers else 0)
        return Engine(
            self._folder, {} if start is None else {START: start}, dtype=self.dtype,
            max_loras=int(answers or start is not None), max_lora_rank=arguments["rank"],
            num_blocks=-(-most // BLOCK) + 1, block_size=BLOCK, max_num_seqs=1,
        )  # fmt: skip

    def _shown(self) -> int:
        """Return of how many examples the answers before and after are shown."""
        return SHOWN if self.kind is SFT and sys.stderr.isatty() else 0

    def _comparing(self, engine: Engine, course: Course) -> Callable[[], None]:
        """Answer the examples that are shown, and return a function that answers them again by the adapter that was
        trained, and shows both answers.
        """
        prompts = [tokens for tokens, _, _ in _questions(engine, course, self._shown())]
        if not prompts:
            return lambda: None
        before = _said(engine, prompts, None if self.adapter.init_from is None else START)

        def show() -> None:
            after = _said(engine, prompts, engine.load_adapter(TAUGHT, self.out))
            for tokens, was, now in zip(prompts, before, after, strict=True):
                print(printable(engine.codec.said(tokens)))
                print(printable(f"    before: {was}"))
                print(printable(f"    after:  {now}"))

        return show

    def _encoded(
        self, engine: Engine, lines: list[Line[Any]], held_lines: list[Line[Any]]
    ) -> tuple[Encoded[Any], Course]:
        """Return the examples as data, and the course over those that are learned and those that are held out."""
        longest = min(self.data.longest, engine.info.max_model_len)
        found = self.kind.encode(lines, engine.codec, max_length=longest, raw=self.data.raw)
        train, held = split(found.data, self.data.valid_share, self.config.seed)
        if held_lines:
            held = self.kind.encode(held_lines, engine.codec, max_length=longest, raw=self.data.raw).data
        if found.shortened or found.left_out:
            warn(
                f"{found.shortened} examples were cut to {longest} tokens, and {found.left_out} left out, "
                f"{self.kind.left_out}"
            )
        return found, Course(self.config, train, held, self.kind.objective)

    def _learn(self, engine: Engine, arguments: dict[str, Any], found: Encoded[Any], course: Course) -> None:
        """Train from the beginning or from the saved state on, and keep the best adapter and the newest state."""
        train, held = course.train, course.valid
        decides = {
            "model": self._folder,
            "dtype": engine.info.dtype,
            "data": digest(train, held),
            "adapter": arguments | self.kind.arguments | {"init_from": str(self.adapter.init_from)},
            "settings": self.config,
        }
        saved = self._run_folder.load(decides) if self.resume else None
        if saved is None:
            trainer = engine.trainer(self.kind.name, seed=self.config.seed, **arguments, **self.kind.arguments)
        else:
            trainer = engine.trainer(self.kind.name, resume=saved[0])
            self.log = Log(saved[1].events)
            say(f"resuming after step {len(self.log.steps)}")
        say(f"{len(train)} examples to learn, {len(held)} held out, {trainer.info.parameters:,} parameters")
        about = self._about(engine, trainer, found, course)
        recorder = self._recorder(about)
        questions = _questions(engine, course, self.records.samples)
        show_answers = self._comparing(engine, course)
        try:
            with _progress() as show:
                for event in fit(trainer, course, tuple(self.log.events)):
                    self.log.add(event)
                    _record(recorder, event)
                    if isinstance(event, Evaluation) and event.best:
                        self._keep(trainer, about)
                    if self._is_saved_after(event, course):
                        self._run_folder.save(trainer.save, RunState(_plain(decides), self.log.events))
                    if isinstance(event, Evaluation) and questions:
                        recorder.samples(event.step, _answers(engine, trainer, questions))
                    show(self.log)
        finally:
            recorder.close()
        if not held:
            self._keep(trainer, about)
        show_answers()

    def _is_saved_after(self, event: Event, course: Course) -> bool:
        """Return whether the state after this event is saved: at evaluations, or else at the ends of epochs."""
        if isinstance(event, Evaluation):
            return not self.save_every
        if course.valid and not self.save_every:
            return False
        return event.step % (self.save_every or len(course.groups(0))) == 0

    def _recorder(self, about: dict[str, Any]) -> Recorder:
        """Return the recorder of the run. Its files are in the run's folder, which is at last the adapter's."""
        folder, records = self._run_folder.path, self.records
        file = folder / "metrics.jsonl" if records.file is None else records.file
        return Recorder(openers(file, records.trackers, folder, self.out.absolute().name, about), warn)

    def _about(self, engine: Engine, trainer: Trainer, found: Encoded[Any], course: Course) -> dict[str, Any]:
        data, info = self.data, engine.info
        counts = {
            "learned": len(course.train),
            "held_out": len(course.valid),
            "shortened": found.shortened,
            "left_out": found.left_out,
        }
        more = {"max_length": data.longest, "valid_share": data.valid_share, "raw": data.raw}
        return {
            "format": 1,
            "kind": self.kind.name,
            "base": {"path": self._folder, "model_type": info.model_type, "dtype": info.dtype},
            "adapter": msgspec.to_builtins(trainer.info),
            "data": {"file": str(data.file), "valid": str(data.valid) if data.valid else None, **counts},
            "settings": msgspec.to_builtins(self.config) | more,
        }

    def _keep(self, trainer: Trainer, about: dict[str, Any]) -> None:
        """Save the present weights in place of those saved before.

        Except for the moment between two renames, the name leads to a whole adapter or to none yet.
        """
        new, old = (self.out.with_name(f".{self.out.name}.{word}") for word in ("new", "old"))
        judged = self.log.evaluations
        now = {
            "step": self.log.steps[-1].step,
            "held_out_loss": judged[-1].loss if judged else None,
            "held_out_loss_before": judged[0].loss if judged else None,
        }
        if judged and judged[-1].accuracy is not None:
            now["held_out_accuracy"] = judged[-1].accuracy
        with files.storage(self.out):
            files.remove_tree(new)
            files.remove_tree(old)
            trainer.save(new)
            manifest = about | now | {"digest": inspect(new).digest}
            files.create(new / MANIFEST, json.dumps(manifest, indent=2).encode() + b"\n")
            files.sync_folder(new)
            if self.out.exists():
                files.DISK.rename(self.out, old)
            files.DISK.rename(new, self.out)
            files.sync_folder(self.out.absolute().parent)
            files.remove_tree(old)

    def _report(self) -> dict[str, Any]:
        self._run_folder.end(self.out)
        self._is_done = True
        kept: dict[str, Any] = json.loads((self.out / MANIFEST).read_text(encoding="utf-8"))
        judged, steps = self.log.evaluations, self.log.steps
        if judged:
            before, after = kept["held_out_loss_before"], kept["held_out_loss"]
            unit = self.kind.objective.unit
            print(f"held-out loss {before:.4f} → {after:.4f} nats per {unit} (step {kept['step']} of {len(steps)})")
            if "held_out_accuracy" in kept:
                print(f"held-out pairs ranked right: {kept['held_out_accuracy']:.1%}")
            if after >= before:
                warn("what is held out is not predicted better than before: this adapter is of no use")
            if judged[-1].fell:
                warn("the held-out loss was still falling at the end: more epochs (--epochs) would teach more")
        print(f"wrote {self.out}; try it: {self._command(kept['adapter']['rank'])}")
        if self.out.parent == files.own_adapters() and self.model is None:
            print(f"a running server of the built-in model has it, too: tandem chat --adapter {self.out.name}")
        return kept | {
            "tokens_per_s": self.log.rate,
            "seconds": self.log.seconds,
            "steps": [structs.asdict(s) for s in steps],
            "evaluations": [structs.asdict(e) for e in judged],
        }

    def _command(self, rank: int) -> str:
        """Return the command that serves the adapter."""
        base = [] if self.model is None else ["--model", self.model]
        room = ["--max-lora-rank", str(rank)] if rank > LoraConfig().max_lora_rank else []
        return shlex.join(["tandem", "serve", *base, "--adapter", self.out.absolute().name, str(self.out), *room])


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


def _record(recorder: Recorder, event: Event) -> None:
    """Record one event."""
    if isinstance(event, Step):
        rate = event.tokens / max(event.seconds, 1e-9)
        numbers = structs.asdict(event) | {"tokens_per_s": rate}
        recorder.scalars("step", event.step, {name: numbers[name] for name in STEP_METRICS})
    else:
        known = {"loss": event.loss} | ({} if event.accuracy is None else {"accuracy": event.accuracy})
        recorder.scalars("evaluation", event.step, known)


def _questions(engine: Engine, course: Course, count: int) -> list[tuple[tuple[int, ...], str, str]]:
    """Return the first held-out examples: the tokens of the prompt, its text and the expected answer."""
    text = engine.codec.decode
    held = [d for d in course.valid[:count] if isinstance(d, Datum)]
    return [(d.tokens[: d.prompt_length], text(d.tokens[: d.prompt_length]), text(d.tokens[d.prompt_length :]))
            for d in held]  # fmt: skip


def _said(engine: Engine, prompts: list[tuple[int, ...]], adapter: str | None) -> list[str]:
    """Return what the base or an adapter answers, without sampling, each on one line."""
    done = engine.generate(prompts, adapter=adapter, temperature=0, max_tokens=SHOWN_TOKENS)
    return [" ".join(answer.text.split()) for answer in done]


def _answers(engine: Engine, trainer: Trainer, questions: Sequence[tuple[tuple[int, ...], str, str]]) -> list[Sample]:
    """Return what the adapter answers now, without sampling."""
    label = trainer.publish()
    prompts = [tokens for tokens, _, _ in questions]
    done = engine.generate(prompts, adapter=label, temperature=0, max_tokens=SAMPLE_TOKENS)
    return [
        Sample(prompt, answer.text, expected=expected)
        for (_, prompt, expected), answer in zip(questions, done, strict=True)
    ]


@contextmanager
def _progress() -> Iterator[Callable[[Log], None]]:
    """Yield a function that shows progress: a bar on a terminal, elsewhere a line at every evaluation."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)

    def text(log: Log) -> str:
        steps, judged = log.steps, log.evaluations
        loss = f"loss {steps[-1].loss:.4f}   " if steps else ""
        held = f"held out {judged[-1].loss:.4f}   " if judged else ""
        return f"{loss}{held}{log.rate:,.0f} tokens/s"

    if not console.is_terminal:
        said = 0

        def line(log: Log) -> None:
            nonlocal said
            if len(log.evaluations) > said:
                said = len(log.evaluations)
                most = log.steps[-1].steps if log.steps else None
                left = "" if most is None else f"   {(most - len(log.steps)) * log.seconds / len(log.steps):.0f} s left"
                say(f"step {len(log.steps)}   {text(log)}{left}")

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)

        def show(log: Log) -> None:
            bar.update(
                task,
                description=text(log),
                total=log.steps[-1].steps if log.steps else None,
                completed=len(log.steps),
            )

        yield show


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the losses by step into a PNG or SVG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, held = found["steps"], found["evaluations"]
    axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], color="tab:gray", lw=1, label="learned")
    if held:
        axes.plot([e["step"] for e in held], [e["loss"] for e in held], "o-", color="tab:blue", label="held out")
    axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, path)
