"""A checkpoint that was acknowledged is there, byte for byte; one that is not whole is never used."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem import demo
from mlx_tandem.adapters.convert import inspect
from mlx_tandem.errors import Conflict, InvalidRequest, NotFound
from mlx_tandem.files import DISK, FileOps, StorageError
from mlx_tandem.training.store import manifests
from mlx_tandem.training.store.checkpoints import BEST, CheckpointInfo, Checkpoints
from mlx_tandem.training.store.manifests import Corrupt, Manifest
from tests.faulty import FaultFiles, ForgetfulFiles, contents

FILES = ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "trainer.json")


def opened(folder: Path, keep: int = 3, ops: FileOps = DISK) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep, ops)
    checkpoints.lock()
    return checkpoints


def save(
    c: Checkpoints,
    step: int,
    reward: float | None = None,
    name: str = "",
    ops: FileOps = DISK,
    digest: str = "",
) -> CheckpointInfo:
    """A new checkpoint, and what is too many then goes."""
    temporary = c.new(name or c.free_name(step))
    for file in FILES:
        fd = ops.open(temporary / file, os.O_CREAT | os.O_WRONLY)
        ops.write(fd, f"{file} {step}".encode())
        os.close(fd)
    manifest = Manifest(
        name=name or c.free_name(step),
        step=step,
        version=step,
        digest=digest or f"d{step}",
        reward=reward,
        pinned=bool(name),
        counters={"updates": step},
    )
    info = c.commit(temporary, manifest)
    for gone in c.surplus(c.list()):
        c.delete(gone.name)
    return info


def names(c: Checkpoints) -> list[str]:
    return [i.name for i in c.list()]


def test_save_list_prune(tmp_path: Path):
    """The newest N, the best beside them, and what someone gave a name to."""
    c = opened(tmp_path / "deep" / "checkpoints")
    infos = [save(c, 10, 0.2), save(c, 20, 0.9), save(c, 25, name="mine"), save(c, 30, 0.5)]
    infos += [save(c, 40), save(c, 50, 0.9)]
    assert [i.best for i in infos] == [True, True, False, False, False, False], "of equals the earlier"
    assert names(c) == ["checkpoint-50", "checkpoint-40", "checkpoint-30", "mine", BEST]
    best = c.verify(BEST)
    assert (best.step, best.reward, best.counters, best.version) == (20, 0.9, {"updates": 20}, 20)
    assert (c.path(BEST) / "trainer.json").read_text() == "trainer.json 20", "though checkpoint-20 is gone"
    assert [i.best for i in c.list()] == [False, False, False, False, True]
    newest = c.newest()
    assert newest is not None and newest.name == "checkpoint-50" and newest == c.verify("checkpoint-50")
    save(c, 60)
    assert names(c) == ["checkpoint-60", "checkpoint-50", "checkpoint-40", "mine", BEST]
    for name in ("mine", BEST):
        c.delete(name)
    assert names(c) == ["checkpoint-60", "checkpoint-50", "checkpoint-40"]
    assert not [p for p in c.folder.iterdir() if p.name.startswith((".new", ".old"))]


def test_a_course_that_was_rolled_back_keeps_its_checkpoints(tmp_path: Path):
    c = opened(tmp_path)
    for step, digest in ((10, "a"), (20, "b"), (10, "c")):
        save(c, step, digest=digest)
    assert names(c) == ["checkpoint-10.2", "checkpoint-20", "checkpoint-10"]
    newest = c.newest()
    assert newest is not None and newest.name == "checkpoint-10.2", "the last that was made, not the highest step"


def test_one_that_is_renewed_is_the_newest_under_its_name(tmp_path: Path):
    c = opened(tmp_path)
    infos = [save(c, step, reward) for step, reward in ((10, 0.5), (20, None), (30, 0.25))]
    before = contents(c.path("checkpoint-20"))
    manifest = msgspec.structs.replace(c.verify("checkpoint-20"), counters={"updates": 99}, reward=None)
    info = c.renew(manifest)
    assert names(c) == ["checkpoint-20", "checkpoint-30", "checkpoint-10", BEST]
    newest = c.newest()
    assert newest is not None and (newest.name, newest.counters, newest.step) == ("checkpoint-20", {"updates": 99}, 20)
    assert info.label == newest.label not in [i.label for i in infos], "it is told from what it was"
    after = contents(c.path("checkpoint-20"))
    assert {f: b for f, b in after.items() if f != manifests.MANIFEST} == {f: before[f] for f in FILES}
    assert c.renew(msgspec.structs.replace(manifest, name="checkpoint-10")).reward == 0.5, (
        "what it is worth stays known"
    )
    assert c.renew(msgspec.structs.replace(manifest, reward=0.75)).best
    assert [i.name for i in c.list() if i.best] == ["checkpoint-20", BEST]
    with pytest.raises(NotFound):
        c.renew(msgspec.structs.replace(manifest, name="nobody"))


def test_the_best_is_known_once_it_is_judged(tmp_path: Path):
    c = opened(tmp_path)
    for step in (10, 20, 30):
        save(c, step)
    assert BEST not in names(c)
    assert c.judge("checkpoint-20", 0.5).best and c.verify(BEST).step == 20
    assert not c.judge("checkpoint-10", 0.25).best and c.verify(BEST).step == 20
    assert c.judge("checkpoint-30", 0.75).best and c.verify(BEST).step == 30
    assert [(i.name, i.reward) for i in c.list()] == [
        ("checkpoint-30", 0.75), (BEST, 0.75), ("checkpoint-20", 0.5), ("checkpoint-10", 0.25)
    ]  # fmt: skip
    assert c.judge("checkpoint-10", math.nan).reward is None
    for name in names(c):
        c.verify(name)


INFOS = st.builds(
    lambda name, digest, pinned: CheckpointInfo(name, 1, 1, digest, 0.0, None, pinned, False, 0),
    st.sampled_from([f"checkpoint-{i}" for i in range(30)] + [BEST]),
    st.sampled_from("abcdef"),
    st.booleans(),
)


@given(st.lists(INFOS, max_size=12, unique_by=lambda i: i.name), st.integers(1, 5))
def test_exactly_so_many_are_kept_that_nobody_named(infos: list[CheckpointInfo], keep: int):
    """The newest, of each content one; whoever has a name stays, and the best."""
    going = Checkpoints(Path("nowhere"), keep).surplus(infos)
    mine = [i for i in infos if not i.pinned and i.name != BEST]
    assert set(going) <= set(mine)
    left = [i for i in mine if i not in going]
    digests = list(dict.fromkeys(i.digest for i in mine))
    assert [i.digest for i in left] == digests[:keep], "infos come newest first"


@pytest.mark.parametrize(
    ("newest_first", "needed", "going"),
    [
        (["guard-9", "guard-7", "checkpoint-5", "guard-3", "checkpoint-1"], [], ["guard-7", "guard-3"]),
        ([BEST, "guard-9", "guard-7"], [], ["guard-7"]),
        (["checkpoint-9", "guard-7", "guard-5", "checkpoint-3"], ["guard-5"], ["guard-7"]),
        (["checkpoint-9", "checkpoint-8", "checkpoint-7", "checkpoint-6"], ["checkpoint-6"], ["checkpoint-7"]),
    ],
)
def test_what_the_guard_does_not_need_goes_unless_it_is_the_newest_of_all(
    newest_first: list[str], needed: list[str], going: list[str]
):
    """Where the process goes on from after a restart is in the newest, whoever it was made for."""
    infos = [CheckpointInfo(name, 1, 1, name, 0.0, None, False, False, 0) for name in newest_first]
    found = Checkpoints(Path("nowhere"), 2).surplus(infos, frozenset(needed))
    assert [info.name for info in found] == going


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_only_a_number_can_be_the_best(tmp_path: Path, reward: float | None):
    c = opened(tmp_path)
    save(c, 1, reward)
    assert names(c) == ["checkpoint-1"]


@pytest.mark.parametrize("name", ["../x", ".hidden", "", "a/b", "a" * 65, "journal", BEST, "x.corrupt", "x.corrupt.2"])
def test_names_that_are_refused(tmp_path: Path, name: str):
    c = opened(tmp_path)
    save(c, 1)
    with pytest.raises(InvalidRequest) as e:
        c.new(name)
    assert e.value.param == "checkpoint_name"
    with pytest.raises(InvalidRequest):
        c.path(name)
    with pytest.raises(InvalidRequest):
        c.delete(name)


def test_names_are_taken_once(tmp_path: Path):
    c = opened(tmp_path)
    save(c, 1, name="mine")
    with pytest.raises(Conflict, match="mine"):
        c.new("mine")
    with pytest.raises(NotFound, match="other"):
        c.path("other")


@pytest.mark.promise("FLT-31")
@pytest.mark.parametrize("file", [*FILES, manifests.MANIFEST])
def test_a_damaged_newest_is_set_aside_and_the_one_before_is_used(tmp_path: Path, file: str):
    for at in (0, -3, None):
        c = opened(tmp_path / str(at))
        save(c, 1)
        save(c, 2)
        target = c.path("checkpoint-2") / file
        content = bytearray(target.read_bytes())
        if at is None:
            target.unlink()
        else:
            content[at] ^= 1
            target.write_bytes(content)
        newest = c.newest()
        assert newest is not None and newest.name == "checkpoint-1"
        assert names(c) == ["checkpoint-1"]
        if at is None and file == manifests.MANIFEST:
            continue  # without it, it is no checkpoint at all
        assert (c.folder / "checkpoint-2.corrupt").is_dir(), "nothing is thrown away"
        with pytest.raises(NotFound):
            c.path("checkpoint-2.corrupt")
        assert save(c, 2).name == "checkpoint-2"
        c.path("checkpoint-2").joinpath(file).write_bytes(b"{}")
        assert c.newest() == newest and (c.folder / "checkpoint-2.corrupt.2").is_dir()


def test_every_bit_of_a_manifest_counts(tmp_path: Path):
    c = opened(tmp_path)
    save(c, 1, 0.5, name="mine")
    file = c.path("mine") / manifests.MANIFEST
    content, manifest = file.read_bytes(), manifests.read(c.path("mine"))
    assert json.loads(content)["manifest"]["step"] == 1, "plain JSON"
    for i in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[i // 8] ^= 1 << i % 8
        file.write_bytes(flipped)
        with contextlib.suppress(Corrupt):
            assert manifests.read(c.path("mine")) == manifest, i
    file.write_bytes(content)
    c.path("mine").rename(tmp_path / "other")
    with pytest.raises(Corrupt, match="another checkpoint"):
        c.verify("other")


@pytest.mark.promise("FLT-34")
def test_another_format_is_refused_in_clear_text(tmp_path: Path):
    c = opened(tmp_path)
    save(c, 1)
    path = c.path("checkpoint-1")
    old = msgspec.structs.replace(manifests.read(path), format=0)
    (path / manifests.MANIFEST).write_bytes(manifests.seal(old))
    with pytest.raises(StorageError, match=r"format 0; this version of mlx-tandem reads format 1\. Move it") as e:
        c.newest()
    assert e.value.code == "unknown_format" and path.is_dir(), "it is not called damaged"
    assert names(c) == []


@pytest.mark.promise("FLT-55")
def test_one_server_at_a_time(tmp_path: Path):
    c = opened(tmp_path)
    save(c, 1)
    with pytest.raises(StorageError, match=f"process {os.getpid()}"):
        opened(tmp_path)
    reader = Checkpoints(tmp_path, 1)
    assert names(reader) == ["checkpoint-1"] and reader.verify("checkpoint-1").step == 1
    with pytest.raises(RuntimeError):
        reader.new("x")
    c.close()
    c.close()
    opened(tmp_path).close()


def test_an_empty_folder_and_none(tmp_path: Path):
    assert Checkpoints(tmp_path / "none", 1).list() == []
    assert not (tmp_path / "none").exists()
    assert opened(tmp_path).newest() is None


def test_a_checkpoint_and_its_export_are_adapters(tmp_path: Path):
    """Though there are other files in the folder of a checkpoint."""
    c = opened(tmp_path / "c")
    temporary = c.new("mine")
    source = demo.ADAPTER_PATHS["json"]
    for file in FILES:
        known = source / file
        (temporary / file).write_bytes(known.read_bytes() if known.exists() else b"x")
    c.commit(temporary, Manifest(name="mine", step=1, version=1, digest="d", pinned=True))
    target = tmp_path / "out" / "adapter"
    c.export("mine", target)
    assert list(contents(target)) == list(FILES[:2])
    found = [dataclasses.replace(inspect(folder), path="") for folder in (target, c.path("mine"), source)]
    assert found[0] == found[1] == found[2] and found[0].problems == ()
    with pytest.raises(Conflict):
        c.export("mine", target)
    (c.path("mine") / "trainer.json").write_bytes(b"y")
    with pytest.raises(Corrupt):
        c.export("mine", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.promise("FLT-30")
def test_an_acknowledged_checkpoint_survives_a_loss_of_power(tmp_path: Path):
    """Also when whoever wrote its files has not brought them to the drive."""
    ops = ForgetfulFiles()
    c = opened(tmp_path / "c", ops=ops)
    for step in (1, 2, 3):
        save(c, step, step / 10, ops=ops)
        ops.lose_power()
        assert c.verify(f"checkpoint-{step}").step == step
        assert c.verify(BEST).step == step
        assert (c.path(BEST) / FILES[-1]).read_text() == f"{FILES[-1]} {step}"
    c.renew(c.verify("checkpoint-1"))
    c.judge("checkpoint-2", 0.9)
    ops.lose_power()
    assert names(c)[0] == "checkpoint-1" and c.verify("checkpoint-2").reward == 0.9
    assert c.verify(BEST).step == 2


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("what", ["renew", "judge"])
def test_any_file_operation_may_fail_while_a_manifest_is_replaced(tmp_path: Path, what: str, renamed: bool):
    """The old holds or the new, whole, for this process and the next, and it works again."""
    fail_at, ops = 0, FaultFiles(1)
    while ops.failed or not fail_at:
        fail_at += 1
        folder = tmp_path / str(fail_at)
        c = opened(folder)
        for step in (1, 2):
            save(c, step, 0.1)
        c.close()
        ops = FaultFiles()
        c = opened(folder, ops=ops)
        ops.calls, ops.fail_at, ops.renamed = 0, fail_at, renamed

        def change(c: Checkpoints) -> CheckpointInfo:
            if what == "judge":
                return c.judge("checkpoint-2", 0.5)
            return c.renew(msgspec.structs.replace(c.verify("checkpoint-1"), counters={"updates": 3}))

        done = False
        with contextlib.suppress(StorageError):
            change(c)
            done = True
        for ends in (False, True):
            if ends:
                c.close()
                c = opened(folder)
            for name in names(c):
                c.verify(name)
            assert BEST in names(c) and {"checkpoint-1", "checkpoint-2"} < set(names(c))
            newest = c.newest()
            assert newest is not None
            if what == "renew":
                assert newest.name == ("checkpoint-1" if newest.counters == {"updates": 3} else "checkpoint-2")
                assert newest.name == "checkpoint-1" or not done, "acknowledged"
            else:
                assert newest.reward in ((0.5,) if done else (0.1, 0.5))
        change(c)
        assert c.verify(BEST).step == (2 if what == "judge" else 1)
        assert not [p for p in folder.rglob("*") if p.name.startswith((".new", ".old"))]
        c.close()
    assert fail_at > 5


@pytest.mark.promise("FLT-30")
@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("repeat", [1, 1000])
def test_any_file_operation_may_fail(tmp_path: Path, renamed: bool, repeat: int):
    """After each failure, by the same process and by the next one: every earlier checkpoint is whole, the one that
    failed is whole or not there, there is a best one, and saving works again."""
    fail_at, ops = 0, FaultFiles(1)
    while ops.failed or not fail_at:
        fail_at += 1
        folder = tmp_path / str(fail_at)
        c = opened(folder, keep=2)
        for step in (1, 2):
            save(c, step, step / 10)
        c.close()
        ops = FaultFiles()
        c = opened(folder, keep=2, ops=ops)
        ops.calls, ops.fail_at, ops.repeat, ops.renamed = 0, fail_at, repeat, renamed
        try:
            committed = save(c, 3, 0.3).name
        except StorageError:
            committed = ""
            assert ops.failed
        for ends in (False, True):
            if ends:
                c.close()
                c = opened(folder, keep=2)
            newest = c.newest()
            assert newest is not None and newest.name in ("checkpoint-2", "checkpoint-3")
            assert newest.name == (committed or newest.name), "acknowledged"
            assert "checkpoint-2" in names(c)
            assert BEST in names(c) or (repeat > 1 and not ends)
            for name in names(c):
                c.verify(name)
            assert not list(folder.glob("*.corrupt*")), "nothing half written has a checkpoint's name"
        assert c.verify(BEST).step in (2, 3)
        save(c, 4, 0.4)
        assert c.verify(BEST).step == 4 and names(c)[0] == "checkpoint-4"
        assert not [p for p in folder.iterdir() if p.name.startswith((".new", ".old"))]
        c.close()
    assert fail_at > 25
