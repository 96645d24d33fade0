"""`Conversation`: several turns whose answers are kept as they were drawn, so that a trainer can learn from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from mlx_tandem.api.generation import Completion, Generation
from mlx_tandem.api.trainer import Call
from mlx_tandem.engine.learning import Datum
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.continued_chats import Kept, digest
from mlx_tandem.training.draws import altered, check_same, truncation
from mlx_tandem.training.online.advantages import datum
from mlx_tandem.training.open_trajectories import Beginning, Exchange, OpenTrajectory
from mlx_tandem.types import SamplingParams

Message = Mapping[str, Any]


class Conversation:
    """A conversation with one adapter, which `Engine.conversation` begins.

    >>> talk = engine.conversation(adapter="mine", tools=[…])
    >>> answer = talk.ask("What is the score in Oslo?", temperature=1)
    >>> answer = talk.ask({"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "3 to 1"})
    >>> trainer.forward_backward([talk.datum(advantage)], "ppo")

    Each answer is computed after the tokens of the conversation so far, which are never tokenised again.
    """

    def __init__(self, call: Call, generation: Generation, adapter: str | None, options: dict[str, Any]):
        self._call = call
        self._generation = generation
        self._adapter = adapter
        self._options = options
        self._kept = OpenTrajectory(Beginning("", 0, 1.0), 0.0)
        self._altered = ""  # the first parameter beside which nothing can be learned; empty: none was used
        self.messages: list[Message] = []
        """All messages so far, the assistant's among them."""

    def ask(self, *messages: str | Message, **sampling: Any) -> Completion:
        """Add messages, a text being one of the user, and return the assistant's answer, which is added, too.

        `sampling` are the arguments of `Engine.generate`; temperature, top_p, top_k and min_p are the same in all
        turns. A call that fails adds nothing. Raises InvalidRequest.
        """
        if "n" in sampling:
            raise InvalidRequest("a conversation has one answer at a time", param="n")
        new = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        given = [*self.messages, *new]
        exchanges = self._kept.exchanges
        begun, kept = self._kept.begun, None
        wanted: dict[str, Any] = {"logprobs": 0, "temperature": begun.temperature}
        if exchanges:
            last = exchanges[-1]
            tokens = [t for e in exchanges for part in (e.given, e.tokens) for t in part]
            kept = Kept(tokens, last.tokens, last.messages, last.rendered)
            wanted |= asdict(begun.truncation)

        def check(params: SamplingParams) -> None:
            if exchanges:
                check_same(params, begun.temperature, begun.truncation)

        rendered, prompted, completion = self._call(
            lambda: self._generation.go_on(given, self._adapter, self._options, wanted | sampling, kept, check)
        )
        (prompt,), params, grammar = prompted.prompts, prompted.params, prompted.grammar
        if not exchanges:
            self._kept.begun = Beginning("", 0, params.temperature, truncation=truncation(params))
        self._altered = self._altered or (altered(params) if grammar is None else grammar.param)
        self._kept.add(
            Exchange(
                given=tuple(prompt[0 if kept is None else len(kept.tokens) :]),
                tokens=completion.token_ids,
                logprobs=tuple(lp.sampled for lp in completion.logprobs or ()),
                model_logprobs=tuple(lp.model for lp in completion.logprobs or ()),
                versions=(0,) * len(completion.token_ids),
                messages=len(given),
                rendered=digest(rendered),
            )
        )
        self.messages = [*given, _said(completion)]
        return completion

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far: the prompt, the answers, and what was said between them."""
        return tuple(t for e in self._kept.exchanges for part in (e.given, e.tokens) for t in part)

    def datum(self, advantages: float | Sequence[float]) -> Datum:
        """Return the conversation as data for a trainer: its answers are trained on, and nothing else.

        `advantages` is one number for all answers, or one for each. Raises InvalidRequest, also for answers whose
        distribution no trainer computes.
        """
        if self._altered:
            raise InvalidRequest(f"answers that were drawn with {self._altered} are not data", param=self._altered)
        turns = len(self._kept.pieces)
        each = tuple(map(float, advantages)) if isinstance(advantages, Sequence) else (float(advantages),)
        if not turns or len(each) not in (1, turns):
            raise InvalidRequest(f"advantages has {len(each)} numbers for {turns} answers", param="advantages")
        return datum(self._kept.rewarded("", 0.0, (), 0.0), each)


def _said(completion: Completion) -> Message:
    """Return an answer as a message of the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.text}
    if completion.reasoning:
        message["reasoning_content"] = completion.reasoning
    if completion.tool_calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in completion.tool_calls
        ]
    return message
