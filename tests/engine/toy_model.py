"""A model without a device, whose next token is a hash of the cells that its layers see.

A cell stands for the keys and values of a position. `alone` computes the output of one sequence by itself. All ways of
serving it have to give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from struct import pack, unpack
from zlib import crc32

from mlx_tandem.engine.masks import allows
from mlx_tandem.engine.plan import Mask
from mlx_tandem.kv.disk.records import Payload
from mlx_tandem.types import AdapterRef, Pooling, SamplingParams, TokenLogprob

BASE = ""
"""The digest of the base model's cells."""
NOWHERE = 1 << 40
"""A position that no sequence has."""
_PRIME = (1 << 61) - 1
NAN = -1
"""A cell that is not finite: it spoils whatever reads its block, even behind a mask."""


def cell(token: int, digest: str) -> int:
    """Return what one position of the cache holds: a token, and the adapter under which it was computed."""
    return _high_bits(digest) | token


@cache
def _high_bits(digest: str) -> int:
    return crc32(digest.encode()) << 20


def cells_of_tokens(tokens: Sequence[int], digest: str, begins: int = 0) -> list[int]:
    """Return the cells of a sequence whose adapter applies from position `begins` on; before that the base applies."""
    own, base = _high_bits(digest), _high_bits(BASE)
    return [base | t for t in tokens[:begins]] + [own | t for t in tokens[begins:]]


def begins_in(prompt: Sequence[int], adapter: AdapterRef | None) -> int:
    """Return the position in a prompt from which on an adapter applies, or NOWHERE.

    It is the beginning of the last occurrence of the tokens that invoke it, and 0 for an adapter without such tokens.
    """
    wanted = () if adapter is None else adapter.invocation
    places = [at for at in range(len(prompt)) if tuple(prompt[at : at + len(wanted)]) == wanted]
    return 0 if not wanted else places[-1] if places else NOWHERE


def bytes_of(cells: Sequence[int | None]) -> bytes:
    """Return the content of one block, all of whose positions must have been written."""
    assert None not in cells, "what was not written is saved"
    assert NAN not in cells, "what is not finite is saved"
    return pack(f"<{len(cells)}q", *cells)


def cells_of(content: Payload) -> list[int]:
    return list(unpack(f"<{len(content) // 8}q", content))


def next_token(
    context: Sequence[int],
    params: SamplingParams,
    choice: int,
    history: Sequence[int],
    vocab: int,
    banned: Iterable[int] = (),
    mask: Mask | None = None,
) -> int:
    """Return the token after `context`, the cells that the layers see. It is allowed by the mask and not `banned`.

    A greedy token depends on the context alone, and others on the seed, the choice and the position as well. With a
    penalty it also depends on how often each token occurs in what the penalty counts of `history`, which is the prompt
    and the output so far.
    """
    key: tuple[object, ...] = (tuple(context),)
    if not params.greedy:
        key += (params.seed, choice, len(history), params.top_k, params.xtc_probability)
    if params.repetition_penalty != 1.0:
        key += (tuple(sorted(history[-params.repetition_context :])),)
    if params.presence_penalty or params.frequency_penalty:
        key += (tuple(sorted(history)),)
    if params.logit_bias:
        key += (params.logit_bias,)
    token = hash(key) % _PRIME % vocab  # of integers and floats only, so the same in every process
    if mask is None and not params.allowed_token_ids and token not in banned:
        return token
    allowed = set(params.allowed_token_ids or range(vocab)).difference(banned)
    if mask is not None:
        allowed = {t for t in allowed if allows(mask, t)}
    return next(t % vocab for t in range(token, token + vocab) if t % vocab in allowed)


def logprob_of(token: int, params: SamplingParams) -> TokenLogprob:
    """Return logprobs that tell for which token they are and how many alternatives were asked for."""
    k = params.logprobs or 0
    return TokenLogprob(-float(token), -float(token) / 2, tuple((i, -float(i)) for i in range(k)))


def score_of(context: Sequence[int], token: int, params: SamplingParams) -> TokenLogprob:
    """Return the logprob of a prompt's token after `context`, a list of cells; with the alternatives asked for."""
    value = -float(hash((tuple(context), token)) % 1009)
    return TokenLogprob(value, value, tuple((i, value - i) for i in range(params.prompt_logprobs or 0)), token + 1)


def hidden_of(context: Sequence[int]) -> list[float]:
    """Return the hidden state at the last of these cells: whole numbers, so that sums are exact."""
    value = hash(tuple(context))
    return [float(value % 1009), float(value % 17)]


def embedding_alone(
    prompt: Sequence[int], pooling: Pooling, digest: str, windows: Windows = (None,), begins: int = 0
) -> list[float]:
    """Return the pooled hidden states of a prompt that is alone."""
    cells = cells_of_tokens(prompt, digest, begins)
    hidden = [hidden_of(seen(cells[:end], windows)) for end in range(1, len(prompt) + 1)]
    return [sum(v) / len(prompt) for v in zip(*hidden, strict=True)] if pooling == "mean" else hidden[-1]


Windows = tuple[int | None, ...]
"""What the layers of each cache group see; None: everything; STATE: a state that every position goes into."""

STATE = 0
NOTHING = 1
"""The state before the first position."""


def state_after(state: int, own: int) -> int:
    """Return the state after it has taken in a position with this cell."""
    return NAN if NAN in (state, own) else hash((state, own)) % _PRIME


def seen(cells: Sequence[int], windows: Windows) -> list[int]:
    """Return what the layers see of all `cells` up to a position, one cache group after the other."""
    context: list[int] = []
    for w in windows:
        if w == STATE:
            context.append(reduce(state_after, cells, NOTHING))
        else:
            context += cells if w is None else cells[-w:]
    return context


def scores_alone(
    prompt: Sequence[int], params: SamplingParams, digest: str, windows: Windows = (None,), begins: int = 0
) -> list[TokenLogprob]:
    """Return the logprobs of a prompt's own tokens, for a sequence that is alone."""
    cells = cells_of_tokens(prompt, digest, begins)
    return [score_of(seen(cells[:at], windows), prompt[at], params) for at in range(1, len(prompt))]


def alone(
    prompt: Sequence[int],
    params: SamplingParams,
    choice: int,
    digest: str,
    vocab: int,
    stop_ids: Iterable[int] = (),
    windows: Windows = (None,),
    mask_of: Callable[[Sequence[int]], Mask] | None = None,
    begins: int = 0,
) -> list[int]:
    """Return the output of a sequence that is alone. Its adapter applies from position `begins` on."""
    stops = frozenset(stop_ids)
    tokens, cells = list(prompt), cells_of_tokens(prompt, digest, begins)
    while len(tokens) - len(prompt) < params.max_tokens:
        banned = stops if len(tokens) - len(prompt) < params.min_tokens else ()
        context = seen(cells, windows)
        mask = None if mask_of is None else mask_of(tokens)
        tokens.append(next_token(context, params, choice, tokens, vocab, banned, mask))
        cells.append(cell(tokens[-1], digest if len(cells) >= begins else BASE))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]
