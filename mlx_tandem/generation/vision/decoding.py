"""Decodes images in the calling process, which an image may end; sizes are checked before anything is decoded."""

from __future__ import annotations

import warnings
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mlx_tandem.limits import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGE_RATIO

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""The formats that are decoded, under Pillow's names."""


class BadImage(Exception):
    """The error for an image that cannot be used. Its text follows the name of the image's field."""


def decoded(data: bytes) -> Image.Image:
    """Return the image in `data`, or the first frame of an animation, upright and in RGB. Raises BadImage.

    What is transparent in it shows white behind it.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise BadImage(f"has over {MAX_IMAGE_BYTES} bytes")
    if (size := webp_size(data)) is not None:  # Pillow allocates the canvas of a WebP file when it opens it.
        check_pixels(*size)
    Image.MAX_IMAGE_PIXELS = MAX_IMAGE_PIXELS  # Pillow checks the sizes that it finds inside a file.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image = Image.open(BytesIO(data), formats=FORMATS)
            check_pixels(*image.size)
            return _on_white(ImageOps.exif_transpose(image))
        except (BadImage, MemoryError):
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise BadImage(_TOO_MANY) from None
        except UnidentifiedImageError:
            raise BadImage("is no PNG, JPEG, WebP or GIF image, or a damaged one") from None
        except Exception:  # Pillow raises errors of many types for damaged files.
            raise BadImage("is damaged or cut off") from None


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image in RGB, composed over white where it is transparent."""
    seen: Image.Image | None = None  # white where the image is opaque
    if image.mode == "I;16":  # Pillow's own conversion cuts these levels off at 255 instead of scaling them.
        levels = np.asarray(image)
        clear = image.info.get("transparency")
        if clear is not None:
            seen = Image.fromarray(np.where(levels == clear, 0, 255).astype(np.uint8))
        image = Image.fromarray((levels >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        seen = image.getchannel("A")
    if seen is None:
        return image.convert("RGB")
    made = Image.new("RGB", image.size, "white")
    made.paste(image.convert("RGB"), mask=seen)
    return made


_TOO_MANY = f"has over {MAX_IMAGE_PIXELS} pixels"


def check_pixels(width: int, height: int) -> None:
    """Raise BadImage for an image of too many pixels or of none, and for one that is nearly a line."""
    if width < 1 or height < 1:
        raise BadImage("has no pixels")
    if width * height > MAX_IMAGE_PIXELS:
        raise BadImage(_TOO_MANY)
    if max(width, height) > MAX_IMAGE_RATIO * min(width, height):  # Some processors scale the shorter side up.
        raise BadImage(f"has one side that is over {MAX_IMAGE_RATIO} times as long as the other")


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Return the width and height of the canvas in the header of a WebP file; None for other files.

    The format is described at https://developers.google.com/speed/webp/docs/riff_container.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return None
