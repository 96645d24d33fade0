"""A leader and its callers: what is shown, what is taken, and that nothing wrong gets in."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from mlx_tandem import demo
from mlx_tandem.training.cluster import bases
from mlx_tandem.training.cluster.client import LeaderClient, Refused, Unreachable
from mlx_tandem.training.cluster.folder import MOST_PARTS
from mlx_tandem.training.cluster.wire import (
    CHUNK,
    MOST_ITEMS,
    Base,
    Contribution,
    Feed,
    File,
    Item,
    Items,
    Publication,
    Version,
)
from mlx_tandem.training.trajectories import Trajectory
from tests.leading import KEY, OTHERS, OURS, PATH, content, feed, leading, publication, published, shown, upload
from tests.serving import RunningServer

GOOD = Trajectory(
    id="traj-1",
    group="request:traj-0:0",
    prompt=(5, 6, 7),
    tokens=(8, 9),
    logprobs=(-0.5, -1.0),
    model_logprobs=(-0.5, -1.0),
    versions=(0, 0),
    temperature=1.0,
    reward=1.0,
)


@pytest.fixture(scope="module")
def leader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with leading(tmp_path_factory.mktemp("leader")) as server:
        yield server


@pytest.fixture
def client(leader: RunningServer) -> LeaderClient:
    return LeaderClient(leader.url, KEY)


def changed_config(config: bytes) -> bytes:
    """The settings of an adapter with another scale."""
    settings = json.loads(config)
    return json.dumps(settings | {"lora_alpha": 2 * settings["lora_alpha"]}).encode()


def policies(leader: RunningServer) -> set[str]:
    return {m["id"] for m in leader.client.get("/v1/models").json()["data"] if m["id"].startswith("policy")}


def status(leader: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = leader.client.get(f"{PATH}/status").json()
    return found


def test_what_a_leader_shows(leader: RunningServer) -> None:
    base = msgspec.json.decode(leader.client.get(f"{PATH}/base").content, type=Base)
    assert (base.sha256, base.adapter) == (bases.digest(demo.MODEL_PATH), "policy")
    assert "tandem-demo" in base.names
    for name in demo.ADAPTER_PATHS:
        for file in shown(leader, name).files:
            whole = content(name, file)
            assert (file.size, file.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
            url = f"{PATH}/files/{file.sha256}"
            assert leader.client.get(url, params={"offset": 10}).content == whole[10 : 10 + CHUNK]
            assert leader.client.get(url, params={"offset": file.size}).content == b""


def test_a_version_is_served_once_it_is_whole(leader: RunningServer, client: LeaderClient) -> None:
    before = feed(leader)
    published(leader, client, "shout", 1)
    published(leader, client, "shout", 1)  # as a trainer does that has not got the answer
    assert leader.complete([5, 6, 7], model="policy").json()["model"] == "policy@1"
    published(leader, client, "json", 2)
    assert leader.complete([5, 6, 7], model="policy").json()["model"] == "policy@2"
    assert leader.complete([5, 6, 7], model="policy@1").json()["model"] == "policy@1"
    after = asyncio.run(client.feed(before.sequence, before.leader, 10.0))  # answers at once: there is something new
    (adapter,) = (adapter for adapter in after.adapters if adapter.name == "policy")
    assert (adapter.current, [version.number for version in adapter.versions]) == (2, [1, 2])
    published(leader, client, "shout", 1)  # the trainer has gone back
    assert leader.complete([5, 6, 7], model="policy").json()["model"] == "policy@1"
    published(leader, client, "json", 2)


def test_an_upload_goes_on_where_it_ended(leader: RunningServer, client: LeaderClient) -> None:
    whole = bytes(range(256)) * 64
    file = File("adapter_config.json", len(whole), hashlib.sha256(whole).hexdigest())

    async def work() -> None:
        assert await client.upload(OURS, file, 0, whole[:1000]) == 1000
        assert await client.upload(OURS, file, 0, b"") == 1000
        assert await client.upload(OURS, file, 500, whole[500:2000]) == 1000  # not the next bytes
        assert await client.upload(OURS, file, 1000, whole[1000:]) == len(whole)
        with pytest.raises(Refused, match="400"):  # a file has no more bytes than it was said to have
            await client.upload(OURS, replace(file, sha256="a" * 64, size=10), 0, whole)

    asyncio.run(work())


def test_files_of_one_trainer_on_their_way_are_bounded(leader: RunningServer, client: LeaderClient) -> None:
    files = [File("adapter_config.json", 100, f"{i:064x}") for i in range(2 * MOST_PARTS)]

    async def work() -> list[int]:
        for file in files:
            assert await client.upload(OURS, file, 0, b"some") == 4
        with pytest.raises(Unreachable, match=r"409.*another trainer"):  # of which there are as many as there may be
            await client.upload(OTHERS, files[0], 0, b"some")
        return [await client.upload(OURS, file, 0, b"") for file in files]

    assert asyncio.run(work()) == [0] * MOST_PARTS + [4] * MOST_PARTS


def test_what_cannot_be_served_is_refused_before_its_files_are_looked_at(
    leader: RunningServer, client: LeaderClient
) -> None:
    """A conflict is said although none of the files is there."""
    published(leader, client, "shout", 1)
    nowhere = tuple(File(file.name, file.size, "c" * 64) for file in shown(leader, "shout").files)

    async def work() -> None:
        base = (await client.base()).sha256
        for number, digest in ((1, "e" * 64), (7, shown(leader, "shout").digest)):
            version = Version(number, digest, nowhere)
            with pytest.raises(Unreachable, match=r"409.*policy@1"):
                await client.publish(Publication(OURS, base, "policy", version))
        stale = Contribution(OURS, base, "policy", Version(9, "e" * 64, nowhere), 2**40, 5)
        with pytest.raises(Unreachable, match=r"409.*is served now: learn from that"):
            await client.contribute(stale)

    before = status(leader)["stale"]
    asyncio.run(work())
    assert status(leader)["stale"] == before + 1


@pytest.mark.parametrize("key", ["", "another", KEY + "x"])
def test_a_wrong_key_gets_nothing_in_or_out(leader: RunningServer, key: str) -> None:
    version = shown(leader, "shout")
    stranger, before = LeaderClient(leader.url, key), status(leader)
    calls = [
        lambda: stranger.base(),
        lambda: stranger.feed(),
        lambda: stranger.chunk(version.files[0], 0),
        lambda: stranger.upload(OURS, version.files[0], 0, b"x"),
        lambda: stranger.publish(publication(leader, replace(version, number=9))),
        lambda: stranger.send(feed(leader).base, OURS, [Item(GOOD)]),
        lambda: stranger.take(OURS, OURS, 2**40, 1, 0.0),
    ]
    for call in calls:
        with pytest.raises(Refused, match="401"):
            asyncio.run(call())
    assert status(leader) == before


def test_another_base_gets_nothing_in(leader: RunningServer, client: LeaderClient) -> None:
    before, other = status(leader), "a" * 64
    with pytest.raises(Unreachable, match=r"409.*another base model"):
        published(leader, client, "shout", 7, base=other)
    with pytest.raises(Unreachable, match=r"409.*another base model"):
        asyncio.run(client.send(other, OURS, [Item(GOOD)]))
    assert (policies(leader), status(leader)) == ({"policy", "policy@1", "policy@2"} & policies(leader), before)


def test_a_changed_version_gets_nothing_in(leader: RunningServer, client: LeaderClient) -> None:
    before, down = feed(leader), shown(leader, "down")
    published_before = status(leader)["published"]
    config, weights = down.files

    async def send(*parts: tuple[File, bytes], version: Version) -> None:
        for file, whole in parts:
            await upload(client, file, whole)
        await client.publish(publication(leader, version))

    changed = bytearray(content("down", weights))
    changed[-1] ^= 1
    with pytest.raises(Refused, match="its bytes were changed"):  # on the way
        asyncio.run(send((config, content("down", config)), (weights, bytes(changed)), version=replace(down, number=3)))
    with pytest.raises(Refused, match="is not there"):  # so the file is not there
        asyncio.run(client.publish(publication(leader, replace(down, number=3))))
    other = File(weights.name, len(changed), hashlib.sha256(changed).hexdigest())
    forged = Version(3, down.digest, (config, other))
    with pytest.raises(Refused, match="it was changed"):  # by somebody who has renewed the hash of the file
        asyncio.run(send((config, content("down", config)), (other, bytes(changed)), version=forged))
    setting = changed_config(content("down", config))
    text = File(config.name, len(setting), hashlib.sha256(setting).hexdigest())
    with pytest.raises(Refused, match="it was changed"):  # in its settings
        asyncio.run(
            send((text, setting), (weights, content("down", weights)), version=Version(3, down.digest, (text, weights)))
        )
    rubbish = File(weights.name, 8, hashlib.sha256(b"rubbish!").hexdigest())
    with pytest.raises(Refused, match="400"):
        asyncio.run(
            send(
                (config, content("down", config)),
                (rubbish, b"rubbish!"),
                version=Version(3, "b" * 64, (config, rubbish)),
            )
        )
    assert feed(leader) == before
    assert status(leader)["published"] == published_before
    published(leader, client, "down", 3)  # the true one is taken afterwards


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"adapter": "shout"}, "400.*the adapter that is trained here is policy"),
        ({"adapter": "base"}, "400"),
        ({"trainer": OTHERS}, "409.*another trainer"),
    ],
)
def test_who_may_publish_what(leader: RunningServer, client: LeaderClient, fields: dict[str, Any], says: str) -> None:
    before = feed(leader)
    with pytest.raises((Refused, Unreachable), match=says):
        published(leader, client, "down", 3, **fields)
    assert feed(leader) == before


def test_a_number_stands_for_one_content(leader: RunningServer, client: LeaderClient) -> None:
    before = feed(leader)
    with pytest.raises(Unreachable, match=r"409.*policy@1 has other content here"):
        published(leader, client, "json", 1)
    with pytest.raises(Unreachable, match=r"409.*same content"):
        published(leader, client, "json", 8)
    assert feed(leader) == before
    reply = leader.client.post("/v1/adapters", json={"name": "policy", "path": str(demo.ADAPTER_PATHS["down"])})
    assert reply.status_code == 409  # only a trainer changes what is trained


def test_trajectories_pass_through(leader: RunningServer, client: LeaderClient) -> None:
    base = feed(leader).base
    items = [Item(replace(GOOD, id=f"traj-{i}"), 2) for i in range(4)]

    async def work() -> None:
        await client.send(base, OURS, items)
        await client.send(base, OURS, items)  # as a follower does that has not got the answer
        first = await client.take(OURS, OURS, 0, 3, 0.0)
        assert [item.trajectory.id for item in first.items] == ["traj-0", "traj-1", "traj-2"]
        again = await client.take(OURS, first.queue, 0, 3, 0.0)  # as a trainer does that was killed
        assert again == first
        rest = await client.take(OURS, first.queue, first.items[-1].number, MOST_ITEMS, 0.0)
        assert [(item.trajectory, item.size) for item in rest.items] == [(items[3].trajectory, 2)]
        with pytest.raises(Unreachable, match=r"409.*another trainer"):
            await client.take(OTHERS, first.queue, 0, 1, 0.0)
        # The numbers of another queue, as after the loss of the leader's folder, acknowledge nothing.
        assert (await client.take(OURS, OTHERS, 2**40, MOST_ITEMS, 0.0)).items == rest.items
        assert not (await client.take(OURS, first.queue, rest.items[-1].number, MOST_ITEMS, 0.0)).items
        waiting = asyncio.create_task(client.take(OURS, first.queue, 0, 1, 20.0))
        await asyncio.sleep(0)
        await client.send(base, OURS, [Item(replace(GOOD, id="traj-late"))])
        found = await waiting
        assert [item.trajectory.id for item in found.items] == ["traj-late"]
        await client.take(OURS, first.queue, found.items[-1].number, 0, 0.0)

    asyncio.run(work())
    assert status(leader)["waiting"] == 0


def test_answers_of_the_leader_are_for_the_trainer(leader: RunningServer, client: LeaderClient) -> None:
    scoring = [{"function": "regex", "options": {"pattern": "[13579]"}}]
    fields: dict[str, Any] = {"temperature": 1.0, "n": 3, "collect_trajectory": True, "scoring_function": scoring}
    reply = leader.complete([5, 6, 7], model="policy", **fields).json()
    found = asyncio.run(client.take(OURS, OURS, 0, MOST_ITEMS, 0.0))
    assert {item.trajectory.id for item in found.items} == {c["trajectory_id"] for c in reply["choices"]}
    for item in found.items:
        assert item.size == 3
        assert len(item.trajectory.logprobs) == len(item.trajectory.tokens) == len(item.trajectory.versions)
    asyncio.run(client.take(OURS, found.queue, found.items[-1].number, 0, 0.0))
    later = leader.complete([5, 6, 7], model="policy", **fields | {"scoring_function": "later"})
    assert (later.status_code, later.json()["error"]["code"]) == (400, "learning_disabled")
    other = leader.complete([5, 6, 7], model="shout", **fields)
    assert other.status_code == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": ""},
        {"id": "a b"},
        {"id": "x" * 1000},
        {"group": "../etc"},
        {"group": "g" * 5000},
        {"prompt": ()},
        {"tokens": ()},
        {"prompt": (1 << 40,)},
        {"prompt": (-1,)},
        {"tokens": (1 << 20, 1)},
        {"prompt": (1,) * 5000},
        {"logprobs": (-1.0,)},
        {"logprobs": (-1.0, 3.0)},
        {"logprobs": (-1.0, -1e400)},
        {"model_logprobs": (-1.0, 5.0)},
        {"versions": (1,)},
        {"versions": (-1, 1)},
        {"versions": (1 << 60, 1)},
        {"temperature": 0.0},
        {"temperature": 1e9},
        {"reward": 1e9},
        {"reward": float("inf")},
        {"created": -1.0},
        {"metadata": {"a": "x" * 70_000}},
        {"mask": (0, 0)},
        {"mask": (1, 2)},
        {"mask": (1,)},
        {"turn_rewards": (1.0, 2.0)},
        {"turn_rewards": (1e9,)},
        {"finish_reason": "s" * 100},
        {"truncation": [2.0, 0, 0.0]},
        {"truncation": [1.0, -1, 0.0]},
    ],
    ids=str,
)
def test_a_wrong_trajectory_is_refused_with_all_beside_it(leader: RunningServer, wrong: dict[str, Any]) -> None:
    names = Trajectory.__struct_fields__
    fields = msgspec.to_builtins(GOOD)
    for name, value in wrong.items():
        fields[names.index(name)] = value
    good = msgspec.to_builtins(replace(GOOD, id="traj-good"))
    body = {"base": feed(leader).base, "queue": OURS, "items": [{"trajectory": good}, {"trajectory": fields}]}
    before = status(leader)
    reply = leader.client.post(f"{PATH}/trajectories", content=json.dumps(body))
    assert reply.status_code == 400, reply.text
    assert status(leader) == before


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/versions?after=-1", None, 400),
        ("GET", "/versions?after=1e400", None, 400),
        ("GET", "/versions?wait=1e9", None, 400),
        ("GET", "/versions?wait=nan", None, 400),
        ("GET", f"/versions?leader={'a' * 500}", None, 400),
        ("GET", "/versions?unknown=1", None, 400),
        ("GET", f"/files/{'a' * 64}", None, 404),
        ("GET", f"/files/{'A' * 64}", None, 404),
        ("GET", "/files/..%2f..%2fetc%2fpasswd", None, 404),
        ("GET", f"/files/{'a' * 64}?offset=-1", None, 400),
        ("PUT", f"/files/{'a' * 64}?trainer={OURS}&name=../../x&size=1", b"x", 400),
        ("PUT", f"/files/{'a' * 64}?trainer={OURS}&name=adapter_model.bin&size=1", b"x", 400),
        ("PUT", f"/files/{'a' * 64}?trainer={OURS}&name=adapter_config.json&size=99999999999999", b"x", 400),
        ("PUT", f"/files/{'a' * 64}?trainer={OURS}&name=adapter_config.json&size=0", b"x", 400),
        (
            "PUT",
            f"/files/{'a' * 64}?trainer={OURS}&name=adapter_config.json&size=9000000",
            b"x" * (CHUNK + 1),
            400,
        ),
        (
            "PUT",
            f"/files/{'a' * 64}?trainer={OURS}&name=adapter_config.json&size=90000000",
            b"x" * (17 << 20),
            413,
        ),
        ("PUT", f"/files/{'a' * 64}?trainer=..&name=adapter_config.json&size=1", b"x", 400),
        ("PUT", f"/files/{'a' * 64}?name=adapter_config.json&size=1", b"x", 400),
        ("PUT", f"/files/x?trainer={OURS}&name=adapter_config.json&size=1", b"x", 404),
        ("POST", "/versions", b"", 400),
        ("POST", "/versions", b"\xff\xfe", 400),
        ("POST", "/versions", b"[" * 100_000, 400),
        ("POST", "/versions", b'{"trainer": "0000000000000000"}', 400),
        ("POST", "/trajectories", b"null", 400),
        ("POST", "/trajectories", b'{"base": 1e999, "queue": "", "items": []}', 400),
        ("GET", "/trajectories", None, 400),
        ("GET", f"/trajectories?trainer={OURS}&queue={OURS}&after=99999999999999999999", None, 400),
        ("GET", f"/trajectories?trainer={OURS}&queue={OURS}&most=100000", None, 400),
        ("GET", "/trajectories?trainer=x&queue=y", None, 400),
    ],
)
def test_numbers_and_texts_are_bounded(
    leader: RunningServer, method: str, path: str, body: bytes | None, code: int
) -> None:
    before = status(leader)
    reply = leader.client.request(method, PATH + path, content=body)
    assert reply.status_code == code, reply.text
    assert reply.json()["error"]["message"]
    assert status(leader) == before


def test_pages_of_other_sites_neither_post_nor_take(leader: RunningServer) -> None:
    """Without a key a browser would send these for any page that is open in it."""
    page = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    body = {"base": feed(leader).base, "queue": OURS, "items": [{"trajectory": msgspec.to_builtins(GOOD)}]}
    before = status(leader)
    for media in ({"Content-Type": "text/plain"}, {}):
        headers = page | media
        assert leader.client.post(f"{PATH}/trajectories", content=json.dumps(body), headers=headers).status_code == 415
    taking = f"{PATH}/trajectories?trainer={OURS}&queue={OURS}"
    assert leader.client.get(taking, headers=page).status_code == 403
    assert status(leader) == before


def test_too_many_trajectories_at_once(leader: RunningServer) -> None:
    items = [Item(replace(GOOD, id=f"traj-{i}")) for i in range(MOST_ITEMS + 1)]
    body = msgspec.json.encode({"base": feed(leader).base, "queue": OURS, "items": items})
    assert leader.client.post(f"{PATH}/trajectories", content=body).status_code == 400
    assert msgspec.json.decode(msgspec.json.encode(Items("a" * 64, OURS, ())), type=Items).items == ()


def test_what_the_leader_forgets_is_shown_no_more(leader: RunningServer) -> None:
    before = feed(leader)
    assert leader.client.delete("/v1/adapters/shout").status_code == 200
    after = asyncio.run(LeaderClient(leader.url, KEY).feed(before.sequence, before.leader, 10.0))
    assert {a.name for a in before.adapters} - {a.name for a in after.adapters} == {"shout"}


def test_a_server_that_does_not_lead_says_so(server: RunningServer) -> None:
    reply = server.client.get(f"{PATH}/versions")
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "learning_disabled")
    assert server.client.get(f"{PATH}/status").status_code == 404


def test_the_digest_of_a_base(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    first = bases.digest(tmp_path)
    (tmp_path / "README.md").write_text("of no matter", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    assert bases.digest(tmp_path) == first
    (tmp_path / "tokenizer.json").write_text("changed", encoding="utf-8")
    changed = bases.digest(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    assert len({first, changed, bases.digest(tmp_path)}) == 3


def test_the_way_may_be_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    tls = Path(__file__).parents[1] / "tls"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
    reply = msgspec.json.encode(Feed("a" * 16, 3, "b" * 64, ()))

    async def work() -> int:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert b"Authorization: Bearer the-key" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(reply), reply))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as serving:
            client = LeaderClient(f"https://localhost:{serving.sockets[0].getsockname()[1]}", KEY)
            with pytest.raises(Unreachable, match="is not trusted"):
                await client.feed()
            monkeypatch.setenv("SSL_CERT_FILE", str(tls / "cert.pem"))
            return (await client.feed()).sequence

    assert asyncio.run(work()) == 3


def test_a_reply_without_end_is_not_kept() -> None:
    """A leader that sends more than it should is cut off."""

    async def work() -> None:
        async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 999999999\r\n\r\n")
            try:
                while True:
                    writer.write(b"x" * (1 << 20))
                    await writer.drain()
            except OSError:
                writer.close()

        async with await asyncio.start_server(endless, "127.0.0.1", 0) as serving:
            port = serving.sockets[0].getsockname()[1]
            with pytest.raises(Unreachable):
                await LeaderClient(f"127.0.0.1:{port}", "").chunk(File("adapter_config.json", 10, "a" * 64), 0)

    asyncio.run(work())
