"""Decoding images: which are accepted, and that sizes are checked by the header."""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mlx_tandem.generation.vision.decoding import BadImage, decoded, webp_size
from mlx_tandem.limits import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGE_RATIO
from tests.images import picture, png_header


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_each_format_becomes_rgb(form: str) -> None:
    image = decoded(picture(7, 5, form))
    assert (image.mode, image.size) == ("RGB", (7, 5))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_each_kind_of_pixel_becomes_rgb(mode: str) -> None:
    out = BytesIO()
    Image.new(mode, (3, 2)).save(out, "PNG")
    assert decoded(out.getvalue()).mode == "RGB"


def saved(image: Image.Image, form: str, **more: Any) -> bytes:
    out = BytesIO()
    image.save(out, form, **more)
    return out.getvalue()


@given(st.lists(st.integers(0, 65_535), min_size=1, max_size=60))
def test_a_grey_image_of_16_bits_is_scaled_to_8(levels: list[int]) -> None:
    image = Image.fromarray(np.array([levels], np.uint16))
    shown = np.asarray(decoded(saved(image, "PNG")))
    assert (shown == np.array([[[level / 65_536 * 256] * 3 for level in levels]]).astype(np.uint8)).all()
    clear = np.asarray(decoded(saved(image, "PNG", transparency=levels[0])))
    assert (clear == np.where(np.array(levels)[None, :, None] == levels[0], 255, shown)).all()


BLACK_AND_CLEAR = np.array([[[9, 8, 7, 255], [9, 8, 7, 0], [9, 8, 7, 128]]], np.uint8)


@pytest.mark.parametrize(
    ("mode", "form", "more"),
    [
        ("RGBA", "PNG", {}),
        ("LA", "PNG", {}),
        ("RGBA", "WEBP", {"lossless": True, "exact": True}),
        ("RGBA", "GIF", {}),
    ],
)
def test_what_is_transparent_shows_white(mode: str, form: str, more: dict[str, Any]) -> None:
    shown = np.asarray(decoded(saved(Image.fromarray(BLACK_AND_CLEAR).convert(mode), form, **more)))
    opaque, clear, half = shown[0].astype(int)
    assert (opaque < 12).all()
    assert (clear == 255).all()
    if form != "GIF":  # whose pixels are opaque or not
        assert (abs(half - (255 + 8) / 2) < 3).all()


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_a_transparent_colour_of_a_palette_shows_white(form: str) -> None:
    image = Image.new("P", (2, 1), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    for clear in (0, b"\x00\xff") if form == "PNG" else (0,):
        shown = decoded(saved(image, form, transparency=clear))
        assert [shown.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (200, 100, 50)]


@pytest.mark.parametrize(("mode", "clear", "other"), [("1", 0, 255), ("L", 7, 90), ("RGB", (1, 2, 3), (90, 90, 90))])
def test_a_transparent_colour_without_a_palette_shows_white(mode: str, clear: Any, other: Any) -> None:
    image = Image.new(mode, (2, 1), clear)
    image.putpixel((1, 0), other)
    shown = decoded(saved(image, "PNG", transparency=clear))
    expected = (other,) * 3 if isinstance(other, int) else other
    assert [shown.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), expected]


def test_one_pixel_is_an_image() -> None:
    assert decoded(picture(1, 1)).size == (1, 1)


def test_an_image_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: turned by a quarter
    assert decoded(picture(20, 10, "JPEG", exif=exif)).size == (10, 20)


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    for form in ("GIF", "WEBP", "PNG"):
        out = BytesIO()
        frames[0].save(out, form, save_all=True, append_images=frames[1:] * 50, lossless=True)
        assert decoded(out.getvalue()).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("kept", [0.05, 0.5, 0.9])
def test_an_image_that_is_cut_off_is_refused(form: str, kept: float) -> None:
    whole = picture(64, 64, form)
    with pytest.raises(BadImage):
        decoded(whole[: int(len(whole) * kept)])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a" + b"\xff" * 64,
        b"RIFF\xff\xff\xff\xffWEBPVP8X" + b"\0" * 64,
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"BM" + bytes(64),
        b"\xff\xd8\xff\xe0" + bytes(64),
    ],
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(BadImage):
        decoded(data)


def test_other_formats_of_the_library_are_refused() -> None:
    for form in ("BMP", "TIFF", "PPM", "ICO"):
        with pytest.raises(BadImage, match="PNG, JPEG, WebP or GIF"):
            decoded(picture(16, 16, form))


def test_an_image_of_too_many_bytes_is_refused() -> None:
    with pytest.raises(BadImage, match="bytes"):
        decoded(picture(4, 4) + bytes(MAX_IMAGE_BYTES))


SIDE = st.integers(1, 2**31 - 1)


@given(SIDE, SIDE)
def test_too_many_pixels_are_told_by_the_header(width: int, height: int) -> None:
    """The file holds no more than its header, so decoding would say that it is cut off."""
    with pytest.raises(BadImage) as found:
        decoded(png_header(width, height))
    if width * height > MAX_IMAGE_PIXELS:
        assert "pixels" in str(found.value)
    elif max(width, height) > MAX_IMAGE_RATIO * min(width, height):
        assert "times as long" in str(found.value)
    else:
        assert "cut off" in str(found.value)


def described() -> Image.Exif:
    """Metadata, with which a WebP file has another kind of header."""
    exif = Image.Exif()
    exif[0x010E] = "x"
    return exif


@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.booleans())
def test_the_size_of_a_webp_file_is_read_from_its_header(width: int, height: int, lossless: bool, more: bool) -> None:
    data = picture(width, height, "WEBP", lossless=lossless, **({"exif": described()} if more else {}))
    assert webp_size(data) == (width, height)


def test_a_webp_file_with_a_huge_canvas_is_refused_by_its_header() -> None:
    data = bytearray(picture(8, 8, "WEBP", exif=described()))
    assert data[12:16] == b"VP8X"
    data[24:30] = struct.pack("<I", 16_382)[:3] + struct.pack("<I", 16_382)[:3]
    with pytest.raises(BadImage, match="pixels"):  # before the library finds that the file ends here
        decoded(bytes(data[:30]))


def test_a_frame_outside_of_the_screen_of_a_gif_is_counted() -> None:
    data = bytearray(picture(4, 4, "GIF"))
    at = data.index(b"\x2c")  # the descriptor of the first frame: left, top, width, height
    data[at + 1 : at + 9] = struct.pack("<HHHH", 0, 0, 65_535, 65_535)
    with pytest.raises(BadImage):
        decoded(bytes(data))
