"""Processed images are kept within their bytes, the last used ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.generation.vision.image_cache import ImageCache, key_of
from mlx_tandem.generation.vision.messages import GroupJob, Job, Made

LIMIT = 100


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 120)), max_size=60))
def test_the_last_used_images_are_kept_within_their_bytes(uses: list[tuple[int, int]]) -> None:
    kept, expected, sizes = ImageCache(LIMIT), list[int](), dict[int, int]()
    hits = 0
    for name, size in uses:
        size = sizes.setdefault(name, size)  # the same file always becomes the same arrays
        found = kept.get(bytes([name]))
        assert (found is not None) == (name in expected)
        if found is None:
            kept.keep(bytes([name]), Made(bytes([name]) * 16, b"x" * size, "", [1]))
        else:
            hits += 1
            assert found.digest == bytes([name]) * 16
            expected.remove(name)
        expected += [name] * (size <= LIMIT)
        while sum(sizes[n] for n in expected) > LIMIT:
            expected.pop(0)
        assert kept.nbytes == sum(sizes[n] for n in expected) <= LIMIT
    assert (kept.hits, kept.misses) == (hits, len(uses) - hits)


def test_an_image_that_is_made_twice_at_once_is_counted_once() -> None:
    kept, made = ImageCache(LIMIT), Made(b"d" * 16, b"x" * 60, "", [1])
    kept.keep(b"a", made)
    kept.keep(b"a", made)
    assert kept.nbytes == 60 and kept.get(b"a") is made


def test_the_key_tells_base64_from_bytes() -> None:
    assert key_of(Job(b"abcd", True)) != key_of(Job(b"abcd", False))
    assert key_of(Job(b"abcd", True)) == key_of(Job(b"abcd", True))


def test_the_key_tells_frames_their_order_and_the_length_of_their_video_apart() -> None:
    a, b = Job(b"a", False), Job(b"b", False)
    groups = GroupJob([a, b], 4), GroupJob([b, a], 4), GroupJob([a, b], 6), GroupJob([a], 4)
    assert len({*map(key_of, groups), key_of(a)}) == 5
    assert key_of(GroupJob([a, b], 4)) == key_of(groups[0])
