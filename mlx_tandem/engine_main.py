"""The engine process: builds the runner and runs the core's loop. The front starts it, never a person."""

from __future__ import annotations

import faulthandler
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mlx_tandem import files
from mlx_tandem.config import EngineConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.core import EngineCore, EngineFailure, Gauges
from mlx_tandem.engine.wire import EngineChannel, WireError
from mlx_tandem.errors import ModelError, TandemError
from mlx_tandem.files import StorageError
from mlx_tandem.printable import printable
from mlx_tandem.rank_group import group
from mlx_tandem.types import AdapterSource, EngineInfo

if TYPE_CHECKING:
    from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
    from mlx_tandem.adapters.slots import SlotTable
    from mlx_tandem.engine.block_manager import BlockManager
    from mlx_tandem.engine.cost import CostModel
    from mlx_tandem.engine.grammars.masks import Grammars
    from mlx_tandem.engine.proposers.draft_model import DraftModel
    from mlx_tandem.engine.ranks.leader import RankLeader
    from mlx_tandem.engine.scheduler import Scheduler
    from mlx_tandem.kv.disk.opening import Opening
    from mlx_tandem.kv.groups import CacheGroup
    from mlx_tandem.kv.hashing import Namespace
    from mlx_tandem.model.build import Built
    from mlx_tandem.model.choices import Kept
    from mlx_tandem.model.footprint import SlotRoom
    from mlx_tandem.model.ops.lora.slots import Arrays, Uploads
    from mlx_tandem.training.device.trainers import MLXTrainers

SWITCH_SECONDS = 5e-4
"""The interpreter's switch interval: how long the loop and a thread that prepares adapters or masks keep the
interpreter while the other waits for it."""
EXIT_FAILURE = 70
"""Exit status after a failure (EX_SOFTWARE), upon which the supervisor starts another engine."""

log = logging.getLogger("mlx_tandem.engine")


def run(sock: socket.socket, config: EngineConfig, *, own_process: bool = False) -> int:
    """Serve one front over `sock` until it drains or goes away; return the exit status.

    It runs on the calling thread, which from then on is the only one to use MLX.
    """
    channel = EngineChannel(sock)
    try:
        return serve(channel, config, own_process)
    except WireError as e:
        log.info("engine ends: %s", e)
        return 0
    except TandemError as e:
        return _die(channel, e.code or "engine_error", e.message)
    except EngineFailure as e:
        return _die(channel, "engine_error", str(e))
    except Exception as e:
        log.exception("the engine failed")
        return _die(channel, "engine_error", f"the engine failed: {type(e).__name__}")
    finally:
        if own_process:
            faulthandler.cancel_dump_traceback_later()
        channel.close()


def _die(channel: EngineChannel, code: str, message: str) -> int:
    with suppress(WireError):
        channel.send([m.Fatal(code, message)])
    return EXIT_FAILURE


def serve(channel: EngineChannel, config: EngineConfig, own_process: bool) -> int:
    """Build the engine and run its loop until it has drained or the channel is closed (WireError).

    Meanwhile the interpreter's switch interval is SWITCH_SECONDS.
    """
    channel.send([m.Progress("starting", 0.0)])
    with group(config, channel.wake) as (own, leader):
        return _serve(channel, own, own_process, leader)


def _serve(channel: EngineChannel, config: EngineConfig, own_process: bool, leader: RankLeader | None) -> int:
    """Build the engine and run its loop, as `serve` says."""
    # The device is opened here and not at import: a process that starts an engine may never use it itself.
    from mlx_tandem.model import device

    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with Notes(channel) if own_process else nullcontext():
            core = _built(channel, config, own_process, leader)
        if own_process:
            # Objects that exist by now stay. Collecting them as garbage would stop steps for tens of milliseconds.
            gc.collect()
            gc.freeze()
        core.run()
    finally:
        device.leave_thread()
        sys.setswitchinterval(usual)
    return 0


class Notes(logging.Handler):
    """Sends what this process logs to the front inside a `with` block, instead of to standard error.

    Only the thread that entered the block writes on the channel. Records of other threads are sent with the next
    record of that thread, or at the end of the block.
    """

    def __init__(self, channel: EngineChannel):
        super().__init__()
        self._channel = channel
        self._thread = threading.get_ident()
        self._waiting: deque[m.Note] = deque()
        self._replaced: list[logging.Handler] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, and send the queue if this is the thread that may."""
        trace = logging.Formatter().formatException(record.exc_info).split("\n") if record.exc_info else []
        self._waiting.append(m.Note(record.levelno, record.getMessage(), tuple(trace)))
        if threading.get_ident() == self._thread:
            self._send()

    def _send(self) -> None:
        while self._waiting:
            self._channel.send([self._waiting.popleft()])

    def __enter__(self) -> None:
        root = logging.getLogger()
        self._replaced, root.handlers[:] = root.handlers[:], [self]

    def __exit__(self, *error: object) -> None:
        logging.getLogger().handlers[:] = self._replaced
        with suppress(WireError):
            self._send()


def _built(channel: EngineChannel, config: EngineConfig, own_process: bool, leader: RankLeader | None) -> EngineCore:
    """Return an engine. An unforeseen error is raised with its text, in which no prompt can be yet."""
    try:
        return _build(channel, config, own_process, leader)
    except (TandemError, EngineFailure, WireError):
        raise
    except Exception as e:
        log.exception("the engine could not be started")
        raise EngineFailure(f"the engine could not be started: {type(e).__name__}: {e}") from e


def _kept_choices() -> Kept | None:
    """Return the choices of earlier starts; None if the user has no folder for them."""
    from mlx_tandem.model.choices import Kept

    with suppress(RuntimeError):
        return Kept(files.cache_folder() / "choices")
    return None


def _build(channel: EngineChannel, config: EngineConfig, own_process: bool, leader: RankLeader | None) -> EngineCore:
    from mlx_tandem.adapters.slots import SlotTable
    from mlx_tandem.adapters.store import AdapterStore
    from mlx_tandem.engine.adapters import Adapters
    from mlx_tandem.engine.loading import Loader
    from mlx_tandem.engine.pipeline import Pipeline
    from mlx_tandem.engine.proposers.speculation import Speculation
    from mlx_tandem.engine.time_share import TimeShare
    from mlx_tandem.engine.trainers import TrainerHost
    from mlx_tandem.kv.groups import open_groups
    from mlx_tandem.training.device.beside import BesideSteps

    weights: dict[str, AdapterWeights] = {}
    if config.speculation.method == "draft":
        _check_vocabulary(config)
    built = _build_model(channel, config, weights, leader)
    info = built.info
    groups = open_groups(info.memory, info.block_size)
    blocks, opening = _open_blocks(config, info, groups, channel.wake)
    slots = SlotTable(config.lora.max_loras)
    scheduler = _scheduler(config, built, blocks, slots)
    smaller = _draft_model(channel, config, built) if config.speculation.method == "draft" else None
    if built.verifies:
        scheduler.drafting.proposer = Speculation(config.speculation, smaller)
    time_share = TimeShare(config.duty)
    trainers = _trainers(config, built)
    if time_share.learns:
        _warm_up_learning(channel, config, trainers)
    cost = scheduler.prefill.cost
    built.warm_up(cost)
    tokens = _micro_batch_tokens(channel, config, trainers, cost) if time_share.learns else 0
    hidden = built.runner.hidden_size
    info = msgspec.structs.replace(info, prompt_cost=cost.form, micro_batch_tokens=tokens, hidden_size=hidden)
    store = AdapterStore(weights, most_bytes=int(config.lora.max_cpu_lora_gb * 1e9), most=config.lora.max_cpu_loras)
    company = built.runner.prebuilt.company
    read = _adapter_reader(config, built.linears, info, built.uploads, built.slot_room, leader)
    adapters = Adapters(store, Loader(company.around(read)), slots, _adapter_pieces(channel, built, info))
    host = TrainerHost(
        company.around(lambda: BesideSteps(trainers(), company)),
        adapters,
        learns=time_share.learns,
        most_rank=config.lora.max_lora_rank,
        budget_bytes=built.trainer_budget,
    )
    core = EngineCore(
        channel,
        Pipeline(scheduler, built.runner, time_share, host),
        adapters,
        _grammars(config, info, channel.wake),
        Gauges(groups[0].pool, slots, built.memory, built.adapter_bytes),
        heartbeat_seconds=config.heartbeat_seconds,
        opening=opening,
        on_turn=_on_turn(config, own_process, leader),
    )
    channel.send([m.Ready(info)])
    return core


def _on_turn(config: EngineConfig, own_process: bool, leader: RankLeader | None) -> Callable[[], None]:
    """Return what the loop calls in each turn."""
    pat = _Watchdog(config.stall_seconds).pat if own_process else lambda: None
    if leader is None:
        return pat

    def look() -> None:
        pat()
        leader.check()

    return look


def _build_model(
    channel: EngineChannel, config: EngineConfig, weights: dict[str, AdapterWeights], leader: RankLeader | None
) -> Built:
    """Load the engine's model and make its runner, and send the progress to the front."""
    from mlx_tandem.model.build import build
    from mlx_tandem.model.kernel_checks import ONCE

    def report(stage: str, fraction: float) -> None:
        channel.send([m.Progress(stage, fraction, stage in ONCE)])

    return build(config, weights, report, kept=_kept_choices(), leader=leader)


def _adapter_pieces(channel: EngineChannel, built: Built, info: EngineInfo) -> Iterator[None] | None:
    """Return what makes ready, piece by piece, the kernels that only adapters need, and then tells the front which they
    are; None if that was done at start.
    """
    if built.prepare_adapters is None:
        return None
    pieces = built.prepare_adapters()

    def prepare() -> Iterator[None]:
        backend, reason = yield from pieces
        channel.send([m.Ready(msgspec.structs.replace(info, lora_backend=backend, lora_reason=reason))])

    return prepare()


def _scheduler(config: EngineConfig, built: Built, blocks: BlockManager, slots: SlotTable) -> Scheduler:
    """Return the scheduler of the engine's only model."""
    from mlx_tandem.engine.images import Images
    from mlx_tandem.engine.scheduler import Scheduler

    vision = built.info.vision
    scheduler = Scheduler(
        config.scheduler,
        blocks,
        slots,
        max_model_len=built.info.max_model_len,
        vocab_size=built.info.vocab_size,
        eos_token_ids=built.info.eos_token_ids,
        limits=built.step_limits,
    )
    if vision is not None and built.image_room:
        scheduler.images = Images(vision.tokens, built.image_room, built.image_columns)
    return scheduler


def _check_vocabulary(config: EngineConfig) -> None:
    """Raise ModelError if the draft model has another vocabulary than the model."""
    from mlx_tandem.generation.tokenizer import Tokenizer

    folder = Path(config.speculation.draft_model)
    if config.speculation.draft_model and not Tokenizer.load(folder).has_tokens_of(
        Tokenizer.load(Path(config.model.path))
    ):
        raise ModelError(
            f"{folder} cannot draft for {config.model.path}: its tokenizer has other tokens", param="draft_model"
        )


def _draft_model(channel: EngineChannel, config: EngineConfig, built: Built) -> DraftModel:
    """Return the draft model beside a model, ready to draft."""
    from mlx_tandem.engine.cost import CostModel
    from mlx_tandem.engine.proposers.draft_model import DraftModel
    from mlx_tandem.kv.groups import open_groups
    from mlx_tandem.model.build import build_draft

    def report(stage: str, fraction: float) -> None:
        channel.send([m.Progress(f"draft model: {stage}", fraction)])

    draft = build_draft(config, built.info, report)
    if set(draft.info.eos_token_ids) != set(built.info.eos_token_ids):
        log.warning(
            "%s ends texts with the tokens %s, and the model with %s: drafts of the end of an answer will be wrong",
            config.speculation.draft_model,
            sorted(draft.info.eos_token_ids),
            sorted(built.info.eos_token_ids),
        )
    draft.warm_up(CostModel())
    info = draft.info
    return DraftModel(
        draft.runner,
        open_groups(info.memory, info.block_size),
        seats=info.max_num_seqs,
        vocab_size=info.vocab_size,
        longest=info.max_model_len,
    )


def _grammars(config: EngineConfig, info: EngineInfo, wake: Callable[[], None]) -> Grammars:
    """Return the store of grammars, which opens the tokenizer when there is a request with one."""
    from mlx_tandem.engine.grammars.compiling import open_tokenizer
    from mlx_tandem.engine.grammars.digits import DigitLimitedGrammars

    tokenizer = partial(open_tokenizer, Path(config.model.path), info.vocab_size, info.eos_token_ids)
    return DigitLimitedGrammars(tokenizer, info.vocab_size, wake)


def _open_blocks(
    config: EngineConfig, info: EngineInfo, groups: Sequence[CacheGroup], wake: Callable[[], None]
) -> tuple[BlockManager, Opening | None]:
    """Return the manager of the groups' blocks with their caches, and the KV offload while it is being opened."""
    from mlx_tandem.engine.block_manager import BlockManager
    from mlx_tandem.engine.budget import size_text
    from mlx_tandem.engine.kv_offload.offload import KVOffload
    from mlx_tandem.kv.disk.cache import MOST_RECORD_BYTES
    from mlx_tandem.kv.hashing import Namespace
    from mlx_tandem.kv.prefix import PrefixCache
    from mlx_tandem.model import backend, deterministic

    # A model is identified by one digest of all its files, which takes a while to compute. Keys of blocks in memory do
    # not need it, since there is one model. On the drive each model has an index of its own, and blocks name it (see
    # KVOffload).
    heads = "a head's keys" if config.speculation.method == "mtp" else ""
    positions = [group for group in groups if not group.snapshots]
    # What a state consists of is decided by mlx-lm's code of the family.
    states = f"states of mlx-lm {version('mlx-lm')}" if len(positions) < len(groups) else ""
    several = f"{config.parallel.ranks} ranks" if config.parallel.ranks > 1 else ""
    # Keys by packed and by unpacked weights differ in their last bits, and --deterministic promises each bit.
    arithmetic = (info.quantization or "", deterministic.arithmetic(info) if config.deterministic else "")
    namespace = Namespace(
        weights="",
        tokenizer="",
        dtype=info.dtype,
        block_size=info.block_size,
        kv_bits=config.cache.kv_bits,
        kv_group_size=config.cache.kv_group_size if config.cache.kv_bits < 16 else 0,
        # A record on the drive holds a block of each group with positions, and the keys of a head where one is used.
        layout=", ".join(
            filter(None, ("windows apart" if len(positions) > 1 else "", heads, states, several, *arithmetic))
        ),
    )
    caches = [PrefixCache(group, namespace) for group in groups] if config.cache.prefix_caching else []
    state_bytes = config.parallel.ranks * sum(group.block_bytes for group in groups if group.snapshots)
    if config.disk.on and state_bytes > MOST_RECORD_BYTES:
        log.warning("nothing is kept on the drive: a state of this model has %s", size_text(state_bytes))
    opening = _open_offload(config, namespace, wake) if caches and state_bytes <= MOST_RECORD_BYTES else None
    offload = None
    if opening is not None:
        offload = KVOffload(
            groups,
            caches,
            write_through=config.disk.policy == "write_through",
            step_bytes=backend.current().steps.drive_bytes,
            ranks=config.parallel.ranks,
        )
    return BlockManager(groups, caches, offload), opening


def _adapter_reader(
    config: EngineConfig,
    linears: Mapping[str, LinearShape],
    info: EngineInfo,
    uploads: Uploads,
    room: SlotRoom,
    leader: RankLeader | None,
) -> Callable[[AdapterSource], AdapterWeights]:
    """Return a function that reads an adapter, prepares its upload, and sends it to the other ranks, if there are any.

    Loading threads call it, so it must not hold the model: a thread that still reads when the engine ends would keep
    the weights in memory.
    """
    from mlx_tandem.adapters import formats

    def read(source: AdapterSource) -> AdapterWeights:
        weights = formats.read(
            Path(source.path),
            linears,
            max_rank=config.lora.max_lora_rank,
            base_layers=info.layers,
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            follow_links=source.follow_links,
            root=Path(source.root) if source.root is not None else None,
        )
        room.promise(weights.info.rank, weights.tensors)
        uploads.prepare(weights)
        if leader is not None:
            leader.offer(weights)
        return weights

    return read


def _trainers(config: EngineConfig, built: Built) -> Callable[[], MLXTrainers]:
    """Return a function that makes the trainers of this model when it is first called."""
    from mlx_tandem.model import backend
    from mlx_tandem.training.device.cutting import Cutting
    from mlx_tandem.training.device.trainers import MLXTrainers

    here = backend.current().learning
    uploads, room = built.uploads, built.slot_room  # not `built`: publishing threads must not hold the model

    def publish(weights: AdapterWeights, served: Arrays) -> None:
        room.promise(weights.info.rank, weights.tensors)
        uploads.keep(weights.info.digest, served)

    @cache
    def trainers() -> MLXTrainers:
        return MLXTrainers(
            built.twin,
            built.adapter_dtype,
            vocab_size=built.info.vocab_size,
            micro_batch_tokens=config.duty.micro_batch_tokens or here.micro_batch_tokens,
            most_tokens=built.info.max_model_len,
            cutting=Cutting(
                forward_layers=here.forward_layers,
                few_shapes=here.few_shapes,
                kept_bytes=here.kept_bytes,
                mask_axes=0 if here.masks_are_slow or built.deterministic else built.mask_axes,
            ),
            prepare=publish,
            exact=built.deterministic,
        )

    return trainers


def _warm_up_learning(channel: EngineChannel, config: EngineConfig, trainers: Callable[[], MLXTrainers]) -> None:
    """Compile the kernels of learning where that takes long, if it is known that clients will train."""
    from mlx_tandem.model import backend

    if not config.duty.trainer_rank or not backend.current().learning.compiles_for_long:
        return
    channel.send([m.Progress("warming up learning", 0.0)])
    try:
        trainers().warm_up(config.duty.trainer_rank)
    except Exception as e:  # clients that train are told later; requests are served
        log.warning("learning could not be warmed up: %r", e)


def _micro_batch_tokens(
    channel: EngineChannel, config: EngineConfig, trainers: Callable[[], MLXTrainers], cost: CostModel
) -> int:
    """Return the tokens of one micro-batch, as configured or by default; where slices are timed, so that they delay no
    decode.
    """
    from mlx_tandem.model import backend
    from mlx_tandem.training.device import pace

    here = backend.current().learning
    tokens = config.duty.micro_batch_tokens or here.micro_batch_tokens
    if not config.duty.trainer_rank or config.duty.micro_batch_tokens or not here.times_slices:
        return tokens
    channel.send([m.Progress("timing learning", 0.0)])
    tokens = trainers().micro_batch_tokens = pace.micro_batch_tokens(
        lambda tokens: trainers().slowest_slice(config.duty.trainer_rank, tokens), cost.decode(1), tokens
    )
    return tokens


def _open_offload(config: EngineConfig, namespace: Namespace, wake: Callable[[], None]) -> Opening | None:
    """Return the KV offload if it is configured.

    Raise StorageError if a folder that was named cannot be used; without the default folder the engine works, too.
    """
    from mlx_tandem.kv.disk.opening import Opening

    if not config.disk.on or config.model.random_weights:
        return None
    try:
        return Opening(config.disk, Path(config.model.path), namespace, wake)
    except StorageError as e:
        if config.disk.dir:
            raise
        log.warning("nothing is kept on the drive: %s", e.message)
        return None


class _Watchdog:
    """Ends the process with a stack dump if the loop has not turned for `seconds`, so that a hang becomes a restart."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._due = 0.0

    def pat(self) -> None:
        """Note that the loop has turned."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._seconds / 10
            faulthandler.dump_traceback_later(self._seconds, exit=True)


class EngineLines(logging.Formatter):
    """Formats a record as one line on standard error.

    The lines of a traceback are indented, so that no text of a file or a client can look like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line = printable(f"{record.levelname} {record.name}: {record.getMessage()}")
        trace = self.formatException(record.exc_info).split("\n") if record.exc_info else []
        return "\n    ".join([line, *map(printable, trace)])


def main(arguments: list[str]) -> int:
    """Run the engine of the front that started this process; return the exit status."""
    faulthandler.enable()  # a crash of a library leaves a line that says so
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EngineLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # The front decides when the engine ends; a Ctrl-C in the terminal would reach both, and so would its end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    config = msgspec.json.decode(options["--config"], type=EngineConfig)
    return run(socket.socket(fileno=int(options["--fd"])), config, own_process=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
