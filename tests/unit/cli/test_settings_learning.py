"""Settings of learning: another server's file as it is written, what follows from what, what is refused and why."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem import limits
from mlx_tandem.cli import serve
from mlx_tandem.cli.app import app
from mlx_tandem.cli.flags import MODES
from mlx_tandem.cli.options import PANELS
from mlx_tandem.cli.settings import SettingsError, build
from mlx_tandem.config import CheckpointingConfig, ClusterConfig, Config, DutyConfig, RLTrainingConfig, TinkerConfig
from mlx_tandem.training.own_settings import own_settings
from mlx_tandem.training.store.checkpoints import Checkpoints
from mlx_tandem.training.store.manifests import Manifest

ROOT = Path(__file__).resolve().parents[3]
SECTIONS = {
    "duty": DutyConfig,
    "rl_training": RLTrainingConfig,
    "tinker": TinkerConfig,
    "cluster": ClusterConfig,
    "checkpointing": CheckpointingConfig,
}

PARALLM = """
server:
  mode: "inference_and_training"
  max_batch_size: 128
model:
  base_model_path: "models/Llama-3-8B"
  lora_rank: 8
  lora_alpha: 64
  lora_target_modules: ["q_proj", "v_proj"]
rl_training:
  enabled: true
  trajectory_buffer_size: 500
  update_frequency: 50
  scoring_batch_size: 16
  atropos_url: "http://localhost:8001"
  environment: "gsm8k"
checkpointing:
  interval: 100
  keep_n_checkpoints: 5
  checkpoint_dir: "./kept"
"""


def settings(tmp_path: Path, text: str, **options: Any) -> Config:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return build(file, options)


def test_the_file_of_mlx_parallm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path, PARALLM)
    assert config.engine.duty == DutyConfig(mode="inference_and_training", trainer_rank=8)
    assert config.engine.scheduler.max_num_seqs == 128
    assert config.engine.model.path == "models/Llama-3-8B"
    assert config.rl_training == RLTrainingConfig(
        enabled=True,
        lora_rank=8,
        lora_alpha=64.0,
        lora_target_modules=("q_proj", "v_proj"),
        trajectory_buffer_size=500,
        update_frequency=50,
        scoring_batch_size=16,
        atropos_url="http://localhost:8001",
        environment="gsm8k",
        scoring_function="gsm8k",
    )
    assert config.checkpointing == CheckpointingConfig("./kept", 100, 5)
    assert capsys.readouterr().err == ""


def test_it_is_quiet_while_learning_is_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path, PARALLM.replace("enabled: true", "enabled: false"))
    assert not config.rl_training.enabled
    assert config.rl_training.scoring_function == ""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "scoring_function"),
    [
        ("environment: gsm8k", "gsm8k"),
        ("environment: gsm8k, scoring_function: length", "length"),
        ("environment: kitchen", ""),
        ("environment: mixed, rewards: {mixed: [{function: gsm8k}]}", "mixed"),
        ("scoring_function: gsm8k", "gsm8k"),
    ],
)
def test_an_environment_that_is_a_scoring_function_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, scoring_function: str
) -> None:
    config = settings(tmp_path, f"rl_training: {{enabled: true, {text}}}")
    assert config.rl_training.scoring_function == scoring_function
    assert ("'kitchen' is no scoring function" in capsys.readouterr().err) == (not scoring_function)


@pytest.mark.parametrize("mode", [*MODES, *MODES.values()])
@pytest.mark.parametrize("place", ["server", "duty"])
def test_a_mode_in_a_file(tmp_path: Path, place: str, mode: str) -> None:
    config = settings(tmp_path, f"{place}: {{mode: {mode}}}\nrl_training: {{enabled: true}}")
    assert config.engine.duty.mode == MODES.get(mode, mode)


@given(st.floats(0, 1))
def test_the_shares_of_time_are_all_of_it(share: float) -> None:
    duty = build(None, {"enable_rl_training": True, "training_share": share}).engine.duty
    assert duty.training == share
    assert math.isclose(duty.inference + duty.training, 1.0)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(SettingsError, match="--training-share is"):
        build(None, {"enable_rl_training": True, "training_share": share})


ON = "rl_training: {enabled: true}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("duty: {mode: training_only}", "nothing is trained: add --enable-rl-training"),
        ("duty: {inference: 0, training: 0}", "one of 'duty.inference' and 'duty.training' must be above 0"),
        ("duty: {mode: sometimes}", "duty.mode"),
        ("duty: {mode: inference}\nserver: {mode: training}", "'server.mode' and 'duty.mode' are the same setting"),
        (ON + "lora: {max_loras: 0}", "'lora.max_loras' is 0, which leaves no room on the device for 'policy'"),
        (ON + "lora: {max_lora_rank: 8}", "'rl_training.lora_rank' is 16, over 'lora.max_lora_rank', 8"),
        ("rl_training: {enabled: true, update_frequency: 1001}", "'rl_training.update_frequency' is 1001, over"),
        ("rl_training: {enabled: true, schedule: cosine}", "'cosine', which needs 'rl_training.decay_steps'"),
        ("rl_training: {enabled: true, adapter: a/b}", "'rl_training.adapter' must be 1 to 64 letters"),
        ("rl_training: {enabled: true, adapter: base}", "'base' is an alias or the base itself"),
        ("rl_training: {enabled: true, adapter: Base}", "'Base' is an alias or the base itself"),
        ("rl_training: {enabled: true, adapter: default_model}", "'default_model' is an alias or the base itself"),
        (ON + "aliases: {policy: {base: 1}}", "'policy' is an alias or the base itself"),
        (
            "rl_training: {enabled: true, kl_coef: 0.1, kl_reference: init}",
            "'init', which needs 'rl_training.init_from'",
        ),
        ("rl_training: {enabled: true, kl_reference: accepted, guard_prompts: 0}", "no version is ever accepted"),
        (ON + "adapters: {policy: x}", "to train it further set 'rl_training.init_from: policy'"),
        ("rl_training: {enabled: true, init_from: x}", "'rl_training.init_from' is 'x', but no adapter of this name"),
        ("rl_training: {enabled: true, adapter: best-performance}", "'best-performance' in 'rl_training.adapter' is a"),
        (ON + "adapters: {checkpoint-500: x}", "'checkpoint-500' in 'adapters' is a name that checkpoints get by them"),
        (ON + "adapters: {Checkpoint-5.2: x}", "'Checkpoint-5.2' in 'adapters' is a name that checkpoints get by them"),
        (ON + "aliases: {best-performance: {base: 1}}", "'best-performance' in 'aliases' is a name that checkpoints"),
        ("rl_training: {enabled: true, scoring_function: no_such}", "'rl_training.scoring_function' is 'no_such'"),
        ("rl_training: {enabled: true, atropos_api: true, atropos_url: 'http://x:1'}", "give one of them"),
        ("rl_training: {enabled: true, verifiers: no.toml}", "'rl_training.verifiers' is 'no.toml', but there is no"),
        ("rl_training: {enabled: true, verifiers: wordle}", "-m pip install 'verifiers>=0.4'"),
        ("feedback: {learn: sql}\nduty: {mode: inference}", "'feedback.learn' needs a mode that trains"),
        ("feedback: {learn: sql}\nrl_training: {enabled: true}", "give both the same name"),
        ("feedback: {learn: sql}\nrl_training: {adapter: other}", "give both the same name"),
        ("feedback: {learn: a/b}", "'rl_training.adapter' must be 1 to 64 letters"),
        ("rl_training: {algorithm: sarsa}", "rl_training.algorithm"),
        ("rl_training: {lora_rnk: 1}", "unknown setting 'rl_training.lora_rnk'; did you mean 'lora_rank'?"),
        ("server: {lora_rank: 1}", "did you mean 'rl_training.lora_rank'?"),
        ("checkpointing: {interval: 0}", "'checkpointing.interval' is 0: it must lie between 1 and"),
    ],
)
def test_what_is_refused_says_why(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        settings(tmp_path, text)


SEVERAL = """
rl_training:
  enabled: true
  learning_rate: 2e-5
  adapters:
    policy: {}
    coder: {learning_rate: 1e-4, lora_rank: 32, kl_coef: 0.1, kl_reference: accepted}
    sql.writer:
      steps_per_update: 2
      rewards: {lines: [{function: regex, options: {pattern: "a\\nb"}}]}
      scoring_function: lines
"""


def test_several_adapters_are_trained_each_with_its_own_settings(tmp_path: Path) -> None:
    config = settings(tmp_path, SEVERAL + f"checkpointing: {{checkpoint_dir: {tmp_path / 'kept'}}}")
    own = {each.name: each.config.rl_training for each in own_settings(config)}
    assert {name: each.learning_rate for name, each in own.items()} == {
        "policy": 2e-5, "coder": 1e-4, "sql.writer": 2e-5
    }  # fmt: skip
    assert own["sql.writer"].scoring_function == "lines" and own["policy"].scoring_function == ""
    duty = config.engine.duty
    assert (duty.trainer_rank, duty.trainers, duty.several_steps) == (32, 4, True), "one is for a reference"
    with_tinker = settings(tmp_path, SEVERAL + "tinker: {enabled: true, trainers: 2}").engine.duty
    assert with_tinker.trainers == 6
    line = serve._learning(config)
    assert "policy (rank 16, grpo), coder (rank 32, grpo), sql.writer (rank 16, grpo)" in line


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        ("{coder: {}}", "'rl_training.adapters' does not name 'policy', the default adapter: add it there, or set"),
        ("{policy: {lora_rnk: 1}}", "unknown setting 'rl_training.adapters.policy.lora_rnk'; did you mean 'lora_rank'"),
        ("{policy: {enabled: true}}", "'rl_training.adapters.policy.enabled' belongs to the server"),
        ("{policy: {lora_rank: 0}}", "'rl_training.adapters.policy.lora_rank' is 0: it must lie between 1 and"),
        ("{policy: {lora_rank: many}}", "rl_training.adapters.policy.lora_rank must be of type int, not str"),
        ("{policy: }", "'rl_training.adapters.policy' must hold settings by name"),
        ("[policy, coder]", "rl_training.adapters must be of type object, not array"),
        ("{policy: {}, coder: {lora_rank: 128}}", "the adapter 'coder': 'rl_training.lora_rank' is 128, over 'lora."),
        ("{policy: {}, coder: {scoring_function: x}}", "the adapter 'coder': 'rl_training.scoring_function' is 'x'"),
        ("{policy: {}, base: {}}", "the adapter 'base': 'base' is an alias or the base itself"),
        ("{policy: {}, checkpoint-5: {}}", "'checkpoint-5' in 'rl_training.adapters' is a name that checkpoints get"),
        ("{policy: {}, c: {}, c.checkpoint-5: {}}", "'c.checkpoint-5' in 'rl_training.adapters' is a name that"),
        (
            "{policy: {}, a: {metrics_file: m}, b: {metrics_file: m}}",
            "'a' and 'b' have the same 'metrics_file', m: give",
        ),
    ],
)
def test_what_is_refused_of_several_adapters_says_where(tmp_path: Path, adapters: str, said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        settings(tmp_path, f"rl_training: {{enabled: true, adapters: {adapters}}}")


def test_an_adapter_that_learns_from_feedback_is_trained(tmp_path: Path) -> None:
    made = settings(tmp_path, "feedback: {learn: sql}\nrl_training: {lora_rank: 4}")
    training, duty = made.rl_training, made.engine.duty
    assert (training.enabled, training.adapter, training.init_from) == (True, "sql", "")
    assert (duty.trainer_rank, duty.trainers) == (4, 2), "there is room for the reference, too"
    made = settings(tmp_path, "feedback: {learn: sql}\nadapters: {sql: x}")
    assert made.rl_training.init_from == "sql", "it goes on from its folder"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("atropos_api: true}\nduty: {mode: inference_only", "'rl_training.atropos_api' has no effect in the mode"),
        ("atropos_url: 'http://x:1'}\nduty: {mode: inference_only", "'rl_training.atropos_url' has no effect in the"),
        ("verifiers_python: python3", "'rl_training.verifiers_python' has no effect without 'rl_training.verifiers'"),
        ("verifiers_variables: [A]", "'rl_training.verifiers_variables' has no effect without"),
    ],
)
def test_environments_without_effect_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    settings(tmp_path, f"rl_training: {{enabled: true, {text}}}")
    assert said in capsys.readouterr().err


def test_a_checkpoint_that_is_there_keeps_its_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "kept", 3)
    checkpoints.lock()
    checkpoints.commit(checkpoints.new("mine"), Manifest(name="mine", step=1, version=1, digest="d", pinned=True))
    checkpoints.close()
    text = f"checkpointing: {{checkpoint_dir: {tmp_path / 'kept'}}}\nadapters: {{Mine: x}}\n"
    with pytest.raises(SettingsError, match="'Mine' in 'adapters' is the name of a checkpoint: give it another name"):
        settings(tmp_path, ON + text)
    assert settings(tmp_path, text).adapters == (("Mine", "x"),), "a server that does not learn has no checkpoints"


@pytest.mark.parametrize(
    "text",
    [
        "rl_training: {enabled: true}\nduty: {mode: inference_only}",  # it collects and does not train
        "adapters: {checkpoint-500: x, best-performance: y}",
        ON + "adapters: {checkpoint-final: x, checkpoint: y}",
        "rl_training: {enabled: true, adapter: a, init_from: a}\nadapters: {a: x}",
        "rl_training: {enabled: true, init_from: a}\nadapter_root: r",
    ],
)
def test_what_looks_odd_and_is_not(tmp_path: Path, text: str) -> None:
    assert settings(tmp_path, text).rl_training.enabled is ("rl_training" in text)


@pytest.mark.parametrize("place", [p for p in limits.SETTINGS if p.split(".")[-2] in SECTIONS])
def test_every_number_has_its_bounds(tmp_path: Path, place: str) -> None:
    section, key = place.split(".")[-2:]
    r = limits.SETTINGS[place]
    default = getattr(SECTIONS[section](), key)
    assert default == "auto" or r.low <= default <= r.high
    for value in (r.low - 1, r.high * 2):
        text = str(int(value)) if r.integer else f"{value:.20f}"
        with pytest.raises(SettingsError, match=re.escape(f"{section}.{key}")):
            settings(tmp_path, f"{section}: {{{key}: {text}}}")


def test_options_of_learning_without_learning_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    build(None, {"lora_rank": 8, "checkpoint_dir": "c", "mode": "inference_only", "lora_target_modules": []})
    assert capsys.readouterr().err.splitlines() == [
        "tandem: warning: --lora-rank has no effect without --enable-rl-training"
    ], "the folder is also that of feedback"


def test_the_page_has_every_setting() -> None:
    """Those of serving are checked where its YAML is run."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/command-line.md").read_text(), re.M | re.S)
    for section, struct in SECTIONS.items():
        (text,) = re.findall(rf"^{section}:.*?\n((?: .*\n)+)", block, re.M)
        assert set(re.findall(r"^  (\w+):", text, re.M)) == set(struct.__struct_fields__)
    for option in PANELS["Learning"]:
        assert option.flags in block


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings that a command line comes to: everything but the serving."""
    seen: list[Config] = []

    def record(file: Path | None, options: dict[str, object], defaults: Any, *, called_as: str, verbose: bool) -> None:
        seen.append(build(file, options, defaults))
        raise SystemExit(0)

    monkeypatch.setattr("mlx_tandem.cli.serve.serve", record)

    def run(*words: str) -> Config:
        with pytest.raises(SystemExit) as end:
            app(args=["train", "rl", *words], prog_name="tandem")
        assert end.value.code == 0
        return seen.pop()

    return run


def test_train_rl_is_for_training_unless_told_otherwise(trained: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for text, words, mode in (
        ("{}", (), "training_only"),
        ("rl_training: {enabled: false}", (), "training_only"),
        ("server: {mode: both}", (), "inference_and_training"),
        ("server: {mode: both}", ("--mode", "inference"), "inference_only"),
    ):
        file.write_text(text)
        config = trained("--config", str(file), *words)
        assert (config.rl_training.enabled, config.engine.duty.mode) == (True, mode)


def test_what_is_said_when_a_server_that_learns_is_ready() -> None:
    def line(**options: object) -> str:
        return serve._learning(build(None, options))

    assert line() == ""
    on = {"enable_rl_training": True}
    assert line(**on, checkpoint_dir="c", training_share=0.25) == (
        "  learning  policy (rank 16, grpo); 25 % of the device; checkpoints in c\n"
    )
    assert "training comes first" in line(**on, mode="training_only")
    assert "collected, but not trained" in line(**on, mode="inference_only")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"validation_prompts": "nowhere.jsonl"}, "there is no file nowhere.jsonl for --validation-prompts"),
        ({"checkpoint_dir": __file__}, f"{__file__} is not a folder; name another one with --checkpoint-dir"),
    ],
)
def test_files_of_learning_are_looked_for_first(
    capsys: pytest.CaptureFixture[str], options: dict[str, object], said: str
) -> None:
    with pytest.raises(SystemExit) as end:
        serve.prepare(None, {"enable_rl_training": True, "port": 0, **options})
    assert (end.value.code, capsys.readouterr().err) == (1, f"tandem: {said}\n")


def test_settings_can_be_written_down() -> None:
    config = build(None, {"enable_rl_training": True})
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


@pytest.mark.parametrize(
    ("text", "duty"),
    [
        ("kl_coef: 0.1, kl_reference: accepted", DutyConfig(trainer_rank=16, trainers=2)),
        ("kl_coef: 0.1", DutyConfig(trainer_rank=16)),
        ("steps_per_update: 2", DutyConfig(trainer_rank=16, several_steps=True)),
    ],
)
def test_memory_is_reserved_for_the_reference_and_for_a_step_back(tmp_path: Path, text: str, duty: DutyConfig) -> None:
    assert settings(tmp_path, f"rl_training: {{enabled: true, {text}}}").engine.duty == duty


@pytest.mark.parametrize(
    ("text", "duty"),
    [
        ("tinker: {enabled: true}", DutyConfig(trainer_rank=32, trainers=4, trains_head=True)),
        (
            "tinker: {enabled: true, trainers: 2, rank: 8}\nrl_training: {enabled: true}",
            DutyConfig(trainer_rank=16, trainers=3, trains_head=True),
        ),
        (
            "tinker: {enabled: true, trainers: 2}\nrl_training: {enabled: true, kl_coef: 0.1, kl_reference: accepted}",
            DutyConfig(trainer_rank=32, trainers=4, trains_head=True),
        ),
    ],
)
def test_memory_is_reserved_for_clients_of_tinker(tmp_path: Path, text: str, duty: DutyConfig) -> None:
    assert settings(tmp_path, text).engine.duty == duty


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("duty: {mode: inference_only}", "needs a mode that trains"),
        ("lora: {max_loras: 0}", "'lora.max_loras' is 0"),
        ("lora: {max_lora_rank: 16}", "'tinker.rank' is 32, over 'lora.max_lora_rank', 16"),
    ],
)
def test_settings_under_which_no_client_of_tinker_could_train_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(says)):
        settings(tmp_path, f"tinker: {{enabled: true}}\n{text}")


def test_options_of_tinker_without_it_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    build(None, {"tinker_rank": 8, "training_share": 0.5})
    assert capsys.readouterr().err.splitlines() == [
        "tandem: warning: --training-share has no effect without --enable-rl-training or --enable-tinker",
        "tandem: warning: --tinker-rank has no effect without --enable-tinker",
    ]
    build(None, {"tinker_rank": 8, "training_share": 0.5, "enable_tinker": True, "mode": "training_only"})
    assert capsys.readouterr().err == ""


def test_a_reference_without_a_weight_has_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings(tmp_path, "rl_training: {enabled: true, kl_reference: accepted}")
    assert "'rl_training.kl_reference' has no effect without 'rl_training.kl_coef'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "prepares"),
    [
        ({"model": "m"}, False),
        ({"model": "m", "adapter": [("a", "/a")]}, True),
        ({"model": "m", "adapter_root": "/a"}, True),
        ({"model": "m", "prepare_adapters": True}, True),
        ({}, True),
    ],
    ids=["no adapter", "an adapter", "a root", "asked for", "the built-in model"],
)
def test_kernels_of_adapters_are_made_ready_at_start_where_adapters_are_configured(
    options: dict[str, object], prepares: bool
) -> None:
    assert build(None, options).engine.lora.prepare == prepares


def test_kernels_of_adapters_are_made_ready_at_start_where_learning_is_configured() -> None:
    assert build(
        None, {"model": "m", "enable_rl_training": True, "scoring_function": "exact_match"}
    ).engine.lora.prepare


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"share_model": True, "connect_to": "a:1"}, "'cluster.share' and 'cluster.connect_to' exclude each other"),
        ({"share_model": True, "enable_rl_training": True}, "tandem train rl --connect-to HOST:PORT"),
        ({"connect_to": "ftp://a"}, "'cluster.connect_to' is 'ftp://a'; it must be HOST:PORT"),
        ({"connect_to": "http://a:1/path"}, "it must be HOST:PORT"),
        ({"connect_to": "a:99999999"}, "it must be HOST:PORT"),
    ],
)
def test_parts_of_several_machines_that_exclude_each_other(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        build(None, options)
    assert says in str(refused.value)


def test_a_leader_that_only_its_own_machine_reaches_says_what_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(None, {"share_model": True})
    (said,) = capsys.readouterr().err.splitlines()
    assert "export TANDEM_HOST=0.0.0.0 TANDEM_API_KEY=$(openssl rand -hex 24)" in said
    monkeypatch.setenv("TANDEM_HOST", "0.0.0.0")
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    config = build(None, {"share_model": True})
    assert (config.server.host, config.server.api_key) == ("0.0.0.0", "secret")
    assert build(None, {"host": "::1"}).server.host == "::1"
    assert capsys.readouterr().err == ""


def test_a_server_whose_answers_are_learned_from_elsewhere_draws_no_siblings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = build(None, {"connect_to": "node1:8000", "scoring_function": "gsm8k"})
    assert (config.rl_training.siblings, config.rl_training.scoring_function) == (0, "gsm8k")
    assert (config.engine.model.path, config.adapters) == ("", ())  # those of the leader
    assert capsys.readouterr().err == ""
    build(None, {"cluster_dir": "d"})
    assert capsys.readouterr().err == (
        "tandem: warning: --cluster-dir has no effect without --share-model or --connect-to\n"
    )
