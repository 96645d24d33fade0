"""Shared parts of the routes for rollouts: the policy that answers, the plan, and the logprobs that trainers need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.logprobs import LOWEST
from mlx_tandem.errors import renamed
from mlx_tandem.generation.adapters.model_names import Selection
from mlx_tandem.generation.grammar.fields import constraint_of
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.sampling import Sampling, check_logprobs, choices, sampling_params, text_options
from mlx_tandem.limits import bounds
from mlx_tandem.types import SamplingParams, TokenLogprob


class TokenSampling(Sampling, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `SamplingParams`: how tokens are drawn, and how many alternatives are reported for each."""

    logprobs: Annotated[int, bounds("logprobs")] | None = None
    # Without effect here: replies are whole, or streamed in pieces, and have token ids in any case.
    detokenize: bool | None = None
    output_kind: int | None = None
    spaces_between_special_tokens: bool | None = None
    routed_experts_prompt_start: int | None = None  # no reply has a model's routing


async def policy(front: ServerFront, model: str | None, user: str | None = None) -> Selection:
    """Return the model that `model` names; without a name, the trained adapter on a server that learns.

    The base answers on other servers, or the default adapter. Raises NotFound.
    """
    if model is None and front.learning is not None:
        model = front.config.rl_training.adapter
    return await front.models.select(model, user)


async def rollout(
    front: ServerFront, body: TokenSampling, model: Selection, prompts: Sequence[list[int]], param: str
) -> Prompted:
    """Return the request that continues `prompts`, which the field `param` holds. Raises InvalidRequest.

    The model's folder gives no defaults: a trainer takes what it did not ask for as drawn from the whole distribution.
    """
    check_logprobs(front, "logprobs", body.logprobs)
    n, constraint = choices(front, body), constraint_of(body)
    params = sampling_params(front, body, max(map(len, prompts)), param, logprobs=body.logprobs, plain=True)
    version = None if front.learning is None else front.learning.version_of(model.ref)
    return Prompted(
        prompts,
        [model.ref] * len(prompts),
        params,
        n,
        text_options(body),
        version=version,
        priority=body.priority or 0,
        speculate=body.speculation is not False,
        grammar=None if constraint is None else await front.constraints.grammar(constraint),
    )


@contextmanager
def within(field: str) -> Iterator[None]:
    """Name the parameters of `Sampling` as members of the object `field` in errors that the block raises."""
    with renamed(**{name: f"{field}.{name}" for name in TokenSampling.__struct_fields__}):
        yield


def drawn(params: SamplingParams, logprob: TokenLogprob) -> float:
    """Return a token's logprob under the distribution that it was drawn from, which importance weights are made of.

    A greedy choice was not drawn; its logprob is that of the model's own distribution.
    """
    return max(logprob.model if params.greedy else logprob.sampled, LOWEST)
