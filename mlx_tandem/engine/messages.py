"""What crosses the socket between the front and the engine: typed, tagged msgpack, never pickle.

A frame is a 4-byte little-endian length and one msgpack array of messages. Both sides check the length
against MAX_FRAME before reading on.
"""

from __future__ import annotations

from msgspec import Struct

from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, Delta, EngineInfo, EngineStats, Request

MAX_FRAME = 256 << 20


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    request: Request


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    request: int
    choice: int | None = None  # None: all choices


class LoadAdapter(Struct, frozen=True, array_like=True, tag="load"):
    """Read and check a folder; answered by AdapterLoaded or CallFailed with the same `call`."""

    call: int
    source: AdapterSource
    pin: bool = False


class KnowAdapter(Struct, frozen=True, array_like=True, tag="know"):
    """A version that an earlier engine had loaded: requests may use it, and it is read when one does."""

    info: AdapterInfo
    source: AdapterSource
    pin: bool = False


class UnloadAdapter(Struct, frozen=True, array_like=True, tag="unload"):
    """Forget a version once its last row has ended; answered at once by CallDone."""

    call: int
    digest: str


class FollowAdapter(Struct, frozen=True, array_like=True, tag="follow"):
    """Sequences of requests that follow this name go on under `ref`, their keys and values kept."""

    ref: AdapterRef


class OpenTrainer(Struct, frozen=True, array_like=True, tag="open"):
    """A trainer as `spec` says; its arrays come from `folder` (a checkpoint, with the optimiser's state), or from the
    loaded adapter `digest`, or are fresh. Answered by TrainerOpened. One of that name that is open is replaced.
    """

    call: int
    spec: TrainerSpec
    folder: str = ""
    digest: str = ""


class CloseTrainer(Struct, frozen=True, array_like=True, tag="close"):
    """Answered by CallDone."""

    call: int
    trainer: str


class ForwardBackward(Struct, frozen=True, array_like=True, tag="pass"):
    """Forward, and unless `forward_only` backward: gradients add up in each trainer until its OptimStep. Answered by
    PassDone. The same data and `micro_batch_tokens` (0: as configured) in the same state give the same gradients.
    """

    call: int
    batches: tuple[Batch, ...]
    forward_only: bool = False
    micro_batch_tokens: int = 0


class OptimStep(Struct, frozen=True, array_like=True, tag="step"):
    """One step of the optimiser with the gradients there are, which are gone then. Answered by Stepped. The state
    before it is kept until SettleTrainer or the next OptimStep.
    """

    call: int
    trainer: str
    adam: AdamParams


class SettleTrainer(Struct, frozen=True, array_like=True, tag="settle"):
    """Keep the last step, or take it and all gradients back. Answered by CallDone."""

    call: int
    trainer: str
    keep: bool


class PublishTrainer(Struct, frozen=True, array_like=True, tag="publish"):
    """Make the present weights an adapter that requests may name by its digest; it stays in memory until
    UnloadAdapter. Answered by AdapterLoaded.
    """

    call: int
    trainer: str


class SaveTrainer(Struct, frozen=True, array_like=True, tag="save"):
    """Write the adapter in PEFT's format and the optimiser's state into `folder`, which is there and empty.
    Answered by CallDone once everything is on disk; other work goes on meanwhile.
    """

    call: int
    trainer: str
    folder: str


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """Finish what runs, take nothing new, then end the process."""


Learning = OpenTrainer | CloseTrainer | ForwardBackward | OptimStep | SettleTrainer | PublishTrainer | SaveTrainer
"""Handled one after the other, beside what is served."""

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
    | Drain
)


class Progress(Struct, frozen=True, array_like=True, tag="progress"):
    stage: str
    fraction: float  # 0 … 1


class Note(Struct, frozen=True, array_like=True, tag="note"):
    """What the engine logs before it is ready, when only the front writes on the terminal."""

    level: int  # of Python's logging
    text: str
    trace: tuple[str, ...] = ()  # lines of the traceback of an exception


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    info: EngineInfo


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot go on; `code` and `message` are safe to show. The process ends after it."""

    code: str
    message: str


class Started(Struct, frozen=True, array_like=True, tag="started"):
    """The first row of a request is in a step. `at`: in seconds of the monotonic clock, which is the same in all
    processes of a machine.
    """

    request: int
    at: float


class Preempted(Struct, frozen=True, array_like=True, tag="preempted"):
    """A sequence of this request gave its blocks back and will be computed again."""

    request: int


class Output(Struct, frozen=True, array_like=True, tag="output"):
    """All deltas of one step."""

    deltas: list[Delta]


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """One request ends with an error. `retryable`: 503, else 400."""

    request: int
    code: str
    message: str
    param: str | None = None
    retryable: bool = True


class AdapterLoaded(Struct, frozen=True, array_like=True, tag="loaded"):
    call: int
    info: AdapterInfo


class TrainerOpened(Struct, frozen=True, array_like=True, tag="opened"):
    call: int
    info: TrainerInfo


class PassDone(Struct, frozen=True, array_like=True, tag="passed"):
    call: int
    results: tuple[BatchResult, ...]  # in the order of the batches


class Stepped(Struct, frozen=True, array_like=True, tag="stepped"):
    call: int
    done: StepDone


class CallDone(Struct, frozen=True, array_like=True, tag="done"):
    call: int


class CallFailed(Struct, frozen=True, array_like=True, tag="callfailed"):
    call: int
    code: str
    message: str
    param: str | None = None


class Load(Struct, frozen=True, array_like=True, tag="load_now"):
    """How full the engine is; sent with the outputs of a step whenever it has changed."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    free_blocks: int = 0
    deferred: int = 0  # of those that wait, how many wait for their adapter to be in memory


class Heartbeat(Struct, frozen=True, array_like=True, tag="heartbeat"):
    stats: EngineStats


Outbound = (
    Progress
    | Note
    | Ready
    | Fatal
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
    | Load
    | Heartbeat
)
