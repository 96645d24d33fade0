"""What crosses the socket between the front and the engine: typed, tagged msgpack, never pickle.

A frame is a 4-byte little-endian length and one msgpack array of messages. Both sides check the length
against MAX_FRAME before reading on.
"""

from __future__ import annotations

from msgspec import Struct

from mlx_tandem.types import AdapterInfo, AdapterSource, Delta, EngineInfo, EngineStats, Request

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


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """Finish what runs, take nothing new, then end the process."""


Inbound = Submit | Cancel | LoadAdapter | KnowAdapter | UnloadAdapter | Drain


class Progress(Struct, frozen=True, array_like=True, tag="progress"):
    stage: str
    fraction: float  # 0 … 1


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    info: EngineInfo


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot go on; `code` and `message` are safe to show. The process ends after it."""

    code: str
    message: str


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


class Heartbeat(Struct, frozen=True, array_like=True, tag="heartbeat"):
    stats: EngineStats


Outbound = Progress | Ready | Fatal | Output | Failed | AdapterLoaded | CallDone | CallFailed | Load | Heartbeat
