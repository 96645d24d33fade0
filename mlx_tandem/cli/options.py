"""The options of `tandem serve`: one line for every setting of serving and the common ones of learning.

The type of an option's value follows from the type of its field in config.py, so the two cannot differ.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from mlx_tandem.config import Config


@dataclass(frozen=True)
class Option:
    """One option of the command line."""

    place: str  # path of the setting in Config
    flags: str  # separated by spaces; the first names the parameter; a switch and its opposite with a slash
    help: str
    metavar: str | None = None

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.flags.split()[0].partition("/")[0].removeprefix("--").replace("-", "_")


PANELS: dict[str, tuple[Option, ...]] = {
    "Model": (
        Option("engine.model.path", "--model -m --model-path", "The same as the argument.", "MODEL"),
        Option("engine.model.dtype", "--dtype", "auto: float32 on a CPU, else the model's own."),
        Option(
            "engine.model.unpack_weights",
            "--unpack-weights/--no-unpack-weights",
            "On a CPU, unpack weights of 4 or 8 bits at start where half of the memory suffices (on).",
        ),
        Option(
            "engine.model.max_model_len",
            "--max-model-len --ctx-size --max-kv-size",
            "Longest prompt and answer, in tokens; at most the model's own.",
        ),
        Option("engine.model.images", "--images/--no-images", "Take images where the model does (on)."),
        Option("engine.model.random_weights", "--random-weights", "Draw weights at random, for benchmarks."),
        Option(
            "server.chat_template",
            "--chat-template",
            "A file with the chat template, or the template itself, instead of the model's.",
            "FILE",
        ),
        Option(
            "server.tool_call_parser",
            "--tool-call-parser",
            "Form of the model's tool calls: by its chat template (auto), unknown (none), or a name.",
            "NAME",
        ),
        Option(
            "server.reasoning_parser",
            "--reasoning-parser",
            "Form of the model's thoughts: by its chat template (auto), part of the answer (none), or a name.",
            "NAME",
        ),
        Option(
            "server.reranker",
            "--reranker",
            "Whether the model scores documents: by its folder (auto), never (none), or as Qwen 3's rerankers (qwen3).",
            "NAME",
        ),
        Option(
            "server.generation_config",
            "--generation-config",
            "Where sampling defaults come from: the model's folder (auto), nowhere (vllm, none), or another folder.",
            "FOLDER",
        ),
        Option(
            "server.seed",
            "--seed",
            "Seed of the generator that gives requests without a seed theirs.",
        ),
    ),
    "Adapters": (
        Option("adapters", "--adapter", "Serve the LoRA adapter in PATH as NAME (repeatable).", "NAME PATH"),
        Option(
            "server.default_adapter",
            "--default-adapter",
            "Adapter that answers when a request names no model, or the base by its own name.",
            "NAME",
        ),
        Option("adapter_root", "--adapter-root", "Folder of adapters that are read when first asked for.", "FOLDER"),
        Option(
            "aliases",
            "--alias",
            "A name whose requests are split over adapters by weight (repeatable).",
            "NAME=ADAPTER:WEIGHT,ADAPTER:WEIGHT",
        ),
        Option(
            "ab_tests",
            "--ab-test",
            "Compare the scores of an alias's arms with those of CONTROL, and keep the better one (repeatable).",
            "NAME=CONTROL",
        ),
        Option("engine.lora.max_loras", "--max-loras", "Adapters on the device at once (16)."),
        Option("engine.lora.max_lora_rank", "--max-lora-rank", "Highest rank that is accepted (64)."),
        Option("engine.lora.max_cpu_loras", "--max-cpu-loras", "Adapters in memory; 0: what the next option holds."),
        Option("engine.lora.max_cpu_lora_gb", "--max-cpu-lora-gb", "Memory for adapters off the device, in GB (2)."),
        Option(
            "engine.lora.backend", "--lora-backend", "How adapters are computed; auto: the fastest that is right here."
        ),
        Option(
            "engine.lora.prepare",
            "--prepare-adapters",
            "Choose the kernels of adapters at start though none is named; else the first to be loaded waits for it.",
        ),
    ),
    "Server": (
        Option("server.host", "--host", "Address to bind (127.0.0.1); one that other machines reach needs a key."),
        Option("server.port", "--port", "Port to bind, 0 for a free one (8000)."),
        Option("server.uds", "--uds", "Unix socket to serve on, in place of host and port.", "PATH"),
        Option("server.ssl_certfile", "--ssl-certfile", "Serve HTTPS with this certificate (PEM).", "FILE"),
        Option("server.ssl_keyfile", "--ssl-keyfile", "Its key, if it is not in the same file.", "FILE"),
        Option("server.root_path", "--root-path", "Path prefix under which a reverse proxy serves this.", "PATH"),
        Option("server.served_model_names", "--served-model-name", "A further name of the base (repeatable).", "NAME"),
        Option("server.api_key", "--api-key", "Key that clients must send; a file does not show in `ps`.", "KEY"),
        Option("server.api_key_file", "--api-key-file", "File whose first line is the key.", "FILE"),
        Option("server.keys_file", "--keys", "File of named keys with scopes and limits (`tandem key new`).", "FILE"),
        Option(
            "server.force_include_usage",
            "--enable-force-include-usage",
            "End every stream with its usage, as if stream_options.include_usage were true.",
        ),
        Option(
            "server.log_format",
            "--log-format",
            "Events as JSON lines (json) or short lines for people (text); auto: text on a terminal, else JSON.",
        ),
        Option("server.allowed_hosts", "--allowed-host", "A further accepted Host header (repeatable).", "NAME"),
        Option(
            "server.allow_image_hosts",
            "--allow-image-hosts",
            "Hosts from which images of requests are fetched (repeatable, or with commas).",
            "HOST,HOST",
        ),
        Option(
            "server.allowed_origins",
            "--allowed-origins",
            "Origins of web pages that may use this from a browser (repeatable, or with commas); * for all.",
            "ORIGIN,ORIGIN",
        ),
    ),
    "Limits": (
        Option(
            "server.max_logprobs", "--max-logprobs", "Most alternatives that logprobs may ask for; at most 20 (20)."
        ),
        Option("server.default_max_tokens", "--default-max-tokens", "max_tokens of requests that do not set it (512)."),
        Option("server.max_prompt_tokens", "--max-prompt-tokens", "Longest prompt; 0: what fits."),
        Option("server.max_generation_tokens", "--max-generation-tokens", "Upper bound of max_tokens; 0: what fits."),
        Option("server.max_n", "--max-n", "Most choices of one prompt, up to 128 (16)."),
        Option("server.max_request_bytes", "--max-request-bytes", "Largest request body in bytes (1048576)."),
        Option(
            "server.max_image_request_bytes",
            "--max-image-request-bytes",
            "Largest body of a chat in bytes, where the model reads images (33554432).",
        ),
        Option(
            "server.max_registered_adapters",
            "--max-registered-adapters",
            "Most versions of adapters that requests may register (10000); more get 507.",
        ),
        Option("server.max_queue_size", "--max-queue-size", "Most choices that may wait (1024); more get 429."),
        Option(
            "server.max_concurrent_requests",
            "--max-concurrent-requests",
            "Most open requests (0: any number); more get 429.",
        ),
        Option(
            "server.memory_pressure_threshold",
            "--memory-pressure-threshold",
            "Share of the blocks in use from which on new requests get 503 (0.9).",
        ),
        Option("server.request_timeout_s", "--request-timeout-s", "Longest time of a whole request; 0: no limit."),
        Option(
            "server.first_token_timeout_s",
            "--first-token-timeout-s",
            "Longest time until the first token (300); 0: no limit.",
        ),
        Option(
            "server.stream_keepalive_s",
            "--stream-keepalive-s",
            "Time without an event after which a stream gets a comment or a ping (5); 0: none.",
        ),
        Option("batches.dir", "--batch-dir", "Folder of files and batches (./batches).", "FOLDER"),
        Option(
            "server.idle_unload_s", "--idle-unload-s", "Time without work until the engine is unloaded; 0: never (0)."
        ),
        Option(
            "server.receive_timeout_s",
            "--receive-timeout-s",
            "Longest time of a request's headers, and of its body (30).",
        ),
        Option(
            "server.write_timeout_s",
            "--write-timeout-s",
            "Time until a client that reads nothing is disconnected (60).",
        ),
        Option(
            "server.chat_template_timeout_s",
            "--chat-template-timeout-s",
            "CPU time of the chat template for one conversation (1).",
        ),
        Option(
            "server.drain_seconds",
            "--drain-seconds --shutdown-timeout",
            "Time that running requests have to finish after SIGTERM (30).",
        ),
    ),
    "Batching": (
        Option("engine.scheduler.max_num_seqs", "--max-num-seqs --max-batch-size", "Most sequences in a batch (64)."),
        Option(
            "engine.scheduler.max_chunk_tokens",
            "--max-chunk-tokens --max-num-batched-tokens",
            "Most prompt tokens in one step (0: 1024 on a CPU, up to 4096 on a GPU).",
        ),
        Option(
            "engine.scheduler.prefill_share",
            "--prefill-share",
            "Time for prompts per step while sequences decode, as a multiple of a decode step's time.",
        ),
        Option(
            "engine.scheduler.idle_prefill_ms",
            "--idle-prefill-ms",
            "Time for prompts per step while nothing decodes, in milliseconds.",
        ),
        Option(
            "engine.scheduler.prefill_batch_size",
            "--prefill-batch-size",
            "Most prompts read in one step; 0: as many as the time allows.",
        ),
        Option(
            "engine.scheduler.max_inflight_tokens",
            "--max-inflight-tokens",
            "Most tokens of all running requests; 0: what the pool holds.",
        ),
        Option("engine.heartbeat_seconds", "--heartbeat-seconds", "Time between two heartbeats of the engine."),
        Option(
            "engine.deterministic",
            "--deterministic",
            "Give every request the same bits whatever runs beside it, which takes longer.",
        ),
        Option("engine.memory_limit_gb", "--memory-limit-gb", "Device memory of this server in GB; 0: what is free."),
        Option("engine.stall_seconds", "--stall-seconds", "Time after which a silent engine is restarted."),
    ),
    "Speculation": (
        Option(
            "engine.speculation.method",
            "--spec-decode",
            "Verify drafts of several tokens in one step: none, ngram, which copies from prompt and answer, draft, "
            "which asks a smaller model, or mtp, which asks the head that some checkpoints carry.",
        ),
        Option(
            "engine.speculation.draft_model",
            "--draft-model-path",
            "The smaller model for --spec-decode draft: a folder, or an id of the Hugging Face hub.",
            "MODEL",
        ),
        Option(
            "engine.speculation.num_tokens",
            "--num-speculative-tokens --num-draft-tokens",
            "Drafts of a sequence at first, of a draft model at most; with --no-spec-decode-dynamic always (5).",
        ),
        Option(
            "engine.speculation.dynamic",
            "--spec-decode-dynamic/--no-spec-decode-dynamic",
            "Draft as much as is accepted, and not where that brings fewer tokens per second (on).",
        ),
        Option(
            "engine.speculation.disable_batch_size",
            "--spec-decode-disable-batch-size",
            "No drafts while more sequences run; 0: no such limit.",
        ),
        Option("engine.speculation.ngram_min", "--ngram-min", "Fewest tokens that must stand at an earlier place (2)."),
        Option("engine.speculation.ngram_max", "--ngram-max", "Most tokens that are compared (8)."),
        Option(
            "engine.speculation.prompt_lookup",
            "--ngram-prompt-lookup/--no-ngram-prompt-lookup",
            "Copy from the prompt, too, and not from the answer alone (on).",
        ),
    ),
    "KV cache": (
        Option("engine.cache.block_size", "--block-size --kv-block-size", "Tokens in a block (16)."),
        Option(
            "engine.cache.num_blocks",
            "--num-blocks",
            "Blocks in the pool; 0: from --memory-fraction. Layers with a window have a pool of at most as many.",
        ),
        Option(
            "engine.cache.memory_fraction",
            "--memory-fraction --gpu-memory-utilization",
            "Share of the memory left after weights and activations that blocks may use.",
        ),
        Option(
            "engine.cache.prefix_caching",
            "--enable-prefix-caching/--no-enable-prefix-caching",
            "Compute common beginnings of prompts only once (on).",
        ),
        Option("engine.cache.kv_bits", "--kv-bits", "Bits of a cached number: 4, 8, or 16 for the model's own."),
        Option("engine.cache.kv_group_size", "--kv-group-size", "Fewest cached numbers that share a scale (64)."),
        Option(
            "engine.cache.attention_backend",
            "--attention-backend",
            "How attention is computed; auto: the fastest back end that is right on this device.",
        ),
    ),
    "KV cache on the drive": (
        Option("engine.disk.enabled", "--ssd/--no-ssd", "Keep blocks on the drive (if a folder is named)."),
        Option(
            "engine.disk.dir",
            "--ssd-cache-dir",
            "Folder of the blocks; with --ssd alone, mlx-tandem/kv-cache in the user's cache folder.",
            "FOLDER",
        ),
        Option("engine.disk.ttl_days", "--ssd-ttl-days", "Days until a block expires (7); 0: never."),
        Option(
            "engine.disk.policy",
            "--ssd-policy",
            "When a block is written: when its place is needed, or as soon as it is full.",
        ),
        Option("engine.disk.durability", "--ssd-durability", "persistent: sync writes, and retry those that fail."),
        Option(
            "engine.disk.async_writes",
            "--ssd-async-writes/--no-ssd-async-writes",
            "Write on another thread (on); off: steps wait for the drive.",
        ),
        Option(
            "engine.disk.writer_queue_size", "--ssd-writer-queue-size", "Most blocks that wait to be written (512)."
        ),
        Option(
            "engine.disk.persistent_max_retries",
            "--ssd-persistent-max-retries",
            "Retries of a failed write, if durability is persistent (3).",
        ),
        Option(
            "engine.disk.flush_interval_s", "--ssd-flush-interval-s", "Time between two syncs and checks of ages (1)."
        ),
        Option("engine.disk.max_size_gb", "--ssd-max-size-gb", "Most GB of all blocks (50); 0: no limit."),
    ),
    "Learning": (
        Option("rl_training.enabled", "--enable-rl-training", "Train an adapter while serving."),
        Option("engine.duty.mode", "--mode", "What the device is for; short: inference, training, both (both)."),
        Option(
            "engine.duty.training",
            "--training-share",
            "Training's share of the device's time while requests wait, too (0.3).",
        ),
        Option("rl_training.adapter", "--train-adapter", "Name of the adapter that is trained (policy).", "NAME"),
        Option("rl_training.lora_rank", "--lora-rank", "Rank of a fresh adapter (16)."),
        Option(
            "rl_training.lora_alpha",
            "--lora-alpha",
            "Alpha of a fresh adapter; its delta is scaled by alpha / rank (32).",
        ),
        Option(
            "rl_training.lora_target_modules",
            "--lora-target-modules",
            "Linear layers by the last part of their name (repeatable, or with commas); all if absent.",
            "NAME,NAME",
        ),
        Option("rl_training.algorithm", "--algorithm", "How rewards become gradients (grpo)."),
        Option(
            "rl_training.learning_rate",
            "--learning-rate",
            "Learning rate of AdamW; auto: the one that moves the adapter's answers by the next option (auto).",
            "NUMBER|auto",
        ),
        Option("rl_training.target_kl", "--target-kl", "Nats by which an update should move them (0.001)."),
        Option("rl_training.kl_coef", "--kl-coef", "Weight of the KL divergence from the reference (0)."),
        Option(
            "rl_training.kl_reference",
            "--kl-reference",
            "Reference of the divergence: the base, the adapter to begin with, or the accepted version (base).",
        ),
        Option(
            "rl_training.scoring_function",
            "--scoring-function",
            "Scoring function of requests that collect and name none.",
            "NAME",
        ),
        Option(
            "rl_training.atropos_url",
            "--atropos-url",
            "Address of Atropos' trajectory API (run-api), whose batches are learned from.",
            "URL",
        ),
        Option(
            "rl_training.atropos_api",
            "--atropos-api",
            "Be Atropos' trajectory API as well, to which environments post what is learned from.",
        ),
        Option(
            "rl_training.verifiers",
            "--environment",
            "Environment of verifiers to play and learn from: a taskset's id, or a TOML file as vf-eval takes it.",
            "ID",
        ),
        Option(
            "rl_training.verifiers_python",
            "--environment-python",
            "Python of the virtual environment in which verifiers is installed (the server's own).",
            "FILE",
        ),
        Option(
            "rl_training.verifiers_variables",
            "--environment-variables",
            "Environment variables that it gets beside the usual ones (repeatable, or with commas).",
            "NAME,NAME",
        ),
        Option("rl_training.update_frequency", "--update-frequency", "Completions per update (100)."),
        Option("rl_training.trajectory_buffer_size", "--trajectory-buffer-size", "Completions that are kept (1000)."),
        Option("rl_training.scoring_batch_size", "--scoring-batch-size", "Completions scored at once (32)."),
        Option(
            "rl_training.group_size",
            "--group-size",
            "Over 1: prompts of requests are sampled again this many times, in training's share.",
        ),
        Option(
            "rl_training.validation_prompts",
            "--validation-prompts",
            "JSONL file whose mean reward each version must keep to be published.",
            "FILE",
        ),
        Option("rl_training.metrics_file", "--metrics-file", "JSONL file of metrics and samples of updates.", "FILE"),
        Option(
            "rl_training.report_to",
            "--report-to",
            "Trackers that get them: tensorboard, wandb, trackio (repeatable, or with commas).",
            "NAME,NAME",
        ),
        Option(
            "feedback.learn",
            "--learn-from-feedback",
            "Train this adapter by what people say of its answers and the base's (/v1/feedback).",
            "NAME",
        ),
        Option("tinker.enabled", "--enable-tinker", "Let clients of Tinker's API train adapters and sample from them."),
        Option("tinker.trainers", "--tinker-trainers", "Models that such clients train at once (4)."),
        Option("tinker.rank", "--tinker-rank", "Highest rank of these models (32)."),
        Option("tinker.dir", "--tinker-dir", "Folder of their checkpoints (./tinker).", "FOLDER"),
        Option("tinker.lease_s", "--tinker-lease-s", "Seconds of silence after which such a client is gone (120)."),
        Option("checkpointing.checkpoint_dir", "--checkpoint-dir", "Folder of checkpoints (./checkpoints).", "FOLDER"),
        Option("checkpointing.interval", "--checkpoint-interval", "Updates between two checkpoints (500)."),
        Option("checkpointing.keep_n_checkpoints", "--keep-n-checkpoints", "How many checkpoints are kept (10)."),
    ),
    "Several devices": (
        Option(
            "engine.parallel.ranks",
            "--tensor-parallel-size",
            "Ranks that compute the model together, each a process with a device and a share of the weights (1).",
        ),
        Option(
            "engine.parallel.mode",
            "--distributed-mode",
            "What carries the sums of several ranks; off: nccl with CUDA, else ring, if there are several.",
        ),
        Option("engine.parallel.sharding", "--distributed-sharding", "How the model is divided: each layer (tensor)."),
        Option("engine.parallel.local_ranks", "--num-local-ranks", "Ranks on this machine; the same number as above."),
        Option(
            "engine.parallel.strict",
            "--distributed-strict/--no-distributed-strict",
            "End where MLX has no such mode (on), or else serve on one device.",
        ),
        Option(
            "engine.parallel.hostfile",
            "--distributed-hostfile",
            "File with the hosts of the ranks, as mlx.launch takes it ($MLX_HOSTFILE).",
            "FILE",
        ),
        Option(
            "engine.parallel.ibv_devices",
            "--distributed-ibv-devices",
            "Of jaccl: file with the RDMA devices between the ranks ($MLX_IBV_DEVICES).",
            "FILE",
        ),
        Option(
            "engine.parallel.jaccl_coordinator",
            "--distributed-jaccl-coordinator",
            "Of jaccl: address of the first rank ($MLX_JACCL_COORDINATOR).",
            "HOST:PORT",
        ),
    ),
    "Several machines": (
        Option("cluster.share", "--share-model", "Lead: give other machines adapters, and take their trajectories."),
        Option(
            "cluster.connect_to",
            "--connect-to",
            "Serve what the server at this address shares, or train for it; its base is found here by its digest.",
            "HOST:PORT",
        ),
        Option(
            "cluster.wait_s",
            "--wait-for-leader",
            "Seconds to wait at the first start for a leader that does not answer (600).",
            "SECONDS",
        ),
        Option(
            "cluster.trainers",
            "--federate",
            "Of a leader: trainers whose versions are averaged in rounds (1: one trainer publishes).",
        ),
        Option(
            "cluster.dir",
            "--cluster-dir",
            "Folder of what comes from other machines and goes there (./cluster).",
            "FOLDER",
        ),
    ),
}
"""All options by the section of the help in which they appear."""

FLAG = {option.name: option.flags.split()[0].partition("/")[0] for panel in PANELS.values() for option in panel}
"""The flag of each option, by the name of its parameter."""

LEARNING = {option.name: FLAG[option.name] for option in PANELS["Learning"]}
"""The flag of each option of learning, by the name of its parameter."""

OPTIONS: dict[str, str] = {option.name: option.place for panel in PANELS.values() for option in panel}
"""The path in `Config` of each parameter of `tandem serve`. The command line and the file have the same settings."""


def with_flag(message: str, flag: str | None) -> str:
    """Return the message of an error, and append the option that it is about if the message does not name it."""
    return message if flag is None or flag in message else f"{message} ({flag})"


def parameters() -> Iterator[inspect.Parameter]:
    """Yield the options as parameters of a command's function; each is None if it was not given."""
    for panel, options in PANELS.items():
        for option in options:
            kind = _type_of(option.place)
            words = _words(kind)
            declared = typer.Option(
                *option.flags.split(),
                help=option.help,
                metavar=option.metavar,
                rich_help_panel=panel,
                parser=_number_or(words) if words else None,
            )
            given = str if words else list[str] if get_origin(kind) is tuple else kind
            yield inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[given | None, declared],
            )


_types = functools.cache(get_type_hints)  # most of a command's start if each option reads its class again


def _type_of(place: str) -> Any:
    return functools.reduce(lambda found, part: _types(found)[part], place.split("."), Config)


def _words(kind: Any) -> tuple[str, ...]:
    """Return the words that a setting may have in place of a number; none for a setting of another type."""
    kinds = get_args(kind)
    return tuple(word for k in kinds if get_origin(k) is Literal for word in get_args(k)) if float in kinds else ()


def _number_or(words: tuple[str, ...]) -> Callable[[str], float | str]:
    """Return what reads the value of an option that is a number or one of these words."""

    def read(value: str) -> float | str:
        try:
            return value if value in words else float(value)
        except ValueError:
            raise typer.BadParameter(f"'{value}' is not a number or {' or '.join(map(repr, words))}") from None

    return read
