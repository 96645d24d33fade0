"""Plain data of learning: what the front asks of the trainers, and what they answer."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

LossKind = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
"""The losses of tokens."""

Part = Literal["attention", "mlp", "head"]
"""A part of a model by what its linears do: they mix positions, they are of feed-forward blocks or experts, or they are
the output head."""


class LossConfig(Struct, frozen=True):
    """A loss and its settings; `training/device/losses.py` has the formulas.

    In the formulas, q stands for the logprobs of the policy that drew the tokens of a datum, and p for the trainer's.
    """

    kind: Literal[LossKind, "score"] = "importance_sampling"  # score: that of reward models
    ratio: Literal["token", "sequence"] = "token"  # sequence: the geometric mean over a completion (GSPO)
    normalize: Literal["token_sum", "token_mean", "sequence_mean"] = "token_sum"
    scale: float = 1.0  # factor of the loss, after normalisation; Dr. GRPO: 1 / (completions x longest)
    clip_low: float = 0.2  # ratios are clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    kl_coef: float = 0.0  # weight of k3 to the reference: a datum's own, else the base model
    beta: float = 0.05  # of dro
    max_importance_ratio: float = 0.0  # p/q of sampler and trainer is truncated there; 0: not corrected
    decoupled: bool = False  # ratios are those to the anchor, and its ratio to the sampler is a weight
    max_divergence: float = 0.0  # mean q - p over a completion from which what counts against it is left out; 0: none


class Truncation(Struct, frozen=True, array_like=True):
    """Which tokens a draw left out, in the order of the sampler: min_p, top_k, then top_p of the rest."""

    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0


WHOLE = Truncation()
"""Of a draw from the whole vocabulary."""


class Datum(Struct, frozen=True, array_like=True):
    """One sequence to learn from. `weights` and `logprobs` are as long as its completion, `tokens[prompt_length:]`.

    With `targets` a loss is computed for these tokens in place of the completion's, one or several at each of its
    positions. Then `weights`, `logprobs` and the like are as long as `targets`.

    The loss `score` has scores of the completion's tokens in place of their logprobs, each read at the token itself.
    """

    tokens: tuple[int, ...]
    prompt_length: int  # at least 1
    weights: tuple[float, ...]  # advantages, or plain weights for cross_entropy
    logprobs: tuple[float, ...] | None = ()  # of the policy that drew the tokens; None: of the trainer before the pass
    temperature: float = 1.0  # at which p is computed, to be comparable with `logprobs`
    mask: tuple[int, ...] = ()  # 1: the token is trained on; empty: tokens whose weight is not 0 are
    anchor: tuple[float, ...] = ()  # logprobs before the update; empty: of the trainer before the pass
    truncation: Truncation = (
        WHOLE  # of the draw: p is that of the same tokens, and tokens that are not among them count not
    )
    reference: tuple[float, ...] = ()  # logprobs of the model that kl_coef keeps to; empty: of the base
    targets: tuple[int, ...] = ()  # the tokens of each position of the completion, position after position

    @property
    def completion_length(self) -> int:
        """Number of positions of the completion."""
        return len(self.tokens) - self.prompt_length

    @property
    def predicted(self) -> tuple[int, ...]:
        """The tokens whose logprobs are computed."""
        return self.targets or self.tokens[self.prompt_length :]

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each of the predicted tokens is trained on."""
        return tuple(map(bool, self.mask or self.weights))


class Batch(Struct, frozen=True, array_like=True):
    """The data of one trainer in one pass."""

    trainer: str
    data: tuple[Datum, ...]
    loss: LossConfig


class AdamParams(Struct, frozen=True):
    """Parameters of AdamW (Loshchilov and Hutter) with bias correction. `grad_norm` 0: gradients are not clipped."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_norm: float = 0.0


class LoraOptions(Struct, frozen=True):
    """Ways in which an adapter is trained that differ from plain LoRA."""

    rslora: bool = False  # the delta is scaled by alpha / sqrt(rank) (Kalajdzievski 2023) instead of alpha / rank
    plus_ratio: float = 1.0  # B's learning rate over A's (LoRA+, Hayou et al. 2024)
    dropout: float = 0.0  # share of A's inputs that passes with gradients leave out


class TrainerSpec(Struct, frozen=True):
    """The shape of a new trainer. A is uniform in ±1/sqrt(inputs), B is zero."""

    name: str
    rank: int
    alpha: float
    targets: tuple[str, ...] = ()  # last parts of module paths; empty: every linear layer but the output head
    seed: int = 0
    options: LoraOptions = LoraOptions()
    parts: tuple[Part, ...] = ()  # parts whose linears are adapted, in place of `targets`; empty: by `targets`
    scores: bool = False  # whether it has a score head, by which it is a reward model and learns by the loss `score`

    @property
    def scale(self) -> float:
        """Factor of the adapter's delta."""
        return self.alpha / (math.sqrt(self.rank) if self.options.rslora else self.rank)


class TrainerInfo(Struct, frozen=True):
    """The description of an open trainer."""

    name: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    parameters: int
    step: int  # of the optimiser


class BatchResult(Struct, frozen=True):
    """The results of a pass for one batch. Sums are over the tokens that are trained on."""

    trainer: str
    loss: float
    tokens: int
    logprobs: tuple[tuple[float, ...], ...]
    """The trainer's, of each predicted token, at the datum's temperature. With the loss `score`: the scores there."""
    model_logprobs: tuple[tuple[float, ...], ...]  # the same at temperature 1
    kl_reference: float = 0.0  # mean k3 to the reference of the loss; 0 when kl_coef is


class StepDone(Struct, frozen=True):
    """The result of a step of the optimiser. `finite` False: the gradients were not finite, and nothing was changed."""

    trainer: str
    step: int
    grad_norm: float  # before clipping
    finite: bool
    agreement: float | None = None  # cosine of the gradient and the mean of earlier ones; None: there was none
