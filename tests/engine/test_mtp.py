"""Drafts by a model's head for multi-token prediction: what is said is what is said without them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from mlx_tandem.engine.proposers.speculation import Speculation
from mlx_tandem.errors import ModelError
from mlx_tandem.model.build import build, plan
from mlx_tandem.model.loader import load_unread
from mlx_tandem.model.mtp import FORMATS
from mlx_tandem.types import Request
from tests import tiny_heads, tiny_models
from tests.engine.harness import Loop
from tests.engine.mlx_engine import Engine
from tests.engine.test_masks import Turns
from tests.engine.test_verify import PROMPTS, assert_same, few, requests

MTP = SpeculationConfig("mtp", dynamic=False)


@pytest.fixture(autouse=True)
def _compile_some(request: pytest.FixtureRequest) -> Iterator[None]:
    """Greedy draws run compiled, as serving does, with and without states; the others traced anew for each step, which
    spares a compiler the kernels of each way to draw."""
    if not hasattr(request.node, "callspec") or request.node.callspec.params.get("name") != "greedy":
        mx.disable_compile()
    yield
    mx.enable_compile()


def make_engine(folder: Path, **cache: Any) -> Engine:
    config = EngineConfig(
        ModelConfig(str(folder)),
        CacheConfig(**{"block_size": 8, "num_blocks": 48} | cache),
        scheduler=SchedulerConfig(max_num_seqs=8),
        lora=LoraConfig(max_loras=2, max_lora_rank=16),
        speculation=MTP,
    )
    return Engine(build(config, {}, lambda stage, fraction: None), {})


class Noted(Speculation):
    """The server's proposer, which keeps what the head has drafted."""

    def __init__(self, config: SpeculationConfig = MTP) -> None:
        super().__init__(config)
        self.noted: dict[tuple[int, int, int], int] = {}

    def offer(self, request: Request, choice: int, tokens: int, draft: int) -> None:
        self.noted[request.id, choice, tokens] = draft
        super().offer(request, choice, tokens, draft)


def serve(
    engine: Engine, asked: list[Request], proposer: Noted | None = None, maker: Turns | None = None, **options: int
) -> Loop:
    loop = engine.loop(**options)
    loop.scheduler.drafting.proposer, loop.scheduler.mask_maker = proposer, maker
    loop.scheduler.drafting.most_tokens = 64
    for request in asked:
        loop.add(request)
        for _ in range(4):
            loop.step()
    loop.run()
    loop.assert_idle()
    return loop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_heads.make(tmp_path_factory.mktemp("model") / "mimo", "mimo")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("greedy", {"depth": 0}),
        ("hot", {}),
        ("penalties", {"blocks": 14}),
        ("nothing ends it before", {"chunks": 5, "piggybacked": 6}),
    ],
)
def test_a_head_changes_nothing(engine: Engine, name: str, options: dict[str, int]) -> None:
    """Of so few tokens to choose from, the head foresees some by chance."""
    asked, proposer = requests(name, params=few(name)), Noted()
    assert_same(serve(engine, asked, proposer, **options), serve(engine, asked))
    assert 0 < proposer.counts.all.accepted < proposer.counts.all.drafted == proposer.counts.all.rows
    assert not proposer._drafters


def foreseen(noted: Noted, loop: Loop, expected: tiny_heads.Expected) -> float:
    """The fraction of the drafts that are what the head predicts of the whole text before them."""
    texts = {key: [*loop.requests[key[0]].prompt, *tokens] for key, tokens in loop.tokens.items()}
    allowed = few("greedy").allowed_token_ids
    right = [draft == expected.after(texts[r, c][:n], allowed) for (r, c, n), draft in noted.noted.items()]
    assert len(right) > 10
    return sum(right) / len(right)


@pytest.mark.parametrize(
    ("options", "least"),
    [({}, 1.0), ({"depth": 0}, 1.0), ({"chunks": 5, "piggybacked": 6}, 1.0), ({"blocks": 14}, 0.9)],
)
def test_a_head_drafts_what_it_predicts_of_the_whole_text(
    engine: Engine, folder: Path, options: dict[str, int], least: float
) -> None:
    """Behind every prefix, however it was computed: in pieces, behind rejected drafts, for choices that share their
    prompt, again after a preemption. The last position of a block that another text shares may be off by one token."""
    noted = Noted()
    loop = serve(engine, requests("greedy", few("greedy")), noted, **options)
    assert foreseen(noted, loop, tiny_heads.Expected(folder, "mimo")) >= least
    assert bool(loop.piggybacked) == ("piggybacked" in options) and loop.accepted


def test_a_head_with_experts_drafts_what_it_predicts(tmp_path: Path) -> None:
    folder, noted = tiny_heads.make(tmp_path / "model", "glm4_moe"), Noted()
    loop = serve(make_engine(folder), requests("greedy", few("greedy"))[:2], noted)
    assert foreseen(noted, loop, tiny_heads.Expected(folder, "glm4_moe")) == 1.0


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [("qwen3_5", "greedy", {}), ("qwen3_5", "hot", {"blocks": 14}), ("qwen3_next", "penalties", {"chunks": 5})],
)
def test_a_head_of_a_model_with_states_changes_nothing(
    tmp_path: Path, family: str, name: str, options: dict[str, int]
) -> None:
    """The states after rejected drafts are those before them; and it drafts what it predicts of the whole text."""
    folder, noted = tiny_heads.make(tmp_path / "model", family), Noted()
    engine, asked = make_engine(folder), requests(name, few(name))
    loop = serve(engine, asked, noted, **options)
    assert_same(loop, serve(engine, asked, **options))
    assert 0 < noted.counts.all.accepted < noted.counts.all.drafted == noted.counts.all.rows
    if name == "greedy":
        assert foreseen(noted, loop, tiny_heads.Expected(folder, family)) == 1.0


def test_a_converted_checkpoint_with_a_head_predicts_what_the_original_does(tmp_path: Path) -> None:
    original = tiny_heads.make(tmp_path / "original", "qwen3_5")
    folder = tiny_heads.converted(tmp_path / "converted", original)
    models = [
        load_unread(ModelConfig(str(path)), lambda stage, fraction: None, mtp=True) for path in (original, folder)
    ]
    tokens = mx.array([PROMPTS[1]])
    said: list[mx.array] = []
    for model in models:
        module: Any = model.module
        assert model.mtp is not None
        said.append(model.mtp.logits(model.mtp(module.model(tokens)[:, :-1], tokens[:, 1:], KVCache())))
    assert mx.allclose(*said, atol=1e-4)


@pytest.mark.parametrize("family", tiny_heads.NAMES)
def test_a_head_is_loaded_by_the_names_of_its_family(tmp_path: Path, family: str) -> None:
    folder = tiny_heads.make(tmp_path / "model", family)
    model = load_unread(ModelConfig(str(folder)), lambda stage, fraction: None, mtp=True)
    assert model.mtp is not None and sorted(tiny_heads.NAMES) == sorted(FORMATS)
    module: Any = model.module
    tokens = mx.array([PROMPTS[1]])
    hidden = model.mtp(module.model(tokens)[:, :-1], tokens[:, 1:], KVCache())
    assert model.mtp.logits(hidden)[0, -1].argmax().item() == tiny_heads.Expected(folder, family).after(PROMPTS[1])


def test_a_head_shares_a_step_with_rows_that_draw_by_masks(engine: Engine) -> None:
    asked, proposer = requests("greedy"), Noted()
    assert_same(serve(engine, asked, proposer, Turns()), serve(engine, asked, None, Turns()))


def test_a_head_reads_on_while_it_does_not_draft(engine: Engine, folder: Path) -> None:
    """Its keys and values are complete when drafts are used again."""

    class Sometimes(Noted):
        turns = 0

        def is_on(self, rows: int) -> bool:
            self.turns += bool(rows)
            return bool(rows) and self.turns // 4 % 2 == 1

    asked, proposer = requests("greedy", few("greedy")), Sometimes()
    loop = serve(engine, asked, proposer)
    assert_same(loop, serve(engine, asked))
    assert foreseen(proposer, loop, tiny_heads.Expected(folder, "mimo")) == 1.0


def test_a_head_works_over_keys_and_values_in_few_bits(folder: Path) -> None:
    engine, asked, proposer = make_engine(folder, kv_bits=8, kv_group_size=16), requests("hot", few("hot")), Noted()
    assert_same(serve(engine, asked, proposer), serve(engine, asked))
    assert proposer.counts.all.accepted > 0


def test_loading_keeps_the_head_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = make_engine(folder)
    assert "the weights of the head for multi-token prediction are kept: model.mtp_layers.0.*" in caplog.text
    info = engine.built.info
    assert (info.layers, engine.built.layers) == (2, 2)
    config = EngineConfig(ModelConfig(str(folder)), CacheConfig(block_size=8, num_blocks=48))
    without, _ = plan(config)
    assert info.memory.weights > without.weights and info.memory.block_bytes == without.block_bytes * 3 // 2


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("mimo", "none of its weights is named model.mtp_layers.0."),
        ("qwen3", "not supported for the model_type 'qwen3'"),
        ("qwen3_5", "none of its weights is named mtp."),
    ],
)
def test_a_checkpoint_without_heads_is_refused_by_name(tmp_path: Path, family: str, says: str) -> None:
    folder = tiny_models.make(tmp_path / "model", family)
    with pytest.raises(ModelError, match=says) as e:
        make_engine(folder)
    assert str(folder) in e.value.message and "--spec-decode mtp" in e.value.message and e.value.param == "method"


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tiny_heads.make(tmp_path / "model", "mimo")
    stored: Any = mx.load(str(folder / "model.safetensors"))
    del stored["model.mtp_layers.0.input_proj.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), stored, {"format": "mlx"})
    with pytest.raises(ModelError, match="its weights do not fit"):
        make_engine(folder)
