"""Vision model folders of a few kilobytes with random weights, in mlx-vlm's layout; images and videos for them; and
mlx-vlm's own answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from safetensors.numpy import load, save

from mlx_tandem.model.vision import library
from mlx_tandem.model_folder import VISION_FAMILIES
from mlx_tandem.types import Image
from tests.tiny_models import VOCAB, _draw

IMAGE, BREAK, BEGIN, VIDEO = 290, 291, 292, 293
"""Ids of the placeholder of images, of the token that pixtral puts behind each line of patches, of the token that the
qwen families put before an image, and of the placeholder of videos."""

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_scaling": None,
}

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 32,
}


@dataclass(frozen=True)
class Family:
    """What a family's folder says besides the common shapes, and how its processor would describe an image."""

    text: str
    """The type of its language model."""
    vision: str
    tokens: int
    """Placeholders of an image."""
    line: int = 0
    """Placeholders between two breaks; 0: there are no breaks."""
    text_more: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    tiles: bool = False
    """Whether its images have an axis of tiles."""
    sizes: bool = False
    """Whether the size of an image goes with it."""
    grid: tuple[int, int] = (0, 0)
    """Lines and columns of an image's patches, in families whose positions have several axes."""
    vision_more: dict[str, Any] = field(default_factory=dict)
    squares: int = 0
    """Patches on each side of the square that a placeholder stands for, in families whose images are lists of patches;
    0: they are not.
    """
    flat: bool = False
    """Whether its folders describe the language model beside its settings, not within."""


_AXES = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "attention_bias": True}

_QWEN_VISION = {
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 2,
    "fullatt_block_indexes": [1],
    "window_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}

_DEEP = {"deepstack_visual_indexes": [0]}

_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

_STATES = {
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "head_dim": 32,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [4, 2, 2],
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
}
"""Of two layers the first keeps a state. Half of a head is turned."""

FAMILIES = {
    "llava": Family("llama", "clip_vision_model", 16),
    "pixtral": Family("mistral", "pixtral", 16, line=4, sizes=True),
    "mistral3": Family("mistral", "pixtral", 4, line=2, sizes=True),
    "gemma3": Family(
        "gemma3_text",
        "siglip_vision_model",
        4,
        text_more={
            "mm_tokens_per_image": 4,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
            "rope_theta": 1e6,  # which mlx-vlm calls rope_global_base_freq, and assumes
        },
        more={"hidden_size": 64, "vocab_size": VOCAB},
    ),
    "gemma4": Family(
        "gemma4_text",
        "gemma4_vision",
        4,
        squares=2,
        text_more={
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
            },
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "sliding_window": 16,
            "tie_word_embeddings": True,
            "enable_moe_block": False,
        },
        more={"vocab_size": VOCAB, "image_token_id": IMAGE, "video_token_id": VIDEO},
        vision_more={
            "global_head_dim": 16,
            "num_key_value_heads": 2,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
            "default_output_length": 6,
            "use_clipped_linears": True,
            "standardize": True,
        },
    ),
    "idefics3": Family("llama", "idefics3_vision", 8, tiles=True),
    "smolvlm": Family("llama", "siglip_vision_model", 8, tiles=True),
    "internvl_chat": Family("qwen2", "intern_vit_6b", 4),
    "qwen2_vl": Family("qwen2_vl", "qwen2_vl", 6, 0, _AXES, grid=(4, 6), vision_more={"hidden_size": 64}, flat=True),
    "qwen3_vl": Family("qwen3_vl", "qwen3_vl", 6, 0, _AXES, grid=(4, 6), vision_more=_DEEP),
    "qwen3_vl_moe": Family("qwen3_vl_moe", "qwen3_vl_moe", 6, 0, _AXES | _EXPERTS, grid=(4, 6), vision_more=_DEEP),
    "qwen2_5_vl": Family("qwen2_5_vl", "qwen2_5_vl", 15, 0, _AXES, grid=(6, 10), flat=True),
    "qwen3_5": Family("qwen3_5_text", "qwen3_5", 6, 0, _STATES, grid=(4, 6)),
    "qwen3_5_moe": Family("qwen3_5_moe_text", "qwen3_5_moe", 6, 0, _STATES | _EXPERTS, grid=(4, 6)),
}


def make(folder: Path, family: str, *, seed: int = 0, bits: int = 0) -> Path:
    """Write a folder that mlx-vlm loads. `bits`: quantise what can be quantised in groups of 32; 0: nothing."""
    own = FAMILIES[family]
    config = {
        "model_type": family,
        "image_token_index": IMAGE,
        "eos_token_id": 2,
        **own.more,
        "text_config": {**_TEXT, "model_type": own.text, **own.text_more},
        "vision_config": {**_VISION, "model_type": own.vision},
    }
    if own.vision == "pixtral":
        config["vision_config"]["rope_theta"] = 10_000.0
    config["vision_config"] |= own.vision_more
    if own.grid[0]:
        if own.flat:
            config |= config.pop("text_config")
        config |= {"model_type": family, "image_token_id": IMAGE, "vision_start_token_id": BEGIN}
        config["video_token_id"] = VIDEO
        config["vision_config"] |= _QWEN_VISION | own.vision_more
    model = build(config)
    rng = np.random.default_rng(seed)
    parameters: Any = tree_flatten(model.parameters())
    weights = {name: _draw(rng, name, p) for name, p in parameters}
    # Gemma 4's encoder cuts its numbers off between two bounds.
    weights |= {name: -w for name, w in weights.items() if name.endswith(("input_min", "output_min"))}
    if family == "gemma3":  # its head is the embedding; mlx-vlm has a copy of it
        weights["language_model.lm_head.weight"] = weights["language_model.model.embed_tokens.weight"]
    if bits:
        model.load_weights(list(weights.items()))
        nn.quantize(model, 32, bits, class_predicate=_is_wide)
        weights = dict(tree_flatten(model.parameters()))
        config["quantization"] = {"group_size": 32, "bits": bits}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _is_wide(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def build(config: dict[str, Any]) -> Any:
    module = library.family(config["model_type"])
    made = module.ModelConfig.from_dict(dict(config))
    made.text_config = module.TextConfig.from_dict(config.get("text_config", config))
    made.vision_config = module.VisionConfig.from_dict(config["vision_config"])
    return module.Model(made)


def image(family: str, seed: int, start: int = 0) -> Image:
    """A random image, whose first placeholder is at `start`."""
    own, rng = FAMILIES[family], np.random.default_rng(seed)
    lines, columns = own.grid
    shape: tuple[int, ...] = (1, 2, 3, 16, 16) if own.tiles else (1, 3, 16, 16)
    shape = (lines * columns, 3 * 16) if lines else shape
    if own.squares:  # The last patches are padding.
        side = 2 * own.squares
        places = np.full((1, (own.tokens + 2) * own.squares**2, 2), -1, np.int32)
        places[0, : side**2] = [(n % side, n // side) for n in range(side**2)]
        shape = (1, places.shape[1], 3 * 16)
    arrays: dict[str, Any] = {"pixel_values": rng.standard_normal(shape).astype(np.float32)}
    if own.squares:
        arrays["image_position_ids"] = places
    if lines:
        arrays["image_grid_thw"] = np.array([[1, lines, columns]], np.int32)
    if own.sizes:
        arrays["image_sizes"] = np.array([[16, 16]], np.int32)
    if own.tiles:
        arrays["pixel_attention_mask"] = np.ones((1, 2, 16, 16), np.int32)
    content = save(arrays)
    digest = blake2b(family.encode() + content, digest_size=16).digest()
    return Image(digest, start, own.tokens, content)


@dataclass(frozen=True)
class Clip:
    """A video: the seeds of its groups of two frames each, and where these lie on the axis of time."""

    seeds: tuple[int, ...]
    times: tuple[int, ...] = ()
    """Empty: the numbers of the groups."""


def group(family: str, seed: int, start: int, time: int = 0, follows: bool = False) -> Image:
    """A group of two random frames that differ, or an image where frames are images, which begins at `start`."""
    if FAMILIES[family].squares:
        return image(family, 100 + seed, start)
    own, rng = FAMILIES[family], np.random.default_rng((7, seed))
    lines, columns = own.grid
    pixels = rng.standard_normal((lines * columns, 3 * 2 * 16)).astype(np.float32)
    content = save({"pixel_values_videos": pixels, "video_grid_thw": np.array([[1, lines, columns]], np.int32)})
    digest = blake2b(family.encode() + content + bytes((time, follows)), digest_size=16).digest()
    return Image(digest, start, own.tokens, content, time, follows)


def clip(family: str, given: Clip, start: int) -> tuple[tuple[int, ...], list[Image]]:
    """The tokens and groups of a video at `start`. Where texts have the times, one token stands for each text."""
    stamped = VISION_FAMILIES[family].videos in ("texts", "clock")
    tokens: tuple[int, ...] = () if stamped else (BEGIN,)
    groups: list[Image] = []
    for n, seed in enumerate(given.seeds):
        if stamped:
            tokens += (50 + n, BEGIN)
        time = 0 if stamped else (given.times or range(len(given.seeds)))[n]
        groups.append(group(family, seed, start + len(tokens), time, n > 0 and not stamped))
        tokens += (VIDEO,) * FAMILIES[family].tokens
    return tokens, groups


def placeholders(family: str) -> tuple[int, ...]:
    """The tokens that stand for an image in a prompt."""
    own = FAMILIES[family]
    if not own.line:
        return (IMAGE,) * own.tokens
    return ((IMAGE,) * own.line + (BREAK,)) * (own.tokens // own.line)


Parts = Sequence[tuple[int, ...] | int | Clip]
"""The parts of a prompt: texts, images by their seeds, and videos."""


def prompt(family: str, parts: Parts) -> tuple[tuple[int, ...], tuple[Image, ...]]:
    """The tokens and images of a prompt."""
    tokens: tuple[int, ...] = ()
    images: list[Image] = []
    for part in parts:
        if isinstance(part, int):
            if FAMILIES[family].grid[0]:
                tokens += (BEGIN,)
            images.append(image(family, part, len(tokens)))
            part = placeholders(family)
        elif isinstance(part, Clip):
            part, groups = clip(family, part, len(tokens))
            images += groups
        tokens += part
    return tokens, tuple(images)


class Oracle:
    """mlx-vlm's own model of a folder, one sequence at a time, over its own cache."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        self.model = build(config)
        if how := config.get("quantization"):
            nn.quantize(self.model, how["group_size"], how["bits"], class_predicate=_is_wide)
        weights: Any = mx.load(str(folder / "model.safetensors"))
        self.model.load_weights(list(weights.items()))
        self.model.eval()
        self._said: dict[Any, tuple[list[int], list[np.ndarray[Any, Any]]]] = {}

    def greedy(
        self, tokens: tuple[int, ...], images: Sequence[Image], count: int
    ) -> tuple[list[int], list[np.ndarray[Any, Any]]]:
        """The tokens that follow, and at each the logprobs of the whole vocabulary."""
        key = tokens, tuple(i.digest for i in images), count
        if key not in self._said:
            self._said[key] = self._greedy(tokens, images, count)
        return self._said[key]

    def _greedy(
        self, tokens: tuple[int, ...], images: Sequence[Image], count: int
    ) -> tuple[list[int], list[np.ndarray[Any, Any]]]:
        ids, language = mx.array([tokens]), self.model.language_model
        language._rope_deltas = language._position_ids = None  # of the sequence before, in the qwen families
        found = self.embeddings(ids, images)
        cache = language.make_cache() if hasattr(language, "make_cache") else make_prompt_cache(language)
        said: list[int] = []
        logprobs: list[np.ndarray[Any, Any]] = []
        for _ in range(count):
            given = found if not said else {}
            logits = language(mx.array([said[-1:]]) if said else ids, cache=cache, **given).logits[0, -1]
            logprobs.append(np.array(logits - mx.logsumexp(logits)))
            said.append(int(logprobs[-1].argmax()))
        return said, logprobs

    def embeddings(self, ids: mx.array, images: Sequence[Image]) -> dict[str, Any]:
        """What mlx-vlm computes of a prompt with one image after the other before the language model."""
        if not images:
            return {}
        arrays = [load(i.arrays) for i in images]
        if any("pixel_values_videos" in a for a in arrays):
            return self._with_videos(ids, images, arrays)
        if "image_position_ids" in arrays[0]:
            return self._with_frames(ids, images, arrays)
        axis = 1 if arrays[0]["pixel_values"].ndim == 5 else 0
        joined = {
            name: mx.array(np.concatenate([a[name] for a in arrays], axis if axis and name.startswith("pixel") else 0))
            for name in arrays[0]
        }
        mask, pixels = mx.ones(ids.shape, mx.int32), joined.pop("pixel_values")
        if "image_grid_thw" in joined:  # a patch has two equal frames, of which an image's arrays have one
            pixels = mx.array(_twice(np.array(pixels)))
        return self._given(self.model.get_input_embeddings(ids, pixels, mask=mask, **joined))

    def _with_frames(self, ids: mx.array, images: Sequence[Image], arrays: Sequence[Any]) -> dict[str, Any]:
        """The same where frames are images. mlx-vlm takes them with an axis of videos before that of frames."""
        given: dict[str, Any] = {}
        for token, axes, pixels, places in (
            (IMAGE, (), "pixel_values", "image_position_ids"),
            (VIDEO, (None,), "pixel_values_videos", "video_position_ids"),
        ):
            own = [a for i, a in zip(images, arrays, strict=True) if ids[0, i.start].item() == token]
            if own:
                given[pixels] = mx.array(np.concatenate([a["pixel_values"] for a in own])[axes])
                given[places] = mx.array(np.concatenate([a["image_position_ids"] for a in own])[axes])
        return self._given(self.model.get_input_embeddings(ids, **given))

    def _with_videos(self, ids: mx.array, images: Sequence[Image], arrays: Sequence[Any]) -> dict[str, Any]:
        """The same of a prompt with videos. mlx-vlm takes no images beside videos, so it is told that the latter are
        images then, except where it computes positions.
        """
        model, mask = self.model, mx.ones(ids.shape, mx.int32)
        clips: list[list[int]] = []
        for image, a in zip(images, arrays, strict=True):
            if image.follows:
                clips[-1][0] += 1
            elif "video_grid_thw" in a:
                clips.append(a["video_grid_thw"][0].tolist())
        given: dict[str, Any] = {"video_grid_thw": mx.array(clips)}
        if all("video_grid_thw" in a for a in arrays):
            pixels = mx.array(np.concatenate([a["pixel_values_videos"] for a in arrays]))
            found = model.get_input_embeddings(ids, mask=mask, pixel_values_videos=pixels, **given)
        else:
            whole = [a.get("pixel_values_videos", _twice(a.get("pixel_values"))) for a in arrays]
            grids = [a["video_grid_thw" if "video_grid_thw" in a else "image_grid_thw"] for a in arrays]
            own = [a["image_grid_thw"] for a in arrays if "image_grid_thw" in a]
            given["image_grid_thw"] = mx.array(np.concatenate(own))
            found = model.get_input_embeddings(
                mx.where(ids == VIDEO, IMAGE, ids),
                mx.array(np.concatenate(whole)),
                mask=mask,
                image_grid_thw=mx.array(np.concatenate(grids)),
            )
            found.position_ids, found.rope_deltas = model.language_model.get_rope_index(
                ids, given["image_grid_thw"], given["video_grid_thw"], mask
            )
        if any(image.time for image in images):
            _set_times(found, images)
        return self._given(found)

    def _given(self, found: Any) -> dict[str, Any]:
        """What the language model takes of these features."""
        names = (
            *("inputs_embeds", "per_layer_inputs"),
            *("position_ids", "rope_deltas", "visual_pos_masks", "deepstack_visual_embeds"),
        )
        return {name: getattr(found, name) for name in names if getattr(found, name) is not None}


def _twice(patches: Any) -> Any:
    """Patches of one frame as patches of two equal frames."""
    if patches is None:
        return None
    return np.repeat(patches.reshape(len(patches), 3, 1, -1), 2, axis=2).reshape(len(patches), -1)


def _set_times(found: Any, images: Sequence[Image]) -> None:
    """Set the positions of videos' groups on the axis of time, where mlx-vlm puts their numbers.

    What follows a video is behind the largest of its positions.
    """
    positions = np.array(found.position_ids)
    begin = 0
    for n, image in enumerate(images):
        own = slice(image.start, image.start + image.tokens)
        begin = begin if image.follows else int(positions[0, 0, image.start])
        positions[0, 0, own] = begin + image.time
        if n + 1 == len(images) or not images[n + 1].follows:
            behind = int(max(positions[:, 0, own].max(), begin)) + 1
            positions[:, 0, own.stop :] += behind - positions[0, 0, own.stop]
    found.position_ids = mx.array(positions)
    found.rope_deltas = mx.array([[int(positions.max()) + 1 - positions.shape[-1]]])
