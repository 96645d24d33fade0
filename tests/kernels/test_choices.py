"""The choices that one process made by timing serve in another, which checks and times nothing."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import msgspec
import pytest

from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.cost import CostModel
from mlx_tandem.errors import ModelError
from mlx_tandem.model import warm_up
from mlx_tandem.model.build import Built, build
from mlx_tandem.model.choices import MOST_KEPT, Choices, Kept, KernelChoices, Pace, Subject
from mlx_tandem.model.kernel_checks import examine
from mlx_tandem.model.kernels import checking, inplace
from mlx_tandem.model.loader import load_unread
from mlx_tandem.model.ops import delta_net, gated_delta
from mlx_tandem.model.ops.attention import choice
from mlx_tandem.model.ops.attention.block import FusedBlock
from mlx_tandem.model.ops.attention.choice import AttentionDivision
from mlx_tandem.model.ops.attention.division import Division
from mlx_tandem.model.ops.delta_net import FusedDeltaNet
from mlx_tandem.model.ops.lora import choice as lora
from mlx_tandem.model.ops.lora.choice import AdapterLimits
from mlx_tandem.model.ops.products import few_rows
from mlx_tandem.model.ops.products.few_rows import AnyForm, FewRows, FormsByShape, Products, Shape
from mlx_tandem.model.ops.products.measure import Meter
from mlx_tandem.model.ops.products.skinny import Form
from mlx_tandem.model.ops.products.tuning import Tuned
from mlx_tandem.model.ops.products.wgmma import WideForm
from mlx_tandem.model.ops.sampling import choice as sampling
from mlx_tandem.model.ops.sampling.choice import SamplingKernels
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.mlx_engine import Engine, Oracle, assert_agrees
from tests.kernels import gpu as fake
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

ROOT = Path(__file__).resolve().parents[2]
BEST = Division(24, queries=2, depth=2)
"""A division that is not the one that is tried first."""


def config_of(folder: Path, **cache: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(folder)),
        cache=CacheConfig(block_size=8, num_blocks=24, **cache),
        scheduler=SchedulerConfig(max_num_seqs=4),
        lora=LoraConfig(max_loras=1, max_lora_rank=8, prepare=True),
    )


def metal(patch: pytest.MonkeyPatch) -> fake.Gpu:
    """A Metal device whose kernels are all faster than MLX's operations, attention with BEST more than others."""
    gpu = fake.install("metal", shim.maker(), patch)
    fake.time_by_clock(gpu, patch)
    patch.setattr(choice, "STEPS", ((2, 64), (1, 192)))
    patch.setattr(choice, "shorter", lambda *args: ())
    patch.setattr(choice, "wider", lambda *args: (BEST,))
    patch.setattr(choice, "_seconds", lambda shape, kernels, *rest: _attention_seconds(kernels))
    patch.setattr(sampling, "ROWS", 2)
    patch.setattr(lora, "_TOKENS", (1, 16))
    mx.disable_compile()  # the shim computes at once; while a step is traced there are no numbers
    return gpu


def _attention_seconds(kernels: Any) -> float:
    return 2e-5 if kernels is None else 1e-6 if kernels.attention.division == BEST else 1e-5


def serve(built: Built, folder: Path) -> None:
    prompts = [(5, 6, 7, 8, 9), tuple(range(3, 23))]
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3)
    loop = Engine(built, {}).run([Request(i, prompt, params) for i, prompt in enumerate(prompts)], chunks=16)
    assert_agrees(loop, Oracle.load(folder), "served")


def refuse(*args: Any, **options: Any) -> NoReturn:
    raise AssertionError("a process that was given its choices must not time or check anything")


def serve_by_given(folder: Path, file: Path) -> None:
    """What the other process does."""
    forbidden: list[tuple[Any, str]] = [
        (checking, "seconds"),
        (warm_up.time, "perf_counter"),
        (choice, "_problem"),
        (choice, "_seconds"),
        (choice, "contiguous_seconds"),
        (lora, "wrong"),
        (sampling, "wrong"),
        (sampling, "wrong_truncated"),
        (inplace, "problem"),
        (gated_delta, "problem"),
        (delta_net, "problem"),
        (delta_net, "seconds"),
        *((Meter, name) for name in ("seconds", "device_seconds", "host_seconds")),
    ]
    given = Choices.read(file)
    with pytest.MonkeyPatch.context() as patch:
        metal(patch)
        with pytest.MonkeyPatch.context() as starting:
            for owner, name in forbidden:
                starting.setattr(owner, name, refuse)
            built = build(config_of(folder), {}, lambda stage, fraction: None, given=given)
            cost, first = CostModel(), CostModel()
            made = built.warm_up(cost)
        assert made == given  # read from the functions that were built
        look(built, made)
        first.fit(list(given.pace.chunks), list(given.pace.decodes))
        assert cost.form == first.form and cost.decode(5) == first.decode(5)
        serve(built, folder)
    print("served")


def look(built: Built, made: Choices) -> None:
    """The functions are those of the kernels."""
    assert built.info.attention_backend == "metal" and built.info.lora_backend == "fused"
    assert made.kernels.attention.divisions == (BEST,)
    assert made.kernels.sampling.plain and made.kernels.sampling.truncated and made.kernels.adapters.mixed
    assert any(isinstance(m, FusedBlock) for m in built.runner.module.modules())
    assert any(isinstance(m, FusedDeltaNet) for m in built.runner.module.modules())
    assert inplace.writing().store is not None
    assert not built.runner.one_at_a_time


@pytest.mark.timeout(400)  # kernels may have to be compiled first, and two engines check them
def test_another_process_builds_the_same_functions_without_a_trial(tmp_path: Path) -> None:
    wide = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}  # of the states, wide enough for kernels
    folder, file = tiny_models.make(tmp_path / "model", "qwen3_5", **wide), tmp_path / "choices.json"
    try:
        with pytest.MonkeyPatch.context() as patch:
            metal(patch)
            built = build(config_of(folder), {}, lambda stage, fraction: None)
            made = built.warm_up(CostModel())
            look(built, made)
        made.write(file)
        assert Choices.read(file) == made
        code = "import sys; from pathlib import Path; from tests.kernels.test_choices import serve_by_given as s; "
        run = subprocess.run(
            [sys.executable, "-c", f"{code}s(*map(Path, sys.argv[1:]))", str(folder), str(file)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.stdout.endswith("served\n"), run.stderr
    finally:
        mx.enable_compile()
        inplace.writing.cache_clear()


def subject_of(config: EngineConfig) -> Subject:
    model = load_unread(config.model, lambda stage, fraction: None)
    found = examine(config, model, evaluate=False)
    return Subject.of(config, model, found.layers, found.vocab_size)


def test_choices_for_another_subject_are_refused(tmp_path: Path) -> None:
    folders = [tiny_models.make(tmp_path / family, family) for family in ("llama", "qwen2")]
    config = config_of(folders[0])
    own = subject_of(config)
    assert own == subject_of(config)
    nothing = KernelChoices(
        1, "", Products(""), AttentionDivision("portable", ""), "", AdapterLimits(""), SamplingKernels("")
    )
    made = Choices(own, nothing, Tuned(), Pace((), (), False))
    for other in (config_of(folders[1]), config_of(folders[0], kv_bits=8, kv_group_size=16)):
        with pytest.raises(ModelError, match="another model"):
            build(other, {}, lambda stage, fraction: None, given=made)
    made = msgspec.structs.replace(made, subject=msgspec.structs.replace(own, device="another GPU"))
    with pytest.raises(ModelError, match="another device: another GPU"):
        build(config, {}, lambda stage, fraction: None, given=made)


@pytest.mark.parametrize("text", [b"", b"{}", b'{"subject": 3}', b"\xff"])
def test_a_file_without_choices_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "choices.json"
    file.write_bytes(text)
    with pytest.raises(ModelError, match=r"choices.json is damaged or holds no choices"):
        Choices.read(file)
    file.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    with pytest.raises(ModelError, match=r"choices.json holds no choices of this version"):
        Choices.read(file)


def nothing_chosen(config: EngineConfig) -> Choices:
    """The choices of a device without kernels."""
    own = KernelChoices(
        1, "", Products(""), AttentionDivision("portable", ""), "", AdapterLimits(""), SamplingKernels("")
    )
    return Choices(subject_of(config), own, Tuned(), Pace(((8, 0, 1.0),), ((1, 1.0),), False))


def test_each_change_of_what_choices_depend_on_leads_to_others(tmp_path: Path) -> None:
    config = config_of(tiny_models.make(tmp_path / "model", "llama"))
    made, kept = nothing_chosen(config), Kept(tmp_path / "kept")
    kept.keep(made)
    assert kept.find(made.subject) == made
    for name in ("device", "driver", "mlx", "sources", "model"):
        assert kept.find(msgspec.structs.replace(made.subject, **{name: "another"})) is None


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"bits": 4}, {"bits": 8}),
        ({"bits": 4}, {}),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}),
        ({}, {"rope_theta": 5e5}),
        ({}, {"rms_norm_eps": 1e-4}),
    ],
)
def test_models_that_differ_have_choices_of_their_own(
    ours: dict[str, Any], theirs: dict[str, Any], tmp_path: Path
) -> None:
    folders = [tiny_models.make(tmp_path / str(i), "llama", **each) for i, each in enumerate((ours, theirs))]
    own, other = (subject_of(config_of(folder)) for folder in folders)
    assert own.model != other.model


def test_groups_of_packed_weights_of_another_size_are_another_model(tmp_path: Path) -> None:
    subjects = []
    for group in (32, 64):
        folder = write_model(tmp_path / str(group), SHAPES["0.13m"], weights=False)
        settings = msgspec.json.decode((folder / "config.json").read_bytes())
        settings["quantization"] = {"group_size": group, "bits": 4}
        (folder / "config.json").write_bytes(msgspec.json.encode(settings))
        config = msgspec.structs.replace(config_of(folder), model=ModelConfig(str(folder), random_weights=True))
        subjects.append(subject_of(config))
    assert subjects[0].model != subjects[1].model


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "folder"])
def test_damaged_choices_are_not_used_and_are_replaced(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tiny_models.make(tmp_path / "model", "llama"))
    made, kept = nothing_chosen(config), Kept(tmp_path / "kept")
    kept.keep(made)
    (file,) = (tmp_path / "kept").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes({"cut": bytes(content[:-9]), "flipped": bytes(content), "empty": b""}[damage])
    assert kept.find(made.subject) is None
    assert "the choices of the last start are not used" in caplog.text
    kept.keep(made)
    assert (kept.find(made.subject) == made) is (damage != "folder")


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tiny_models.make(tmp_path / "model", "llama"))
    (tmp_path / "file").write_text("")
    made, kept = nothing_chosen(config), Kept(tmp_path / "file" / "kept")
    kept.keep(made)
    assert "are not kept" in caplog.text
    assert kept.find(made.subject) is None
    kept.drop(made.subject)


def test_choices_of_many_models_are_kept_and_no_more(tmp_path: Path) -> None:
    config = config_of(tiny_models.make(tmp_path / "model", "llama"))
    made, kept = nothing_chosen(config), Kept(tmp_path / "kept")
    subjects = [msgspec.structs.replace(made.subject, model=str(i)) for i in range(MOST_KEPT + 3)]
    for i, subject in enumerate(subjects):
        kept.keep(msgspec.structs.replace(made, subject=subject))
        os.utime(kept._file(subject), (i, i))
    assert len(list((tmp_path / "kept").iterdir())) == MOST_KEPT
    assert kept.find(subjects[-1]) is not None
    assert kept.find(subjects[0]) is None


def test_forms_of_products_come_back_as_they_were() -> None:
    """These are of CUDA alone, which the device above is not."""
    own: dict[int, AnyForm] = {1: Form(1, 2, 3), 2: Form(2, 4, 2), 10: WideForm(1, 2, 4, 3)}
    forms = {Shape(40, 64, False): own}
    kept = msgspec.json.encode(few_rows.by_shape(forms))
    read = msgspec.json.decode(kept, type=tuple[FormsByShape, ...])
    few = few_rows.made(Products("", adapted=read))
    assert isinstance(few, FewRows) and few.adapted == forms
