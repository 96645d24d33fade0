"""Bodies that may be compressed with zstd, unpacked within a limit."""

from __future__ import annotations

import zstandard

from mlx_tandem.errors import InvalidRequest, TooLarge, UnsupportedMedia

_UNKNOWN = (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR)


def unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body without its content encoding, of at most `most` bytes.

    A compressed body has to say how large it is, which is looked at before anything is unpacked, and has to be exactly
    as large. Raises UnsupportedMedia for other encodings than zstd, TooLarge, and InvalidRequest for damaged data.
    """
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise UnsupportedMedia("Content-Encoding must be zstd, if there is one")
    try:
        size = zstandard.get_frame_parameters(body).content_size
        if size in _UNKNOWN:
            raise InvalidRequest("the zstd data must say in its header how large it is unpacked")
        if size > most:
            raise TooLarge(f"the body is over the limit of {most} bytes when it is unpacked")
        if not size:  # which the library takes for an unknown size
            return b""
        return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise InvalidRequest("the body is no whole zstd data") from e
