"""`tandem bench engine` on a real engine: what takes turns, what is counted, and what is kept when the peer ends."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem import demo
from mlx_tandem.cli.bench.batch_generator import BatchGeneratorPeer
from mlx_tandem.cli.bench.engine import Batch, EngineBench, EngineLoad
from mlx_tandem.cli.bench.floor import Floor
from mlx_tandem.cli.bench.hybrid_shape import HybridShape
from mlx_tandem.cli.bench.plot import plot_engine
from mlx_tandem.cli.bench.script import Script, ScriptChannel, Work
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.bench.sides import label, summary
from mlx_tandem.config import EngineConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.wire import WireError
from mlx_tandem.engine_main import serve
from mlx_tandem.model import footprint, loader
from mlx_tandem.types import EngineInfo, Request, SamplingParams
from tests.unit.cli_tools import tandem

SHAPE = SHAPES["0.13m"]


def test_sides_take_turns_on_the_same_work(tmp_path: Path) -> None:
    out, picture = tmp_path / "engine.json", tmp_path / "engine.svg"
    command = ["bench", "engine", "--shape", "0.13m", "--batch", "2,3x40"]
    options = ["--prompt-tokens", "8", "--max-tokens", "6", "--repeats", "1", "--adapters", "2", "--sampling", "greedy"]
    done = tandem(*command, *options, "--num-requests", "5", "--json-out", str(out), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [label(row) for row in result["results"]] == ["2 × 8", "3 × 40"]
    assert "no_peer" not in result
    adapters = {"same": 1, "mixed": 2}
    for row in result["results"]:
        assert set(row["ratio"]) == {"decode", "prefill", "same/base", "mixed/base", "mixed/same"}
        for side in ("tandem", "same", "mixed", "batch_generator"):
            m = row[side]
            assert ("loop_tokens_per_s" in m) == (side != "batch_generator")
            assert m["step_ms"] > 0 and m["prefill_ms"] > 0
            moved = m["weight_bytes"] + m["cache_bytes"] + m["adapter_bytes"]
            assert m["floor_ms"] == pytest.approx(1e3 * moved / result["copy_bytes_per_s"], abs=1e-3)
            assert m["adapter_bytes"] == adapters.get(side, 0) * row["same"]["adapter_bytes"]
        (done_once,) = row["rounds"]["tandem"]
        assert done_once["loop_tokens_per_s"] * done_once["loop_s"] == pytest.approx(5 * 6)
    assert picture.read_text().startswith("<?xml")
    assert "BatchGenerator" in done.stdout and "mixed" in done.stdout


@pytest.mark.parametrize("text", ["repeats", "random"])
def test_drafts_take_turns_with_none(tmp_path: Path, text: str) -> None:
    out = tmp_path / "engine.json"
    command = ["bench", "engine", "--shape", "0.13m", "--batch", "2", "--no-peer"]
    options = ["--prompt-tokens", "8", "--max-tokens", "24", "--repeats", "1", "--spec", "ngram", "--text", text]
    done = tandem(*command, *options, "--json-out", str(out))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["results"]
    assert set(row["ratio"]) == {"drafts/base"} and row["drafts"]["decode_tokens_per_s"] > 0
    assert "with drafts" in done.stdout


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return ModelConfig(path=str(write_model(tmp_path / "model", SHAPE)))


def on_its_thread(measure: Callable[[], None]) -> None:
    """The thread of an engine is done with the device after it."""
    engine = Thread(target=measure)
    engine.start()
    engine.join()


class Watched(ScriptChannel):
    """Counts the requests under way."""

    def __init__(self, start: Callable[[EngineInfo], Script]):
        super().__init__(start)
        self.handed: list[int] = []
        self.under_way: list[int] = []  # whenever some were handed in
        self._ended = 0

    def receive(self, wait: float) -> list[m.Inbound]:
        messages = super().receive(wait)
        if messages:
            self.handed += [message.request.id for message in messages if isinstance(message, m.Submit)]
            self.under_way.append(len(self.handed) - self._ended)
        return messages

    def send(self, messages: Sequence[m.Inbound | m.Outbound]) -> None:
        super().send(messages)
        outputs = (message for message in messages if isinstance(message, m.Output))
        self._ended += sum(delta.finish is not None for output in outputs for delta in output.deltas)


def test_a_draft_model_answers_questions(tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    command = ["bench", "engine", str(demo.MODEL_PATH), "--batch", "2"]
    options = ["--text", "chat", "--max-tokens", "12", "--repeats", "1", "--sampling", "greedy", "--no-peer"]
    drafts = ["--spec", "draft", "--draft-model-path", str(demo.DRAFT_PATH), "--json-out", str(out)]
    done = tandem(*command, *options, *drafts)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["results"]
    tokens = {side: row[side]["decode_tokens_per_s"] * row[side]["step_ms"] / 1e3 for side in ("tandem", "drafts")}
    assert tokens["tandem"] == pytest.approx(2, abs=0.01) and tokens["drafts"] > 2.5


def test_a_request_of_a_closed_loop_follows_one_that_ended(model: ModelConfig) -> None:
    lengths = [3, 40, 5, 7, 2, 8]  # all others follow one another beside the second
    came: list[int] = []

    def script(info: EngineInfo) -> Script:
        for most in (2, 6):
            answers = yield Work(
                [
                    m.Submit(Request(10 * most + i, (i, 1, 2), SamplingParams(n, temperature=0.0, ignore_eos=True)))
                    for i, n in enumerate(lengths)
                ],
                most,
            )
            assert answers is not None
            came.append(answers.timeline.tokens)

    channel = Watched(script)

    def run() -> None:
        with suppress(WireError):
            serve(channel, EngineConfig(model), False)

    on_its_thread(run)
    assert came == [sum(lengths)] * 2
    assert channel.handed == [10 * most + i for most in (2, 6) for i in range(6)]
    assert channel.under_way == [2, 2, 2, 2, 2, 6]


def test_the_script_goes_on_when_the_engine_says_again_that_it_is_ready(model: ModelConfig) -> None:
    """As it does when kernels of adapters were made ready after the start."""

    class Announced(Watched):
        def send(self, messages: Sequence[m.Inbound | m.Outbound]) -> None:
            self.ready = next((each for each in messages if isinstance(each, m.Ready)), None) or self.ready
            again = [self.ready] if self.ready and any(isinstance(each, m.Output) for each in messages) else []
            super().send([*messages, *again])

        ready: m.Ready | None = None

    came: list[int] = []

    def script(info: EngineInfo) -> Script:
        for i in range(2):
            answers = yield Work([m.Submit(Request(i, (1, 2), SamplingParams(3, temperature=0.0, ignore_eos=True)))])
            assert answers is not None
            came.append(answers.timeline.tokens)

    def run() -> None:
        with suppress(WireError):
            serve(Announced(script), EngineConfig(model), False)

    on_its_thread(run)
    assert came == [3, 3]


def test_what_was_measured_is_kept_when_the_peer_ends(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(self: BatchGeneratorPeer, prompts: Any, *others: Any) -> Any:
        if len(prompts) > 1:
            raise MemoryError("2 rows are too many")
        return real(self, prompts, *others)

    real = BatchGeneratorPeer.generate
    monkeypatch.setattr(BatchGeneratorPeer, "generate", generate)
    kept: list[dict[str, Any]] = []

    def keep(found: dict[str, Any]) -> None:
        kept.append(found | {"left_out_of_collections": gc.get_freeze_count()})

    load = EngineLoad((Batch(1, 8), Batch(2, 8), Batch(1, 9)), max_tokens=4, repeats=1)
    bench = EngineBench(EngineConfig(model, scheduler=SchedulerConfig(max_num_seqs=2)), load, [], keep)
    on_its_thread(bench.measure)
    sizes = [len(k["results"]) for k in kept if "results" in k]
    assert sizes == sorted(sizes) and sizes[-1] == 3
    assert ["batch_generator" in row for row in kept[-1]["results"]] == [True, False, False]
    assert kept[-1]["results"][1]["ratio"] == {}
    assert all(k["left_out_of_collections"] for k in kept) and not gc.get_freeze_count()
    assert kept[-1]["no_peer"] == "MemoryError: 2 rows are too many"


def test_the_least_that_a_step_moves(model: ModelConfig) -> None:
    module = loader.load_unread(model, lambda stage, fraction: None).module
    # The embedding is the head, too: a step reads all of it.
    assert footprint.read_by_a_step(module) == 4 * SHAPE.parameters
    widths = sum(i + o for o, i in SHAPE.linears().values()) * SHAPE.layers
    assert footprint.adapter_bytes(module, 16, 2) == 2 * 16 * widths
    floor = Floor(weights=1000, token=10, state=3, adapter=100, bandwidth=1e6)
    assert floor.of_step(rows=4, context=25.0, adapters=2, milliseconds=4.4) == {
        "weight_bytes": 1000,
        "cache_bytes": 1024,  # the states are read and written
        "adapter_bytes": 200,
        "floor_ms": 2.224,
        "bandwidth_share": 0.505,
    }


def test_an_embedding_that_is_looked_up_is_not_read(tmp_path: Path) -> None:
    config = ModelConfig(path=str(write_model(tmp_path, SHAPES["qwen3-8b"], weights=False)), random_weights=True)
    module = loader.load_unread(config, lambda stage, fraction: None).module
    shape = SHAPES["qwen3-8b"]
    item = mx.float32.size  # on this device
    assert footprint.read_by_a_step(module) == item * (shape.parameters - shape.vocab * shape.hidden)


def test_a_hybrid_s_shape_is_that_of_its_model(tmp_path: Path) -> None:
    shape = HybridShape(64, 8, 4, 2, 16, 128, 512, 2, 4, 16)
    config = ModelConfig(path=str(write_model(tmp_path, shape, weights=False)), random_weights=True)
    module = loader.load_unread(config, lambda stage, fraction: None).module
    assert {k: (s.outputs, s.inputs) for k, s in footprint.linears(module).items()} == shape.adapted()
    with pytest.raises(ValueError, match="random"):
        write_model(tmp_path, shape)


def test_a_quantised_shape_is_measured_as_what_it_is(tmp_path: Path) -> None:
    folder = write_model(tmp_path, SHAPE, weights=False, bits=4)
    config = ModelConfig(path=str(folder), random_weights=True)
    module = loader.load(config, lambda stage, fraction: None).module
    packed = 4 / 8 + 2 * 4 / 64  # bytes a weight: codes, and a float32 scale and bias for each group
    norms = 4 * sum(dims[0] for dims in SHAPE.tensors().values() if len(dims) == 1)
    matrices = SHAPE.parameters - norms // 4
    assert footprint.read_by_a_step(module) == packed * matrices + norms


def test_ratios_are_of_neighbours_in_time() -> None:
    def rounds(*rates: float) -> list[dict[str, float]]:
        return [
            {f"{kind}_tokens_per_s": r for kind in ("decode", "prefill")}
            | {"step_ms": 1.0, "prefill_ms": 1.0, "generated_before": 2.0}
            for r in rates
        ]

    sides = {"tandem": rounds(100, 200, 300), "same": rounds(90, 160, 270), "mixed": rounds(45, 160, 240)}
    found = summary(8, 10, sides, Floor(1, 1, 0, 1, 1.0), adapters=4)
    assert found["ratio"] == {"same/base": 0.9, "mixed/base": 0.8, "mixed/same": 0.889}
    assert found["mixed"]["adapter_bytes"] == 4
    assert found["mixed"]["cache_bytes"] == 8 * (10 + 2)


def test_a_picture_of_sides_that_did_not_all_run(tmp_path: Path) -> None:
    side = {"decode_tokens_per_s": 5.0, "step_ms": 2.0, "floor_ms": 1.0}
    rows = [
        {"batch": 1, "prompt_tokens": 8, "tandem": side, "batch_generator": side},
        {"batch": 2, "prompt_tokens": 8, "tandem": side},
    ]
    plot_engine({"results": rows}, tmp_path / "engine.png")
    assert (tmp_path / "engine.png").read_bytes().startswith(b"\x89PNG")
