"""TRL's side of `benchmarks/beside_trl.py`, which runs it in an environment of its own, without this project.

    python benchmarks/trl_side.py TASK.json

TASK.json has the model's folder, the questions in the order in which they are asked, and the settings that both sides
share. For each line on standard input it makes one batch, and writes its mean reward to standard output.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def say(**line: Any) -> None:
    """Write one line for the benchmark."""
    print(json.dumps(line), flush=True)


class Curve(TrainerCallback):
    """Reports each batch, and begins the next one when it is told to."""

    def __init__(self) -> None:
        self._reward = 0.0

    def reward(self, completions: list[str], answer: list[str], **_: Any) -> list[float]:
        """Return 1 for each completion that is the answer, else 0, and note the batch's mean."""
        scores = [float(c.strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]
        self._reward = sum(scores) / len(scores)
        return scores

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say that the model is loaded, and wait."""
        say(ready=True, versions={name: version(name) for name in ("trl", "transformers", "torch", "peft")})
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the batch that was just learned from, and wait."""
        say(reward=self._reward)
        self._wait(control)

    def _wait(self, control: Any) -> None:
        if not sys.stdin.readline():
            control.should_training_stop = True


def main() -> None:
    """Run TRL's GRPOTrainer on the task of the file that is named."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    asked = {"prompt": [q for q, _ in task["questions"]], "answer": [a for _, a in task["questions"]]}
    rollouts = task["prompts"] * task["answers"]
    curve = Curve()
    with tempfile.TemporaryDirectory(prefix="tandem-trl-") as scratch:
        arguments = GRPOConfig(
            output_dir=scratch,
            seed=task["seed"],
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=rollouts,
            num_generations=task["answers"],
            max_completion_length=task["max_tokens"],
            shuffle_dataset=False,
            max_steps=len(task["questions"]) // task["prompts"],
            learning_rate=task["learning_rate"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            adam_beta1=task["beta1"],
            adam_beta2=task["beta2"],
            weight_decay=0.0,
            loss_type="grpo",
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=curve.reward,
            args=arguments,
            train_dataset=Dataset.from_dict(asked),
            processing_class=tokenizer,
            callbacks=[curve],
            peft_config=LoraConfig(r=task["rank"], lora_alpha=task["alpha"], target_modules=LINEARS, lora_dropout=0.0),
        )
        trainer.train()


if __name__ == "__main__":
    main()
