"""How the toy dialect writes replies: a line for each event, whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_tandem.dialects.plan import Renderer
from mlx_tandem.errors import TandemError
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.events import Finish, TextDelta, Usage
from mlx_tandem.training.live.recorder import Outcome


def error_line(error: TandemError) -> bytes:
    """Return what a request gets that fails, before its stream has begun or after."""
    return f"wrong: {error.code} in {error.param}\n".encode()


class ToyRenderer(Renderer):
    """Writes one reply."""

    id = "toy-1"

    def text(self, event: TextDelta) -> bytes:
        return f"{event.choice} says {event.text}\n".encode()

    def finish(self, event: Finish) -> bytes:
        return f"{event.choice} ends by {event.reason}\n".encode()

    def close(self, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        return f"{usage.completion} tokens\n".encode()

    def error(self, error: TandemError) -> bytes:
        return error_line(error)

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        return b"".join(f"{i} said {answer.text}\n".encode() for i, answer in enumerate(answers.choices))
