"""Vision models through the real runner: with images they say what mlx-vlm says, whatever else is served.

Tiny random models in float32, against mlx-vlm's own forward over its own cache, one sequence at a time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from mlx_tandem.adapters import formats
from mlx_tandem.config import DiskCacheConfig
from mlx_tandem.engine.kv_offload import reads
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.kv.disk.cache import DiskCache
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.inplace import Store, Writing
from mlx_tandem.model.ops.attention.block import FusedBlock
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.vision import library
from mlx_tandem.model_folder import VISION_FAMILIES
from mlx_tandem.types import AdapterRef, Image, Request, SamplingParams
from tests import tiny_heads, tiny_models, tiny_vision
from tests.engine.harness import Loop
from tests.engine.mlx_engine import NEAR_TIE, TOLERANCE, Engine, make_engine
from tests.engine.test_mtp import Noted
from tests.engine.test_mtp import make_engine as make_engine_with_head
from tests.engine.test_mtp import serve as serve_with_head
from tests.engine.test_verify import Oracle as Foreseen
from tests.kernels import shim
from tests.tiny_vision import IMAGE, Oracle, Parts

pytestmark = pytest.mark.skipif(not library.is_installed(), reason="mlx-vlm is not installed")

TOKENS = 6
COMPILED = "llava"
HYBRID = "qwen3_5"
"""A family whose language model has layers with a state."""
_rng = np.random.default_rng(3)
TEXTS = [tuple(_rng.integers(3, 280, n).tolist()) for n in (9, 5, 21, 2)]


@pytest.fixture(autouse=True)
def _compile_some(request: pytest.FixtureRequest) -> Iterator[None]:
    family = request.node.callspec.params.get("family") if hasattr(request.node, "callspec") else COMPILED
    if family != COMPILED:
        mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {family: tiny_vision.make(root / family, family) for family in tiny_vision.FAMILIES}


@pytest.fixture(scope="module")
def llava(folders: dict[str, Path]) -> tuple[Engine, Oracle]:
    return make_engine(folders["llava"]), Oracle(folders["llava"])


def ask(number: int, family: str, parts: Parts, *, n: int = 1, max_tokens: int = TOKENS) -> Request:
    """A request for the prompt of these parts."""
    tokens, images = tiny_vision.prompt(family, parts)
    return Request(number, tokens, SamplingParams(max_tokens, temperature=0.0, logprobs=0), n=n, images=images)


def assert_agrees(loop: Loop, oracle: Oracle, case: str, only: Collection[int] | None = None) -> None:
    """Every sequence equals mlx-vlm's, token by token, and so do its logprobs. `only`: requests to look at."""
    for (number, choice), tokens in loop.tokens.items():
        if only is not None and number not in only:
            continue
        request = loop.requests[number]
        want, logprobs = oracle.greedy(request.prompt, request.images, request.params.max_tokens)
        assert len(tokens) == len(want), f"{case}: request {number} has {len(tokens)} tokens"
        for i, (token, said, lp) in enumerate(zip(tokens, loop.logprobs[number, choice], logprobs, strict=True)):
            where = f"{case}: request {number}, choice {choice}, token {i}"
            assert abs(said.model - lp[token]) < TOLERANCE, f"{where}: logprob {said.model}, should be {lp[token]}"
            if token != want[i]:
                assert lp[want[i]] - lp[token] < NEAR_TIE, f"{where}: {token}, should be {want[i]}"
                break


def test_every_family_that_is_served_is_tested() -> None:
    assert set(tiny_vision.FAMILIES) == set(VISION_FAMILIES)


@pytest.mark.parametrize("family", tiny_vision.FAMILIES)
def test_a_family_says_with_images_what_mlx_vlm_says(family: str, folders: dict[str, Path]) -> None:
    engine, oracle = make_engine(folders[family], num_blocks=64), Oracle(folders[family])
    one = ask(0, family, [TEXTS[0], 1, TEXTS[3]])
    two = ask(1, family, [TEXTS[1], 2, TEXTS[2], 3, TEXTS[0]])
    text = ask(2, family, [TEXTS[2]], max_tokens=20)
    assert oracle.greedy(one.prompt, one.images, 1)[1][0].argmax() >= 0
    assert_agrees(engine.run([one]), oracle, "alone")
    everyone = [text, one, two, ask(3, family, [1, TEXTS[3]], n=2)]
    assert_agrees(engine.run(everyone, chunks=7, stagger=1), oracle, "batched, in chunks, with text")


@pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("family", ["qwen2_5_vl", HYBRID])
def test_images_are_shown_where_kernels_read_the_pool(
    family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: one kernel leads from products to the pool, but for tokens that are not where their index says.

    Prompts of the hybrid do not go with rows that decode.
    """
    mx.disable_compile()  # the shim computes at once
    monkeypatch.setattr(inplace, "writing", lambda: Writing(Store(shim.maker())))
    backends = [Fused("cuda", shim.maker())]
    engine, oracle = make_engine(folders[family], attention_backend="cuda", backends=backends), Oracle(folders[family])
    engine.built.runner.rectangles.common_offsets = engine.built.runner.inputs.packed = True
    assert any(isinstance(m, FusedBlock) for m in engine.built.runner.module.modules())
    loop = engine.loop(piggybacked=engine.built.step_limits.piggybacked)
    begin = TEXTS[0][:8]  # with it, the image ends with a block
    loop.add(ask(0, family, [TEXTS[1]], max_tokens=24))
    for number, tail in enumerate((TEXTS[3], TEXTS[2]), 1):
        loop.add(ask(number, family, [begin, 2, tail]))
        for _ in range(10):
            loop.step()
    loop.run()
    assert family == HYBRID or (loop.piggybacked > 0 and loop.cached[2] == 24)
    assert_agrees(loop, oracle, "by kernels")


def test_an_image_decides_what_is_said(llava: tuple[Engine, Oracle]) -> None:
    """Otherwise the comparisons here would show little."""
    engine, _ = llava
    loop = engine.run([ask(i, "llava", [TEXTS[0], 1 + i, TEXTS[3]]) for i in range(3)])
    assert len({tuple(tokens) for tokens in loop.tokens.values()}) == 3


def test_preempted_sequences_are_computed_again_with_their_images(llava: tuple[Engine, Oracle]) -> None:
    engine, oracle = llava
    requests = [ask(i, "llava", [TEXTS[i], i, TEXTS[3], 9, TEXTS[1]], max_tokens=24) for i in range(3)]
    loop = engine.run(requests, blocks=16, chunks=9)
    assert loop.scheduler.queue.preemptions > 0
    assert_agrees(loop, oracle, "preempted")


def test_after_a_failed_step_images_are_encoded_again(llava: tuple[Engine, Oracle]) -> None:
    engine, oracle = llava
    loop = engine.loop(chunks=9)
    for i in range(2):
        loop.add(ask(i, "llava", [TEXTS[i], i, TEXTS[3], 9, TEXTS[1]]))
    for _ in range(5):
        loop.step()
    loop._fail([plan for plan, _ in loop._flights], again=True)
    loop.run()
    assert_agrees(loop, oracle, "after a failure")


def test_a_quantised_folder_says_what_mlx_vlm_says(tmp_path: Path) -> None:
    folder = tiny_vision.make(tmp_path / "model", "llava", bits=8)
    assert_agrees(make_engine(folder).run([ask(0, "llava", [TEXTS[0], 1, TEXTS[3]])]), Oracle(folder), "quantised")


def test_images_wait_for_room_and_none_waits_forever(llava: tuple[Engine, Oracle]) -> None:
    """There is room for the embeddings of one image, and several requests have two."""
    engine, oracle = llava
    engine.built.runner.reset()
    loop = engine.loop(image_room=17, chunks=11)
    for i in range(4):
        loop.add(ask(i, "llava", [TEXTS[i], i, TEXTS[3], 9 + i, TEXTS[1]]))
        loop.step()
    while loop.step():
        assert sum(map(len, engine.built.runner._embeddings._of.values())) <= 17
    assert_agrees(loop, oracle, "little room")


def test_the_same_image_is_a_hit_and_another_is_a_miss(llava: tuple[Engine, Oracle]) -> None:
    engine, oracle = llava
    loop = engine.loop()
    size, begin = engine.built.info.block_size, TEXTS[0][:6]
    cases = [(1, 0), (1, 24), (2, 6), (1, 24)]  # the seed of the image, and how many tokens are found
    assert size == 8
    for i, (seed, _) in enumerate(cases):
        loop.add(ask(i, "llava", [begin, seed, TEXTS[1]]))
        loop.run()
    assert [loop.cached[i] for i in range(len(cases))] == [found for _, found in cases]
    assert_agrees(loop, oracle, "prefixes")


def test_gemma_4_finds_an_image_again_and_not_another(folders: dict[str, Path]) -> None:
    """Whose layers also read an embedding of their own for each token, in which images have no part."""
    engine, oracle = make_engine(folders["gemma4"]), Oracle(folders["gemma4"])
    loop = engine.loop()
    cases = [(1, 0), (1, 16), (2, 6)]  # the seed of the image, and how many tokens are found
    for i, (seed, _) in enumerate(cases):
        loop.add(ask(i, "gemma4", [TEXTS[0][:6], seed, TEXTS[0]]))
        loop.run()
    assert [loop.cached[i] for i in range(len(cases))] == [found for _, found in cases]
    assert_agrees(loop, oracle, "prefixes")


def test_a_hit_that_ends_within_an_image_is_read_on(llava: tuple[Engine, Oracle]) -> None:
    """The blocks behind its first half are given to others, so the other half is computed from the embeddings."""
    engine, oracle = llava
    loop = engine.loop()
    whole = ask(0, "llava", [TEXTS[0][:4], 1, TEXTS[1]])
    loop.add(whole)
    loop.run()
    cache = loop.scheduler._blocks._caches[0]
    table = [e.block for e in cache.entries()]
    cache.drop(table[1:])
    loop.add(ask(1, "llava", [TEXTS[0][:4], 1, TEXTS[1]]))
    loop.run()
    assert loop.cached[1] == 8
    assert_agrees(loop, oracle, "within an image")


@pytest.mark.parametrize("family", ["llava", "gemma4", HYBRID])
def test_an_adapter_changes_the_language_model_only(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """In one batch with the base, and not in its blocks."""
    engine, base, changed = make_engine(folders[family]), Oracle(folders[family]), Oracle(folders[family])
    assert not any("vision" in path for path in engine.built.linears)
    deltas = tiny_models.make_adapter(tmp_path / "a", engine.built.linears, "mlx-lm", rank=4, seed=1)
    layers = len(base.model.layers)
    loaded = formats.read(tmp_path / "a", engine.built.linears, max_rank=16, base_layers=layers)
    engine.weights[loaded.info.digest] = loaded
    tiny_models.merge(changed.model, deltas)
    plain = [ask(i, family, [TEXTS[i % 2], 1 + i % 3, TEXTS[3]]) for i in range(4)]
    ref = AdapterRef("a", 1, loaded.info.digest)
    adapted = [msgspec.structs.replace(request, id=10 + request.id, adapter=ref) for request in plain]
    loop = engine.run([*plain, *adapted], chunks=9)
    for oracle, asked in ((base, plain), (changed, adapted)):
        ids = {request.id for request in asked}
        assert_agrees(loop, oracle, "mixed with an adapter", ids)
    first = [loop.logprobs[number, 0][0].model for number in (0, 10)]
    assert loop.tokens[0, 0] != loop.tokens[10, 0] or abs(first[0] - first[1]) > TOLERANCE, (
        "the adapter changes nothing"
    )


def test_a_conversation_goes_on_from_the_state_behind_its_images(folders: dict[str, Path]) -> None:
    """And under another image not from a state behind it."""
    engine, oracle = make_engine(folders[HYBRID], num_blocks=64), Oracle(folders[HYBRID])
    loop = engine.loop(chunks=9)
    parts: list[tuple[int, ...] | int] = [TEXTS[0], 1, TEXTS[1]]
    found: list[int] = []
    for turn, image in enumerate((2, 3, 4)):
        request = ask(turn, HYBRID, parts, max_tokens=9)
        loop.add(request)
        loop.run()
        found.append(loop.cached[turn] - len(request.prompt))
        parts += [tuple(loop.tokens[turn, 0]), image, TEXTS[3 if turn else 1]]
    assert found[0] == -len(TEXTS[0] + TEXTS[1]) - 7 and all(-3 * 8 < left < 0 for left in found[1:]), found
    other = ask(9, HYBRID, [TEXTS[0], 5, *parts[2:]])
    loop.add(other)
    loop.run()
    assert loop.cached[9] <= other.images[0].start
    assert_agrees(loop, oracle, "a conversation")


def test_an_original_checkpoint_says_what_a_converted_one_says(folders: dict[str, Path], tmp_path: Path) -> None:
    """Hugging Face's names; convolutions in PyTorch's order; norms less 1."""
    weights = mx.load(str(folders[HYBRID] / "model.safetensors"))
    assert isinstance(weights, dict)
    original: dict[str, mx.array] = {}
    for name, w in weights.items():
        if name.endswith("conv1d.weight"):
            w = w.moveaxis(1, 2)
        elif name.endswith("patch_embed.proj.weight"):
            w = w.transpose(0, 4, 1, 2, 3)
        elif name.endswith(("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")):
            w = w - 1.0
        for new, old in (
            ("lm_head.", "language_model.lm_head."),
            ("model.language_model.", "language_model.model."),
            ("model.visual.", "vision_tower."),
        ):
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        original[name] = mx.contiguous(w)
    (tmp_path / "config.json").write_text((folders[HYBRID] / "config.json").read_text())
    mx.save_safetensors(str(tmp_path / "model.safetensors"), original)
    loop = make_engine(tmp_path).run([ask(0, HYBRID, [TEXTS[0], 1, TEXTS[3]])])
    assert_agrees(loop, Oracle(folders[HYBRID]), "an original checkpoint")


@pytest.mark.parametrize("family", ["qwen2_vl", HYBRID])
def test_drafts_behind_images_change_nothing(family: str, folders: dict[str, Path]) -> None:
    """Where positions differ from indices, also of rows that verify drafts; and with states after each draft."""
    engine, oracle = make_engine(folders[family], num_blocks=64), Oracle(folders[family])
    asked = [ask(i, family, [TEXTS[i], i + 1, TEXTS[3]], max_tokens=12) for i in range(2)]
    loop = engine.loop(chunks=7)
    loop.scheduler.drafting.proposer = Foreseen(engine.run(asked), 3)
    for request in asked:
        loop.add(request)
    loop.run()
    assert loop.accepted > 4
    assert_agrees(loop, oracle, "with drafts")


def test_drafts_of_a_head_behind_images_change_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head reads placeholders and indices, since it only guesses."""
    mx.disable_compile()
    config = (folders[HYBRID] / "config.json").read_text()
    text = json.loads(config)["text_config"] | {"model_type": HYBRID}
    monkeypatch.setattr(tiny_heads, "settings", lambda family: text)
    weights = mx.load(str(folders[HYBRID] / "model.safetensors"))
    assert isinstance(weights, dict)
    (tmp_path / "config.json").write_text(config)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights | tiny_heads._weights(HYBRID, 1))
    asked = [ask(i, HYBRID, [TEXTS[i], i + 1, TEXTS[3], 5, TEXTS[1]], max_tokens=12) for i in range(2)]
    loop = serve_with_head(make_engine_with_head(tmp_path), asked, proposer := Noted(), chunks=7)
    assert proposer.counts.all.drafted > 10
    assert_agrees(loop, Oracle(folders[HYBRID]), "with a head")


def test_blocks_with_images_come_back_from_the_drive(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart; those of another image under the same text do not."""
    monkeypatch.setattr(reads, "WORTH_READING", 1)
    engine, oracle = make_engine(folders["llava"]), Oracle(folders["llava"])
    parts = [TEXTS[0][:6], 1, TEXTS[1]], [TEXTS[0][:6], 2, TEXTS[1]]
    config = DiskCacheConfig(dir=str(tmp_path / "kv"))
    for cached in (0, 24):
        drive = DiskCache(config, bytes(32))
        assert drive.settle()
        loop = engine.loop(drive=drive)
        loop.add(ask(0, "llava", parts[0]))
        assert drive.settle()
        loop.run()
        assert loop.cached[0] == cached
        if cached:
            loop.add(ask(1, "llava", parts[1]))
            assert drive.settle()
            loop.run()
            assert loop.cached[1] == 6, "the tokens before the image, copied from the block in memory"
        assert_agrees(loop, oracle, "from the drive")
        assert drive.settle()
        drive.close()
        engine.built.runner.reset()


def test_an_image_that_does_not_fit_the_model_fails_its_request_only(llava: tuple[Engine, Oracle]) -> None:
    engine, oracle = llava
    good, bad = ask(0, "llava", [TEXTS[0], 1, TEXTS[3]]), ask(1, "llava", [TEXTS[0], 2, TEXTS[3]])
    wrong = Image(b"x" * 16, bad.images[0].start, bad.images[0].tokens, tiny_vision.image("idefics3", 1).arrays)
    loop = engine.loop()
    loop.add(good)
    loop.add(Request(1, bad.prompt, bad.params, images=(wrong,)))
    loop.add(Request(2, bad.prompt, bad.params, images=(Image(b"y" * 16, *_place(bad), b"no arrays"),)))
    loop.run()
    loop.add(Request(3, bad.prompt, bad.params, images=(wrong,)))
    loop.run()
    assert loop.failed == {1, 2, 3}
    assert not loop.failures, "a step failed"
    for number in loop.failed:
        del loop.tokens[number, 0]
    assert_agrees(loop, oracle, "beside a bad one")


def _place(request: Request) -> tuple[int, int]:
    return request.images[0].start, request.images[0].tokens


@pytest.mark.parametrize(
    ("tokens", "places", "what"),
    [
        ((5, IMAGE, IMAGE, 6), [(2, 1)], "does not have the placeholders"),
        ((5, IMAGE, IMAGE, 6), [(1, 3)], "does not have the placeholders"),
        ((5, IMAGE, IMAGE, 6), [(1, 0)], "does not have the placeholders"),
        ((5, IMAGE, IMAGE, 6), [(1, 1)], "belongs to no image"),
        ((5, IMAGE, IMAGE, 6), [(1, 1), (1, 1)], "does not have the placeholders"),
        ((5, IMAGE, IMAGE), [(1, 2)], "ends with an image"),
        ((5, *(IMAGE,) * 40, 6), [(1, 40)], "fit here"),
    ],
)
def test_images_without_their_placeholders_are_refused(
    tokens: tuple[int, ...], places: list[tuple[int, int]], what: str, llava: tuple[Engine, Oracle]
) -> None:
    images = tuple(Image(bytes([n]) * 16, *place, b"") for n, place in enumerate(places))
    loop = llava[0].loop(image_room=39)
    with pytest.raises(InvalidRequest, match=what) as refused:
        loop.add(Request(0, tokens, SamplingParams(1), images=images))
    assert refused.value.param == "images"


def test_a_text_model_refuses_images(llava: tuple[Engine, Oracle]) -> None:
    loop = llava[0].loop()
    loop.scheduler.images = None
    with pytest.raises(InvalidRequest, match="takes no images"):
        loop.add(ask(0, "llava", [TEXTS[0], 1, TEXTS[1]]))
