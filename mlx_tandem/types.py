"""The plain data that the parts of the project exchange, made of the standard library and msgspec only.

Everything here is immutable and crosses process borders as msgpack. Token ids, positions and counts are plain
integers; times are seconds unless a name says otherwise.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

FinishReason = Literal["stop", "length"]

Pooling = Literal["mean", "last"]
"""The way in which the hidden states of a prompt become one vector: their mean, or that of the last token."""


class ThoughtBudget(Struct, frozen=True, array_like=True):
    """The most tokens of an answer's thoughts, and the token ids that begin, end and forcibly close a thought.

    `closing` contains `close`. With `is_open`, the answer begins inside a thought.
    """

    tokens: int
    open: tuple[int, ...]
    close: tuple[int, ...]
    closing: tuple[int, ...]
    is_open: bool = False


LEAST_TEMPERATURE = 1e-4
"""The temperature below which the likeliest token is taken. Noise would be rounded away: it is added to logits."""


class SamplingParams(Struct, frozen=True, array_like=True):
    """Sampling parameters of one request. The server has checked the ranges of `limits.py`.

    `seed` is always set: the server draws one if the caller gave none. Token n of choice i depends on (seed, i,
    position) only, never on neighbours, chunking or preemption.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end-of-sequence ids
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: the sampled token's; k: also the k most likely
    min_tokens: int = 0  # tokens before which no end-of-sequence or stop token is sampled
    prompt_logprobs: int | None = None  # like `logprobs`, for the prompt's own tokens
    repetition_context: int = 0  # number of last tokens that the repetition penalty counts; 0: all
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that may be sampled; empty: all
    xtc_probability: float = 0.0  # probability that the most likely tokens are left out of a draw; 0: never
    xtc_threshold: float = 0.1  # tokens above it are left out, all but the least likely of them
    xtc_kept: tuple[int, ...] = ()  # tokens that are never left out
    thoughts: ThoughtBudget | None = None  # None: thoughts may have any length

    @property
    def counts_tokens(self) -> bool:
        """Whether what was said before changes what is drawn, by a penalty."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < LEAST_TEMPERATURE or self.top_p == 0.0


class AdapterRef(Struct, frozen=True, array_like=True):
    """One immutable version of a LoRA adapter. `digest` is the hash of its content, by which the engine knows it.

    An adapter with `invocation` tokens is an activated LoRA: it applies from where they occur last in a prompt. One
    that `scores` is a reward model, which generates nothing.
    """

    name: str
    version: int
    digest: str
    invocation: tuple[int, ...] = ()
    scores: bool = False

    @property
    def label(self) -> str:
        """The name and number that clients use: `name@version`."""
        return f"{self.name}@{self.version}"


class Grammar(Struct, frozen=True, array_like=True):
    """A grammar that the output must match, in llguidance's notation, as UTF-8. `param` is the field that asked for
    it.
    """

    text: bytes
    param: str


class Image(Struct, frozen=True, array_like=True):
    """One image of a prompt, or one group of a video's frames, as the model's processor made it by itself.

    Its placeholders are the next `tokens` tokens from `start` on whose id is one that VisionInfo names; other
    tokens may lie between them, such as line breaks. `start` is the index of the first in the prompt. `arrays` is the
    content of a safetensors file with the processor's arrays under their own names: `pixel_values`, `image_grid_thw`
    and so on; for groups of frames of the Qwen families, `pixel_values_videos` and `video_grid_thw`. The encoders of
    these families take patches of several frames. In an image these frames are equal, so its `pixel_values` hold only
    the first.

    Where positions have several axes, `time` is added to the positions of its tokens on the axis of time. If `follows`
    is set, its positions begin where those of the image before it begin: both are groups of one video.

    `digest` is a BLAKE2b digest of 16 bytes. It depends on the name of the model's family and on `arrays`, and for the
    groups of a video whose times are positions also on `time` and `follows`.
    """

    digest: bytes
    start: int
    tokens: int
    arrays: bytes
    time: int = 0
    follows: bool = False


class Request(Struct, frozen=True, array_like=True):
    """One request: prompt ids in, `n` choices out. The adapter's version is fixed here."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: AdapterRef | None = None  # None: the base model
    n: int = 1
    priority: int = 0  # lower runs earlier
    follow: bool = False  # switch to newer versions of the adapter as they are published
    background: bool = False  # made for training or of a batch: runs in training's share of the device's time
    pooling: Pooling | None = None  # the prompt's hidden states are wanted, pooled like this; None: they are not
    grammar: Grammar | None = None  # None: the output may be any text
    speculate: bool = True  # drafts may be verified for it, where the server makes any
    prediction: tuple[int, ...] = ()  # what the output may contain, from which drafts are copied
    images: tuple[Image, ...] = ()  # in the order of their placeholders in the prompt
    client: int = 0  # whose request it is; clients take turns


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural logarithms of a token's probability."""

    model: float  # under the model's own, untruncated distribution at temperature 1
    sampled: (
        float  # under the distribution sampled from, after penalties, temperature and truncation; of a prompt: model
    )
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens of the model's distribution, best first
    rank: int = 0  # of a prompt's token: its rank in that distribution from 1 on; else 0


class Delta(Struct, frozen=True, array_like=True):
    """New tokens of one choice of one request. The last delta of a choice has `finish`.

    `prompt_logprobs` come once per request, with its first tokens, and are those of the prompt's tokens from the
    second on.
    """

    request: int
    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    version: int = 0  # version of the adapter that made the tokens, if the request follows; 0: the request's
    cached: int = 0  # prompt tokens whose keys and values were reused
    embedding: bytes = b""  # once, with the first token: the pooled hidden states as float32 numbers of this machine
    predicted: tuple[int, int] | None = None  # drafts from the request's prediction: accepted ones, rejected ones


class AdapterSource(Struct, frozen=True, array_like=True):
    """The place of an adapter's files.

    With a `root`, `path` lies under it and no link on the way is followed. With `follow_links` the files themselves
    may be links, as in a download cache.
    """

    path: str
    root: str | None = None
    follow_links: bool = False


class AdapterInfo(Struct, frozen=True):
    """The engine's description of an adapter's folder."""

    digest: str
    rank: int
    scale: float
    format: Literal["mlx-lm", "peft"]
    targets: tuple[str, ...]  # module names with the layer number left out, sorted
    nbytes: int  # bytes of its tensors on disk
    memory_bytes: int  # once loaded
    invocation: tuple[int, ...] = ()  # tokens from whose last occurrence in a prompt it applies; empty: everywhere
    score_head: bytes = b""  # of a reward model: its score head as float32 numbers of this machine; empty: it has none


class PoolBudget(Struct, frozen=True):
    """One pool of blocks: for layers that see every position, for those that see a window, or for states."""

    num_blocks: int
    block_bytes: int
    window: int = 0  # positions; 0: every one
    row: int = 0  # tokens of a row at most, which matters to a window
    state: bool = False  # a block is the state of recurrent layers after the last token in it


class CacheGroupInfo(Struct, frozen=True):
    """What the layers of one kind keep of a sequence."""

    kind: Literal["attention", "window", "state"]
    layers: int
    nbytes: int  # of all of them, for each token; of a state for each sequence
    window: int = 0  # positions that the layers see; 0: every one


class VisionInfo(Struct, frozen=True):
    """The part of a model folder that encodes images, and whether the engine uses it."""

    image_token: int = -1  # the id of placeholders of images in prompts
    refusal: str = ""  # why images are not served; empty: they are
    video_token: int = -1  # the id of placeholders of videos; -1: there are none

    @property
    def tokens(self) -> frozenset[int]:
        """The ids of placeholders."""
        return frozenset((self.image_token, self.video_token)) - {-1}

    @property
    def outcome(self) -> str:
        """Whether images are served, and why not, in words."""
        return f"not served: {self.refusal}" if self.refusal else "served"


class ModelSummary(Struct, frozen=True):
    """What a model folder holds, as far as can be told without its weights."""

    model_type: str
    dtype: str
    quantization: str | None
    parameters: int
    layers: int
    groups: tuple[CacheGroupInfo, ...]
    unsupported: tuple[str, ...]  # what the server does for other models and not for this one
    vision: VisionInfo | None = None  # None: the folder has no part for images


class MemoryBudget(Struct, frozen=True):
    """The division of the device's memory in bytes, decided once at start."""

    limit: int = 0  # memory that this process may use
    limit_reason: str = ""  # why it may use no more, in words
    weights: int = 0
    activations: int = 0  # most that a step needs besides everything else
    chunk_tokens: int = 0  # most prompt tokens of such a step
    learning: int = 0  # a trainer and one micro-batch of it
    pool: int = 0  # keys and values
    adapter_slots: int = 0  # to which the slots may grow with adapters of higher ranks and on more linears
    adapter_slots_wanted: int = 0  # for every slot at the highest rank over every linear
    block_bytes: int = 0  # one block of the first pool
    pools: tuple[PoolBudget, ...] = ()

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.activations + self.learning + self.pool + self.adapter_slots

    @property
    def unassigned(self) -> int:
        """Bytes that no part was given."""
        return self.limit - self.total


class EngineInfo(Struct, frozen=True):
    """The description of a ready engine: its model and its device."""

    model: str  # the folder it was loaded from
    model_type: str
    dtype: str
    quantization: str | None
    parameters: int
    layers: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    num_blocks: int  # blocks of the first pool
    kv_bytes_per_token: int  # in all layers
    kv_bits: int  # bits of a cached number: 4, 8, or those of dtype
    max_num_seqs: int
    max_loras: int
    max_lora_rank: int
    device: str
    attention_backend: str
    lora_backend: str
    load_seconds: float
    memory: MemoryBudget = MemoryBudget()
    attention_reason: str = ""  # why this back end
    lora_reason: str = ""  # why this back end
    products_reason: str = ""  # which products of few rows a kernel computes, or why none
    prompt_cost: tuple[float, ...] = ()  # the form of `engine.cost.CostModel` for chunks; empty: unknown
    micro_batch_tokens: int = 0  # tokens of one forward and backward of learning; 0: not decided
    hidden_size: int = 0  # numbers of a pooled hidden state; 0: requests may not ask for any
    vision: VisionInfo | None = None  # None: the folder has no part for images
    deterministic: bool = False  # answers have the same bits whatever runs beside them


class DiskStats(Struct, frozen=True):
    """Statistics of the KV cache on the drive, counted since start.

    `bytes`, `records`, `segments`, `queued`, `scanning`, `read_only` and `off` say what holds now.
    """

    bytes: int  # size of all segments in the folder
    records: int  # blocks that can be found
    segments: int
    queued: int
    hits: int  # blocks that were read
    misses: int  # reads that ended at a block that was missing or damaged
    written: int  # blocks
    written_bytes: int
    dropped: int  # blocks that should have been written and were not
    evicted: int  # blocks that were removed with their segments
    quarantined: int  # damaged records and segments that were set aside
    errors: int  # operations that the drive refused
    reload_bytes: int  # bytes of blocks that were read
    reload_seconds: float  # time to read and check them
    scanning: bool  # the folder is still being indexed
    read_only: bool
    off: str  # why the drive is no longer used; empty: it is used


class MemoryInUse(NamedTuple):
    """Memory of the device in bytes as MLX counts it, and the number of compiled steps in the host's memory."""

    active: int = 0
    peak: int = 0  # highest `active` since start
    kept: int = 0  # freed memory that MLX keeps for new arrays
    compiled_steps: int = 0


DraftSource = Literal["prediction", "ngram", "draft", "mtp"]
"""The source of drafts: the request's prediction, the sequence's own earlier tokens, the draft model, or the model's
own head."""


class DraftCounts(Struct, frozen=True):
    """The drafts of one source."""

    source: DraftSource
    rows: int  # rows that verified drafts
    drafted: int  # tokens
    accepted: int  # of these
    recent_acceptance: float  # moving average of the share that is accepted, 0 to 1


class DraftMinute(Struct, frozen=True):
    """The rows that decoded in one minute."""

    minutes_ago: int  # 0: the present minute
    sources: tuple[DraftCounts, ...]
    undrafted: int  # rows without drafts


class SpeculationStats(Struct, frozen=True):
    """Statistics of drafts, counted since start."""

    method: str
    rows: int = 0  # rows that verified drafts
    drafted: int = 0  # tokens
    accepted: int = 0  # of these
    by_position: tuple[int, ...] = ()  # rows whose draft number i, from 0, was accepted
    recent_acceptance: float = 0.0  # moving average of the share that is accepted, 0 to 1
    sources: tuple[DraftCounts, ...] = ()  # of the above
    undrafted: int = 0  # rows that decoded without drafts
    minutes: tuple[DraftMinute, ...] = ()  # oldest first
    per_row: float = 0.0  # mean number of drafts of a row in the newest step that verified any
    uses_drafts: bool = False  # whether drafts are used at the present size of the batch
    tokens_per_s_with: float = 0.0  # of a row at this size; 0: not measured
    tokens_per_s_without: float = 0.0


class PassUnderWay(Struct, frozen=True):
    """A pass of a trainer, and the share of it that is done."""

    trainer: str
    done: float  # 0 to 1


class EngineStats(Struct, frozen=True):
    """Counters since start and present gauges; sent at each heartbeat, and when a client asks for them."""

    cached_blocks: int = 0  # blocks that a prompt may find, including free ones
    prefix_queries: int = 0  # tokens of prompts that were looked up, since start
    prefix_hits: int = 0  # of these, tokens that were found
    prefix_evictions: int = 0  # blocks given to others, since start
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    step_failures: int = 0
    step_ms: float = 0.0  # moving average
    peak_memory: int = 0  # bytes, as MLX counts them
    active_memory: int = 0
    kept_memory: int = 0  # freed memory that MLX keeps for new arrays
    compiled_steps: int = 0  # compiled steps in the host's memory
    resident_adapters: tuple[str, ...] = ()  # digests in slots on the device
    loaded_adapters: int = 0  # in the engine's memory
    loaded_adapter_bytes: int = 0
    adapter_evictions: int = 0  # dropped from memory for others, since start
    adapter_slot_bytes: int = 0  # bytes of all slots on the device
    lora_rows: int = 0  # rows that ran under an adapter, since start
    rows: int = 0  # all rows, since start
    serving_ms: float = 0.0  # device time of users' rows, since start
    training_ms: float = 0.0  # device time of gradient work and of rows made for training, since start
    training_jobs: int = 0  # gradient work that waits or is under way
    passes: tuple[PassUnderWay, ...] = ()
    step_tokens: tuple[int, ...] = ()  # steps by how many tokens they computed: engine/histogram.py has the bounds
    step_tokens_sum: int = 0  # tokens of all steps, since start
    batch_fill: tuple[int, ...] = ()  # steps by the share of the batch's seats that had a row, in equal parts
    prompt_tokens_per_s: float = 0.0  # rate of the last step that read prompts
    decode_tokens_per_s: float = 0.0  # rate of the last step that decoded
    speculation: SpeculationStats | None = None  # None: the engine makes no drafts
    disk: DiskStats | None = None  # None: KV offload is not configured, or it is not open yet
    disk_hit_tokens: int = 0  # prompt tokens whose keys and values came from the drive, since start
    disk_unsaved: int = 0  # of the drive's `dropped` blocks, those that were reused before they could be handed over
