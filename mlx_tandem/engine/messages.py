"""The messages between the front and the engine: typed, tagged msgpack, never pickle.

A frame is a 4-byte little-endian length and one msgpack array of messages. Both sides check the length against
MAX_FRAME before they read on.
"""

from __future__ import annotations

import time

from msgspec import Struct, field

from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, Delta, EngineInfo, EngineStats, Request

MAX_FRAME = 256 << 20
"""Most bytes of a frame, without its length."""


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """Begin a request."""

    request: Request


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """End a request, or one choice of it, without an answer."""

    request: int
    choice: int | None = None  # None: all choices


class LoadAdapter(Struct, frozen=True, array_like=True, tag="load"):
    """Read and check a folder; answered by AdapterLoaded or CallFailed with the same `call`."""

    call: int
    source: AdapterSource
    pin: bool = False


class KnowAdapter(Struct, frozen=True, array_like=True, tag="know"):
    """Let requests use a version that an earlier engine had loaded; it is read when one does."""

    info: AdapterInfo
    source: AdapterSource
    pin: bool = False


class UnloadAdapter(Struct, frozen=True, array_like=True, tag="unload"):
    """Forget a version once its last row has ended; answered at once by CallDone."""

    call: int
    digest: str


class FollowAdapter(Struct, frozen=True, array_like=True, tag="follow"):
    """Let sequences of requests that follow this name continue under `ref`, with the keys and values they have."""

    ref: AdapterRef


class OpenTrainer(Struct, frozen=True, array_like=True, tag="open"):
    """Open a trainer; answered by TrainerOpened. An open trainer of the same name is replaced.

    Its arrays come from `folder` (a checkpoint, with the optimiser's state), else from the loaded adapter `digest`,
    else they are new.
    """

    call: int
    spec: TrainerSpec
    folder: str = ""
    digest: str = ""


class CloseTrainer(Struct, frozen=True, array_like=True, tag="close"):
    """Close a trainer; answered by CallDone."""

    call: int
    trainer: str


class ForwardBackward(Struct, frozen=True, array_like=True, tag="pass"):
    """Run a forward pass and, unless `forward_only`, a backward pass; answered by PassDone.

    Gradients add up in each trainer until its OptimStep. The same data and `micro_batch_tokens` (0: as configured) in
    the same state give the same gradients.
    """

    call: int
    batches: tuple[Batch, ...]
    forward_only: bool = False
    micro_batch_tokens: int = 0


class OptimStep(Struct, frozen=True, array_like=True, tag="step"):
    """Take one step of the optimiser with the gradients so far, which are dropped afterwards; answered by Stepped.

    The state before the step is kept until SettleTrainer or the next OptimStep. With `more` it is kept beyond the next
    pass and OptimStep, so that both steps are kept or taken back together.
    """

    call: int
    trainer: str
    adam: AdamParams
    more: bool = False


class SettleTrainer(Struct, frozen=True, array_like=True, tag="settle"):
    """Keep the last step of the optimiser, or take it and all gradients back; answered by CallDone."""

    call: int
    trainer: str
    keep: bool


class PublishTrainer(Struct, frozen=True, array_like=True, tag="publish"):
    """Make the present weights an adapter that requests may name by its digest; answered by AdapterLoaded.

    The adapter stays in memory until UnloadAdapter.
    """

    call: int
    trainer: str


class SaveTrainer(Struct, frozen=True, array_like=True, tag="save"):
    """Write the adapter in PEFT's format and the optimiser's state into `folder`, which exists and is empty.

    Answered by CallDone once everything is on disk; other work continues meanwhile. Without `optimizer` only the
    adapter is written, from which no trainer can be opened.
    """

    call: int
    trainer: str
    folder: str
    optimizer: bool = True


class Report(Struct, frozen=True, array_like=True, tag="report"):
    """A request to send the occupancy and the statistics now, which include everything before this message;
    then CallDone.
    """

    call: int


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """Finish running requests, accept no new ones, then end the process."""


Learning = OpenTrainer | CloseTrainer | ForwardBackward | OptimStep | SettleTrainer | PublishTrainer | SaveTrainer
"""Messages to trainers. Those of one trainer are handled one after the other, between the steps of requests."""

Inbound = (
    Submit
    | Cancel
    | LoadAdapter
    | KnowAdapter
    | UnloadAdapter
    | FollowAdapter
    | OpenTrainer
    | CloseTrainer
    | ForwardBackward
    | OptimStep
    | SettleTrainer
    | PublishTrainer
    | SaveTrainer
    | Report
    | Drain
)


class Progress(Struct, frozen=True, array_like=True, tag="progress"):
    """How far the start of the engine has come."""

    stage: str
    fraction: float  # 0 … 1
    once: bool = False  # whether only a start without kept choices has this stage


class Note(Struct, frozen=True, array_like=True, tag="note"):
    """A log record of the engine before it is ready, while only the front writes to the terminal."""

    level: int  # of Python's logging
    text: str
    trace: tuple[str, ...] = ()  # lines of the traceback of an exception


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The engine accepts requests from now on. It is sent again when something that `info` says has changed."""

    info: EngineInfo


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot continue, and its process ends; `code` and `message` are safe to show to clients."""

    code: str
    message: str


class Accepted(Struct, frozen=True, array_like=True, tag="accepted"):
    """A request is in the queue of the scheduler: nothing is wrong with it, and its adapter and grammar are there."""

    request: int


class Started(Struct, frozen=True, array_like=True, tag="started"):
    """The first row of a request was planned.

    `at` is in seconds of the monotonic clock, which all processes of a machine share.
    """

    request: int
    at: float


class Preempted(Struct, frozen=True, array_like=True, tag="preempted"):
    """A sequence of this request had to give its blocks back and will be computed again."""

    request: int


class Output(Struct, frozen=True, array_like=True, tag="output"):
    """All deltas of one step.

    `at` is when the engine reported them, in seconds of the monotonic clock, which all processes of a machine share.
    """

    deltas: list[Delta]
    at: float = field(default_factory=time.monotonic)


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """One request has ended with an error. `retryable`: the request itself was right (503), else it was wrong (400)."""

    request: int
    code: str
    message: str
    param: str | None = None
    retryable: bool = True


class AdapterLoaded(Struct, frozen=True, array_like=True, tag="loaded"):
    """The answer to LoadAdapter and PublishTrainer."""

    call: int
    info: AdapterInfo


class TrainerOpened(Struct, frozen=True, array_like=True, tag="opened"):
    """The answer to OpenTrainer."""

    call: int
    info: TrainerInfo


class PassDone(Struct, frozen=True, array_like=True, tag="passed"):
    """The answer to ForwardBackward."""

    call: int
    results: tuple[BatchResult, ...]  # in the order of the batches


class Stepped(Struct, frozen=True, array_like=True, tag="stepped"):
    """The answer to OptimStep."""

    call: int
    done: StepDone


class CallDone(Struct, frozen=True, array_like=True, tag="done"):
    """The answer to calls that return nothing."""

    call: int


class CallFailed(Struct, frozen=True, array_like=True, tag="callfailed"):
    """The answer to a call that failed. `code` and `message` say why, `param` which field was wrong."""

    call: int
    code: str
    message: str
    param: str | None = None


class Occupancy(Struct, frozen=True, array_like=True, tag="load_now"):
    """The occupancy of the engine, sent with the outputs of a step whenever it has changed."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    free_blocks: int = 0
    deferred: int = 0  # how many of the waiting wait for their adapter to be in memory


class Heartbeat(Struct, frozen=True, array_like=True, tag="heartbeat"):
    """A regular sign of life with the statistics."""

    stats: EngineStats


Outbound = (
    Progress
    | Note
    | Ready
    | Fatal
    | Accepted
    | Started
    | Preempted
    | Output
    | Failed
    | AdapterLoaded
    | TrainerOpened
    | PassDone
    | Stepped
    | CallDone
    | CallFailed
    | Occupancy
    | Heartbeat
)
