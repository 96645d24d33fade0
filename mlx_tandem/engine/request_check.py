"""The check of a request before the scheduler accepts it."""

from __future__ import annotations

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.types import Request


def check_request(
    request: Request, stop_ids: frozenset[int], *, vocab_size: int, most_tokens: int, most_choices: int
) -> None:
    """Raise InvalidRequest for a request that could never run.

    `most_tokens` is the limit of prompt and output together. Token ids are checked here although the server has checked
    them before, since the device does not check its indices.
    """
    n, params = len(request.prompt), request.params
    thoughts = params.thoughts
    for param, ids in (
        ("prompt", request.prompt),
        ("logit_bias", tuple(t for t, _ in params.logit_bias)),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("xtc_kept", params.xtc_kept),
        ("thoughts", thoughts.closing if thoughts is not None else ()),
        ("prediction", request.prediction),
    ):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            raise InvalidRequest(f"a token of {param} is not in the vocabulary", param=param)
    if n == 0:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if thoughts is not None and not (thoughts.open and thoughts.close and thoughts.closing):
        raise InvalidRequest("a thought needs tokens that begin and end it", param="thoughts")
    if params.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens is larger than max_tokens", param="min_tokens")
    if params.min_tokens and params.allowed_token_ids and stop_ids.issuperset(params.allowed_token_ids):
        raise InvalidRequest(
            "every token of allowed_token_ids ends the choice, which min_tokens forbids", param="allowed_token_ids"
        )
    if request.grammar is not None and (params.ignore_eos or params.min_tokens):
        param = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise InvalidRequest(f"{param} forbids the end of a text that {request.grammar.param} ends", param=param)
    if n + params.max_tokens > most_tokens:
        raise InvalidRequest(
            f"{n} prompt tokens and max_tokens = {params.max_tokens} exceed the {most_tokens} that fit",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if request.pooling is not None and (request.n, params.max_tokens, params.prompt_logprobs) != (1, 1, None):
        raise InvalidRequest("pooled hidden states go with one choice of one token", param="pooling")
    if not 1 <= request.n <= most_choices:
        raise InvalidRequest(f"n is 1 to {most_choices} here", param="n")
