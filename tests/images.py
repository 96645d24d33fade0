"""Images, and a model folder that reads them, for tests."""

from __future__ import annotations

import base64
import json
import random
import shutil
import struct
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from mlx_tandem import demo

IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
{% if part.type == 'image' %}<|image_pad|>{% elif part.type == 'video' %}<|video_pad|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template that prints a placeholder where a message has an image or a video, as Qwen's do."""


def picture(width: int, height: int, form: str = "PNG", **options: Any) -> bytes:
    """Return an image of noise, which is the same for the same arguments."""
    noise = random.Random(width * 65_537 + height).randbytes(width * height * 3)
    out = BytesIO()
    Image.frombytes("RGB", (width, height), noise).save(out, form, **options)
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG file of this size without its pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def data_url(image: bytes, media: str = "image/png") -> str:
    """Return the `data:` URL of an image."""
    return f"data:{media};base64,{base64.b64encode(image).decode()}"


def frames_url(frames: Sequence[bytes]) -> str:
    """Return the `data:` URL of a video with these images as its frames."""
    return f"data:video/jpeg;base64,{','.join(base64.b64encode(frame).decode() for frame in frames)}"


def vision_folder(folder: Path) -> tuple[Path, int]:
    """Make a folder with the tokenizer of the built-in model that says it reads images as Qwen 2 VL does, without
    weights; return it and the id of its placeholder of images, which that of videos follows.
    """
    shutil.copytree(demo.MODEL_PATH, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    token = 1 + max(t["id"] for t in tokenizer["added_tokens"])
    token = max(token, 1 + max(tokenizer["model"]["vocab"].values()))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for id, content in enumerate((IMAGE_TOKEN, VIDEO_TOKEN), token):
        tokenizer["added_tokens"].append({"id": id, "content": content, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen2_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 64}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder, token
