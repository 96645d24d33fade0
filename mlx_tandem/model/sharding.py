"""One rank's share of a model, where several ranks compute it together (tensor parallelism).

mlx-lm decides for each family which weights are divided. Two kinds of linears come of it. The outputs of one kind are
divided: each rank computes some of them, which is a plain linear with fewer outputs. The inputs of the other kind are
divided: each rank's product is a part of a sum over all ranks. `Summed` adds these parts up around everything else that
changes the linear, so that an adapter's delta is part of the rank's part. Inside blocks of experts and of recurrent
layers, the block's own code adds up.

Until `join`, a rank computes alone, as if the others' parts were zero. In this way kernels are checked and timed, each
rank as often as it likes. After `join`, all ranks have to compute the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.utils import tree_map, tree_unflatten

from mlx_tandem.errors import ModelError
from mlx_tandem.model.loader import LoadedModel, first_line
from mlx_tandem.model.modules import clone, mix_in
from mlx_tandem.model.ops.all_sum import Sums
from mlx_tandem.model.targets import Cut, find_head, find_targets
from mlx_tandem.model_folder import text_settings

FLAG = "--tensor-parallel-size"

_DIVIDED = (
    ("num_attention_heads", "query heads"),
    ("num_key_value_heads", "heads of keys and values"),
    ("linear_num_key_heads", "key heads of its recurrent layers"),
    ("linear_num_value_heads", "value heads of its recurrent layers"),
)
"""Settings whose numbers are divided between the ranks, and what they count."""

_LATENT = "kv_lora_rank"
"""Setting of models that cache latent vectors, of which every rank has all."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The number of a rank, from 0, and how many ranks there are.

    It stands in for a group of MLX before the ranks are connected.
    """

    number: int
    ranks: int

    def rank(self) -> int:
        """Return the number of this rank, as a group does."""
        return self.number

    def size(self) -> int:
        """Return the number of ranks, as a group does."""
        return self.ranks


class Summed:
    """Mixin of a linear whose inputs are divided between the ranks: its output is the sum of all ranks' products.

    It stays outside all other mixins, so that what they add, such as an adapter's delta, is in this rank's part.
    """

    outermost = True
    sharding_group: mx.distributed.Group | None
    sums: Sums

    def __call__(self, x: mx.array) -> mx.array:
        """Return the sum over the ranks; this rank's part alone before `join`."""
        part: mx.array = super().__call__(x)  # type: ignore[misc]
        return part if self.sharding_group is None else self.sums(part)


class Gathered:
    """Mixin of an output head whose outputs are divided: it returns the outputs of all ranks, side by side.

    It stays outside all other mixins. `ranks` is the number of ranks.
    """

    outermost = True
    sharding_group: mx.distributed.Group | None
    ranks: int

    def __call__(self, x: mx.array) -> mx.array:
        """Return the logits of the whole vocabulary; before `join` this rank's, repeated to the same width."""
        part: mx.array = super().__call__(x)  # type: ignore[misc]
        if self.sharding_group is None:
            return mx.concatenate([part] * self.ranks, axis=-1)
        lines = part.reshape(-1, part.shape[-1])
        every = mx.distributed.all_gather(lines.T, group=self.sharding_group)  # along the first axis
        return every.T.reshape(*part.shape[:-1], -1)


def require(model: LoadedModel, ranks: int) -> None:
    """Raise ModelError if a model cannot be divided between so many ranks. Nothing of its weights is read."""
    module: Any = model.module
    if not hasattr(module, "shard"):
        raise _refused(model, "the installed mlx-lm does not say how its layers are divided between ranks")
    if model.mtp is not None:
        raise ModelError(f"--spec-decode mtp is not served with {FLAG} over 1", param="speculation")
    settings = text_settings(model.settings)
    for name, what in _DIVIDED:
        number = settings.get(name)
        if name == "num_key_value_heads" and _LATENT in settings:
            continue
        if isinstance(number, int) and number % ranks:
            raise _refused(model, f"its {number} {what} ({name}) cannot be divided by {ranks}")


def shard(model: LoadedModel, place: RankPlace) -> LoadedModel:
    """Return a rank's share of a model, whose weights are unread and of which only this share is read then.

    Raises:
        ModelError: The model cannot be divided between so many ranks.
    """
    require(model, place.ranks)
    module: Any = model.module
    try:
        cuts = find_cuts(module, place)
        module.shard(place)
        _as_plain_linears(module, place)
    except ModelError:
        raise
    except Exception as e:  # mlx-lm's code of each family fails in its own way
        raise _refused(model, f"it cannot be divided between {place.ranks} ranks ({first_line(e)})") from e
    modules = dict(module.named_modules())
    for path, cut in cuts.items():
        modules[path]._cut = cut
    _take_groups(module)
    return replace(model, heads=max(1, model.heads // place.ranks))


def join(module: nn.Module, group: mx.distributed.Group) -> Sums:
    """Have a model that was sharded compute together with the other ranks of `group` from here on, and return what sums
    up its linears.

    Steps that were compiled before compute without them.
    """
    sums = Sums(group)
    for each in module.modules():
        own: Any = each
        if getattr(own, "_sums", False):
            own.sharding_group = group
        if isinstance(own, Summed):
            own.sums = sums
    return sums


def find_cuts(module: nn.Module, place: RankPlace) -> dict[str, Cut]:
    """Return by path what a rank has of each divided linear, whatever the code of the family does with its weights.

    The family's code divides a copy of the model, in whose weights each row is the number of an output.
    """
    copy: Any = clone(module)
    # Some families divide a bias in place, which would change the array of both trees.
    copy.update(tree_map(mx.stop_gradient, copy.parameters()))
    targets = [*find_targets(copy).values()]
    head = find_head(copy)
    if head is not None and isinstance(head.module, (nn.Linear, nn.QuantizedLinear)):
        targets.append(head)
    marked = []
    for target in targets:
        outputs, lead = target.shape.outputs, (1,) if target.shape.experts else ()
        own: Any = target.module if target.shape.experts else nn.Linear(1, 1, bias=False)
        if "bias" in target.module:
            own.bias = target.module["bias"]
        for name in ("scales", "biases"):
            own.pop(name, None)
        own.weight = mx.broadcast_to(mx.arange(outputs)[:, None], (*lead, outputs, place.ranks))
        marked.append((target.path, own))
    copy.update_modules(tree_unflatten(marked))
    copy.shard(place)
    modules = dict(copy.named_modules())
    cuts = {}
    for target in targets:
        weight = modules[target.path]["weight"]
        numbers = np.array(weight[..., 0]).reshape(-1)
        cut = Cut(
            target.shape,
            None if np.array_equal(numbers, np.arange(target.shape.outputs)) else numbers,
            None if weight.shape[-1] == place.ranks else _part(target.shape.inputs, place),
        )
        if cut.outputs is not None or cut.inputs is not None:
            cuts[target.path] = cut
    return cuts


def _part(size: int, place: RankPlace) -> slice:
    """Return this rank's part of an axis that is divided into equal parts."""
    width = size // place.ranks
    return slice(width * place.number, width * (place.number + 1))


def _as_plain_linears(module: nn.Module, place: RankPlace) -> None:
    """Turn mlx's linears for several ranks into plain ones, of which those with divided inputs are `Summed`.

    The first rank's part of the sum has the bias, and the others' have zeros in its place.
    """
    plain: dict[Any, Any] = {AllToShardedLinear: nn.Linear, ShardedToAllLinear: nn.Linear}
    plain |= {QuantizedAllToShardedLinear: nn.QuantizedLinear, QuantizedShardedToAllLinear: nn.QuantizedLinear}
    for each in module.modules():
        kind, own = type(each), _any(each)
        if kind not in plain:
            continue
        own.__class__ = plain[kind]
        del own.group
        if own.get("biases", 0) is None:
            del own["biases"]
        if kind in (ShardedToAllLinear, QuantizedShardedToAllLinear):
            if "bias" in own and place.number:
                own.bias = mx.zeros_like(own.bias)
            own._sums, own.sharding_group = True, None
            mix_in(own, Summed)


def _take_groups(module: nn.Module) -> None:
    """Take the group from the modules whose own code adds up over the ranks, until `join`.

    A model that puts the logits of all ranks together leaves that to its head.
    """
    for each in module.modules():
        own = _any(each)
        group = getattr(own, "sharding_group", None)
        if group is None:
            continue
        own.sharding_group = None
        head = own.get("lm_head")
        if head is not None:
            own = head
            own.ranks, own.sharding_group = group.size(), None
            mix_in(head, Gathered)
        own._sums = True


def _any(module: nn.Module) -> Any:
    """Return the module as an object of which nothing is known."""
    return module


def check_sums(group: mx.distributed.Group, shapes: Sequence[tuple[int, int]], dtype: mx.Dtype) -> str:
    """Check sums over the ranks of arrays of these shapes, two of each in flight at once. Return what is wrong, or an
    empty string.

    Each rank adds known whole numbers of its own, so small that their sums are exact in every type.
    """
    ranks, number = group.size(), group.rank()
    for rows, width in shapes:
        base, own = mx.arange(rows * width).reshape(rows, width), sum(each % 3 for each in range(ranks))
        parts = [((base + shift) % 7 + number % 3).astype(dtype) for shift in (0, 5)]
        sums = [mx.distributed.all_sum(part, group=group) for part in parts]
        mx.async_eval(*sums)
        for shift, total in zip((0, 5), sums, strict=True):
            expected = ((base + shift) % 7) * ranks + own
            if not bool(mx.array_equal(total.astype(mx.int32), expected).item()):
                return (
                    f"the sum of {rows} x {width} numbers ({str(dtype).rpartition('.')[2]}) over {ranks} ranks is wrong"
                )
    return ""


def _refused(model: LoadedModel, why: str) -> ModelError:
    return ModelError(
        f"model_type {model.model_type!r} is not served with {FLAG} over 1: {why}", param="tensor_parallel_size"
    )
