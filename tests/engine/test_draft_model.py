"""A draft model on the MLX runner: what is said is what is said without it, and what it drafts is mostly right."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.config import SpeculationConfig
from mlx_tandem.engine.plan import DeviceError
from mlx_tandem.engine.proposers import Asked
from mlx_tandem.engine.proposers.draft_model import DraftModel
from mlx_tandem.engine.proposers.speculation import Speculation
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.kv.groups import open_groups
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.harness import Loop
from tests.engine.mlx_engine import Engine, make_engine
from tests.engine.test_verify import assert_same

TEXTS = ("Sort down: 3 9 1 7 5", "Tell me a short story about a bear.", "Count from 1 to 30.", "What is 17 + 25?")

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "hot": {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "logprobs": 0},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "few tokens": {"temperature": 0.0, "allowed_token_ids": tuple(range(300, 340)), "min_tokens": 5},
}


def requests(name: str, n: int = 1) -> list[Request]:
    tokenizer = Tokenizer.load(demo.MODEL_PATH)
    params = SamplingParams(**({"max_tokens": 24, "seed": 7} | PARAMS[name]))
    asked = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in TEXTS]
    return [Request(i, tuple(tokenizer.encode(text)), params, n=n) for i, text in enumerate(asked)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(demo.MODEL_PATH, num_blocks=100, max_num_seqs=8, max_loras=0)


@pytest.fixture(scope="module")
def smaller() -> Engine:
    return make_engine(demo.DRAFT_PATH, num_blocks=100, max_num_seqs=8, max_loras=0)


def drafts_of(smaller: Engine, blocks: int = 0, seats: int = 8) -> DraftModel:
    info = smaller.built.info
    (group,) = open_groups(info.memory, info.block_size)
    if blocks:
        group.pool = BlockPool(blocks, info.block_size)
    return DraftModel(smaller.built.runner, [group], seats=seats, vocab_size=info.vocab_size, longest=1000)


def serve(engine: Engine, asked: list[Request], proposer: Speculation | None, **options: int) -> Loop:
    loop = engine.loop(**options)
    loop.scheduler.drafting.proposer = proposer
    loop.scheduler.drafting.most_tokens = 64
    for request in asked:
        loop.add(request)
    loop.run()
    loop.assert_idle()
    return loop


def speculation(model: DraftModel, **options: Any) -> Speculation:
    return Speculation(SpeculationConfig(**{"method": "draft", "dynamic": False, "num_tokens": 3, **options}), model)


@pytest.mark.promise("DET-4")
@pytest.mark.parametrize("name", PARAMS)
def test_drafts_change_nothing_and_are_drawn_as_the_model_draws(engine: Engine, smaller: Engine, name: str) -> None:
    asked, proposer = requests(name), speculation(drafts_of(smaller))
    assert_same(serve(engine, asked, proposer), serve(engine, asked, None))
    least = {"greedy": 0.7, "hot": 0.5, "penalties": 0.3, "few tokens": 0.0}[name]
    assert proposer.counts.all.accepted > least * proposer.counts.all.drafted, proposer.counts


def test_a_model_that_drafts_for_itself_is_always_right(smaller: Engine) -> None:
    """Its noise is that of the model that it drafts for, at every position and for every choice."""
    own = make_engine(demo.DRAFT_PATH, num_blocks=100, max_num_seqs=8, max_loras=0)
    asked, proposer = requests("hot", n=2), speculation(drafts_of(own))
    assert_same(serve(smaller, asked, proposer), serve(smaller, asked, None))
    assert proposer.counts.all.drafted > 100
    assert proposer.counts.all.accepted > 0.95 * proposer.counts.all.drafted, (
        "only what stands behind an end is rejected"
    )


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({"depth": 0}, {}),
        ({"blocks": 14}, {}),  # preemption
        ({}, {"blocks": 12}),  # a pool for few sequences
        ({}, {"seats": 2}),
    ],
)
def test_drafts_change_nothing_with_little_room(
    engine: Engine, smaller: Engine, options: dict[str, int], room: dict[str, int]
) -> None:
    asked, proposer = requests("hot"), speculation(drafts_of(smaller, **room), dynamic=True)
    assert_same(serve(engine, asked, proposer, **options), serve(engine, asked, None))
    assert proposer.counts.all.accepted > 0


def test_long_prompts_are_read_in_pieces(engine: Engine, smaller: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_tandem.engine.proposers.draft_model.READ_AT_ONCE", 9)
    asked, proposer = requests("greedy"), speculation(drafts_of(smaller))
    assert_same(serve(engine, asked, proposer), serve(engine, asked, None))
    assert proposer.counts.all.accepted > 0.7 * proposer.counts.all.drafted > 0


@pytest.mark.promise("FLT-05")
def test_a_draft_model_that_fails_is_given_up(
    engine: Engine, smaller: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, model = requests("greedy"), drafts_of(smaller)
    original, launches = smaller.built.runner.launch, iter(range(100))

    def launch(plan: Any) -> Any:
        if next(launches) == 5:
            raise DeviceError("out of memory")
        return original(plan)

    monkeypatch.setattr(smaller.built.runner, "launch", launch)
    proposer = speculation(model)
    assert_same(serve(engine, asked, proposer), serve(engine, asked, None))
    assert proposer.counts.all.rows and not proposer.for_all
    assert "drafts are off from here on" in caplog.text


@pytest.mark.parametrize("name", PARAMS)
def test_rejected_drafts_leave_nothing_behind(smaller: Engine, name: str) -> None:
    """Drafts are those of a model that has read nothing but the tokens that count."""
    twin = make_engine(demo.DRAFT_PATH, num_blocks=100, max_num_seqs=8, max_loras=0)
    model, rng = drafts_of(smaller), Random(3)
    asked = [Asked(request, 0, list(request.prompt), 0, 3) for request in requests(name)]
    for _ in range(6):
        found = model.draft(asked)
        assert found == drafts_of(twin).draft(asked) and len(found) == len(asked)
        for a in asked:
            drafts = found[a.request.id, 0]
            assert isinstance(a.tokens, list)
            others = [rng.randrange(300, 340) for _ in range(rng.choice((1, 3)))]
            a.tokens.extend([*drafts[: rng.randint(0, 3)], *others])


def test_a_draft_model_with_windows_drafts_for_itself(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Its layers that see a window give blocks back, and none that a rejected draft needs again."""
    request.addfinalizer(mx.enable_compile)
    mx.disable_compile()  # the demo's models run compiled; this one would need other kernels
    folder = tiny_models.make(tmp_path / "model", "gemma3_text", seed=1)
    served, own = [make_engine(folder, num_blocks=60, max_num_seqs=8, max_loras=0) for _ in range(2)]
    info, rng = own.built.info, Random(2)
    groups = open_groups(info.memory, info.block_size)
    model = DraftModel(own.built.runner, groups, seats=8, vocab_size=info.vocab_size, longest=1000)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    asked = [
        Request(i, tuple(rng.randrange(3, info.vocab_size) for _ in range(n)), params) for i, n in enumerate((5, 40))
    ]
    proposer = speculation(model)
    assert len(groups) == 2
    assert_same(serve(served, asked, proposer), serve(served, asked, None))
    assert proposer.counts.all.accepted > 0.95 * proposer.counts.all.drafted > 0
    assert not any(group.pool.used_blocks for group in groups), "blocks leak"


def test_time_in_which_the_draft_model_was_traced_is_not_measured(engine: Engine, smaller: Engine) -> None:
    def traced() -> list[bool]:
        noted: list[bool] = []
        proposer = speculation(drafts_of(smaller))
        proposer.payoff.note = lambda now, tokens, *, usual, new: noted.append(new)  # type: ignore[method-assign]
        serve(engine, requests("greedy"), proposer)
        return noted

    while any(traced()):
        pass  # until all kinds of steps of both models are traced
    smaller.built.runner.compiled.clear()
    assert any(traced()) and not any(traced())


def test_tokens_that_the_draft_model_has_not_are_not_drafted_for(smaller: Engine) -> None:
    """Neither where they are tokens of the sequence nor where its parameters name them."""
    info, params = smaller.built.info, SamplingParams(max_tokens=12, temperature=1.0, seed=1)
    known = Request(0, (1, 2, 3), params)
    named = structs.replace(known, id=1, params=structs.replace(params, logit_bias=((info.vocab_size, 1.0),)))
    asked = [Asked(known, 0, [1, 2, 3], 0, 3), Asked(named, 0, [1, 2, 3], 0, 3)]
    model = drafts_of(smaller)
    assert list(model.draft(asked)) == [(0, 0)]
    assert not model.draft([asked[0]._replace(tokens=[1, 2, 3, info.vocab_size])])
    assert not model.draft([asked[0]._replace(tokens=[1, 2, 3, info.vocab_size, 1])])
