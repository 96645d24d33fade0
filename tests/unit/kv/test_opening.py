"""The KV offload of an engine that starts: which folder it gets, and what happens when it gets none."""

from __future__ import annotations

import ctypes
import logging
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlx_tandem.config import CacheConfig, DiskCacheConfig, EngineConfig, ModelConfig
from mlx_tandem.engine_main import _open_blocks, _open_offload
from mlx_tandem.files import StorageError
from mlx_tandem.kv.disk.opening import Opening
from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.hashing import Namespace
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.model import device
from tests.api.scripted import INFO

NAMESPACE = Namespace("", "", "float32", 16)


def config(tmp_path: Path, disk: DiskCacheConfig) -> EngineConfig:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return EngineConfig(ModelConfig(str(model)), disk=disk)


def opened(settings: EngineConfig, namespace: Namespace = NAMESPACE) -> tuple[Opening, bytes]:
    called = threading.Event()
    opening = _open_offload(settings, namespace, called.set)
    assert opening is not None
    assert opening.cache is None, "what model it is takes a while to find out"
    assert called.wait(30)
    made = opening.poll()
    assert made is not None
    assert opening.poll() is None, "once"
    assert opening.cache is made[0]
    return opening, made[1]


def base_of(
    settings: EngineConfig, dtype: str, cache: CacheConfig, groups: int = 1, quantization: str | None = None
) -> bytes:
    """What the blocks of an engine with these settings have in common."""
    called = threading.Event()
    info = replace(INFO, dtype=dtype, block_size=cache.block_size, quantization=quantization)
    each = [AttentionGroup(BlockPool(8, cache.block_size), 1024) for _ in range(groups)]
    _, opening = _open_blocks(replace(settings, cache=cache), info, each, called.set)
    assert opening is not None and called.wait(30)
    made = opening.poll()
    assert made is not None
    opening.close(5)
    return made[1]


def test_what_its_blocks_have_in_common_is_the_model_and_how_its_keys_are_kept(tmp_path: Path) -> None:
    settings = config(tmp_path, DiskCacheConfig(dir=str(tmp_path / "kv")))
    bases = []
    for namespace, text in (
        (NAMESPACE, "{}"),
        (replace(NAMESPACE, kv_bits=8), "{}"),
        (NAMESPACE, "{ }"),
        (NAMESPACE, "{}"),
    ):
        (Path(settings.model.path) / "config.json").write_text(text)
        opening, base = opened(settings, namespace)
        opening.close(5)
        bases.append(base)
    assert len(set(bases)) == 3
    assert bases[0] == bases[3]


@pytest.mark.promise("FLT-25")
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        ("bfloat16", CacheConfig()),
        ("float16", CacheConfig(block_size=32)),
        ("float16", CacheConfig(kv_bits=8)),
        ("float16", CacheConfig(kv_bits=4)),
        ("float16", CacheConfig(kv_bits=8, kv_group_size=32)),
    ],
)
def test_an_engine_that_keeps_its_keys_in_another_way_finds_nothing(
    tmp_path: Path, dtype: str, cache: CacheConfig
) -> None:
    """Also where the bytes of a block are as many."""
    settings = config(tmp_path, DiskCacheConfig(dir=str(tmp_path / "kv")))
    others = [("float16", CacheConfig()), ("float16", CacheConfig(kv_bits=8))]
    bases = [base_of(settings, *each) for each in [(dtype, cache), *(o for o in others if o != (dtype, cache))]]
    assert len(set(bases)) == len(bases)
    assert base_of(settings, dtype, cache) == bases[0] != base_of(settings, dtype, cache, groups=2)


def test_an_engine_that_rounds_differently_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--deterministic` keys have the same bits whoever computed them, and so have those from the drive."""
    default = config(tmp_path, DiskCacheConfig(dir=str(tmp_path / "kv")))
    exact = replace(default, deterministic=True)

    def base(settings: EngineConfig, quantization: str | None = None) -> bytes:
        return base_of(settings, "float32", CacheConfig(), quantization=quantization)

    bases = [
        base(settings, kind)
        for settings in (default, exact)
        for kind in (None, "4-bit affine", "4-bit affine, unpacked")
    ]
    assert base(exact) == bases[3]
    for name, other in (
        ("mlx_tandem.model.deterministic.sources", lambda: "other"),
        ("mlx_tandem.model.deterministic.version", lambda package: "9.9" if package == "mlx" else "1"),
        ("mlx_tandem.model.device.blas", lambda: "OpenBLAS 9.9, 3 threads"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, other)
            bases.append(base(exact))
            assert base(default) == bases[0]
    assert len(set(bases)) == len(bases)


@pytest.mark.skipif(device.OPENBLAS is None, reason="another BLAS computes here")
def test_the_number_of_threads_is_part_of_what_blas_is() -> None:
    set_threads = ctypes.CDLL(device.OPENBLAS).openblas_set_num_threads
    before = device.blas()
    number = int(before.split()[-2])
    try:
        set_threads(number + 1)
        assert device.blas() == before.replace(f", {number} threads", f", {number + 1} threads") != before
    finally:
        set_threads(number)
    assert device.blas() == before


def test_nothing_is_kept_unless_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for settings in (
        config(tmp_path, DiskCacheConfig()),
        config(tmp_path, DiskCacheConfig(enabled=False, dir=str(tmp_path / "kv"))),
    ):
        assert _open_offload(settings, NAMESPACE, lambda: None) is None
    random = config(tmp_path, DiskCacheConfig(enabled=True))
    random = replace(random, model=replace(random.model, random_weights=True))
    assert _open_offload(random, NAMESPACE, lambda: None) is None
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_a_folder_in_use_is_refused_if_it_was_named_and_done_without_if_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default = config(tmp_path, DiskCacheConfig(enabled=True))
    first, _ = opened(default)
    with caplog.at_level(logging.WARNING):
        assert _open_offload(default, NAMESPACE, lambda: None) is None
    assert "in use" in caplog.text
    named = config(tmp_path, DiskCacheConfig(dir=str(tmp_path / "mlx-tandem" / "kv-cache")))
    with pytest.raises(StorageError) as e:
        _open_offload(named, NAMESPACE, lambda: None)
    assert e.value.code == "folder_in_use"
    first.close(5)
    again, _ = opened(named)
    again.close(5)


def test_a_model_that_cannot_be_read_is_served_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(tmp_path, DiskCacheConfig(dir=str(tmp_path / "kv")))
    opening = Opening(settings.disk, tmp_path / "no-model", NAMESPACE, lambda: None)
    opening.close(5)
    again, _ = opened(settings)
    again.close(5)


def test_a_cache_is_not_made_after_the_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the model's files takes longer than the engine lives."""
    settings = config(tmp_path, DiskCacheConfig(dir=str(tmp_path / "kv")))
    reading, go_on = threading.Event(), threading.Event()

    def digest(*_: object) -> str:
        reading.set()
        assert go_on.wait(30)
        return "0" * 64

    monkeypatch.setattr("mlx_tandem.kv.disk.opening.folder_digest", digest)
    woken = threading.Event()
    opening = Opening(settings.disk, Path(settings.model.path), NAMESPACE, woken.set)
    assert reading.wait(30)
    (thread,) = (t for t in threading.enumerate() if t.name == "kv-disk-opening")
    opening.close(5)
    other = Opening(settings.disk, Path(settings.model.path), NAMESPACE, lambda: None)
    go_on.set()
    thread.join(30)
    assert opening.poll() is None and not woken.is_set()
    other.close(5)
