"""All kernel checks in their order, which change the model's modules so that these use what was chosen.

With the `KernelChoices` of another process nothing is timed: the same functions are built from them. `problem` then
compares what they compute with plain operations, once.

`tried` checks every kernel on its own: how long this device's compiler takes for it, and whether its results are right.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.config import EngineConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend, probe
from mlx_tandem.model.cache.kvformat import Asks, LayerShape, RowFormat
from mlx_tandem.model.choices import KernelChoices
from mlx_tandem.model.kernels import dialect, inplace
from mlx_tandem.model.kernels.checking import MAX_REASON, Choice, Pieces, checked
from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Shaped, Source, Target
from mlx_tandem.model.loader import LoadedModel, Report
from mlx_tandem.model.ops import delta_net, gated_delta, mlp, residual
from mlx_tandem.model.ops.attention import block, fused, portable
from mlx_tandem.model.ops.attention import choice as attention
from mlx_tandem.model.ops.attention.choice import AttentionChoice
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.ops.lora import choice as lora
from mlx_tandem.model.ops.lora.choice import AdapterLimits
from mlx_tandem.model.ops.lora.kernel import GroupedDeltas, LoraKernels
from mlx_tandem.model.ops.mlp import SwiGLU
from mlx_tandem.model.ops.products import few_rows
from mlx_tandem.model.ops.products.few_rows import FewRows
from mlx_tandem.model.ops.products.merged import Merged, use_views
from mlx_tandem.model.ops.residual import AddNorm, Norm
from mlx_tandem.model.ops.sampling import choice as sampling
from mlx_tandem.model.ops.sampling.draw import GumbelMax, TruncatedDraw
from mlx_tandem.model.ops.sampling.sampler import MLX_PICKERS, Pickers

log = logging.getLogger(__name__)

ONCE = (
    PRODUCTS := "checking products",
    ATTENTION := "checking attention",
    MODEL := "checking the model",
    ADAPTERS := "checking adapters",
    TIMING := "timing products",
)
"""Stages of a start that a later start with kept choices does not have."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions that were chosen, and why."""

    products: Choice[FewRows | None]
    attention: AttentionChoice
    own_blocks: str
    """The reason why attention blocks run their own code; empty if they are on the fused path or cannot be."""

    adapters: Choice[GroupedDeltas | None] | None
    """None: they are chosen when the first adapter is loaded."""

    sampling: Choice[Pickers]

    def choices(self, mask_axes: int) -> KernelChoices:
        """Return the choices as plain data, from which `choose` builds the same functions."""
        return KernelChoices(
            mask_axes=mask_axes,
            store_problem=inplace.writing().problem,
            products=few_rows.described(self.products),
            attention=attention.described(self.attention),
            own_blocks=self.own_blocks,
            adapters=None if self.adapters is None else lora.described(self.adapters),
            sampling=sampling.described(self.sampling),
            rule_problem=gated_delta.verdict.found,
            own_delta_nets=delta_net.verdict.found,
        )


def choose(
    config: EngineConfig,
    model: LoadedModel,
    merged: Sequence[Merged],
    candidates: Sequence[fused.Fused],
    report: Report,
    given: KernelChoices | None = None,
) -> tuple[probe.Examined, Kernels]:
    """Check the model, choose its kernels by checks and by timing, and change its modules so that they use them.

    With `given`, the choices of another process, the model and the kernels are not checked.
    """
    if given is not None:
        return _install(config, model, merged, candidates, report, given)
    report(PRODUCTS, 0.0)
    if config.deterministic:
        dialect.wait_for_compiled()
        return _without(config, model)
    delta_net.verdict.give(None)
    merged = use_views(model.module, merged) if candidates else merged
    modules = few_rows.candidates(model.module, merged)
    products = few_rows.choose(modules)
    if products.chosen is not None:
        few_rows.speed_up(modules, merged, products.chosen)
    prepare()
    dialect.wait_for_compiled(packed=False)
    report(ATTENTION, 0.0)
    shapes = examine(config, model, evaluate=False)
    asked, block_size = config.cache.attention_backend, config.cache.block_size
    chosen = attention.choose(asked, shapes.layers, block_size, probe.windows(model), candidates)
    pickers = sampling.choose(model.dtype, shapes.vocab_size)
    dialect.wait_for_compiled()
    report(MODEL, 0.0)
    found = examine(config, model)
    own_blocks = ""
    if any(chosen.layers):
        own = model, found, chosen.layers, block_size
        timed = partial(probe.decode_seconds, *own) if asked == attention.AUTO else None
        error = partial(probe.fused_error, *own)
        own_blocks = block.choose(model.module, timed, error, adapters=config.lora.max_loras > 0)
    adapters = None if lora.can_wait(model.module, config.lora) else _choose_adapters(config, model, report)
    kernels = Kernels(products, chosen, own_blocks, adapters, pickers)
    _log(kernels)
    return found, kernels


def _choose_adapters(config: EngineConfig, model: LoadedModel, report: Report) -> Choice[GroupedDeltas | None]:
    """Choose the kernels of adapters at start."""
    report(ADAPTERS, 0.0)
    return lora.choose(model.module, config.lora, model.dtype)


def choosing_adapters(
    config: EngineConfig, model: LoadedModel, known: AdapterLimits | None, most_bytes: int
) -> Pieces[Choice[GroupedDeltas | None]]:
    """Choose the kernels of adapters piece by piece, before the first adapter is served.

    known: what an earlier start has chosen, of which only the results are checked; most_bytes: the largest outputs of a
    layer's linears that there is memory for.
    """
    if known is not None:
        choice = yield from lora.confirming(model.module, model.dtype, _made_adapters(model, known))
        if choice is not None:
            return choice
    return (yield from lora.choosing(model.module, config.lora, model.dtype, most_bytes=most_bytes))


def _made_adapters(model: LoadedModel, given: AdapterLimits) -> Choice[GroupedDeltas | None]:
    """Return the kernels of adapters that another process chose."""
    return Choice(lora.made(model.module, given.same, given.mixed) if given.mixed else None, given.reason)


def _without(config: EngineConfig, model: LoadedModel) -> tuple[probe.Examined, Kernels]:
    """Examine a model, and return it with kernels of which none was chosen by timing."""
    prepare()
    found = examine(config, model)
    why = "left out by --deterministic"
    nothing: AttentionChoice = AttentionChoice(portable.NAME, why, (None,) * len(found.layers))
    kernels = Kernels(Choice(None, why), nothing, "", Choice(None, why), Choice(MLX_PICKERS, why))
    _log(kernels)
    return found, kernels


def _install(
    config: EngineConfig,
    model: LoadedModel,
    merged: Sequence[Merged],
    candidates: Sequence[fused.Fused],
    report: Report,
    given: KernelChoices,
) -> tuple[probe.Examined, Kernels]:
    """Build the functions that another process chose, and change the model's modules so that they use them.

    Kernels of adapters are chosen here where they are configured and the other process had none.
    """
    dialect.wait_for_compiled()
    inplace.given(given.store_problem)
    gated_delta.verdict.give(given.rule_problem)
    delta_net.verdict.give(given.own_delta_nets)
    merged = use_views(model.module, merged) if candidates and not config.deterministic else merged
    products: Choice[FewRows | None] = Choice(None, given.products.reason)
    if given.products.adapted:
        few = few_rows.made(given.products)
        products = Choice(few, given.products.reason)
        few_rows.speed_up(few_rows.candidates(model.module, merged), merged, few)
    prepare()
    found = examine(config, model, evaluate=False)._replace(mask_axes=given.mask_axes)
    chosen = attention.made(given.attention, found.layers, config.cache.block_size, candidates)
    if any(chosen.layers) and not given.own_blocks:
        block.use(model.module)
    adapters: Choice[GroupedDeltas | None] | None = None
    if given.adapters is not None:
        adapters = _made_adapters(model, given.adapters)
    elif not lora.can_wait(model.module, config.lora):
        adapters = _choose_adapters(config, model, report)
    pickers = sampling.made(given.sampling)
    kernels = Kernels(
        products,
        chosen,
        given.own_blocks,
        adapters,
        Choice(pickers, given.sampling.reason),
    )
    _log(kernels)
    return found, kernels


def forget() -> None:
    """Forget what another process found about kernels, so that it is found anew."""
    inplace.given(None)
    gated_delta.verdict.give(None)
    gated_delta.kernel.cache_clear()
    delta_net.verdict.give(None)


def problem(
    config: EngineConfig,
    model: LoadedModel,
    twin: nn.Module,
    found: probe.Examined,
    kernels: Kernels,
    report: Report,
) -> str:
    """Return what is wrong with the kernels that an earlier start has chosen, by one run of each beside plain
    operations; empty if nothing is.

    `twin` is the model without any changes.
    """
    report("checking kernels", 0.0)
    try:
        error = probe.served_error(model, twin, found, kernels.attention.layers, config.cache.block_size)
        if not error <= 1.0:
            return f"the model's logits are off by {error:.1f} times what is allowed"
        wrong = ""
        if kernels.adapters is not None and kernels.adapters.chosen is not None:
            wrong = lora.wrong_in_any_shape(model.module, kernels.adapters.chosen, model.dtype)
        wrong = wrong or gated_delta.wrong(model.module) or delta_net.wrong(model.module)
        return wrong or sampling.wrong_once(kernels.sampling.chosen, model.dtype, found.vocab_size)
    except ModelError:
        raise
    except Exception as e:
        log.warning("the kernels of the last start failed", exc_info=True)
        return f"{type(e).__name__}: {e}".strip()[:MAX_REASON]


def examine(config: EngineConfig, model: LoadedModel, *, evaluate: bool = True) -> probe.Examined:
    """Examine the model; the layers' shapes are those in the pool, where keys and values may be quantised."""
    found = probe.examine(model, evaluate=evaluate)
    if config.cache.kv_bits == 16:
        return found
    return found._replace(layers=[s.quantised(config.cache.kv_bits, config.cache.kv_group_size) for s in found.layers])


def prepare() -> None:
    """Have the model's attention go through this package, and functions for which the device has better ones."""
    portable.install()
    backend.current().install_functions()


def _log(kernels: Kernels) -> None:
    """Write the choices to the log."""
    log.info("products of few rows: %s", kernels.products.reason)
    log.info("attention by %s: %s", kernels.attention.name, kernels.attention.reason)
    if kernels.own_blocks:
        log.warning("attention blocks run their own code: %s", kernels.own_blocks)
    log.info("sampling: %s", kernels.sampling.reason)


# --- Every kernel on its own -----------------------------------------------------------------------------------------

HALVES = (mx.float16, mx.bfloat16)

BLOCK_SIZE = 16

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 128

VOCABULARY = 1000

WIDTH = 512
"""Numbers of a hidden state."""


class Tried(NamedTuple):
    """The result of one kernel's check."""

    name: str
    forms: int
    """The number of different kernels that were compiled for it."""

    seconds: float
    """Seconds of the first calls of these kernels. Compiling takes nearly all of this time."""

    problem: str
    """The reason why the kernel must not be used; empty if it may."""


def tried(target: Target) -> Iterator[Tried]:
    """Yield the result of each kernel's check for `target`."""
    make = dialect.maker(target)
    for name, check in _checks(target).items():
        calls = FirstCalls(make)
        problem = check(calls)
        yield Tried(name, calls.forms, calls.seconds, problem)


class FirstCalls:
    """A wrapper of a maker of kernels that times the first call of each form of a kernel.

    A form is a kernel with certain constants and types of inputs and outputs. Its first call compiles it.
    """

    def __init__(self, make: Make):
        self._make = make
        self.forms = 0
        self.seconds = 0.0

    def __call__(self, source: Source) -> Kernel:
        """Return the kernel of a source, whose first calls are timed."""
        kernel = self._make(source)
        seen: set[tuple[object, ...]] = set()

        def call(
            inputs: Sequence[mx.array],
            template: Mapping[str, Constant],
            groups: tuple[int, int, int],
            threads: int,
            outputs: Sequence[Shaped],
        ) -> list[mx.array]:
            types = *(array.dtype for array in inputs), *(dtype for _, dtype in outputs)
            form = *(str(each) for each in sorted(template.items(), key=str)), *(str(dtype) for dtype in types)
            if form in seen:
                return kernel(inputs, template, groups, threads, outputs)
            seen.add(form)
            mx.eval(list(inputs))
            started = time.perf_counter()
            made = kernel(inputs, template, groups, threads, outputs)
            mx.eval(made)
            self.seconds += time.perf_counter() - started
            self.forms += 1
            return made

        return call


def _checks(target: Target) -> dict[str, Callable[[Make], str]]:
    """Return the checks by the kernels' names. A check returns what is wrong; empty if the kernel may be used."""
    found: dict[str, Callable[[Make], str]] = {"store": inplace.problem}
    for dtype in HALVES:
        for bits in (0, 8):
            name = f"attention {str(dtype).rpartition('.')[2]}" + (f", {bits} bits" if bits else "")
            form = RowFormat(KV_HEADS, HEAD_DIM, dtype, bits, 64 if bits else 0)
            shape = LayerShape(form, form, Asks(HEADS, sinks=False))
            found[name] = lambda make, shape=shape: _attention(target, make, shape)  # type: ignore[misc]
    forms: lora.Forms = {lora.Shape(WIDTH, (WIDTH,) * members): ("apart", "joined") for members in (1, 2, 3)}
    found["adapters"] = _by(lambda make: lora.wrong(LoraKernels(make), forms, mx.bfloat16))
    dtypes = (mx.bfloat16, mx.float32)
    found["draws"] = _by(lambda make: sampling.wrong(GumbelMax(make), dtypes, VOCABULARY))
    found["truncated draws"] = _by(lambda make: sampling.wrong_truncated(TruncatedDraw(make), dtypes, VOCABULARY))
    found["swiglu"] = lambda make: mlp.problem(SwiGLU(make), (WIDTH,), mx.bfloat16)
    norm = Norm(mx.ones(WIDTH, mx.bfloat16), 1e-6)
    found["add and norm"] = lambda make: residual.problem(AddNorm(make), norm)
    return found | {"gated delta rule": gated_delta.problem}


def _by(wrong: Callable[[Make], str]) -> Callable[[Make], str]:
    """Return a check that returns the result of `wrong`, or the reason why the kernel could not be run."""
    return lambda make: checked("a kernel", lambda: wrong(make), lambda reason: reason)


def _attention(target: Target, make: Make, shape: LayerShape) -> str:
    """Return why the kernels of attention cannot be used for layers of this shape; empty if they can."""
    try:
        attention.choose(target, [shape], BLOCK_SIZE, (), [Fused(target, make)])
    except ModelError as e:
        return e.message
    return ""
