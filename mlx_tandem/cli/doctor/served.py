"""Checks of the whole engine on the built-in model: answers compared with mlx-lm's, adapters, learning, speed."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from mlx_tandem import demo
from mlx_tandem.adapters.convert import convert, inspect
from mlx_tandem.api.engine import Engine
from mlx_tandem.api.generation import Completion
from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.cli.doctor.result import Failed, Figures, Outcome

QUESTION = [{"role": "user", "content": "Sort down: 5 3 9 1 7 2 8"}]
"""A question that the adapters answer differently."""

TOKENS = 16
"""Tokens of each answer that is compared."""
TOLERANCE = 1e-3
"""Largest difference of a logprob in float32. Rows with wrong keys, mask or adapter are off by hundreds of times
that."""


def starts(bench: Bench) -> Outcome:
    """Check that the engine starts with the built-in model."""
    info = _exact(bench).info
    figures: Figures = {"load_seconds": round(info.load_seconds, 2), "blocks": info.num_blocks}
    says = f"on {info.device}, attention by {info.attention_backend}, adapters by {info.lora_backend}"
    return Outcome(says, figures)


def _engine(bench: Bench, dtype: str) -> Engine:
    """Return an engine of this type that reads prompts in chunks of 16 tokens."""
    made = Engine(
        adapters={}, prepare=True, dtype=dtype, num_blocks=513, max_model_len=1024, max_num_seqs=8, max_chunk_tokens=16
    )
    bench.cleanup.callback(made.close)
    return made


def _exact(bench: Bench) -> Engine:
    engine: Engine = bench.keep("float32", lambda: _engine(bench, "float32"))
    return engine


def _usual(bench: Bench) -> Engine:
    """Return the engine of the type that is served here by default, which may be the float32 one."""
    from mlx_tandem.model import backend

    is_exact = backend.current().products.only_float32_is_fast  # then "auto" is float32
    engine: Engine = _exact(bench) if is_exact else bench.keep("auto", lambda: _engine(bench, "auto"))
    return engine


def equal(bench: Bench) -> Outcome:
    """Check tokens and logprobs of every way through a batch against mlx-lm's own generation."""
    from mlx_tandem.model.trials import Oracle

    engine, random = _exact(bench), Random(0)
    size = engine.info.vocab_size

    def prompt(length: int) -> list[int]:
        return [random.randrange(3, size) for _ in range(length)]

    names = [None, *demo.ADAPTER_PATHS]
    alone, batch, long, shared = prompt(11), [prompt(n) for n in (5, 12, 7, 15)], prompt(75), prompt(40)
    ways: list[tuple[str, list[tuple[str | None, list[int]]], bool]] = [
        ("alone", [(None, alone)], False),
        ("batched", [(None, p) for p in batch], False),
        ("chunked", [(None, long)], False),
        ("mixed adapters", [(name, shared) for name in names], False),
        ("a prefix that was there", [(name, shared) for name in reversed(names)], True),
    ]
    with tempfile.TemporaryDirectory(prefix="tandem-doctor-") as scratch:
        oracles: dict[str | None, Oracle] = {None: Oracle(demo.MODEL_PATH)}
        for name, folder in demo.ADAPTER_PATHS.items():
            engine.load_adapter(name, folder)
            if inspect(folder).format != "mlx-lm":
                convert(folder, Path(scratch) / name, "mlx-lm")
                folder = Path(scratch) / name
            oracles[name] = Oracle(demo.MODEL_PATH, folder)
    worst, wrong = 0.0, []
    for way, requests, cached in ways:
        for (adapter, tokens), done in zip(requests, _together(engine, requests), strict=True):
            said = [step.model for step in done.logprobs or ()]
            same, apart = oracles[adapter].disagreement(tokens, done.token_ids, said)
            worst = max(worst, apart)
            if same < TOKENS:
                wrong.append(f"{way} ({adapter or 'base'}): token {same + 1} is another")
            elif apart > TOLERANCE:
                wrong.append(f"{way} ({adapter or 'base'}): a logprob is off by {apart:.1e}")
            elif bool(done.cached_tokens) != cached:
                wrong.append(f"{way}: {done.cached_tokens} tokens of the prompt came from the cache")
    figures: Figures = {"logprobs_apart": worst}
    if wrong:
        raise Failed(
            "; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""),
            "Answers here depend on what else runs, or are not the model's: do not rely on them, and please report it.",
            figures,
        )
    return Outcome(f"{', '.join(way for way, *_ in ways)}: as mlx-lm, logprobs within {worst:.0e}", figures)


def _together(engine: Engine, requests: list[tuple[str | None, list[int]]]) -> list[Completion]:
    def ask(request: tuple[str | None, list[int]]) -> Completion:
        name, tokens = request
        return engine.generate(tokens, adapter=name, max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=0)

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(ask, requests))


def swaps(bench: Bench) -> Outcome:
    """Check that answers follow the folder when one name is loaded from several folders in turn."""
    engine = _exact(bench)
    times, answers = [], []
    for name in ("shout", "json", "down", "shout"):
        started = time.perf_counter()
        engine.load_adapter("doctor", demo.ADAPTER_PATHS[name])
        engine.chat(QUESTION, adapter="doctor", temperature=0, max_tokens=1)
        times.append((time.perf_counter() - started) * 1e3)
        answers.append(engine.chat(QUESTION, adapter="doctor", temperature=0, max_tokens=24).text)
    engine.unload_adapter("doctor")
    figures: Figures = {"swap_ms": round(min(times[1:3]), 1), "swap_back_ms": round(times[3], 1)}
    if len(set(answers[:3])) < 3 or answers[3] != answers[0]:
        raise Failed(
            "after a swap the answers are not those of the adapter that was loaded",
            "Swapping adapters while serving cannot be trusted here: please report it.",
            figures,
        )
    return Outcome(f"an adapter is swapped in {figures['swap_ms']} ms, from its files to a first token", figures)


AGREEMENT = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-2}
"""Largest k3 by type between the served and the trained model, in nats per token."""


def learns(bench: Bench) -> Outcome:
    """Check that a few steps lower the loss, and that the published version's logprobs are the trainer's."""
    engine = _usual(bench)
    lesson = [{"messages": [*QUESTION, {"role": "assistant", "content": "9 8 7 5 3 2 1"}]}]
    trainer = engine.trainer("doctor", rank=4, seed=1)
    losses, started = [], time.perf_counter()
    for _ in range(3):
        losses.append(trainer.forward_backward(lesson).loss)
        if not trainer.step(learning_rate=3e-3).finite:
            raise Failed("gradients are not finite", "Learning does not work here: please report it.")
    update = (time.perf_counter() - started) / len(losses) * 1e3
    losses.append(trainer.forward(lesson).loss)
    trainer.publish()
    prompt = engine.codec.text("Once upon a time", begins=True)  # a prompt that the lesson did not teach
    drawn = engine.generate(
        prompt, adapter="doctor", temperature=1.0, seed=3, max_tokens=32, ignore_eos=True, logprobs=0
    )
    own = trainer.forward([{"prompt": prompt, "completion": list(drawn.token_ids)}]).logprobs[0]
    apart = [o - step.model for o, step in zip(own, drawn.logprobs or (), strict=True)]
    k3 = sum(math.expm1(d) - d for d in apart) / len(apart)
    trainer.close()
    engine.unload_adapter("doctor")
    figures: Figures = {"loss_before": losses[0], "loss_after": losses[-1], "k3": k3}
    figures |= {"logprobs_apart": max(map(abs, apart)), "update_ms": round(update, 1)}
    if not losses[-1] < 0.9 * losses[0]:
        raise Failed(
            f"the loss went from {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses) - 1} steps",
            "Gradients are wrong here: do not train on this machine, and please report it.",
            figures,
        )
    if not k3 <= AGREEMENT[engine.info.dtype]:
        raise Failed(
            f"what is served and what is trained differ by k3 = {k3:.1e} nats a token",
            "Learning from what was served would be wrong by as much: please report it.",
            figures,
        )
    return Outcome(f"loss {losses[0]:.2f} → {losses[-1]:.2f} in {len(losses) - 1} steps, k3 {k3:.0e}", figures)


def speed(bench: Bench) -> Outcome:
    """Measure decoded tokens per second and the copy bandwidth, without judging them."""
    from mlx_tandem.model.kernels.checking import copy_bandwidth

    engine = _usual(bench)
    figures: Figures = {f"tokens_s_at_{rows}": round(_rate(engine, rows)) for rows in (1, 8)}
    figures["copy_gb_s"] = round(copy_bandwidth() / 1e9, 1)
    figures["load"] = round(os.getloadavg()[0], 1)  # if it exceeds the cores, other programs slowed this down
    says = f"{figures['tokens_s_at_1']} tokens/s alone, {figures['tokens_s_at_8']} with 8 at once"
    return Outcome(f"{says} ({engine.info.dtype}); copies {figures['copy_gb_s']} GB/s", figures)


def _rate(engine: Engine, rows: int, tokens: int = 48) -> float:
    """Return decoded tokens per second: the time that further tokens take beyond the first of an answer."""
    prompts = [[3 + row, 5, 7, 11] for row in range(rows)]

    def timed(most: int) -> float:
        started = time.perf_counter()
        engine.generate(prompts, max_tokens=most, temperature=0, ignore_eos=True)
        return time.perf_counter() - started

    def best(work: Callable[[int], float], most: int) -> float:
        return min(work(most) for _ in range(2))

    best(timed, tokens + 1)  # warm-up, which compiles kernels and steps
    return rows * tokens / max(best(timed, tokens + 1) - best(timed, 1), 1e-9)
