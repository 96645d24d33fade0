"""Command lines of other servers: each flag is a setting, or a warning that says what does the job, or refused."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from mlx_tandem.cli import options
from mlx_tandem.cli.app import app
from mlx_tandem.cli.flags import FLAGS, SPELLINGS, Refused, translate
from mlx_tandem.cli.settings import SettingsError, build
from mlx_tandem.config import ABTest, Arm, Config
from tests.verifiers_double import installed

Run = Callable[[str], Config]


@pytest.fixture(scope="module")
def command() -> Any:
    """Typer makes all commands anew whenever it is called, which takes longer than the rest."""
    return get_command(app)


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of packages, with verifiers among them."""
    return str(installed(tmp_path_factory.mktemp("packages")))


@pytest.fixture
def serve(command: Any, verifiers: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The settings that a command line comes to: everything but the serving."""
    seen: list[Config] = []
    monkeypatch.setenv("PYTHONPATH", verifiers)

    def record(file: Path | None, settings: dict[str, object], defaults: Any, *, called_as: str, verbose: bool) -> None:
        seen.append(build(file, settings, defaults))
        raise SystemExit(0)

    monkeypatch.setattr("mlx_tandem.cli.serve.serve", record)
    monkeypatch.setattr("mlx_tandem.cli.launching.go", lambda *_: None)  # it would become mlx.launch

    def run(line: str) -> Config:
        with pytest.raises(SystemExit) as end:
            command(args=["serve", *shlex.split(line)], prog_name="tandem")
        assert end.value.code == 0
        return seen.pop()

    return run


def value(config: Config, place: str) -> Any:
    found: Any = config
    for part in place.split("."):
        found = getattr(found, part)
    return found


EVERY = {f for panel in options.PANELS.values() for o in panel for f in o.flags.replace("/", " ").split()}

HOSTS = str(Path(__file__).parents[2] / "parallel" / "hosts.json")
"""A file of two machines, as mlx.launch takes it."""

SETTINGS = [  # what a user of the other server writes, and what it comes to here
    ("--model m", "engine.model.path", "m"),
    ("-m m", "engine.model.path", "m"),
    ("--model-path m", "engine.model.path", "m"),
    ("--dtype half", "engine.model.dtype", "float16"),
    ("--dtype=float", "engine.model.dtype", "float32"),
    ("--dtype bfloat16", "engine.model.dtype", "bfloat16"),
    ("--ctx-size 4096", "engine.model.max_model_len", 4096),
    ("--max-kv-size 4096", "engine.model.max_model_len", 4096),
    ("--sequence-cache-size 0", "engine.cache.prefix_caching", False),
    ("--max-model-len 4096", "engine.model.max_model_len", 4096),
    ("--random-weights", "engine.model.random_weights", True),
    ("--images --no-images", "engine.model.images", False),
    ("--unpack-weights --no-unpack-weights", "engine.model.unpack_weights", False),
    ("--chat-template t.jinja", "server.chat_template", "t.jinja"),
    ("--chat-template '{{ messages }}'", "server.chat_template", "{{ messages }}"),
    ("--tool-call-parser hermes", "server.tool_call_parser", "hermes"),
    ("--reasoning-parser none", "server.reasoning_parser", "none"),
    ("--reranker qwen3", "server.reranker", "qwen3"),
    ("--generation-config vllm", "server.generation_config", "vllm"),
    ("--generation-config ./other", "server.generation_config", "./other"),
    ("--seed 0", "server.seed", 0),
    ("--max-logprobs 5", "server.max_logprobs", 5),
    ("--enable-force-include-usage", "server.force_include_usage", True),
    ("--log-format text", "server.log_format", "text"),
    ("--ssd", "engine.disk.on", True),
    ("--ssd-cache-dir d", "engine.disk.dir", "d"),
    ("--ssd-cache-dir d", "engine.disk.on", True),
    ("--ssd-cache-dir d --no-ssd", "engine.disk.enabled", False),
    ("--ssd-ttl-days 3", "engine.disk.ttl_days", 3.0),
    ("--ssd-policy write_through", "engine.disk.policy", "write_through"),
    ("--ssd-durability persistent", "engine.disk.durability", "persistent"),
    ("--ssd-async-writes --no-ssd-async-writes", "engine.disk.async_writes", False),
    ("--ssd-writer-queue-size 64", "engine.disk.writer_queue_size", 64),
    ("--ssd-persistent-max-retries 5", "engine.disk.persistent_max_retries", 5),
    ("--ssd-flush-interval-s 0.5", "engine.disk.flush_interval_s", 0.5),
    ("--ssd-max-size-gb 2.5", "engine.disk.max_size_gb", 2.5),
    ("--max-loras 4", "engine.lora.max_loras", 4),
    ("--max-lora-rank 32", "engine.lora.max_lora_rank", 32),
    ("--max-cpu-loras 50", "engine.lora.max_cpu_loras", 50),
    ("--max-cpu-lora-gb 1.5", "engine.lora.max_cpu_lora_gb", 1.5),
    ("--lora-backend gather", "engine.lora.backend", "gather"),
    ("--prepare-adapters", "engine.lora.prepare", True),
    ("--adapter-root r", "adapter_root", "r"),
    ("--default-adapter a", "server.default_adapter", "a"),
    ("--alias ab=a:9,b:1", "aliases", (("ab", (Arm("a", 9.0), Arm("b", 1.0))),)),
    ("--alias ab=a --alias c=b@2:0.5", "aliases", (("ab", (Arm("a", 1.0),)), ("c", (Arm("b@2", 0.5),)))),
    ("--alias ab=a,b --ab-test ab=b", "ab_tests", (("ab", ABTest("b")),)),
    ("--adapter a ./x --adapter b=./y", "adapters", (("a", "./x"), ("b", "./y"))),
    ("--adapter-path ./x", "adapters", (("default", "./x"),)),
    ("--adapter-path ./x", "server.default_adapter", "default"),
    ("--lora-modules a=./x b=./y --port 1", "adapters", (("a", "./x"), ("b", "./y"))),
    ("--lora-modules a=./x --lora-modules=b=./y", "adapters", (("a", "./x"), ("b", "./y"))),
    (
        """--lora-modules '{"name": "a", "path": "./x", "base_model_name": "m"}' b=./y""",
        "adapters",
        (("a", "./x"), ("b", "./y")),
    ),
    ("--host localhost", "server.host", "localhost"),
    ("--port 1234", "server.port", 1234),
    ("m --served-model-name a b org/c --port 1", "server.served_model_names", ("a", "b", "org/c")),
    ("--served-model-name a b -m m", "server.served_model_names", ("a", "b")),
    ("--model=m --served-model-name a b", "server.served_model_names", ("a", "b")),
    ("--served-model-name a b --model-path=m", "server.served_model_names", ("a", "b")),
    ("--served-model-name a m", "server.served_model_names", ("a",)),
    ("-m m --model-id a/b", "server.served_model_names", ("a/b",)),
    ("--served-model-name a m", "engine.model.path", "m"),
    ("--served-model-name a --served-model-name b m", "server.served_model_names", ("a", "b")),
    ("--api-key k", "server.api_key", "k"),
    ("--api-key-file f", "server.api_key_file", "f"),
    ("--keys f", "server.keys_file", "f"),
    ("--allowed-host a --allowed-host b", "server.allowed_hosts", ("a", "b")),
    ("--uds t.sock", "server.uds", "t.sock"),
    ("--ssl-certfile c.pem", "server.ssl_certfile", "c.pem"),
    ("--ssl-keyfile k.pem", "server.ssl_keyfile", "k.pem"),
    ("--root-path /llm", "server.root_path", "/llm"),
    ("--allowed-origins http://a,http://b", "server.allowed_origins", ("http://a", "http://b")),
    ("--allowed-origins http://a --allowed-origins http://b", "server.allowed_origins", ("http://a", "http://b")),
    ("""--allowed-origins '["http://a", "http://b"]'""", "server.allowed_origins", ("http://a", "http://b")),
    ("--allowed-origins *", "server.allowed_origins", ("*",)),
    ("--allow-image-hosts a.test,b.test:81", "server.allow_image_hosts", ("a.test", "b.test:81")),
    ("--max-batch-size 8", "engine.scheduler.max_num_seqs", 8),
    ("--max-batch-size 0", "engine.scheduler.max_num_seqs", 1),
    ("--max-num-seqs 8", "engine.scheduler.max_num_seqs", 8),
    ("--prefill-batch-size 4", "engine.scheduler.prefill_batch_size", 4),
    ("--max-num-batched-tokens 512", "engine.scheduler.max_chunk_tokens", 512),
    ("--max-chunk-tokens 512", "engine.scheduler.max_chunk_tokens", 512),
    ("--max-inflight-tokens 131072", "engine.scheduler.max_inflight_tokens", 131072),
    ("--prefill-share 0.5", "engine.scheduler.prefill_share", 0.5),
    ("--spec-decode draft", "engine.speculation.method", "draft"),
    ("--draft-model-path d", "engine.speculation.draft_model", "d"),
    ("--draft-model d", "engine.speculation.draft_model", "d"),
    ("--draft-model d", "engine.speculation.method", "draft"),
    ("""--speculative-config '{"model": "d", "num_speculative_tokens": 3}'""", "engine.speculation.draft_model", "d"),
    ("""--speculative-config '{"method": "draft_model", "model": "d"}'""", "engine.speculation.method", "draft"),
    ("--spec-decode ngram", "engine.speculation.method", "ngram"),
    ("--spec-decode mtp", "engine.speculation.method", "mtp"),
    ("""--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'""", "engine.speculation.method", "mtp"),
    ("--num-speculative-tokens 7", "engine.speculation.num_tokens", 7),
    ("--num-draft-tokens 3", "engine.speculation.num_tokens", 3),
    ("--spec-decode-dynamic --no-spec-decode-dynamic", "engine.speculation.dynamic", False),
    ("--no-adaptive-k", "engine.speculation.dynamic", False),
    ("--spec-decode-disable-batch-size 8", "engine.speculation.disable_batch_size", 8),
    ("--ngram-min 1", "engine.speculation.ngram_min", 1),
    ("--ngram-max 4", "engine.speculation.ngram_max", 4),
    ("--ngram-prompt-lookup --no-ngram-prompt-lookup", "engine.speculation.prompt_lookup", False),
    ("""--speculative-config '{"method": "ngram", "prompt_lookup_max": 4}'""", "engine.speculation.method", "ngram"),
    ("""--speculative-config '{"method": "ngram", "prompt_lookup_max": 4}'""", "engine.speculation.ngram_max", 4),
    ("--idle-prefill-ms 50", "engine.scheduler.idle_prefill_ms", 50.0),
    ("--heartbeat-seconds 1", "engine.heartbeat_seconds", 1.0),
    ("--deterministic", "engine.deterministic", True),
    ("--memory-limit-gb 7.5", "engine.memory_limit_gb", 7.5),
    ("--stall-seconds 9", "engine.stall_seconds", 9.0),
    ("--attention-backend portable", "engine.cache.attention_backend", "portable"),
    ("--block-size 32", "engine.cache.block_size", 32),
    ("--kv-block-size 32", "engine.cache.block_size", 32),
    ("--num-blocks 2048", "engine.cache.num_blocks", 2048),
    ("--memory-fraction 0.5", "engine.cache.memory_fraction", 0.5),
    ("--enable-prefix-caching --no-enable-prefix-caching", "engine.cache.prefix_caching", False),
    ("--kv-bits 8", "engine.cache.kv_bits", 8),
    ("--kv-group-size 32", "engine.cache.kv_group_size", 32),
    ("--gpu-memory-utilization 0.9", "engine.cache.memory_fraction", 0.9),
    ("--default-max-tokens 9", "server.default_max_tokens", 9),
    ("--max-prompt-tokens 9", "server.max_prompt_tokens", 9),
    ("--max-generation-tokens 9", "server.max_generation_tokens", 9),
    ("--max-n 64", "server.max_n", 64),
    ("--max-request-bytes 2048", "server.max_request_bytes", 2048),
    ("--max-image-request-bytes 2048", "server.max_image_request_bytes", 2048),
    ("--max-registered-adapters 9", "server.max_registered_adapters", 9),
    ("--max-queue-size 9", "server.max_queue_size", 9),
    ("--max-concurrent-requests 9", "server.max_concurrent_requests", 9),
    ("--memory-pressure-threshold 0.8", "server.memory_pressure_threshold", 0.8),
    ("--request-timeout-s 9", "server.request_timeout_s", 9.0),
    ("--first-token-timeout-s 9", "server.first_token_timeout_s", 9.0),
    ("--stream-keepalive-s 9", "server.stream_keepalive_s", 9.0),
    ("--batch-dir b", "batches.dir", "b"),
    ("--idle-unload-s 900", "server.idle_unload_s", 900.0),
    ("--receive-timeout-s 9", "server.receive_timeout_s", 9.0),
    ("--write-timeout-s 9", "server.write_timeout_s", 9.0),
    ("--drain-seconds 9", "server.drain_seconds", 9.0),
    ("--shutdown-timeout 9", "server.drain_seconds", 9.0),
    ("--chat-template-timeout-s 2", "server.chat_template_timeout_s", 2.0),
    ("--enable-rl-training", "rl_training.enabled", True),
    ("--enable-rl-training --mode training", "engine.duty.mode", "training_only"),
    ("--enable-rl-training --mode=training_only", "engine.duty.mode", "training_only"),
    ("--mode inference", "engine.duty.mode", "inference_only"),
    ("--enable-rl-training --training-share 0.25", "engine.duty.training", 0.25),
    ("--enable-rl-training --training-share 0.25", "engine.duty.inference", 0.75),
    ("--enable-rl-training --training-share 1", "engine.duty.inference", 0.0),
    ("--enable-rl-training --train-adapter mine", "rl_training.adapter", "mine"),
    ("--enable-rl-training --lora-rank 8", "rl_training.lora_rank", 8),
    ("--enable-rl-training --lora-alpha 8", "rl_training.lora_alpha", 8.0),
    (
        "--enable-rl-training --lora-target-modules q_proj,v_proj --lora-target-modules o_proj",
        "rl_training.lora_target_modules",
        ("q_proj", "v_proj", "o_proj"),
    ),
    ("--enable-rl-training --algorithm gspo", "rl_training.algorithm", "gspo"),
    ("--enable-rl-training --learning-rate 1e-4", "rl_training.learning_rate", 1e-4),
    ("--enable-rl-training --target-kl 0.01", "rl_training.target_kl", 0.01),
    ("--enable-rl-training --kl-coef 0.1", "rl_training.kl_coef", 0.1),
    ("--enable-rl-training --kl-coef 0.1 --kl-reference accepted", "rl_training.kl_reference", "accepted"),
    ("--enable-rl-training --scoring-function gsm8k", "rl_training.scoring_function", "gsm8k"),
    ("--enable-rl-training --atropos-url http://x:1", "rl_training.atropos_url", "http://x:1"),
    ("--enable-rl-training --update-frequency 9", "rl_training.update_frequency", 9),
    ("--enable-rl-training --trajectory-buffer-size 900", "rl_training.trajectory_buffer_size", 900),
    ("--enable-rl-training --scoring-batch-size 9", "rl_training.scoring_batch_size", 9),
    ("--enable-rl-training --group-size 8", "rl_training.group_size", 8),
    (
        "--enable-rl-training --atropos-url http://localhost:8001",
        "rl_training.atropos_url",
        "http://localhost:8001",
    ),
    ("--enable-rl-training --atropos-api", "rl_training.atropos_api", True),
    ("--enable-rl-training --environment wordle", "rl_training.verifiers", "wordle"),
    (
        f"--enable-rl-training --environment wordle --environment-python {sys.executable}",
        "rl_training.verifiers_python",
        sys.executable,
    ),
    (
        f"--enable-rl-training --environment wordle --environment-python {sys.executable} --environment-variables A,B",
        "rl_training.verifiers_variables",
        ("A", "B"),
    ),
    ("--enable-rl-training --validation-prompts v.jsonl", "rl_training.validation_prompts", "v.jsonl"),
    ("--enable-rl-training --metrics-file m.jsonl", "rl_training.metrics_file", "m.jsonl"),
    ("--enable-rl-training --report-to tensorboard,wandb", "rl_training.report_to", ("tensorboard", "wandb")),
    ("--enable-rl-training --checkpoint-dir c", "checkpointing.checkpoint_dir", "c"),
    ("--enable-rl-training --checkpoint-interval 9", "checkpointing.interval", 9),
    ("--learn-from-feedback sql", "feedback.learn", "sql"),
    ("--enable-tinker", "tinker.enabled", True),
    ("--enable-tinker --tinker-trainers 9", "tinker.trainers", 9),
    ("--enable-tinker --tinker-rank 9", "tinker.rank", 9),
    ("--enable-tinker --tinker-dir t", "tinker.dir", "t"),
    ("--enable-tinker --tinker-lease-s 9", "tinker.lease_s", 9.0),
    ("--enable-rl-training --keep-n-checkpoints 9", "checkpointing.keep_n_checkpoints", 9),
    ("--tensor-parallel-size 2", "engine.parallel.ranks", 2),
    ("--num-local-ranks 2 --distributed-mode ring", "engine.parallel.mode", "ring"),
    ("--num-local-ranks 2", "engine.parallel.local_ranks", 2),
    ("--num-local-ranks 2 --distributed-sharding tensor", "engine.parallel.ranks", 2),
    ("--num-local-ranks 2 --distributed-strict --no-distributed-strict", "engine.parallel.strict", False),
    (f"--tensor-parallel-size 2 --distributed-hostfile {HOSTS}", "engine.parallel.hostfile", HOSTS),
    ("--tensor-parallel-size 2 --distributed-ibv-devices d", "engine.parallel.ibv_devices", "d"),
    (
        "--tensor-parallel-size 2 --distributed-jaccl-coordinator 192.168.1.1:29500",
        "engine.parallel.jaccl_coordinator",
        "192.168.1.1:29500",
    ),
    ("--share-model --host 0.0.0.0 --api-key k", "cluster.share", True),
    ("--share-model --host 0.0.0.0 --api-key k --federate 3", "cluster.trainers", 3),
    ("--connect-to node1:8000", "cluster.connect_to", "node1:8000"),
    ("--connect-to node1:8000 --wait-for-leader 30", "cluster.wait_s", 30.0),
    ("--connect-to node1:8000 --cluster-dir d", "cluster.dir", "d"),
]


@pytest.mark.parametrize(("line", "place", "expected"), SETTINGS)
def test_a_flag_is_a_setting(
    serve: Run, capsys: pytest.CaptureFixture[str], line: str, place: str, expected: object
) -> None:
    assert value(serve(line), place) == expected != value(serve("other-model"), place)
    assert capsys.readouterr().err == ""


def test_no_speculation_is_asked_for_by_name(serve: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("m --spec-decode none").engine.speculation.method == "none"
    assert capsys.readouterr().err == ""


def test_every_option_is_among_them() -> None:
    written = " ".join(line for line, _, _ in SETTINGS)
    assert not {
        flag for flag in EVERY | set(SPELLINGS) if f"{flag} " not in f"{written} " and f"{flag}=" not in written
    }


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_without_a_setting_warns_or_is_refused(
    command: Any, serve: Run, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    row = FLAGS[flag]
    line = f"{flag} 77" if row.value else flag
    if row.quiet:
        for form in (flag, f"{flag}=true", f"{flag}=True"):
            assert serve(f"{form} m --port 5").server.port == 5
            assert capsys.readouterr().err == ""
        with pytest.raises(Refused) as refused:
            translate([f"{flag}=False"], {})
        assert (refused.value.flag, str(refused.value)) == (flag, f"{flag}=False cannot be kept: {row.text}")
    elif row.refuse:
        with pytest.raises(SystemExit) as end:
            command(args=["serve", *line.split()], prog_name="tandem")
        assert end.value.code == 2
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert f"{line} cannot be kept: {row.text}" in said
    else:
        assert serve(f"{line} m --port 5").server.port == 5
        assert capsys.readouterr().err == f"tandem: warning: {flag} has no effect here: {row.text}\n"
    for harmless in row.harmless:
        assert serve(f"{flag} {harmless} m").engine.model.path == "m"
        assert serve(f"{flag}={harmless} m").engine.model.path == "m"
        assert capsys.readouterr().err == ""


def test_a_warning_names_only_options_that_exist() -> None:
    """The successor that a text names must be there."""
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {flag for p in serve.params for flag in p.opts} | set(FLAGS)
    for flag, row in FLAGS.items():
        named = {word.strip(",.;:)") for word in row.text.split() if word.startswith("--")}
        assert named <= known, flag
        assert flag not in named


def test_the_page_for_those_who_move_has_every_flag() -> None:
    page = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert {flag for flag in FLAGS if f"`{flag}`" not in page} == set()


def test_no_row_hides_an_option() -> None:
    assert not set(FLAGS) & EVERY


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--completion-batch-size"], "--completion-batch-size"),
        (["--lora-modules"], "--lora-modules"),
        (["--lora-modules", "a"], "--lora-modules"),
        (["--lora-modules", "{}"], "--lora-modules"),
        (["--lora-modules", json.dumps({"name": "a", "path": 3})], "--lora-modules"),
        (["--adapter-path"], "--adapter-path"),
        (["--draft-model"], "--draft-model"),
        (["--spec-decode", "base"], "--spec-decode"),
        (["--spec-decode"], "--spec-decode"),
        (["--speculative-config", "[]"], "--speculative-config"),
        (["--speculative-config", "{"], "--speculative-config"),
        (["--speculative-config", '{"method": "eagle"}'], "--speculative-config"),
        (["--speculative-config", '{"method": "draft_model"}'], "--speculative-config"),
        (["--speculative-config", '{"method": "ngram", "model": "d"}'], "--speculative-config"),
        (["--speculative-config", '{"method": "ngram", "rejection": 1}'], "--speculative-config"),
        (["--served-model-name"], "--served-model-name"),
        (["--adapter"], "--adapter"),
        (["--dtype"], "--dtype"),
        (["--mode"], "--mode"),
    ],
)
def test_a_value_that_is_missing_or_not_supported(words: list[str], flag: str) -> None:
    with pytest.raises(Refused) as refused:
        translate(words, {})
    assert refused.value.flag == flag


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--adapter sql --port 9401", "--adapter: a path must follow the name sql, not the option --port"),
        ("--adapter sql --prot 9401", "--adapter: a path must follow the name sql, not the option --prot"),
        ("--adapter sql -m ./model", "--adapter: a path must follow the name sql, not the option -m"),
        ("--adapter sql", "--adapter: a path must follow the name sql"),
        ("--adapter --port 9401", "--adapter: a name and a path must follow, not the option --port"),
        ("--model --port 9401", "--model: a value must follow, not the option --port"),
        ("--lora-modules --port 9401", "--lora-modules: a value must follow, not the option --port"),
        ("--tensor-parallel-size --port 1", "--tensor-parallel-size: a value must follow, not the option --port"),
    ],
)
def test_an_option_in_the_place_of_a_value_is_named(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app(args=["serve", *line.split()], prog_name="tandem")
    assert end.value.code == 2
    assert capsys.readouterr().err == f"Error: Invalid value for {said}\n"


def test_values_are_never_taken_for_flags() -> None:
    words = ["--host=--completion-batch-size", "--port", "-1", "--", "--completion-batch-size", "8"]
    assert translate(words, {"--host": True, "--port": True}) == (words, [])
    assert translate(["--enable-lora=true", "m"], {})[0] == ["m"]


def test_mola_s_command_line(serve: Run, capsys: pytest.CaptureFixture[str]) -> None:
    config = serve(
        "--model mlx-community/Qwen3.5-9B-MLX-4bit --adapter rust ./r --adapter sql ./s --max-inflight-tokens 131072 "
        "--max-batch-size 128 --prefill-batch-size 32 --enable-routed-decode-reference "
        "--strict-routed-decode-reference --routed-decode-backend gather-mm --enable-mixed-decode-migration "
        "--prestep-mixed-decode-migration --cache-routed-decode-sessions --detached-shared-decode-owner --port 8001"
    )
    assert config.engine.model.path == "mlx-community/Qwen3.5-9B-MLX-4bit"
    assert config.adapters == (("rust", "./r"), ("sql", "./s"))
    assert (config.engine.scheduler.max_num_seqs, config.server.port) == (128, 8001)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 7
    assert all(line.startswith("tandem: warning: --") for line in warnings)


def test_mlx_parallm_s_command_line(serve: Run, capsys: pytest.CaptureFixture[str]) -> None:
    config = serve(
        "--model-path m --host 127.0.0.1 --port 8001 --scheduler continuous --max-batch-size 8 --batch-timeout 0.05 "
        "--max-concurrent-streams 4 --diverse-mode true"
    )
    assert (config.engine.scheduler.max_num_seqs, config.server.port) == (8, 8001)
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in warnings] == ["--batch-timeout", "--max-concurrent-streams"]


def test_vllm_s_switches_that_are_always_on_say_nothing(serve: Run, capsys: pytest.CaptureFixture[str]) -> None:
    serve(
        "m --enable-prompt-tokens-details --enable-chunked-prefill --enable-tokenizer-info-endpoint "
        "--enable-force-include-usage --max-logprobs 20 --generation-config auto --seed 0"
    )
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"max_logprobs": 21}, "'server.max_logprobs' is 21: it must lie between 0 and 20"),
        ({"max_logprobs": -1}, "'server.max_logprobs' is -1: it must lie between 0 and 20"),
        ({"seed": -1}, "'server.seed' is -1: it must lie between 0 and "),
    ],
)
def test_a_value_that_cannot_be_kept_is_refused_by_name(option: dict[str, object], says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        build(None, option)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["--dtype=half", "--port", "9"], ["--dtype", "float16", "--port", "9"]),
        (["--dtype=", "--port", "9"], ["--dtype", "", "--port", "9"]),
        (["--dtype", "half"], ["--dtype", "float16"]),
        (["--mode=both"], ["--mode", "inference_and_training"]),
        (["--adapter=a=b"], ["--adapter", "a=b"]),
        (["--adapter", "a", "b"], ["--adapter", "a=b"]),
        (["--port=9", "--", "--dtype", "half"], ["--port=9", "--", "--dtype", "half"]),
        (["--port", "--dtype=half"], None),
    ],
)
def test_words_with_and_without_an_equals_sign(words: list[str], own: list[str] | None) -> None:
    takes_value = {"--port": True, "--dtype": True, "--verbose": False}
    if own is None:
        with pytest.raises(Refused):
            translate(words, takes_value)
    else:
        assert translate(words, takes_value) == (own, [])
