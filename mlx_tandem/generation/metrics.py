"""Counters and histograms of generation since the server started, as plain numbers.

All of them belong to one event loop. An observation costs one bisection and two additions, because one is made for
every token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from mlx_tandem.engine.histogram import Histogram
from mlx_tandem.errors import CODES, TandemError

OTHER = "other"
"""The label under which everything is counted that has no series of its own."""

TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
ITL_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
SECONDS_BOUNDS = (
    *(0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS_BOUNDS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)
CHOICES_BOUNDS = (1, 2, 5, 10, 20, 50, 100)
PREEMPTIONS_BOUNDS = (0, 1, 2, 3, 4, 5, 10, 20)
"""Bounds of the histograms. They are vLLM's bounds with finer ones at the low end, for small and quick models."""

REQUESTS: dict[str, tuple[str, Sequence[float]]] = {
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS_BOUNDS),
    "request_generation_tokens": ("Tokens of a choice.", TOKENS_BOUNDS),
    "request_max_num_generation_tokens": ("Tokens of the longest choice of a request.", TOKENS_BOUNDS),
    "request_params_max_tokens": ("max_tokens of a request.", TOKENS_BOUNDS),
    "request_params_n": ("n of a request.", CHOICES_BOUNDS),
    "request_num_preemptions": ("Times that a sequence of a request was preempted.", PREEMPTIONS_BOUNDS),
    "request_queue_time_seconds": ("Until the first tokens of a request were computed.", SECONDS_BOUNDS),
    "request_prefill_time_seconds": ("From then until its first token was drawn.", SECONDS_BOUNDS),
    "request_decode_time_seconds": ("From then until its last token was drawn.", SECONDS_BOUNDS),
    "request_inference_time_seconds": ("Prefill and decode together.", SECONDS_BOUNDS),
}
"""Help text and bounds of each of vLLM's histograms of finished requests, by its name."""


class Metrics:
    """Counters and histograms of everything that the front has handled since it started."""

    def __init__(self) -> None:
        self.prompt_tokens: Counter[str] = Counter()  # by model: the base's id or a registered adapter's name
        self.generation_tokens: Counter[str] = Counter()
        self.finished: Counter[tuple[str, str]] = Counter()  # choices by (model, reason)
        self.completed = 0  # requests whose choices have all ended
        self.errors: Counter[str] = Counter()  # by code
        self.error_replies: Counter[tuple[int, str]] = Counter()  # (HTTP status, code)
        self.shutdown_clean = True  # false once the drain has cut a request off
        self.time_to_first_token = Histogram(TTFT_BOUNDS)
        self.inter_token = Histogram(ITL_BOUNDS)
        self.end_to_end = Histogram(SECONDS_BOUNDS)
        self.requests = {name: Histogram(bounds) for name, (_, bounds) in REQUESTS.items()}

    def finish(
        self,
        prompts: Sequence[int],
        choices: Sequence[int],
        *,
        max_tokens: int,
        n: int,
        preemptions: int,
        times: tuple[float, float | None, float, float],
    ) -> None:
        """Count a request whose choices have all ended.

        `prompts` and `choices` are the token counts of each prompt and choice. `times` holds, in seconds of the
        monotonic clock, when the request arrived, when its first row was planned (None if that is not known), and when
        its first and its last token arrived.
        """
        self.completed += 1
        observe = {name: histogram.observe for name, histogram in self.requests.items()}
        for tokens in prompts:
            observe["request_prompt_tokens"](tokens)
        for tokens in choices:
            observe["request_generation_tokens"](tokens)
        observe["request_max_num_generation_tokens"](max(choices))
        observe["request_params_max_tokens"](max_tokens)
        observe["request_params_n"](n)
        observe["request_num_preemptions"](preemptions)
        came, started, first, last = times
        observe["request_decode_time_seconds"](last - first)
        if started is not None:
            observe["request_queue_time_seconds"](max(started - came, 0.0))
            observe["request_prefill_time_seconds"](max(first - started, 0.0))
            observe["request_inference_time_seconds"](max(last - started, 0.0))

    def fold(self, known: Collection[str]) -> None:
        """Move the counts of all models that are not in `known` to OTHER, so that their sums never decrease."""
        for by_model in (self.prompt_tokens, self.generation_tokens):
            for model in [m for m in by_model if m not in known and m != OTHER]:
                by_model[OTHER] += by_model.pop(model)
        for model, reason in [key for key in self.finished if key[0] not in known and key[0] != OTHER]:
            self.finished[OTHER, reason] += self.finished.pop((model, reason))

    def count_error(self, error: TandemError, *, in_stream: bool = False) -> None:
        """Count the error that ended a request. With `in_stream` it was the last event of a stream, not a reply."""
        code = error.code if error.code in CODES else "other"
        self.errors[code] += 1
        if not in_stream:
            self.error_replies[error.status, code] += 1
