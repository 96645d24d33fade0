"""How many placeholder tokens an image takes in each family, and which tokens stand around them.

The texts are those of the families' processors in transformers (Apache 2.0), which mlx-vlm's follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_tandem.generation.vision.messages import Setup
from mlx_tandem.model_folder import VISION_FAMILIES

if TYPE_CHECKING:
    import numpy as np

Arrays = Mapping[str, "np.ndarray"]


@dataclass(frozen=True)
class Layout:
    """The text that stands for an image in the prompt, and how often each placeholder token in it is repeated."""

    text: str
    runs: list[int]


@dataclass(frozen=True)
class Family:
    """What the prompts of a family have for an image.

    `placeholder` is what the chat template prints for an image, and `token` the text of the placeholder token.
    `layout` gets the folder's parts, the side of the processor's patch, its merge size, and the arrays of an image.
    """

    placeholder: str
    token: str
    layout: Callable[[Setup, int, int, Arrays], Layout]
    unused: frozenset[str] = frozenset()  # arrays that only the layout needs


def family_of(setup: Setup) -> Family:
    """Return the family of a folder. A `llava` folder with Pixtral's encoder is laid out like `pixtral`."""
    tower = _part(setup.config, "vision_config").get("model_type")
    layout = VISION_FAMILIES[setup.family].layout
    return LAYOUTS["pixtral" if layout == "llava" and tower == "pixtral" else layout]


def _llava(setup: Setup, patch: int, merge: int, arrays: Arrays) -> Layout:
    """Lay out one token for each patch. With the strategy `default` the first of the tower's outputs is left out."""
    tower = _part(setup.config, "vision_config")
    side = int(setup.processor.get("patch_size") or tower.get("patch_size") or 14)
    strategy = setup.processor.get("vision_feature_select_strategy")
    strategy = strategy or setup.config.get("vision_feature_select_strategy") or "default"
    more = setup.processor.get("num_additional_image_tokens")
    if more is None:  # The class token of CLIP's tower.
        more = int(tower.get("model_type", "clip_vision_model") == "clip_vision_model")
    height, width = arrays["pixel_values"].shape[-2:]
    return Layout("<image>", [(height // side) * (width // side) + int(more) - (strategy == "default")])


def _gemma3(setup: Setup, patch: int, merge: int, arrays: Arrays) -> Layout:
    count = int(setup.processor.get("image_seq_length") or setup.config.get("mm_tokens_per_image") or 256)
    return Layout("\n\n<start_of_image><image_soft_token><end_of_image>\n\n", [count])


def _gemma4(setup: Setup, patch: int, merge: int, arrays: Arrays) -> Layout:
    return Layout("<|image><|image|><image|>", [int(arrays["num_soft_tokens_per_image"][0])])


def _pixtral(setup: Setup, patch: int, merge: int, arrays: Arrays) -> Layout:
    """Lay out a run for each row of patches, with a token after each row."""
    height, width = (int(n) for n in arrays["image_sizes"].reshape(-1)[:2])
    rows, columns = height // patch, width // patch
    return Layout("[IMG][IMG_BREAK]" * (rows - 1) + "[IMG][IMG_END]", [columns] * rows)


def _internvl(setup: Setup, patch: int, merge: int, arrays: Arrays) -> Layout:
    """Lay out the tokens of all tiles as one run. Folders of `internvl_chat` say how many a tile has by its shape."""
    tower = _part(setup.config, "vision_config")
    side = int(setup.config.get("force_image_size") or tower.get("image_size") or 448) // int(
        tower.get("patch_size") or 14
    )
    usual = int(side**2 * float(setup.config.get("downsample_ratio") or 0.5) ** 2)
    count = int(setup.processor.get("image_seq_length") or usual)
    return Layout("<img><IMG_CONTEXT></img>", [count * len(arrays["pixel_values"])])


def _idefics3(setup: Setup, patch: int, merge: int, arrays: Arrays) -> Layout:
    """Lay out a run for each tile, row by row, and one for the whole image."""
    tower = _part(setup.config, "vision_config")
    side, scale = (
        int(tower.get("image_size", 364)) // int(tower.get("patch_size", 14)),
        setup.config.get("scale_factor", 2),
    )
    count = int(setup.processor.get("image_seq_len") or (side // int(scale)) ** 2)
    rows, columns = (int(arrays[name].reshape(-1)[0]) for name in ("rows", "cols"))
    around, whole = "<fake_token_around_image>", "<global-img><image>"
    if not rows and not columns:
        return Layout(around + whole + around, [count])
    lines = ["".join(f"{around}<row_{r + 1}_col_{c + 1}><image>" for c in range(columns)) for r in range(rows)]
    text = "".join(line + "\n" for line in lines) + f"\n{around}{whole}{around}"
    return Layout(text, [count] * (rows * columns + 1))


def _qwen(setup: Setup, patch: int, merge: int, arrays: Arrays) -> Layout:
    return Layout("<|image_pad|>", [int(arrays["image_grid_thw"].prod()) // merge**2])


LAYOUTS: Mapping[str, Family] = {
    "llava": Family("<image>", "<image>", _llava),
    "gemma3": Family("<start_of_image>", "<image_soft_token>", _gemma3, frozenset(("num_crops",))),
    "gemma4": Family("<|image|>", "<|image|>", _gemma4, frozenset(("num_soft_tokens_per_image",))),
    "pixtral": Family("[IMG]", "[IMG]", _pixtral),
    "internvl": Family("<IMG_CONTEXT>", "<IMG_CONTEXT>", _internvl, frozenset(("num_patches",))),
    # The mask of one image is all ones, which is what a model takes without a mask.
    "idefics3": Family("<image>", "<image>", _idefics3, frozenset(("rows", "cols", "pixel_attention_mask"))),
    "qwen": Family("<|image_pad|>", "<|image_pad|>", _qwen),
}
"""By the names that `VisionFamily.layout` has."""


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object `name` of a configuration; an empty one if there is none."""
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}
