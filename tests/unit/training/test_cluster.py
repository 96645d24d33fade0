"""The queue and the folder of a machine of the cluster, and the check of what comes from another machine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec import ValidationError, convert
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from mlx_tandem.config import ClusterConfig, Config, EngineConfig, ModelConfig
from mlx_tandem.errors import Conflict, EngineUnavailable, InvalidRequest, ModelError
from mlx_tandem.files import StorageError
from mlx_tandem.training.cluster import queue as queues
from mlx_tandem.training.cluster.adopted import KEPT, with_version
from mlx_tandem.training.cluster.averaging import average
from mlx_tandem.training.cluster.checks import check_items
from mlx_tandem.training.cluster.client import LeaderClient, check_url
from mlx_tandem.training.cluster.folder import FETCHED, MOST_PARTS, ClusterFolder, describe
from mlx_tandem.training.cluster.queue import Queue
from mlx_tandem.training.cluster.rounds import Rounds
from mlx_tandem.training.cluster.trainer import Trainer
from mlx_tandem.training.cluster.wire import Adapter, Contribution, File, Item, Version
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import AdapterInfo, AdapterSource

T = TypeVar("T")


def item(number: int, tokens: int = 2) -> Item:
    values = (-0.5,) * tokens
    own = Trajectory(f"traj-{number}", "g", (1,), (2,) * tokens, values, values, (0,) * tokens, 1.0, 1.0)
    return Item(own, 3)


def with_queue(folder: Path, work: Callable[[Queue], Awaitable[T]], capacity: int = 100) -> T:
    async def run() -> T:
        own = Queue(folder, capacity, lambda: True)
        await own.open()
        try:
            return await work(own)
        finally:
            await own.close()

    return asyncio.run(run())


def ids(found: tuple[Item, ...]) -> list[str]:
    return [each.trajectory.id for each in found]


def test_what_was_put_is_there_after_a_restart_until_it_is_removed(tmp_path: Path) -> None:
    async def first(queue: Queue) -> str:
        await queue.put([item(1), item(2)])
        await queue.put([item(2), item(3)])  # one of them for the second time
        return queue.id

    async def second(queue: Queue) -> tuple[str, tuple[Item, ...]]:
        found = await queue.get(0, 2)
        assert ids(found) == ["traj-1", "traj-2"]
        assert found[0] == replace(item(1), number=found[0].number)
        await queue.remove(found[-1].number)
        assert queue.waiting == 1
        return queue.id, found

    async def third(queue: Queue) -> tuple[Item, ...]:
        await queue.put([item(4)])
        return await queue.get(0, 100)

    name = with_queue(tmp_path, first)
    same, before = with_queue(tmp_path, second)
    assert same == name
    after = with_queue(tmp_path, third)
    assert ids(after) == ["traj-3", "traj-4"]
    assert after[0].number > before[-1].number  # numbers are never used twice


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(queue: Queue) -> None:
        await queue.put([item(n) for n in range(5)])
        assert (queue.waiting, queue.dropped) == (3, 2)
        assert ids(await queue.get(0, 100)) == ["traj-2", "traj-3", "traj-4"]
        monkeypatch.setattr(queues, "MOST_BYTES", 2000)
        await queue.put([item(9, tokens=100)])
        assert ids(await queue.get(0, 100)) == ["traj-9"]

    with_queue(tmp_path, work, capacity=3)


def test_a_request_carries_a_bounded_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MOST_BODY", 1000)

    async def work(queue: Queue) -> None:
        await queue.put([item(1, tokens=500), item(2), item(3), item(4, tokens=500)])
        found = await queue.get(0, 100)
        assert ids(found) == ["traj-1"]  # one is always carried
        assert ids(await queue.get(found[-1].number, 100)) == ["traj-2", "traj-3"]

    with_queue(tmp_path, work)


def test_whoever_waits_is_woken(tmp_path: Path) -> None:
    async def work(queue: Queue) -> None:
        waiting = asyncio.create_task(queue.get(0, 1, 60.0))
        await queue.put([item(1)])
        assert ids(await waiting) == ["traj-1"]
        assert await queue.get(10, 1, 0.001) == ()
        assert await queue.get(0, 0, 60.0) == ()  # nothing is wanted

    with_queue(tmp_path, work)


def test_each_trajectory_is_for_one_taker(tmp_path: Path) -> None:
    async def work(queue: Queue) -> None:
        await queue.put([item(n) for n in range(4)])
        first = await queue.get(0, 2, taker="a")
        second = await queue.get(0, 100, taker="b")
        assert (ids(first), ids(second)) == (["traj-0", "traj-1"], ["traj-2", "traj-3"])
        assert await queue.get(0, 2, taker="a") == first  # whoever asks again has not got the answer
        await queue.remove(second[-1].number, "b")
        assert await queue.get(0, 100, taker="a") == first
        await queue.free(["a"])
        assert await queue.get(0, 100, taker="b") == ()
        await queue.free([])
        assert await queue.get(0, 100, taker="b") == first

    with_queue(tmp_path, work)


def test_a_damaged_trajectory_is_left_out(tmp_path: Path) -> None:
    async def put(queue: Queue) -> None:
        await queue.put([item(1), item(2)])

    async def look(queue: Queue) -> None:
        assert ids(await queue.get(0, 100)) == ["traj-2"]

    with_queue(tmp_path, put)
    with sqlite3.connect(tmp_path / queues.NAME) as file:
        file.execute("UPDATE items SET body = x'00ff' WHERE number = 1")
    file.close()
    with_queue(tmp_path, look)


# -- the folder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    own = ClusterFolder(str(tmp_path / "cluster"))
    own.lock()
    return own


def a_file(content: bytes, name: str = "adapter_model.safetensors") -> File:
    return File(name, len(content), hashlib.sha256(content).hexdigest())  # type: ignore[arg-type]


def test_one_process_has_the_folder(folder: ClusterFolder) -> None:
    with pytest.raises(StorageError, match="in use by process"):
        ClusterFolder(str(folder.path)).lock()
    folder.close()
    folder.close()
    other = ClusterFolder(str(folder.path))
    other.lock()
    assert other.held
    other.close()


def test_a_version_is_there_whole_or_not(folder: ClusterFolder) -> None:
    config, weights = a_file(b"{}", "adapter_config.json"), a_file(b"weights")
    version = Version(1, "d" * 64, (config, weights))
    assert folder.append(config, 0, b"{}") == 2
    assert folder.append(weights, 0, b"wei") == 3
    with pytest.raises(InvalidRequest, match="is not there"):
        folder.assemble(version)
    assert folder.source(version.digest) is None
    folder.close()
    again = ClusterFolder(str(folder.path))  # after a restart
    again.lock()
    assert again.received(weights) == 3
    assert again.append(weights, 0, b"weights") == 3
    assert again.append(weights, 3, b"ghts") == 7
    source = again.assemble(version)
    assert Path(source.path) == again.version(version.digest)
    assert set(describe(Path(source.path))) == {config, weights}
    assert again.digests() == [version.digest]
    again.remove(version.digest)
    assert again.digests() == []
    again.close()


def test_bytes_that_are_not_what_they_are_called_are_gone(folder: ClusterFolder) -> None:
    file = a_file(b"weights")
    with pytest.raises(InvalidRequest, match="its bytes were changed"):
        folder.append(file, 0, b"weightx")
    assert folder.received(file) == 0
    with pytest.raises(InvalidRequest, match="at most"):
        folder.append(file, 0, b"weights and more")
    assert folder.append(file, 0, b"weights") == 7
    for n in range(MOST_PARTS + 4):
        folder.append(a_file(b"%d" % (n + 10**6)), 0, b"1")
    assert len(list((folder.path / "parts" / FETCHED).iterdir())) == MOST_PARTS


def test_no_sender_removes_or_completes_files_of_another(folder: ClusterFolder) -> None:
    """As many trainers as there may be send a version each; one of them begins many, and two send the same settings."""
    trainers = [f"{n:016x}" for n in range(64)]
    config = a_file(b"{}", "adapter_config.json")
    sent = {trainer: a_file(b"weights of %d" % n) for n, trainer in enumerate(trainers)}
    for trainer, weights in sent.items():
        assert (folder.append(config, 0, b"{}", trainer), folder.append(weights, 0, b"weights", trainer)) == (2, 7)
    for n in range(50):
        folder.append(a_file(b"%d" % (n + 10**6)), 0, b"1", trainers[0])
    for n, (trainer, weights) in enumerate(sent.items()):
        if n:
            folder.append(weights, 7, b" of %d" % n, trainer)
            folder.assemble(Version(1, f"{n:064x}", (config, weights)), trainer)
    assert len(folder.digests()) == 63
    assert len(list((folder.path / "parts" / trainers[0]).iterdir())) == MOST_PARTS


def test_what_a_sender_asks_about_is_kept(folder: ClusterFolder) -> None:
    first, *others = [a_file(b"%d" % (n + 10**6)) for n in range(3 * MOST_PARTS)]
    folder.append(first, 0, b"1")
    for other in others:
        assert folder.append(first, 0, b"") == 1  # as a trainer asks before it sends the other file of a version
        folder.append(other, 0, b"1")
    assert [folder.received(other) for other in others[-MOST_PARTS:]] == [0] + [1] * (MOST_PARTS - 1)


def test_what_others_have_left_makes_room_for_those_who_are_connected(folder: ClusterFolder) -> None:
    senders = [f"{n:016x}" for n in range(6)]
    for n, sender in enumerate(senders):
        folder.append(a_file(b"%d" % (n + 10**6)), 0, b"1", sender)
        os.utime(folder.path / "parts" / sender, (n, n))
    folder.bound_senders(4, {senders[0], "f" * 16})
    assert {path.name for path in (folder.path / "parts").iterdir()} == {senders[0], *senders[-2:]}


def test_a_file_that_was_called_larger_or_smaller_is_compared_with_its_hash(folder: ClusterFolder) -> None:
    config, weights = a_file(b"{}", "adapter_config.json"), a_file(b"weights")
    version = Version(1, "d" * 64, (config, weights))
    folder.append(config, 0, b"{}")
    folder.append(replace(weights, size=10**6), 0, b"weightx")
    with pytest.raises(InvalidRequest, match="is not there"):
        folder.assemble(version)
    with pytest.raises(InvalidRequest, match="its bytes were changed"):
        folder.append(replace(weights, size=8), 7, b"x")
    with pytest.raises(InvalidRequest, match="different names"):
        folder.assemble(replace(version, files=(config, config)))
    for text in ("d" * 64 + "\n", "D" * 64):
        with pytest.raises(ValidationError):
            convert({"name": "adapter_config.json", "size": 1, "sha256": text}, File)


def test_what_is_known_may_be_damaged(folder: ClusterFolder) -> None:
    adapters = (Adapter("a", 1, (Version(1, "d" * 64, (a_file(b"a", "adapter_config.json"), a_file(b"b"))),)),)
    folder.write("known.json", adapters)
    assert folder.read("known.json", tuple[Adapter, ...]) == adapters
    (folder.path / "known.json").write_bytes(b'[{"name": "../x"}]')
    assert folder.read("known.json", tuple[Adapter, ...]) is None
    assert folder.read("missing.json", tuple[Adapter, ...]) is None


def test_versions_of_a_name_are_bounded() -> None:
    adapter = None
    files = (a_file(b"a", "adapter_config.json"), a_file(b"b"))
    for number in range(1, 20):
        adapter = with_version(adapter, "policy", Version(number, f"{number:064x}", files))
    assert adapter is not None
    assert [v.number for v in adapter.versions] == list(range(20 - KEPT, 20))
    back = with_version(adapter, "policy", adapter.versions[0])
    assert (back.current, len(back.versions)) == (20 - KEPT, KEPT)


def test_a_round_does_not_begin_with_other_content(tmp_path: Path, folder: ClusterFolder) -> None:
    """Each file is what the leader has announced, but the adapter is not what its digest says."""
    forged = Version(3, "d" * 64, describe(an_adapter(folder.version("d" * 64), drawn(1))))
    let_go: list[str] = []

    async def forget(digest: str) -> None:
        let_go.append(digest)

    async def loaded(source: AdapterSource) -> AdapterInfo:
        return AdapterInfo("e" * 64, 8, 2.0, "peft", (), 1, 1)

    cluster = ClusterConfig(connect_to="127.0.0.1:9", dir=str(folder.path))
    front: Any = SimpleNamespace(
        config=Config(EngineConfig(ModelConfig("x")), cluster=cluster),
        client=SimpleNamespace(load_adapter=loaded),
        models=SimpleNamespace(elsewhere=SimpleNamespace(let_go=forget)),
    )
    learning: Any = SimpleNamespace(learner=None)  # which is not asked to adopt anything
    trainer = Trainer(front, learning)
    trainer.folder.path = folder.path
    with pytest.raises(ModelError, match=f"the content is {'e' * 64}, not {'d' * 64}: it was changed"):
        asyncio.run(trainer._begin_round(Adapter("policy", 3, (forged,))))
    assert (folder.digests(), let_go) == ([], ["e" * 64])  # it is fetched anew


# -- federated averaging --------------------------------------------------------------------------------------------


def an_adapter(folder: Path, arrays: dict[str, np.ndarray], settings: str = "{}") -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(settings, encoding="utf-8")
    save_file(arrays, folder / "adapter_model.safetensors")
    return folder


def drawn(seed: int, rows: int = 2) -> dict[str, np.ndarray]:
    own = np.random.default_rng(seed)
    return {name: own.standard_normal((rows, 3)).astype(np.float32) for name in ("m.lora_A.weight", "m.lora_B.weight")}


def test_an_average_is_weighted_by_examples(tmp_path: Path) -> None:
    folders = [an_adapter(tmp_path / str(i), drawn(i)) for i in range(3)]
    (tmp_path / "mean").mkdir()
    average(folders, [1, 2, 5], tmp_path / "mean")
    found = load_file(tmp_path / "mean" / "adapter_model.safetensors")
    for name, array in found.items():
        each = [drawn(i)[name].astype(np.float64) for i in range(3)]
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, (each[0] + 2 * each[1] + 5 * each[2]) / 8, rtol=1e-6)
    assert (tmp_path / "mean" / "adapter_config.json").read_text(encoding="utf-8") == "{}"
    (tmp_path / "alone").mkdir()
    average(folders[:1], [7], tmp_path / "alone")
    alone = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    assert all(np.array_equal(alone[name], array) for name, array in drawn(0).items())


@pytest.mark.parametrize(
    ("arrays", "settings"),
    [
        (drawn(1, rows=4), "{}"),
        (drawn(1) | {"more": np.zeros(1, np.float32)}, "{}"),
        ({name: array.astype(np.float16) for name, array in drawn(1).items()}, "{}"),
        (drawn(1), '{"lora_alpha": 3}'),
    ],
)
def test_what_cannot_be_averaged(tmp_path: Path, arrays: dict[str, np.ndarray], settings: str) -> None:
    folders = [an_adapter(tmp_path / "a", drawn(0)), an_adapter(tmp_path / "b", arrays, settings)]
    (tmp_path / "mean").mkdir()
    with pytest.raises(InvalidRequest):
        average(folders, [1, 1], tmp_path / "mean")


def contribution(folder: ClusterFolder, trainer: int, number: int, begun: int, examples: int) -> Contribution:
    digest = f"{trainer * 100 + number:064x}"
    path = an_adapter(folder.version(digest), drawn(trainer))
    version = Version(number, digest, describe(path))
    return Contribution(f"{trainer:016x}", "b" * 64, "policy", version, begun, examples)


def test_a_round_ends_with_the_last_trainer_or_when_the_time_is_over(folder: ClusterFolder) -> None:
    served: list[tuple[int, dict[str, np.ndarray]]] = []
    arrived = asyncio.Event()

    async def serve(path: Path, number: int) -> None:
        served.append((number, load_file(path / "adapter_model.safetensors")))
        arrived.set()

    async def work() -> None:
        rounds = Rounds(folder, 2, 3600.0, serve)
        await rounds.add(contribution(folder, 1, 5, 3, 10), 3)
        await rounds.add(contribution(folder, 1, 6, 3, 30), 3)  # the same trainer again
        assert (rounds.waiting, served) == (1, [])
        with pytest.raises(Conflict, match="version 3 is served now"):
            await rounds.add(contribution(folder, 2, 4, 2, 10), 3)
        await rounds.add(contribution(folder, 2, 9, 3, 10), 3)
        assert (rounds.waiting, rounds.done, rounds.stale) == (0, 1, 1)
        await rounds.close()
        arrived.clear()
        late = Rounds(folder, 2, 0.001, serve)
        await late.add(contribution(folder, 3, 11, 10, 1), 10)
        await arrived.wait()
        await late.close()
        served.pop()
        failing = Rounds(folder, 1, 3600.0, broken)
        with pytest.raises(EngineUnavailable):
            await failing.add(contribution(folder, 4, 12, 11, 1), 11)
        assert failing.waiting == 1, "what was taken is averaged later"
        await failing.close()

    async def broken(path: Path, number: int) -> None:
        raise EngineUnavailable("not now")

    asyncio.run(work())
    assert len(served) == 1
    (number, mean), *_ = served
    assert number == 10  # above all that were handed in
    for name, array in mean.items():
        np.testing.assert_allclose(array, 0.75 * drawn(1)[name] + 0.25 * drawn(2)[name], rtol=1e-5, atol=1e-6)


# -- addresses, and what is checked ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("node1:8000", "http://node1:8000"),
        ("https://node1:8443/", "https://node1:8443"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("192.168.1.7:8000", "http://192.168.1.7:8000"),
    ],
)
def test_the_address_of_a_leader(address: str, url: str) -> None:
    assert check_url(address) == url == LeaderClient(address, "k").url


@pytest.mark.parametrize(
    "address", ["", "ftp://a", "http://", "http://a/b", "http://a?b", "u:p@a:1", "a:0x", "a:123456"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InvalidRequest, match="must be HOST:PORT"):
        check_url(address)


def test_a_trajectory_that_could_have_been_collected_here_passes() -> None:
    good = item(1).trajectory
    check_items([Item(good)], vocab_size=10, most_tokens=3)
    check_items([Item(replace(good, external=True, logprobs=(), model_logprobs=()))], vocab_size=10, most_tokens=3)
    check_items([Item(replace(good, mask=(0, 1), turn_rewards=(1.0,)))], vocab_size=10, most_tokens=3)
    for vocab_size, most_tokens in ((2, 3), (10, 2)):
        with pytest.raises(InvalidRequest, match=r"items\[0\]"):
            check_items([Item(good)], vocab_size=vocab_size, most_tokens=most_tokens)
