"""The run of `tandem train sft`: trains an adapter on a file of examples, with progress, a report and curves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mlx_tandem import demo, files, limits
from mlx_tandem.adapters.convert import inspect
from mlx_tandem.api import Engine, Trainer
from mlx_tandem.cli.console import say, warn
from mlx_tandem.errors import Conflict
from mlx_tandem.training.sft import Evaluation, SftConfig, Step, encode, fit, read, split
from mlx_tandem.types import EngineInfo

MANIFEST = "manifest.json"
"""File in the adapter's folder that says how it was made."""

BLOCK = 16
"""Positions per block of the pool, which only has to hold one sequence here."""


@dataclass
class Job:
    """One fine-tuning run, with everything checked that can be before the model is loaded."""

    data: Path
    model: str
    out: Path
    valid: Path | None
    valid_share: float
    max_length: int
    raw: bool
    adapter: dict[str, Any]
    dtype: str
    config: SftConfig
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Train the adapter, and return all figures as plain data. Raise TandemError if that is impossible."""
        limits.check("max_length", self.max_length)
        limits.check("valid_share", self.valid_share)
        limits.check("rank", self.adapter["rank"])
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise Conflict(f"{self.out} exists and is not an empty folder: choose another with --adapter-out")
        lines, held_lines = read(self.data), read(self.valid) if self.valid else []
        with files.storage(self.out):
            files.make_folder(self.out.absolute().parent)  # now, so that a failure does not show after hours
        say(f"loading {'the built-in model' if self._is_demo else self.model} …")
        blocks = -(-self.max_length // BLOCK) + 1
        with Engine(
            self.model, {}, dtype=self.dtype, max_loras=0, max_lora_rank=self.adapter["rank"], num_blocks=blocks,
            block_size=BLOCK, max_num_seqs=1,
        ) as engine:  # fmt: skip
            longest = min(self.max_length, engine.info.max_model_len)
            found = encode(lines, engine.codec, max_length=longest, raw=self.raw)
            train, held = split(found.data, self.valid_share, self.config.seed)
            if held_lines:
                held = encode(held_lines, engine.codec, max_length=longest, raw=self.raw).data
            trainer = engine.trainer("sft", seed=self.config.seed, **self.adapter)
            if found.shortened or found.left_out:
                warn(
                    f"{found.shortened} examples were cut to {longest} tokens, and {found.left_out} left out, of which "
                    "nothing to teach would have been left"
                )
            say(f"{len(train)} examples to learn, {len(held)} held out, {trainer.info.parameters:,} parameters")
            counts = {
                "learned": len(train),
                "held_out": len(held),
                "shortened": found.shortened,
                "left_out": found.left_out,
            }
            about = self._about(engine.info, trainer, counts)
            with _progress() as show:
                for event in fit(trainer, train, held, self.config):
                    if isinstance(event, Step):
                        self.steps.append(event)
                    else:
                        self.evaluations.append(event)
                        if event.best:
                            self._keep(trainer, about)
                    show(self)
            if not held:
                self._keep(trainer, about)
        return self._report()

    @property
    def _is_demo(self) -> bool:
        return self.model == str(demo.MODEL_PATH)

    @property
    def rate(self) -> float:
        """Tokens per second, over all steps."""
        return sum(s.tokens for s in self.steps) / max(sum(s.seconds for s in self.steps), 1e-9)

    def _about(self, info: EngineInfo, trainer: Trainer, counts: dict[str, int]) -> dict[str, Any]:
        more = {"max_length": self.max_length, "valid_share": self.valid_share, "raw": self.raw}
        return {
            "format": 1,
            "kind": "sft",
            "base": {"path": self.model, "model_type": info.model_type, "dtype": info.dtype},
            "adapter": msgspec.to_builtins(trainer.info),
            "data": {"file": str(self.data), "valid": str(self.valid) if self.valid else None, **counts},
            "settings": msgspec.to_builtins(self.config) | more,
        }

    def _keep(self, trainer: Trainer, about: dict[str, Any]) -> None:
        """Save the present weights in place of those saved before.

        Except for the moment between two renames, the name leads to a whole adapter or to none yet.
        """
        new, old = (self.out.with_name(f".{self.out.name}.{word}") for word in ("new", "old"))
        now = {
            "step": self.steps[-1].step,
            "held_out_loss": self.evaluations[-1].loss if self.evaluations else None,
            "held_out_loss_before": self.evaluations[0].loss if self.evaluations else None,
        }
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
        kept: dict[str, Any] = json.loads((self.out / MANIFEST).read_text(encoding="utf-8"))
        if self.evaluations:
            before, after = kept["held_out_loss_before"], kept["held_out_loss"]
            print(f"held-out loss {before:.4f} → {after:.4f} nats per token (step {kept['step']} of {len(self.steps)})")
            if after >= before:
                warn("what is held out is not predicted better than before: this adapter is of no use")
            if self.evaluations[-1].fell:
                warn("the held-out loss was still falling at the end: more epochs (--epochs) would teach more")
        base = "" if self._is_demo else f" --model {self.model}"
        print(f"wrote {self.out}; try it: tandem serve{base} --adapter {self.out.resolve().name} {self.out}")
        return kept | {
            "tokens_per_s": self.rate,
            "seconds": sum(s.seconds for s in self.steps),
            "steps": [dataclasses.asdict(s) for s in self.steps],
            "evaluations": [dataclasses.asdict(e) for e in self.evaluations],
        }


@contextmanager
def _progress() -> Iterator[Callable[[Job], None]]:
    """Yield a function that shows progress: a bar on a terminal, elsewhere a line at every evaluation."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)

    def text(job: Job) -> str:
        loss = f"loss {job.steps[-1].loss:.4f}   " if job.steps else ""
        held = f"held out {job.evaluations[-1].loss:.4f}   " if job.evaluations else ""
        return f"{loss}{held}{job.rate:,.0f} tokens/s"

    if not console.is_terminal:
        said = 0

        def line(job: Job) -> None:
            nonlocal said
            if len(job.evaluations) > said:
                said = len(job.evaluations)
                say(f"step {len(job.steps)}   {text(job)}")

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)

        def show(job: Job) -> None:
            bar.update(
                task,
                description=text(job),
                total=job.steps[-1].steps if job.steps else None,
                completed=len(job.steps),
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
