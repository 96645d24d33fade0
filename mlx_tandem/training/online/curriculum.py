"""The curriculum: which of the recorded prompts the loop answers next, by how much their answers differ.

A prompt whose answers are all worth the same teaches nothing. Each prompt has a weight by the variance of its rewards,
and is due again 1 / weight after it was answered. The clock moves by 1 / (the sum of all weights) with each prompt that
is answered. So a prompt of half the weight is answered half as often, and none waits for ever: what is solved may be
forgotten, and what is hopeless may become possible.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from mlx_tandem.training.online import advantages
from mlx_tandem.training.online.prompts import Prompt
from mlx_tandem.training.online.serving import Recorded
from mlx_tandem.training.trajectories import Trajectory

RECORDED = 1024
"""Most prompts that are kept to be answered again; those that were asked longest ago go first."""

REDRAWS = 16
"""Times that the loop answers a recorded prompt before somebody asks it again."""

LEAST = 1 / 16
"""Least weight of a prompt; the largest is 1."""

MEMORY = 16
"""Earlier rewards of a prompt count as at most so many, since they are of earlier versions."""

PRIOR = 2.0
"""Number of rewards as which the mean variance of all prompts counts in the variance of each."""

ALIKE = 8
"""A prompt is solved or hopeless when so many of its last answers got the same reward."""

MASTERED = 0.9
"""Reward from which on answers that all get the same one are taken for right ones."""

Choice = Literal["variance", "uniform"]


@dataclass
class _Known:
    """A recorded prompt, with the running mean and variance of its last `count` rewards."""

    prompt: Prompt
    left: int  # times that it may be answered again before somebody asks it again
    at: float  # on the clock, when it was answered last
    count: float = 0.0
    mean: float = 0.0
    variance: float = 0.0
    last: float = 0.0  # the last reward
    alike: int = 0  # last rewards that were all the same

    def note(self, reward: float) -> None:
        """Count a reward."""
        self.alike = self.alike + 1 if self.alike and reward == self.last else 1
        self.last = reward
        self.count = min(self.count + 1, MEMORY)
        apart = reward - self.mean
        self.mean += apart / self.count
        self.variance = (1 - 1 / self.count) * (self.variance + apart * apart / self.count)


class Curriculum:
    """Prompts of live traffic, each handed out as often as its weight says, new ones first.

    With the choice "variance" a prompt's weight is the variance of its rewards, with "uniform" all weights are 1.
    """

    def __init__(self, choice: Choice = "variance") -> None:
        self._choice = choice
        self._prompts: OrderedDict[tuple[int, ...], _Known] = OrderedDict()  # in the order in which they were asked
        self._clock = 0.0
        self._seed = secrets.randbits(48)

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: Prompt, times: int = REDRAWS) -> None:
        """Keep a prompt, which may be answered again so many times; for one that is known the newest parameters hold.

        A greedy answer never varies, so that temperature and top_p are raised to 1 where they are 0.
        """
        params = prompt.params
        if params.greedy:
            params = msgspec.structs.replace(params, temperature=params.temperature or 1.0, top_p=params.top_p or 1.0)
        prompt = msgspec.structs.replace(prompt, params=params)
        known = self._prompts.setdefault(prompt.tokens, _Known(prompt, times, self._clock - 2.0))
        known.prompt, known.left = prompt, times
        self._prompts.move_to_end(prompt.tokens)
        while len(self._prompts) > RECORDED:
            self._prompts.popitem(last=False)

    def next(self, count: int) -> list[Prompt]:
        """Return at most `count` different prompts, those that are due first, each time with another seed; none when
        each has been answered as often as it may.
        """
        ready = [known for known in self._prompts.values() if known.left > 0]
        weights = self._weights(ready)
        due = sorted(zip(ready, weights, strict=True), key=lambda pair: pair[0].at + 1 / pair[1])
        chosen = [known for known, _ in due[:count]]
        for known in chosen:
            known.at = self._clock
            known.left -= 1
        self._clock += len(chosen) / max(math.fsum(weights), 1.0)
        return [self._drawn(known.prompt) for known in chosen]

    def _weights(self, ready: Sequence[_Known]) -> list[float]:
        """Return the weight of each prompt, LEAST to 1."""
        tried = [known.variance for known in ready if known.count]
        if self._choice == "uniform" or not any(tried):
            return [1.0] * len(ready)
        usual = math.fsum(tried) / len(tried)
        likely = [(known.count * known.variance + PRIOR * usual) / (known.count + PRIOR) for known in ready]
        largest = max(v for v, known in zip(likely, ready, strict=True) if known.count)
        return [max(v / largest, LEAST) if known.count else 1.0 for v, known in zip(likely, ready, strict=True)]

    def _drawn(self, prompt: Prompt) -> Prompt:
        self._seed += 1
        return msgspec.structs.replace(prompt, params=msgspec.structs.replace(prompt.params, seed=self._seed))

    def see(self, trajectories: Sequence[Trajectory]) -> None:
        """Count the rewards of answers to recorded prompts. Answers to other prompts are ignored."""
        for t in trajectories:
            known = self._prompts.get(t.prompt)
            if known is not None:
                known.note(t.reward)

    def answered(self, prompt: Prompt, group: Sequence[Trajectory], size: int) -> None:
        """Count `size` answers to a prompt from `next`; those that have no reward are not in `group`.

        If no rewards differ, this uses up more of the times that the prompt may be answered, twice as many after each
        such group in a row.
        """
        self.see(group)
        known = self._prompts.get(prompt.tokens)
        if known is None:
            return
        for _ in range(0 if group else size):
            known.note(known.mean)
        if not (group and advantages.varies(group)):
            known.left -= 2 ** min(known.alike // size, REDRAWS) - 1

    @property
    def recorded(self) -> Recorded:
        """What is known of the prompts."""
        all = self._prompts.values()
        new = sum(not known.count for known in all)
        alike = [known.last for known in all if known.alike >= ALIKE]
        solved = sum(reward >= MASTERED for reward in alike)
        return Recorded(len(all), new, solved, len(alike) - solved, len(all) - new - len(alike))
