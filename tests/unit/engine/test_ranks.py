"""The group of ranks without a model: frames, orders, and the end of a group."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan, StepResult
from mlx_tandem.engine.ranks import messages as g
from mlx_tandem.engine.ranks import remote
from mlx_tandem.engine.ranks.channel import _HEADER, MAX_FRAME, ChannelError, RankChannel
from mlx_tandem.engine.ranks.follower import Inbox, follow
from mlx_tandem.engine.ranks.leader import EXIT_GROUP, PIECE_BYTES, LedRank, RankLeader, digest_of
from mlx_tandem.engine.ranks.local import environment, hostfile_text, unused_ports
from mlx_tandem.engine.ranks.weights import weights_digest
from mlx_tandem.errors import GroupFailed, ModelError
from mlx_tandem.rank_main import check_weights
from mlx_tandem.types import AdapterInfo, SamplingParams

KEY = b"k" * 32
PLAN = StepPlan(
    (
        Row(RowKind.PROMPT, 1, 0, 2, 0, (1, 2, 3), ((1, 2),), True),
        Row(RowKind.DECODE, 2, 1, 0, 7, (-1,), ((4,),), True),
    ),
    uploads=((2, "digest"),),
    copies=((3, 4),),
    seatings=(Seating(0, SamplingParams(max_tokens=1), 0, 1, (1,), frozenset({2})),),
    masked=(1,),
)


class Ends:
    """Both ends of a connection."""

    def __init__(self, key: bytes = KEY):
        self.ours, self.theirs = socket.socketpair()
        self.leader: RankChannel[g.Answer] = RankChannel(self.ours, KEY, g.Answer)
        self.follower: RankChannel[g.Order] = RankChannel(self.theirs, key, g.Order)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.ours.close()
    made.theirs.close()


@pytest.fixture
def group(ends: Ends) -> Iterator[tuple[RankLeader, Ends, list[int]]]:
    died: list[int] = []
    leader = RankLeader([LedRank(1, ends.leader)], silence_seconds=30.0, die=died.append)
    yield leader, ends, died
    leader.close()


def test_orders_arrive_as_they_were_sent(ends: Ends) -> None:
    ends.leader.send(g.Launch.of(PLAN))
    ends.leader.send(g.Sample(3, ((g.Array.of(np.arange(6, dtype=np.int32).reshape(2, 3)),),)))
    launch, sample = ends.follower.receive(), ends.follower.receive()
    assert isinstance(launch, g.Launch) and launch.plan() == PLAN
    assert isinstance(sample, g.Sample) and sample.launch == 3
    assert sample.numbers[0][0].read().tolist() == [[0, 1, 2], [3, 4, 5]]


def frames(*messages: Any, key: bytes = KEY) -> list[bytes]:
    """The frames of these messages."""
    found = Ends()
    RankChannel(found.ours, key, g.Answer)
    sender: RankChannel[g.Answer] = RankChannel(found.ours, key, g.Answer)
    raw = []
    for message in messages:
        sender.send(message)
        raw.append(found.theirs.recv(1 << 16))
    found.ours.close()
    found.theirs.close()
    return raw


def changed(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


WRONG = "lost or changed, or came from somebody without the key"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        pytest.param(lambda one, two: changed(one), WRONG, id="changed"),
        pytest.param(lambda one, two: two, WRONG, id="one is lost"),
        pytest.param(lambda one, two: one + one, WRONG, id="repeated"),
        pytest.param(lambda one, two: frames(g.Wait(0), key=b"other")[0], WRONG, id="of somebody without the key"),
        pytest.param(lambda one, two: _HEADER.pack(MAX_FRAME + 1, 1, bytes(16)), "over the limit", id="too long"),
        pytest.param(lambda one, two: frames({"type": "Nonsense"})[0], "no message of this version", id="no message"),
        pytest.param(lambda one, two: one[:9], "it has ended the connection", id="cut off"),
    ],
)
def test_a_frame_that_is_not_the_next_one_is_refused(ends: Ends, sent: Any, said: str) -> None:
    one, two = frames(g.Wait(0), g.Wait(1))
    ends.ours.sendall(sent(one, two))
    ends.ours.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelError, match=said):
        for _ in range(2):
            ends.follower.receive()


def test_ranks_that_draw_the_same_go_on(group: tuple[RankLeader, Ends, list[int]]) -> None:
    leader, ends, _ = group
    ends.follower.send(g.Done(digest_of([(1,), (2, 3)])))
    leader.compare([(1,), (2, 3)])
    leader.compare([(4,)])
    ends.follower.send(g.Done(digest_of([(4,)])))
    leader.tell(g.Wait(0))
    assert isinstance(ends.follower.receive(), g.Wait)


@pytest.mark.parametrize("first", ["leader", "follower"])
def test_ranks_that_draw_other_tokens_end_the_group(group: tuple[RankLeader, Ends, list[int]], first: str) -> None:
    leader, ends, died = group

    def compare() -> None:
        leader.compare([(1,)])

    if first == "leader":
        compare()
    ends.follower.send(g.Done(digest_of([(2,)])))
    with pytest.raises(GroupFailed, match="rank 1 has drawn other tokens"):
        if first == "follower":
            compare()
        leader._wait_until(lambda each: False)
    assert not died, "the thread that computes has noticed"


def test_a_rank_that_ends_ends_the_process_of_one_that_waits_for_it(group: tuple[RankLeader, Ends, list[int]]) -> None:
    """The thread that computes hangs in a sum, so nobody asks."""
    leader, ends, died = group
    over = threading.Event()

    def die(status: int) -> None:
        died.append(status)
        over.set()

    leader._die = die
    ends.theirs.shutdown(socket.SHUT_RDWR)
    assert over.wait(30) and died == [EXIT_GROUP]
    with pytest.raises(GroupFailed, match="rank 1: it has ended the connection"):
        leader.tell(g.Wait(0))


def test_a_rank_that_is_silent_ends_the_group(ends: Ends) -> None:
    woken = threading.Event()
    leader = RankLeader([LedRank(1, ends.leader)], silence_seconds=0.1, wake=woken.set, die=lambda status: None)
    assert woken.wait(30)
    with pytest.raises(GroupFailed, match="rank 1 gives no sign of life"):
        leader.check()


def test_a_refusal_names_the_rank_and_the_field(group: tuple[RankLeader, Ends, list[int]]) -> None:
    leader, ends, _ = group
    ends.follower.send(g.Failed("it does not fit", "invalid_model_folder", "model"))
    with pytest.raises(ModelError, match="rank 1: it does not fit") as refused:
        leader._wait_until(lambda each: each.loaded is not None)
    assert refused.value.param == "model"


def weights(digest: str, size: int) -> AdapterWeights:
    numbers = np.random.default_rng(0).standard_normal((size, 4)).astype(np.float32)
    return AdapterWeights(AdapterInfo(digest, 4, 1.0, "peft", (), 0, 0), {"a": (numbers, numbers.T.copy())})


class Recorder:
    """A runner that writes down what it is told."""

    one_at_a_time = False

    def __init__(self) -> None:
        self.told: list[Any] = []

    def launch(self, plan: StepPlan) -> str:
        self.told.append(plan)
        return f"flight {len(self.told)}"

    def sample(self, handle: str, masks: Any) -> None:
        self.told.append((handle, [[each.tolist() for each in own] for own in masks]))

    def wait(self, handle: str) -> StepResult:
        self.told.append(handle)
        return StepResult([(5,)])

    def reset(self) -> None:
        self.told.append("reset")


class Share:
    def __init__(self) -> None:
        self.runner: Any = Recorder()

    def join(self, shapes: Any) -> str:
        return f"the sum of {shapes} is wrong"

    def prepare(self, weights: AdapterWeights) -> None:
        pass

    def memory(self) -> int:
        return 0


def test_a_led_rank_does_what_it_is_told_in_order(ends: Ends) -> None:
    """Adapters come in pieces, in between; the end of the leading rank ends it."""
    ended: list[int] = []
    inbox, share = Inbox(ends.follower, ended.append), Share()
    leader = RankLeader([LedRank(1, ends.leader)], silence_seconds=30.0, die=lambda status: None)
    big = weights("big", PIECE_BYTES // 8)
    leader.offer(big)
    leader.offer(big)
    empty = StepPlan(())
    for order in (
        g.OneAtATime(True),
        g.Launch.of(PLAN),
        g.Launch.of(empty),
        g.Launch.of(PLAN),
        g.Sample(0, ((g.Array.of(np.zeros(2, np.int32)),),)),
        g.Wait(0),
        g.Wait(2),
        g.Reset(),
    ):
        leader.tell(order)
    thread = threading.Thread(target=_follow, args=(inbox, share))
    thread.start()
    for _ in range(2):
        leader.compare([(5,)])
    with pytest.raises(ModelError, match="the sum of"):
        leader.join(((1, 2),), lambda: "")
    got = inbox.adapters["big"]
    assert all(np.array_equal(a, b) for a, b in zip(got.tensors["a"], big.tensors["a"], strict=True))
    leader.forget_all_but({"big"})
    leader.forget_all_but(set())
    leader.close()
    thread.join()
    told = share.runner.told
    assert told == [PLAN, empty, PLAN, ("flight 1", [[[0, 0]]]), "flight 1", "flight 3", "reset"]
    assert share.runner.one_at_a_time and ended == [EXIT_GROUP] and not inbox.adapters


def _follow(inbox: Inbox, share: Share) -> None:
    with pytest.raises(ChannelError):
        follow(inbox, share)  # type: ignore[arg-type]


def test_an_adapter_that_cannot_be_taken_ends_the_rank(ends: Ends) -> None:
    """Else it would give signs of life and take no order any more."""
    ended: list[int] = []
    inbox = Inbox(ends.follower, ended.append)

    def refuse(weights: AdapterWeights) -> None:
        raise MemoryError("no room")

    inbox.prepare = refuse
    leader = RankLeader([LedRank(1, ends.leader)], silence_seconds=30.0, die=lambda status: None)
    leader.offer(weights("small", 4))
    with pytest.raises(ChannelError, match="MemoryError"):
        inbox.next()
    assert ended == [EXIT_GROUP]
    leader.close()


def test_strangers_do_not_keep_ranks_from_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, and one announces more than a rank has to say."""
    monkeypatch.setenv("MLX_JACCL_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setattr(remote, "HELLO_SECONDS", 0.05)
    there: list[Any] = []

    def meet(meeting: bytes) -> bytes:
        told = msgspec.msgpack.decode(meeting, type=remote.Meeting)
        there.extend(socket.create_connection((told.host, told.port)) for _ in range(2))
        there[1].sendall(_HEADER.pack(MAX_FRAME, 1, bytes(16)))
        there.append(remote.reach(meeting, 1))
        return b""

    found: list[LedRank] = []
    thread = threading.Thread(target=lambda: found.extend(remote.LaunchedRanks("jaccl", 2, meet).start()), daemon=True)
    thread.start()
    thread.join(30)
    assert [each.number for each in found] == [1]
    there[2].send(g.Alive())
    assert isinstance(found[0].channel.receive(), g.Alive)
    for each in (*there, found[0].channel):
        each.close()


def test_weights_of_another_model_are_noticed(tmp_path: Path) -> None:
    """Of the same shape, and with the same names of files."""
    ones, others = tmp_path / "ones", tmp_path / "others"
    for folder, number in ((ones, 1), (others, 2)):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([0]) * 100 + bytes([number]) * 1_000_000)
    (ones / "README.md").write_text("more")
    check_weights(weights_digest(ones), ones)
    with pytest.raises(ModelError, match="others are not those of the first rank"):
        check_weights(weights_digest(ones), others)


def test_a_rank_gets_the_variables_of_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert environment("nccl", 1, 2, [5000, 5001], "") == {
        "MLX_RANK": "1", "MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": "5000",
        "CUDA_VISIBLE_DEVICES": "6",
    }  # fmt: skip
    assert environment("ring", 1, 2, [], "file") == {"MLX_RANK": "1", "MLX_HOSTFILE": "file"}
    assert hostfile_text([1, 2]) == '[["127.0.0.1:1"], ["127.0.0.1:2"]]'
    ports = unused_ports(3)
    assert len(set(ports)) == 3 and all(port < 32768 for port in ports)


def test_one_rank_imports_nothing_of_several() -> None:
    """The command and the engine of a server with one rank."""
    said = """
import sys, mlx_tandem.cli.app, mlx_tandem.cli.serve, mlx_tandem.engine_main, mlx_tandem.model.build
own = ("mlx_tandem.engine.ranks.", "mlx_tandem.model.leading", "mlx_tandem.model.sharding")
print([name for name in sys.modules if name.startswith(own)])
"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['mlx_tandem.engine.ranks.launched']"
