"""All settings, typed and nested: every field is a key of one YAML file, and most are options of the command line.

A value of 0 or None, where the comment says so, means that it is decided at start from the device and the model.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The base model and how it is loaded."""

    path: str  # the model's folder
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on CPU, else the model's own
    max_model_len: int = 0  # 0: the model's own limit
    random_weights: bool = False  # draw weights at random from the folder's shapes, for benchmarks
    unpack_weights: bool = True  # on a CPU, unpack 4-bit and 8-bit weights at start if they then fit in half the memory
    images: bool = True  # serve images where the model's family and the installed packages allow it


class CacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache on the device."""

    block_size: int = 16
    num_blocks: int = 0  # 0: from memory_fraction
    memory_fraction: float = 0.6  # share of the memory left after weights and activations
    prefix_caching: bool = True  # keep keys and values for later prompts with the same beginning
    kv_bits: Literal[4, 8, 16] = 16  # bits of a cached number; 16: the model's own type
    kv_group_size: int = 64  # fewest numbers that share a scale, for 4 and 8 bits
    attention_backend: Literal["auto", "portable", "cuda", "metal"] = "auto"  # auto: the fastest that is right here


class DiskCacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """KV offload to the drive."""

    enabled: bool | None = None  # None: on if `dir` is set
    dir: str = ""  # empty: kv-cache in the user's own cache folder
    ttl_days: float = 7.0  # 0: blocks never expire
    policy: Literal["evict_only", "write_through"] = "evict_only"  # when blocks are written
    durability: Literal["best_effort", "persistent"] = "best_effort"  # persistent: synced and retried
    async_writes: bool = True  # False: the engine waits until a block is written
    writer_queue_size: int = 512  # blocks that wait to be written; more are dropped
    persistent_max_retries: int = 3
    flush_interval_s: float = 1.0
    max_size_gb: float = 50.0  # 0: no limit

    @property
    def on(self) -> bool:
        """Whether blocks are kept on the drive."""
        return bool(self.dir) if self.enabled is None else self.enabled


class SchedulerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of what the scheduler puts into a step."""

    max_num_seqs: int = 64  # sequences in one batch
    max_chunk_tokens: int = 0  # most prompt tokens of one step; 0: by the device
    prefill_share: float = 0.6  # time of prompts per time of a decode step, while sequences decode
    idle_prefill_ms: float = 0.0  # longest prefill step while nothing decodes; 0: by the device
    prefill_batch_size: int = 0  # most prompts read in one step; 0: as many as the time allows
    max_inflight_tokens: int = 0  # most prompt tokens plus max_tokens of running requests; 0: what the pool holds


class SpeculationConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Drafts of tokens, which a step verifies together. They change an answer only by rounding."""

    # ngram: from prompt and answer; draft: by a smaller model; mtp: by the model's head for multi-token prediction
    method: Literal["none", "ngram", "draft", "mtp"] = "none"
    draft_model: str = ""  # the smaller model's folder
    num_tokens: int = 5  # drafts of a sequence at first, of a draft model at most; without `dynamic` always
    dynamic: bool = True  # as many drafts as are accepted, and none where steps without them bring more tokens
    disable_batch_size: int = 0  # no drafts while more sequences run; 0: no such limit
    ngram_min: int = 2  # fewest tokens that have to stand where drafts come from
    ngram_max: int = 8  # most tokens that are compared
    prompt_lookup: bool = True  # drafts come from the prompt, too


class LoraConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of adapters that are served at once, and their memory."""

    max_loras: int = 16  # slots on the device beside the base
    max_lora_rank: int = 64
    max_cpu_loras: int = 0  # most adapters in the engine's memory; 0: as many as max_cpu_lora_gb holds
    max_cpu_lora_gb: float = 2.0
    backend: Literal["auto", "gather", "windows", "fused"] = "auto"
    prepare: bool = False  # make their kernels ready at start; set where adapters or learning are configured


Mode = Literal["inference_only", "training_only", "inference_and_training"]
"""The tasks of the engine: answering requests, learning, or both."""


class DutyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the device's time for requests and for learning while both want it."""

    mode: Mode = "inference_and_training"
    inference: float = 0.7  # weight of requests; only the ratio of both weights counts
    training: float = 0.3  # weight of learning
    inter_token_p95_ms: float = 0.0  # learning waits while streams are slower than this; 0: no such limit
    micro_batch_tokens: int = 0  # tokens of one forward and backward; 0: by the device
    trainer_rank: int = 0  # rank of a trainer for which memory is reserved at start; 0: none
    trainers: int = 1  # trainers of that rank for which memory is reserved
    several_steps: bool = False  # whether the state before several steps is kept beside passes, too
    trains_head: bool = False  # whether these trainers adapt the output head as well


class ParallelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Several ranks that compute one model together, each a process with a device and a share of the weights."""

    ranks: int = 1  # how many
    mode: Literal["off", "ring", "jaccl", "nccl", "mpi"] = "off"  # what carries the sums; off: by the device, if any
    sharding: Literal["tensor", "pipeline"] = "tensor"  # tensor: each layer is divided; pipeline is refused
    local_ranks: int = 0  # how many of the ranks are on this machine; 0: all
    strict: bool = True  # False: serve on one device where this MLX does not have the mode
    hostfile: str = ""  # file with the hosts of the ranks; empty: all ranks are on this machine
    ibv_devices: str = ""  # of jaccl: file with the devices between the ranks
    jaccl_coordinator: str = ""  # of jaccl: address and port of the first rank


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the engine process needs to know."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    disk: DiskCacheConfig = field(default_factory=DiskCacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    duty: DutyConfig = field(default_factory=DutyConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    deterministic: bool = False  # no bit of a token's logits depends on other requests or on how steps are cut
    memory_limit_gb: float = 0.0  # device memory for this server; 0: by the device and what else runs on it
    heartbeat_seconds: float = 0.5  # time between two messages with statistics
    stall_seconds: float = 60.0  # a step that takes longer ends the engine


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP server: addresses, access, defaults and limits of requests."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    uds: str = ""  # path of a unix socket that replaces host and port
    ssl_certfile: str = ""  # PEM file with the certificates up to the root; empty: no TLS
    ssl_keyfile: str = ""  # PEM file; empty: the key is in ssl_certfile
    root_path: str = ""  # path prefix under which a reverse proxy serves this server
    served_model_names: tuple[str, ...] = ()  # names of the base model besides its folder's
    default_adapter: str = ""  # adapter for requests that name no model, or the base by its own name
    api_key: str = ""  # empty: no key is asked for
    api_key_file: str = ""  # file whose first line is the key
    keys_file: str = ""  # YAML file of named keys with scopes and limits; empty: none
    allowed_hosts: tuple[str, ...] = ()  # accepted Host headers besides the bound address
    chat_template: str = ""  # a file, or the template itself; empty: the model's own
    tool_call_parser: str = "auto"  # form of the model's tool calls; auto: by the chat template; none: unknown
    reasoning_parser: str = "auto"  # form of the model's thoughts; auto: by the chat template; none: they are text
    reranker: str = "auto"  # whether the model scores documents; auto: by its folder; none; qwen3: as Qwen 3's do
    generation_config: str = "auto"  # sampling defaults: auto: the model folder's; vllm or none: none; or a folder
    seed: int | None = None  # seed of the generator that gives requests without a seed theirs; None: random
    force_include_usage: bool = False  # end every stream with its usage, asked for or not
    max_logprobs: int = 20  # most alternatives per token that a request may ask for
    allowed_origins: tuple[str, ...] = ()  # origins of web pages that may use the server from a browser; "*": any
    default_max_tokens: int = 512
    max_prompt_tokens: int = 0  # 0: what fits
    max_generation_tokens: int = 0  # upper bound of max_tokens; 0: what fits
    max_n: int = 16  # most choices of one prompt
    max_request_bytes: int = 1_048_576
    max_image_request_bytes: int = 33_554_432  # of a chat on a server that reads images
    allow_image_hosts: tuple[str, ...] = ()  # hosts from which images are fetched, each with a port if it is unusual
    max_registered_adapters: int = 10_000  # most adapter versions that requests may register
    max_queue_size: int = 1024  # choices that may wait besides those in the batch
    max_concurrent_requests: int = 0  # 0: no further limit
    memory_pressure_threshold: float = 0.9  # share of the pool's blocks in use from which requests are refused
    request_timeout_s: float = 0.0  # 0: none
    first_token_timeout_s: float = 300.0  # in addition to the predicted time to read the prompt; 0: none
    stream_keepalive_s: float = 5.0  # longest silence of a stream of server-sent events; 0: no limit
    receive_timeout_s: float = 30.0  # time for a request's headers, and for its body
    write_timeout_s: float = 60.0  # time until a client that reads nothing is disconnected
    log_format: Literal["auto", "json", "text"] = "auto"  # auto: text on a terminal, else JSON lines
    idle_unload_s: float = (
        0.0  # time without work after which the engine's process is ended until it is needed; 0: never
    )
    drain_seconds: float = 30.0  # time that running requests have to end at shutdown
    chat_template_timeout_s: float = 1.0  # CPU time of the model's chat template for one conversation


class RewardSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a composite reward."""

    function: str  # a function of training/rewards, or an entry point's name
    weight: float = 1.0
    options: dict[str, Any] = {}


LearningRate = float | Literal["auto"]
"""A learning rate, or that it is found by how far updates move the policy."""


class RLTrainingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the online loop: collect, score, update, validate, publish."""

    enabled: bool = False
    adapter: str = "policy"  # the name whose versions are trained and published
    adapters: dict[str, dict[str, Any]] = {}  # where several are trained: each with its settings in place of these
    init_from: str = ""  # name of the adapter to begin with; empty: a fresh one, which changes nothing
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_target_modules: tuple[str, ...] = ()  # last parts of module paths; empty: all linear layers
    use_rslora: bool = False  # scale the delta by lora_alpha / sqrt(lora_rank) instead of lora_alpha / lora_rank
    lora_plus_ratio: float = 1.0  # learning rate of B over that of A (LoRA+)
    seed: int = 0

    metrics_file: str = ""  # JSONL file of metrics and samples; empty: none
    metrics_samples: int = 2  # answers per update that are recorded as samples
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()  # local files are in checkpoint_dir

    trajectory_buffer_size: int = 1000  # completions
    update_frequency: int = 100  # completions per update
    scoring_batch_size: int = 32
    gradient_accumulation_steps: int = 1  # batches of update_frequency completions per step of the optimiser
    max_staleness: int = 4  # most versions that a completion may be behind
    scoring_function: str = ""  # scoring of requests that collect and name none
    rewards: dict[str, tuple[RewardSpec, ...]] = {}  # composite rewards by name
    reward_workers: int = 1
    reward_timeout_s: float = 5.0
    reward_memory_mb: int = 512
    siblings: int = 8  # answers that the server adds to a request that has one answer and no group; 0: none
    open_trajectories: int = 1024  # most trajectories that wait for a reward; the oldest go first
    open_trajectory_s: float = 86_400.0  # seconds after the last answer in which the reward has to come
    group_size: int = 0  # over 1: each recorded prompt is sampled again so many times, in training's share
    curriculum: Literal["variance", "uniform"] = (
        "variance"  # the weight by which recorded prompts are chosen: the variance of their rewards; uniform: 1 for all
    )

    algorithm: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo", "importance_sampling", "dro"] = "grpo"
    advantage_scale: Literal["", "group", "batch", "none"] = (
        ""  # what advantages are divided by; empty: the algorithm's
    )
    leave_one_out: bool = False  # compare each answer with the mean of its siblings alone
    least_spread: float = 0.01  # least standard deviation that advantages are divided by
    loss_tokens: int = 256  # tokens that dr_grpo divides each completion's loss by
    mask_truncated: bool = False  # learn nothing from answers that were cut off, but compare their siblings with them
    learning_rate: LearningRate = "auto"  # auto: what moves the policy by target_kl; a number: this rate
    target_kl: float = 1e-3  # mean k3 in nats by which an update should move the policy
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate after the rise
    warmup_steps: int = 0  # of the optimiser, over which the rate rises in a line
    decay_steps: int = 0  # of the optimiser after that, over which the rate falls
    rate_floor: float = 0.0  # share of the rate at which the fall ends
    steps_per_update: int = 1  # of the optimiser, all with the same answers
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_low: float = 0.0  # ratios are clipped to [1 - clip_low, 1 + clip_high]; 0: the algorithm's own
    clip_high: float = 0.0
    kl_coef: float = 0.0  # weight of the KL divergence from the reference
    kl_reference: Literal["base", "init", "accepted"] = (
        "base"  # the reference: the base, the adapter that learning begins with, or the accepted version
    )
    max_importance_ratio: float = 2.0  # trainer's probability over the sampler's, truncated here
    decoupled: bool = False  # clip against the policy before the update, and weigh by its ratio to the sampler
    max_divergence: float = 0.5  # nats per token from which nothing is learned from bad answers of others; 0: no limit
    refuse_mismatch: float = 0.1  # mean k3 in nats between sampler and trainer from which an update is refused
    guard_kl: float = 0.5  # most mean k3 in nats by which one update may move the policy
    guard_prompts: int = 6  # live prompts per update that the accepted version answers, too; 0: none
    guard_false_rollback: float = 0.005  # probability of ever taking back versions that are no worse
    guard_false_accept: float = 0.05  # probability of accepting a version that answers no better
    guard_reward_drop: float = 0.1  # drop of the mean reward that matters
    validation_prompts: str = ""  # JSONL file of prompts that each version answers before it is published
    validation_answers: int = 4  # answers of a version to each validation prompt
    atropos_url: str = ""  # address of Atropos' trajectory API, from which batches are taken; empty: none
    atropos_api: bool = False  # environments of Atropos post to this server, which is their trajectory API as well
    environment: str = ""  # name of a scoring function, or a label of what the environment of Atropos plays
    verifiers: str = ""  # environment of verifiers that is played: a taskset's id, or a TOML file as vf-eval takes it
    verifiers_python: str = ""  # the Python that has verifiers; empty: the server's own
    verifiers_variables: tuple[str, ...] = ()  # names of the environment variables that it gets beside the usual ones

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of all adapters that are trained, the default one first."""
        return tuple(dict.fromkeys((self.adapter, *self.adapters)))


class TinkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of training and sampling by clients of Tinker's API."""

    enabled: bool = False
    trainers: int = 4  # models that clients train at once, for which memory is reserved at start
    rank: int = 32  # highest rank of these models
    dir: str = "./tinker"  # folder of the clients' checkpoints
    lease_s: float = 120.0  # seconds without a sign of life after which a client's session ends


class ClusterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of several machines with one base model: a leader, followers, and a trainer elsewhere."""

    share: bool = False  # lead: give other machines the versions of adapters, and take their trajectories
    connect_to: str = ""  # address of the leader; empty: none
    wait_s: float = 600.0  # seconds to wait at the first start for a leader that does not answer
    dir: str = "./cluster"  # folder of versions from other machines, and of trajectories on their way
    trainers: int = 1  # of a leader: trainers whose versions are averaged in rounds; 1: one trainer publishes
    round_updates: int = 4  # of such a trainer: updates in a round
    round_s: float = 600.0  # of such a leader: seconds after the first contribution in which others are waited for


class FeedbackConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of feedback on completions, and of learning from it."""

    learn: str = ""  # name of the adapter that learns from feedback; empty: none does
    remember_s: float = 86_400.0  # seconds in which feedback on a completion can come
    remember_mb: int = 64  # memory for the tokens of these completions; the oldest go first; 0: none is remembered
    keep: int = 100_000  # most feedback in the store; the oldest goes first
    batch_size: int = 16  # feedback of one update
    wait_s: float = 30.0  # seconds after which an update begins with less
    epochs: int = 2  # updates that learn from each feedback
    replay: float = 1.0  # earlier good answers that an update repeats, for each feedback of it
    beta: float = 0.1  # of DPO and KTO: how firmly they keep to what learning began with
    learning_rate: float = 2e-4  # of updates from feedback


class BatchesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of files of requests, and of batches of them."""

    dir: str = "./batches"  # folder of files, and of what became of each request
    max_gb: float = 4.0  # most gigabytes of all files and answers


class CheckpointingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the checkpoints that learning writes."""

    checkpoint_dir: str = "./checkpoints"
    interval: int = 500  # updates between two checkpoints
    keep_n_checkpoints: int = 10


class Arm(Struct, frozen=True, forbid_unknown_fields=True):
    """A share of an alias's traffic. `adapter` is a name, name@version or "base"."""

    adapter: str
    weight: float


class ABTest(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an A/B test of an alias. `control` is the arm with which each of the others is compared."""

    control: str
    false_promotion: float = 0.05  # most probability of promoting an arm that is not better
    false_take_back: float = 0.05  # most probability of taking back an arm that is not worse
    min_answers: int = 8  # fewest compared answers of an arm before anything is decided about it


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one server."""

    engine: EngineConfig
    server: ServerConfig = field(default_factory=ServerConfig)
    adapters: tuple[tuple[str, str], ...] = ()  # (name, folder) pairs, read and checked at start
    adapter_root: str = ""  # folder of adapter folders, each read when its name is first asked for
    aliases: tuple[tuple[str, tuple[Arm, ...]], ...] = ()
    ab_tests: tuple[tuple[str, ABTest], ...] = ()  # by the alias
    rl_training: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    tinker: TinkerConfig = field(default_factory=TinkerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
