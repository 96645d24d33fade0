"""Masks of the host on the MLX runner: what they forbid is never drawn, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from mlx_tandem.engine.masks import Place
from mlx_tandem.engine.plan import Mask
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.harness import Loop
from tests.engine.mlx_engine import Engine, make_engine
from tests.engine.test_verify import PARAMS, PROMPTS, Oracle, assert_same, requests
from tests.engine.workloads import NeverLate

ALLOWED = tuple(range(3, tiny_models.VOCAB, 3))


def mask_of(tokens: Sequence[int]) -> bytes:
    bits = sum(1 << t for t in tokens)
    return bits.to_bytes(-(-tiny_models.VOCAB // 32) * 4, "little")


class Same(NeverLate):
    """Always the same mask, for requests of odd numbers."""

    def constrains(self, request: Request) -> bool:
        return request.id % 2 == 1

    def masks(self, places: Sequence[Place]) -> list[Mask]:
        return [mask_of(self.allowed(place.tokens)) for place in places]

    def allowed(self, tokens: Sequence[int]) -> Sequence[int]:
        return ALLOWED

    def forget(self, request: int, choice: int) -> None:
        pass


class Turns(Same):
    """Of three tokens in a row the sum of the last two decides which third may follow."""

    def allowed(self, tokens: Sequence[int]) -> range:
        return range(1 + sum(tokens[-2:]) % 3, tiny_models.VOCAB, 3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tiny_models.make(tmp_path_factory.mktemp("model") / "model", "qwen3", seed=1)
    return make_engine(folder, max_num_seqs=8)


def serve(
    engine: Engine, asked: list[Request], maker: Same | None, proposer: Oracle | None = None, **options: int
) -> Loop:
    loop = engine.loop(**options)
    loop.scheduler.mask_maker, loop.scheduler.drafting.proposer = maker, proposer
    for request in asked:
        loop.add(request)
    loop.run()
    loop.assert_idle()
    return loop


@pytest.mark.parametrize("name", PARAMS)
def test_a_mask_that_never_changes_is_a_set_of_allowed_tokens(engine: Engine, name: str) -> None:
    """Rows without a mask draw what they draw without neighbours that have one."""
    plain = [
        structs.replace(r, params=structs.replace(r.params, allowed_token_ids=ALLOWED)) if r.id % 2 else r
        for r in requests(name)
    ]
    assert_same(serve(engine, requests(name), Same()), serve(engine, plain, None))


@pytest.mark.parametrize("options", [{}, {"depth": 0}, {"blocks": 14}, {"chunks": 5, "piggybacked": 6}])
@pytest.mark.parametrize("name", ["greedy", "penalties", "hot"])
def test_what_a_mask_forbids_is_never_drawn(engine: Engine, name: str, options: dict[str, int]) -> None:
    """Each mask is made with the token before it; with drafts the same is said."""
    turns = Turns()
    loop = serve(engine, requests(name), turns, **options)
    for (request, _), tokens in loop.tokens.items():
        known = [*PROMPTS[request], *tokens]
        if request % 2:
            for at in range(len(PROMPTS[request]), len(known)):
                assert known[at] in turns.allowed(known[:at])
    drafted = serve(engine, requests(name), turns, Oracle(loop, 4), **options)
    assert_same(drafted, loop)
    assert drafted.accepted


@pytest.mark.parametrize("name", ["hot", "penalties"])
def test_numbers_that_travel_together_and_masks_that_are_placed_early_change_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The runner packs its numbers and places masks early, as on CUDA, with and without masks that are new."""
    usual = serve(engine, requests(name), Turns())
    monkeypatch.setattr(engine.built.runner.inputs, "packed", True)
    monkeypatch.setattr(engine.built.runner, "one_at_a_time", False)
    for proposer in (None, Oracle(usual, 4)):
        loop = serve(engine, requests(name), Turns(), proposer)
        assert_same(loop, usual)
        assert loop.early


def test_masks_travel_before_the_first_of_several_draws(engine: Engine) -> None:
    """Prompts of different lengths are read in forwards of their own, and all their masks are new."""

    class Own(Same):
        def constrains(self, request: Request) -> bool:
            return True

        def allowed(self, tokens: Sequence[int]) -> Sequence[int]:
            return (len(tokens) % tiny_models.VOCAB,)

    lengths = (3, 40, 150)
    asked = [Request(i, tuple(range(n)), SamplingParams(2, temperature=0.0)) for i, n in enumerate(lengths)]
    loop = serve(engine, asked, Own())
    assert loop.tokens == {(i, 0): [n % tiny_models.VOCAB, (n + 1) % tiny_models.VOCAB] for i, n in enumerate(lengths)}


@pytest.mark.parametrize("name", ["penalties", "hot"])
@pytest.mark.parametrize("wrong", [0, 3])
def test_masked_drafts_follow_tokens_that_the_host_has_not_read(engine: Engine, name: str, wrong: int) -> None:
    """The masks of a plan are made when the plan before it has been read, so its drafts may be behind other drafts."""

    class All(Turns):
        def constrains(self, request: Request) -> bool:
            return True

    free = serve(engine, requests(name), All())
    drafted = serve(engine, requests(name), All(), Oracle(free, wrong))
    assert_same(drafted, free)
    assert drafted.accepted and drafted.floated


def test_a_mask_that_forbids_everything_ends_its_request_alone(engine: Engine) -> None:
    class Nothing(Same):
        def allowed(self, tokens: Sequence[int]) -> Sequence[int]:
            return ()

    asked = [Request(i, prompt, SamplingParams(max_tokens=5, temperature=0.0)) for i, prompt in enumerate(PROMPTS)]
    loop = serve(engine, asked, Nothing())
    assert loop.failed == {1, 3}
    assert set(loop.finished) == {(0, 0), (2, 0)}
