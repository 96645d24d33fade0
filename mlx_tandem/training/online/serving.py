"""What the online loop and the server around it say to each other: plain data, and what the loop asks of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

from mlx_tandem.config import Mode
from mlx_tandem.training.online.guard import Verdict
from mlx_tandem.training.trajectories import DropReason, Trajectory
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, SamplingParams

Outcome = Literal["published", "kept", "rolled_back", "refused", "skipped"]
"""Of an update. kept: learned from and not published; rolled_back: the guard took it back; refused: sampler and trainer
disagree too much; skipped: there was nothing to learn from, or the engine could not."""


@dataclass(frozen=True)
class Sampled:
    """One completion that the loop asked for."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    model_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish_reason: str = ""


class Serving(Protocol):
    """The server, as far as the loop needs it. All versions are those of the trained adapter's name."""

    def publish(self, info: AdapterInfo, source: AdapterSource | None, number: int = 0) -> AdapterRef:
        """Make this content, which is in the engine's memory, the current version. `source`: the folder that also has
        it. Content that has a number keeps it; other content gets `number`, which it had before, or the next one.
        """
        ...

    def reserve(self, info: AdapterInfo, number: int = 0) -> AdapterRef:
        """Give content that is not current a number, as `publish` does: only that number names it. There is a current
        one.
        """
        ...

    def count_from(self, number: int) -> None:
        """Give higher numbers than this one, up to which they were given before the process was started."""
        ...

    def expect(self, numbers: Sequence[int]) -> None:
        """Tell whoever asks for one of these versions that it is being made again, until `recovered`."""
        ...

    async def recovered(self) -> None:
        """Treat what was not made again by now as gone."""
        ...

    def current(self) -> AdapterRef | None:
        """Return what the name stands for now."""
        ...

    async def retire(self, ref: AdapterRef) -> None:
        """Let nobody ask for this version, which is not current, any more; requests that run end under it."""
        ...

    def saved(self, info: AdapterInfo, folder: str, name: str) -> None:
        """Let requests call this content by the name of a checkpoint, too; it lies in the checkpoint's folder now."""
        ...

    def relist(self) -> None:
        """Take note that checkpoints have gone, or that another one is the best."""
        ...

    def updated(self, report: UpdateReport, trajectories: Sequence[Trajectory]) -> None:
        """Take note of an update that has come to its end, and of what it learned from as far as that is known."""
        ...

    async def sample(
        self, prompts: Sequence[tuple[int, ...]], n: int, params: SamplingParams, adapter: AdapterRef | None
    ) -> list[list[Sampled]]:
        """Return `n` completions of each prompt, made in training's share of the device. Raises EngineError."""
        ...

    def encode(self, prompt: str | list[dict[str, Any]]) -> tuple[int, ...]:
        """Return token ids of a text, or of chat messages through the model's template. Raises InvalidRequest."""
        ...


class UpdateReport(Struct, frozen=True):
    """What one update did. `kl`: mean k3 in nats that it moved the policy; `kl_reference`: mean k3 to the reference
    that `kl_coef` keeps to, 0 without `kl_coef`; `mismatch_k3`: between sampler and trainer, of tokens that the
    trainer's present weights have sampled. Of one that was published, in milliseconds: `ready_ms` until the engine had
    its weights as a version, beside what it served; `swap_ms` until the name stood for that version. `skipped_groups`
    and `dropped` count what was not learned from since the update before this one.
    """

    step: int  # the optimiser's, afterwards
    version: int  # that was published; 0: none
    trajectories: int
    tokens: int
    groups: int
    skipped_groups: int  # groups whose rewards were all the same
    mean_reward: float
    loss: float
    grad_norm: float
    kl: float
    kl_reference: float
    mismatch_k3: float
    verdict: Verdict
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    validation: float | None = None  # mean reward on the validation prompts, where there are any
    ready_ms: float = 0.0
    swap_ms: float = 0.0
    learning_rate: float = 0.0
    agreement: float | None = None  # cosine of its gradient and the mean of earlier ones; None: there was none
    dropped: dict[DropReason, int] = {}  # trajectories
    feedback: int = 0  # on completions, that was learned from instead of trajectories
    replayed: int = 0  # earlier good answers that were repeated beside it
    dropped_at: dict[DropReason, tuple[int, ...]] = {}  # positions in the `trajectories` of who asked for the update


class Recorded(Struct, frozen=True):
    """The recorded prompts by what their answers were worth. `new` ones have none yet. The last answers of `solved`
    and of `hopeless` ones all got the same reward, of at least 0.9 and below that. Answers of all others differ.
    """

    prompts: int = 0
    new: int = 0
    solved: int = 0
    hopeless: int = 0
    between: int = 0


class TrainingStatus(Struct, frozen=True):
    """The loop, now. Counters are since the very beginning, over restarts; device times since the engine started."""

    training_enabled: bool
    mode: Mode
    running: bool
    busy: bool  # an update is under way, or there is enough for one
    update_done: float | None  # share of the computing of the update under way, 0 to 1; None: there is none
    update_left_s: float | None  # seconds that it still takes; None: there is none, or nothing of it is done
    reason: str  # why it is not, when it stopped by itself
    recovering: int  # updates that have to be computed again before learning goes on where it was
    current_lora: str
    version: int
    step: int
    updates: int
    trajectories_collected: int  # answers of requests, and what clients have sent
    siblings_drawn: int  # answers that the server has drawn to compare those with
    buffered: int
    dropped_stale: int
    dropped_duplicate: int
    dropped_overflow: int
    dropped_no_reward: int
    open_trajectories: int  # whose reward is still missing
    skipped_groups: int
    recorded_prompts: Recorded  # since the server's start
    advice: str  # what keeps it from learning, and what to do about that; empty: nothing that can be seen
    last_update: str | None  # ISO 8601
    loss: float
    kl: float
    mean_reward: float
    grad_norm: float
    learning_rate: float
    target_kl: float  # nats per update by which the learning rate is chosen; 0: it is fixed
    rollbacks: int
    accepted: int  # the version that rollbacks return to; 0: there is none
    compared: int  # prompts on which later versions were compared with it
    difference: float  # mean of what they got more than it did on these
    gain: float | None  # by how much the accepted version is shown to answer better than the first; None: not compared
    alarm: str  # what the last alarm about live rewards has seen; empty: there was none
    last_verdict: Verdict
    checkpoint_saves: int
    publishes: int
    available_checkpoints: tuple[str, ...]
    serving_ms: float
    training_ms: float
