"""All kernel checks in their order, which change the model's modules so that these use what was chosen.

With the `KernelChoices` of another process nothing is timed: the same functions are built from them. `problem` then
compares what they compute with plain operations, once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.nn as nn

from mlx_tandem.config import EngineConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend, probe
from mlx_tandem.model.choices import KernelChoices
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.checking import MAX_REASON, Choice, Pieces
from mlx_tandem.model.loader import LoadedModel, Report
from mlx_tandem.model.ops import delta_net, gated_delta
from mlx_tandem.model.ops.attention import block, fused, portable
from mlx_tandem.model.ops.attention import choice as attention
from mlx_tandem.model.ops.attention.choice import AttentionChoice, AttentionDivision
from mlx_tandem.model.ops.lora import choice as lora
from mlx_tandem.model.ops.lora.choice import AdapterLimits
from mlx_tandem.model.ops.lora.kernel import GroupedDeltas
from mlx_tandem.model.ops.products import few_rows
from mlx_tandem.model.ops.products.few_rows import AnyForm, FewRows, Forms, FormsByShape, Products
from mlx_tandem.model.ops.products.merged import Merged, use_views
from mlx_tandem.model.ops.products.skinny import Form
from mlx_tandem.model.ops.products.wgmma import WideForm
from mlx_tandem.model.ops.sampling import choice as sampling
from mlx_tandem.model.ops.sampling.sampler import MLX_PICKERS, Pickers

log = logging.getLogger(__name__)

ONCE = (
    PRODUCTS := "checking products",
    MODEL := "checking the model",
    ATTENTION := "checking attention",
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
    """Why attention blocks run their own code; empty if they are on the fused path or cannot be."""

    adapters: Choice[GroupedDeltas | None] | None
    """None: they are chosen when the first adapter is loaded."""

    sampling: Choice[Pickers]

    def choices(self, mask_axes: int) -> KernelChoices:
        """Return the choices as plain data, from which `choose` builds the same functions."""
        few, products = self.products.chosen, Products(self.products.reason)
        if few is not None:
            products = Products(self.products.reason, by_shape(few.base), by_shape(few.adapted))
        kinds = {id(kernels): kernels for kernels in self.attention.layers if kernels is not None}
        divisions = tuple(kernels.attention.division for kernels in kinds.values())
        return KernelChoices(
            mask_axes=mask_axes,
            store_problem=inplace.writing().problem,
            products=products,
            attention=AttentionDivision(self.attention.name, self.attention.reason, divisions),
            own_blocks=self.own_blocks,
            adapters=None if self.adapters is None else limits_of(self.adapters),
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
    if config.deterministic:
        return _without(config, model)
    delta_net.verdict.give(None)
    report(PRODUCTS, 0.0)
    merged = use_views(model.module, merged) if candidates else merged
    modules = few_rows.candidates(model.module, merged)
    products = few_rows.choose(modules)
    if products.chosen is not None:
        few_rows.speed_up(modules, merged, products.chosen)
    prepare()
    report(MODEL, 0.0)
    found = examine(config, model)
    report(ATTENTION, 0.0)
    asked, block_size = config.cache.attention_backend, config.cache.block_size
    chosen = attention.choose(asked, found.layers, block_size, probe.windows(model), candidates)
    own_blocks = ""
    if any(chosen.layers):
        own = found.layers, chosen.layers, block_size, found.mask_axes
        seconds = partial(probe.decode_seconds, model, *own, states=found.states)
        error = partial(probe.fused_error, model, found.vocab_size, *own, found.states)
        timed = seconds if asked == attention.AUTO else None
        own_blocks = block.choose(model.module, timed, error, adapters=config.lora.max_loras > 0)
    adapters = None if lora.can_wait(model.module, config.lora) else _choose_adapters(config, model, report)
    kernels = Kernels(products, chosen, own_blocks, adapters, sampling.choose(model.dtype, found.vocab_size))
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
    inplace.given(given.store_problem)
    gated_delta.verdict.give(given.rule_problem)
    delta_net.verdict.give(given.own_delta_nets)
    merged = use_views(model.module, merged) if candidates and not config.deterministic else merged
    products: Choice[FewRows | None] = Choice(None, given.products.reason)
    if given.products.adapted:
        few = few_rows.made(forms_of(given.products.base), forms_of(given.products.adapted))
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


def problem(config: EngineConfig, model: LoadedModel, twin: nn.Module, found: probe.Examined, kernels: Kernels) -> str:
    """Return what is wrong with the model's kernels, by one run of each beside plain operations; empty if nothing is.

    `twin` is the model without any changes.
    """
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


def limits_of(choice: Choice[GroupedDeltas | None]) -> AdapterLimits:
    """Return the choice of the kernels of adapters as plain data."""
    deltas = choice.chosen
    return AdapterLimits(choice.reason) if deltas is None else AdapterLimits(choice.reason, deltas.same, deltas.mixed)


def by_shape(forms: Forms) -> tuple[FormsByShape, ...]:
    """Return the forms by shape, divided by kernel, as they are saved."""

    def only(kind: type[Any], own: Mapping[int, AnyForm]) -> dict[int, Any]:
        return {eighths: form for eighths, form in own.items() if isinstance(form, kind)}

    return tuple(FormsByShape(shape, only(Form, own), only(WideForm, own)) for shape, own in forms.items())


def forms_of(kept: Sequence[FormsByShape]) -> Forms:
    """Return the forms that `by_shape` divided."""
    return {one.shape: {**one.forms, **one.wide} for one in kept}
