"""Prompts that the loop has answered itself: recorded ones for more to learn from, and those that judge a version."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.errors import EngineUnavailable, InvalidRequest
from mlx_tandem.training.draws import truncation
from mlx_tandem.training.messages import Turn, as_text, for_template
from mlx_tandem.training.online.serving import Sampled, Serving
from mlx_tandem.training.rewards import Sample, Scoring
from mlx_tandem.training.trajectories import Trajectory, new_id
from mlx_tandem.types import AdapterRef, EngineInfo, SamplingParams

VALIDATION_TOKENS = 256
"""Most tokens of an answer to a validation prompt that says nothing else."""


class Scorer(Protocol):
    """The part of `RewardPool` that validation and sampled prompts use."""

    def check(self, scoring: Any, metadata: Any, /) -> Scoring:
        """Return how completions are scored. Raises InvalidRequest."""

    async def score(self, scoring: Sequence[Scoring], samples: Sequence[Sample], /) -> list[float | None]:
        """Return the reward of each sample; None where there is none."""


class Prompt(Struct, frozen=True):
    """A prompt that the loop answers itself."""

    tokens: tuple[int, ...]
    scoring: Scoring
    params: SamplingParams
    text: str = ""
    group: str = ""  # of its answers; empty: a new one


class _Line(Struct, forbid_unknown_fields=True):
    prompt: str | list[Turn]
    scoring_function: str | dict[str, float] | list[dict[str, Any]] = ""
    metadata: dict[str, Any] = {}
    max_tokens: int = VALIDATION_TOKENS
    temperature: float = 1.0


def read(path: Path, serving: Serving, rewards: Scorer, default_scoring: str, max_len: int) -> list[Prompt]:
    """Return the prompts of a JSONL file. Raises InvalidRequest with file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise InvalidRequest(f"{path} cannot be read: {e.strerror}", param="validation_prompts") from e
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_prompt(line, serving, rewards, default_scoring, max_len))
            except (InvalidRequest, msgspec.MsgspecError, UnicodeDecodeError) as e:
                raise InvalidRequest(f"{path}, line {number}: {e}", param="validation_prompts") from e
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompt", param="validation_prompts")
    return prompts


def _prompt(line: bytes, serving: Serving, rewards: Scorer, default_scoring: str, max_len: int) -> Prompt:
    said = msgspec.json.decode(line, type=_Line)
    limits.check("max_tokens", said.max_tokens)
    limits.check("temperature", said.temperature)
    scoring = rewards.check(said.scoring_function or default_scoring, said.metadata)
    if not scoring.parts:
        raise InvalidRequest("a validation prompt needs a function that scores its answers", param="scoring_function")
    prompt = said.prompt if isinstance(said.prompt, str) else for_template(said.prompt)
    tokens = serving.encode(prompt)
    room = max_len - len(tokens)
    if not tokens or room < 1:
        raise InvalidRequest(f"the prompt has {len(tokens)} tokens; the model takes {max_len}", param="prompt")
    text = said.prompt if isinstance(said.prompt, str) else as_text(said.prompt)
    return Prompt(tokens, scoring, SamplingParams(min(said.max_tokens, room), temperature=said.temperature), text)


async def answers(
    serving: Serving, prompts: Sequence[Prompt], n: int, adapter: AdapterRef | None
) -> list[list[Sampled]]:
    """Return `n` completions of each prompt. Raises EngineError."""

    async def one(params: SamplingParams, chosen: Sequence[int]) -> None:
        sampled = await serving.sample([prompts[i].tokens for i in chosen], n, params, adapter)
        for i, completions in zip(chosen, sampled, strict=True):
            found[i] = completions

    found: list[list[Sampled]] = [[] for _ in prompts]
    by_params: dict[SamplingParams, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_params.setdefault(prompt.params, []).append(i)
    try:
        async with asyncio.TaskGroup() as tasks:
            for params, chosen in by_params.items():
                tasks.create_task(one(params, chosen))
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None
    return found


async def score(
    rewards: Scorer, prompts: Sequence[Prompt], sampled: Sequence[Sequence[Sampled]]
) -> list[list[float | None]]:
    """Return the reward of each completion; None where there is none."""
    scoring = [p.scoring for p, own in zip(prompts, sampled, strict=True) for _ in own]
    samples = [
        Sample(p.text, s.text, p.scoring.metadata, len(s.tokens), s.finish_reason, (*p.tokens, *s.tokens))
        for p, own in zip(prompts, sampled, strict=True)
        for s in own
    ]
    flat = iter(await rewards.score(scoring, samples))
    return [[next(flat) for _ in own] for own in sampled]


class Validation:
    """The prompts that every version must answer before it is published. Without prompts, there is nothing to do."""

    def __init__(self, serving: Serving, rewards: Scorer) -> None:
        self.prompts: Sequence[Prompt] = ()
        self.present: float | None = None
        """The mean reward of the trainer's weights; None: not known."""
        self._serving, self._rewards = serving, rewards
        self._seed = secrets.randbits(48)

    def read(self, config: RLTrainingConfig, info: EngineInfo | None) -> None:
        """Read the validation prompts, if there are any. Raises InvalidRequest naming the file and the line."""
        if config.validation_prompts:
            if info is None:
                raise EngineUnavailable("the engine is not there")
            path = Path(config.validation_prompts)
            self.prompts = read(path, self._serving, self._rewards, config.scoring_function, info.max_model_len)

    async def rewards(self, adapter: AdapterRef | None, n: int) -> list[float | None]:
        """Return the mean reward of `n` answers to each prompt; None for one none of whose answers could be scored.

        Until `drawn`, all versions answer with the same seeds, so that equal versions give equal answers.
        """
        replace = msgspec.structs.replace
        seeded = [replace(p, params=replace(p.params, seed=self._seed)) for p in self.prompts]
        sampled = await answers(self._serving, seeded, n, adapter)
        scores = await score(self._rewards, seeded, sampled)
        known = [[s for s in own if s is not None] for own in scores]
        return [math.fsum(own) / len(own) if own else None for own in known]

    def drawn(self) -> None:
        """Use other seeds from now on."""
        self._seed += 1


async def groups(
    serving: Serving,
    rewards: Scorer,
    prompts: Sequence[Prompt],
    size: int,
    adapter: AdapterRef | None,
    clock: Callable[[], float],
) -> list[list[Trajectory]]:
    """Return a group of `size` scored completions of each prompt, less those without a score."""
    sampled = await answers(serving, prompts, size, adapter)
    scores = await score(rewards, prompts, sampled)
    made = []
    for prompt, completions, own in zip(prompts, sampled, scores, strict=True):
        group = prompt.group or f"again-{secrets.token_hex(12)}"
        made.append(
            [
                Trajectory(
                    id=new_id(),
                    group=group,
                    prompt=prompt.tokens,
                    tokens=s.tokens,
                    logprobs=s.logprobs,
                    model_logprobs=s.model_logprobs,
                    versions=s.versions,
                    temperature=prompt.params.temperature,
                    reward=reward,
                    created=clock(),
                    metadata=prompt.scoring.metadata,
                    truncation=truncation(prompt.params),
                    finish_reason=s.finish_reason,
                    drawn=True,
                )
                for s, reward in zip(completions, own, strict=True)
                if reward is not None and s.tokens
            ]
        )
    return made
