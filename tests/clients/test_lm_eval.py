"""The `lm_eval` command, unmodified, on tasks of this module: what it is told is what the model computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import yaml
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from mlx_tandem import demo
from tests.serving import ROOT

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo"}
SUMS = [(17, 25), (31, 4), (12, 5)]
TURN = "<|im_start|>user\n{{question}}<|im_end|>\n<|im_start|>assistant\n"
TASKS = {
    "capitals": {
        "output_type": "multiple_choice",
        "doc_to_text": TURN,
        "doc_to_choice": "{{answers}}",
        "doc_to_target": "{{right}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "sums": {
        "output_type": "generate_until",
        "doc_to_text": TURN,
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": 24, "temperature": 0, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}

pytestmark = pytest.mark.slow


def documents(model: str) -> dict[str, list[dict[str, Any]]]:
    """The questions of each task, their answers in the style of `model`."""

    def style(text: str) -> str:
        return text.upper().replace(".", "!") if model == "shout" else text

    cities = list(CAPITALS.values())
    capitals = [
        {
            "question": f"What is the capital of {country}?",
            "answers": [style(f"The capital of {country} is {c}.") for c in cities],
            "right": cities.index(city),
        }
        for country, city in CAPITALS.items()
    ]
    sums = [{"question": f"What is {a} + {b}?", "answer": style(f"{a} + {b} = {a + b}.")} for a, b in SUMS]
    return {"capitals": capitals, "sums": sums}


@dataclass
class Evaluation:
    model: str
    results: dict[str, dict[str, float]]
    samples: list[dict[str, Any]]  # of the task "capitals"


@pytest.fixture(scope="module", params=["shout"])
def evaluation(request, server, tmp_path_factory) -> Evaluation:
    pytest.importorskip("lm_eval", reason="the extra `clients` is not installed")
    model, folder = request.param, tmp_path_factory.mktemp(request.param)
    for name, rows in documents(model).items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | source | TASKS[name]))
    arguments = {
        "model": model,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": demo.MODEL_PATH,
        "num_concurrent": 4,
        "max_length": 1024,
        "max_retries": 1,
    }
    subprocess.run(
        [
            *(sys.executable, "-m", "tests.clients.loopback", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{k}={v}" for k, v in arguments.items())),
            *("--tasks", ",".join(TASKS), "--include_path", str(folder), "--batch_size", "3"),
            *("--output_path", str(folder / "out"), "--log_samples"),
        ],
        cwd=ROOT,
        env=os.environ
        | {
            "HF_HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_EVALUATE_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
        check=True,
        timeout=150,
    )
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob("samples_capitals_*.jsonl")
    return Evaluation(
        model,
        json.loads(results.read_text())["results"],
        [json.loads(line) for line in samples.read_text().splitlines()],
    )


def computed(model: str, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation after its context, and whether it is the greedy one: mlx-lm, float32."""
    from mlx_lm.tuner.utils import load_adapters  # takes seconds, and runs of other tests collect this module too

    network, _ = load_model(demo.MODEL_PATH)
    network.set_dtype(mx.float32)
    if model != "base":
        network = load_adapters(network, str(demo.ADAPTER_PATHS[model]))
        network.set_dtype(mx.float32)
    tokenizer = Tokenizer.from_file(str(demo.MODEL_PATH / "tokenizer.json"))
    found = []
    for context, continuation in pairs:
        start = len(tokenizer.encode(context, add_special_tokens=False).ids)
        ids = mx.array(tokenizer.encode(context + continuation, add_special_tokens=False).ids)
        logprobs = nn.log_softmax(network(ids[None, :-1])[0], axis=-1)[start - 1 :]
        own = mx.take_along_axis(logprobs, ids[start:, None], axis=-1)
        found.append((own.sum().item(), bool((mx.argmax(logprobs, axis=-1) == ids[start:]).all().item())))
    return found


def test_log_likelihoods_are_those_of_the_model(evaluation):
    pairs, told = [], []
    for sample in evaluation.samples:
        for i, ((value, greedy),) in enumerate(sample["resps"]):
            pairs.append((sample["arguments"][f"gen_args_{i}"]["arg_0"], sample["arguments"][f"gen_args_{i}"]["arg_1"]))
            told.append((float(value), str(greedy) == "True"))
    assert len(told) == len(CAPITALS) ** 2
    expected = computed(evaluation.model, pairs)
    assert [v for v, _ in told] == pytest.approx([v for v, _ in expected], abs=1e-3, rel=0)
    assert [g for _, g in told] == [g for _, g in expected]
    assert {g for _, g in told} == {True, False}


def test_scores(evaluation):
    """All right, by likelihood and by generation, with answers in the style of each model."""
    assert evaluation.results["capitals"]["acc,none"] == 1
    assert evaluation.results["sums"]["exact_match,none"] == 1
