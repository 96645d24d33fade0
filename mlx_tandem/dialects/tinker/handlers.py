"""The handlers of the routes that train and sample, and of those that hand out their results."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_tandem import limits
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.route import Received, Reply
from mlx_tandem.dialects.tinker import bodies as b
from mlx_tandem.engine.learning import AdamParams, Part
from mlx_tandem.errors import InvalidRequest, NotFound, TandemError, UnsupportedMedia
from mlx_tandem.generation.prompted import OWNER
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.tinker.models import Kept, TrainedModel
from mlx_tandem.training.tinker.order import Work
from mlx_tandem.training.tinker.promises import POLL_SECONDS, Promise, Result
from mlx_tandem.training.tinker.samplers import Base, Source
from mlx_tandem.training.tinker.service import saving

if TYPE_CHECKING:
    from mlx_tandem.dialects.tinker.wire import PassRequest

PROTOBUF = "application/x-protobuf"
INLINE_BYTES = 4 << 20
"""Size from which a client that wants to is told the size of a result before it gets it."""

LEAST_TTL, MOST_TTL = 3600, 10 * 366 * 86_400
"""Seconds after which a checkpoint may expire."""

_PARTS: Mapping[str, Part] = {"train_attn": "attention", "train_mlp": "mlp", "train_unembed": "head"}


def _content(body: Any) -> bytes:
    """Return a digest of a body, by which a request that comes again is recognised."""
    return hashlib.sha256(b.digest(body)).digest()


def _future(promise: Promise, **more: Any) -> dict[str, Any]:
    """Return the envelope of a promise."""
    return {"request_id": promise.id, **more}


# -- models -------------------------------------------------------------------------------------------------------


async def create_model(front: ServerFront, body: b.ModelBody) -> dict[str, Any]:
    """Begin to open a new model, and return its promise."""
    tinker = front.check_tinker()
    session = tinker.session(body.session_id, OWNER.get())
    content = _content(body)
    if (known := session.begun.get(body.model_seq_id)) is not None and known[0] == content:
        return _future(known[1], model_id=f"{session.id}:train:{body.model_seq_id}")
    _check_base(front, body.base_model)
    _check_optimizer(body.optimizer_config)
    lora = body.lora_config
    if lora is None or lora.rank == 0:
        raise InvalidRequest(
            "lora_config with a rank is needed: models are trained as LoRA adapters", param="lora_config"
        )
    parts = tuple(part for name, part in _PARTS.items() if getattr(lora, name))
    if not parts:
        raise InvalidRequest("one of train_mlp, train_attn and train_unembed must be true", param="lora_config")
    seed = secrets.randbits(31) if lora.seed is None else lora.seed % 2**63
    model = await tinker.new_model(
        session, body.model_seq_id, body.base_model, lora.rank, parts, check_metadata(body.user_metadata)
    )

    def reply() -> bytes:
        return dumps({"model_id": model.id, "type": "create_model"})

    promise = tinker.begin(model, partial(model.open, seed), reply)
    session.begun[body.model_seq_id] = content, promise
    return _future(promise, model_id=model.id)


async def load_weights(front: ServerFront, body: b.LoadBody) -> dict[str, Any]:
    """Begin to load a checkpoint onto a model, or as a new model of a session, and return its promise."""
    tinker, owner = front.check_tinker(), OWNER.get()
    if body.weights_access_token is not None:
        raise InvalidRequest("there are no other accounts here", param="weights_access_token")
    _check_optimizer(body.optimizer_config)
    if body.base_model is not None:
        _check_base(front, body.base_model)
    if body.session_id is None:
        model = tinker.model(body.model_id or "", owner)

        async def work() -> Result:
            await model.load(tinker.checkpoints.get(body.path, owner), optimizer=body.optimizer)
            return Result(dumps({"path": body.path, "model_id": model.id, "type": "load_weights"}))

        return _ordered(model, body.seq_id, _content(body), work)
    if body.model_id is not None or body.model_seq_id is None:
        raise InvalidRequest("either model_id and seq_id are given, or session_id and model_seq_id", param="session_id")
    session, content = tinker.session(body.session_id, owner), _content(body)
    if (known := session.begun.get(body.model_seq_id)) is not None and known[0] == content:
        return _future(known[1], model_id=f"{session.id}:train:{body.model_seq_id}")
    checkpoint = tinker.checkpoints.get(body.path, owner)
    run = tinker.checkpoints.run(checkpoint.run, owner)
    model = await tinker.new_model(
        session,
        body.model_seq_id,
        body.base_model or run.base_model,
        checkpoint.rank,
        checkpoint.parts,
        check_metadata(body.user_metadata),
    )

    def reply() -> bytes:
        return dumps({"path": body.path, "model_id": model.id, "type": "load_weights"})

    promise = tinker.begin(model, partial(model.load, checkpoint, optimizer=body.optimizer), reply)
    session.begun[body.model_seq_id] = content, promise
    return _future(promise, model_id=model.id)


def get_info(front: ServerFront, body: b.ModelIdBody) -> dict[str, Any]:
    """Return what a model is."""
    run = front.check_tinker().model(body.model_id, OWNER.get()).run
    return {
        "type": "get_info",
        "model_data": {"arch": front.client.check_ready().model_type, "model_name": run.base_model},
        "model_id": run.id,
        "is_lora": True,
        "lora_rank": run.rank,
        "model_name": run.base_model,
    }


def unload_model(front: ServerFront, body: b.ModelIdBody) -> dict[str, Any]:
    """Free a model after what was asked of it so far, and return the promise."""
    tinker = front.check_tinker()
    model = tinker.model(body.model_id, OWNER.get())
    return _future(model.order.last(partial(tinker.unload, model)), model_id=model.id)


def _ordered(model: TrainedModel, number: int | None, content: bytes, work: Work, size: int = 0) -> dict[str, Any]:
    """Add a request to a model's queue and return its promise."""
    return _future(model.order.add(_number(number), content, work, size), model_id=model.id)


def _number(given: int | None) -> int:
    if not given:
        raise InvalidRequest("seq_id is needed, from 1 on", param="seq_id", code="missing_required_parameter")
    return given


def _check_base(front: ServerFront, name: str) -> None:
    """Raise NotFound unless the server's base model has this name."""
    if name not in front.models.base_names:
        raise NotFound(
            f"the model {name[:140]!r} is not served here; {front.models.id!r} is. A further name is given by "
            "--served-model-name",
            param="base_model",
            code="model_not_found",
        )


def _check_optimizer(given: b.OptimizerBody | None) -> None:
    if given is not None and given.type != "adamw":
        raise InvalidRequest(
            f"the optimizer {given.type[:64]!r} is not served here; adamw is", param="optimizer_config"
        )


def check_metadata(given: Mapping[str, Any] | None) -> dict[str, str]:
    """Return metadata as texts. Raises InvalidRequest for too much."""
    made = {key: value if isinstance(value, str) else dumps(value).decode() for key, value in (given or {}).items()}
    if len(dumps(made)) > limits.MAX_TINKER_METADATA:
        raise InvalidRequest(f"user_metadata has over {limits.MAX_TINKER_METADATA} bytes", param="user_metadata")
    return made


# -- training -----------------------------------------------------------------------------------------------------


async def forward_backward(front: ServerFront, received: Received) -> dict[str, Any]:
    """Add a pass to a model's queue and return its promise."""
    tinker = front.check_tinker()
    from mlx_tandem.dialects.tinker import passes  # Its imports take time and memory: here and below.

    if received.media != PROTOBUF:
        raise UnsupportedMedia(f"Content-Type must be {PROTOBUF}: newer versions of the SDK send it")
    async with tinker.decoding:
        asked, content = await asyncio.to_thread(_read, received)
        model = tinker.model(asked.model_id, OWNER.get())
        number = _number(asked.seq_id)
        known = model.order.repeated(number, content)
        if known is not None:
            return _future(known, model_id=model.id)
        info = front.client.check_ready()
        try:
            loss = passes.check_loss(asked.loss, asked.config)
            data, shapes = await asyncio.to_thread(
                partial(passes.check_data, asked.data, loss, vocab_size=info.vocab_size, room=front.room(info))
            )
        except TandemError as e:
            # Later requests must not wait for this one, nor a step go without its gradients.
            model.order.refuse(
                number,
                content,
                e,
                lambda m=e.message: None if asked.forward_only else model.miss(m),  # type: ignore[misc]
            )
            raise
    work = partial(
        model.run_pass,
        data,
        loss,
        forward_only=asked.forward_only,
        write=passes.writer(shapes, asked.forward_only),
    )
    size = 32 * sum(len(datum.weights) for datum in data)
    return _ordered(model, number, content, work, size)


def _read(received: Received) -> tuple[PassRequest, bytes]:
    """Return a request for a pass, and a digest of its body."""
    from mlx_tandem.dialects.tinker.unpacking import unpacked
    from mlx_tandem.dialects.tinker.wire import read_pass

    body = unpacked(received.content, received.encoding, limits.MAX_TINKER_UNPACKED)
    return read_pass(body), hashlib.sha256(body).digest()


def optim_step(front: ServerFront, body: b.StepBody) -> dict[str, Any]:
    """Add a step of the optimizer to a model's queue and return its promise."""
    model = front.check_tinker().model(body.model_id, OWNER.get())
    number, content = _number(body.seq_id), _content(body)
    try:
        _check_optimizer(body.optimizer_params)
        given = body.adam_params or b.AdamBody()
        names = {"grad_clip_norm": "grad_norm"}
        numbers = {
            names.get(name, name): float(
                limits.check(names.get(name, name), getattr(given, name), f"adam_params.{name}")
            )
            for name in b.AdamBody.__struct_fields__
        }
    except TandemError as e:
        model.order.refuse(number, content, e, lambda: None)
        raise
    return _ordered(model, number, content, partial(model.step, AdamParams(**numbers)))


def save_weights(front: ServerFront, body: b.SaveBody) -> dict[str, Any]:
    """Add saving a checkpoint to a model's queue and return its promise."""
    return _save(front, body, sampler=False, overwrite=body.overwrite)


def save_weights_for_sampler(front: ServerFront, body: b.SaveSamplerBody) -> dict[str, Any]:
    """Add saving weights to sample from to a model's queue and return its promise."""
    if body.path is not None:
        return _save(front, body, sampler=True, overwrite=False)
    tinker, owner = front.check_tinker(), OWNER.get()
    model = tinker.model(body.model_id, owner)
    number, content = _number(body.seq_id), _content(body)
    if body.sampling_session_seq_id is None:
        raise InvalidRequest("path or sampling_session_seq_id is needed", param="path")
    session = tinker.session(model.id.partition(":")[0], owner)
    work = partial(tinker.sampler_of, model, session, body.sampling_session_seq_id, inflight=body.kind == "inflight")
    return _ordered(model, number, content, work)


def _save(
    front: ServerFront, body: b.SaveBody | b.SaveSamplerBody, *, sampler: bool, overwrite: bool
) -> dict[str, Any]:
    """Add saving under a name to a model's queue."""
    model = front.check_tinker().model(body.model_id, OWNER.get())
    number, content = _number(body.seq_id), _content(body)
    try:
        if body.path is None:
            raise InvalidRequest("path is needed: the checkpoint's name", param="path")
        limits.check_name(body.path, "path")
        seconds = check_ttl(body.ttl_seconds)
        kept = Kept(body.path, seconds, check_metadata(body.user_metadata), overwrite)
    except TandemError as e:
        model.order.refuse(number, content, e, lambda: None)
        raise
    return _ordered(model, number, content, saving(model, kept, sampler=sampler))


def check_ttl(seconds: int | None) -> float | None:
    """Return the seconds until a checkpoint expires; None: never. Raises InvalidRequest."""
    if seconds is not None and not LEAST_TTL <= seconds <= MOST_TTL:
        raise InvalidRequest("ttl_seconds must be between an hour and ten years", param="ttl_seconds")
    return None if seconds is None else float(seconds)


# -- sampling -----------------------------------------------------------------------------------------------------


async def create_sampling_session(front: ServerFront, body: b.SamplerBody) -> dict[str, Any]:
    """Make a sampler of the base model or of a checkpoint."""
    tinker, owner = front.check_tinker(), OWNER.get()
    session, number, content = tinker.session(body.session_id, owner), body.sampling_session_seq_id, _content(body)
    known = session.samplers.get(number)
    if known is None or known.content != content:
        source: Source = Base()
        base = body.base_model
        if body.model_path is not None:
            source = await tinker.saved(body.model_path, owner)
            base = base or tinker.checkpoints.run(source.run, owner).base_model
        elif base is None:
            raise InvalidRequest("base_model or model_path is needed", param="base_model")
        _check_base(front, base)
        known = tinker.add_sampler(session, number, base, source, content)
    return {"type": "create_sampling_session", "sampling_session_id": known.id}


def get_sampler(front: ServerFront, id: str) -> dict[str, Any]:
    """Return what a sampler samples from."""
    _, sampler = front.check_tinker().sampler(id, OWNER.get())
    return {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.path}


def join_sampling_session(front: ServerFront, body: b.JoinBody) -> dict[str, Any]:
    """Give one more client of a sampler its number."""
    _, sampler = front.check_tinker().sampler(body.sampling_session_id, OWNER.get())
    sampler.clients += 1
    return {"type": "join_sampling_session", "client_counter": sampler.clients}


async def asample(front: ServerFront, body: b.SampleBody) -> dict[str, Any]:
    """Begin a request to a sampler and return its promise."""
    tinker = front.check_tinker()
    from mlx_tandem.dialects.tinker.sampling import Sample

    for name in ("base_model", "model_path"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} belongs to create_sampling_session", param=name)
    if body.sampling_session_id is None or body.seq_id is None:
        raise InvalidRequest("sampling_session_id and seq_id are needed", param="sampling_session_id")
    session, sampler = tinker.sampler(body.sampling_session_id, OWNER.get())
    sample = Sample(front, body)
    promise = await tinker.sample(
        sampler, session, body.seq_id, _content(body), sample.count, sample.submissions, sample.write
    )
    return _future(promise, sample_sequence_ids=[f"{promise.id}:{i}" for i in range(sample.count)])


# -- results ------------------------------------------------------------------------------------------------------


async def retrieve_future(front: ServerFront, body: b.RetrieveBody) -> Any:
    """Return a result; 408 while it is not there, after waiting for it for a while."""
    tinker = front.check_tinker()
    promise = tinker.promises.get(body.request_id, OWNER.get())
    if not await promise.wait(POLL_SECONDS):
        return 408, {"type": "try_again", "request_id": promise.id, "queue_state": "active"}
    match promise.outcome:
        case Result() as result:
            if body.allow_metadata_only and len(result.content) > INLINE_BYTES:
                return {"status": "complete_metadata", "response_payload_size": len(result.content)}
            tinker.promises.fetched(promise)
            return result.content if result.media == "json" else Reply(result.content, PROTOBUF)
        case error:
            tinker.promises.fetched(promise)
            assert error is not None
            return {"error": error.named, "category": "user" if error.status < 500 else "server"}


async def retrieve_futures(front: ServerFront, body: b.RetrieveManyBody) -> dict[str, Any]:
    """Return which requests to a sampler are done since the cursor, after waiting for one for a while."""
    tinker, owner = front.check_tinker(), OWNER.get()
    _, sampler = tinker.sampler(body.target.sampling_session_id, owner)
    tinker.promises.forget(body.retrieved_request_ids, owner)
    seconds = POLL_SECONDS if body.timeout is None else min(max(body.timeout, 0.0), POLL_SECONDS)
    found = await sampler.completions(body.target.cloned_sampler_id, body.prev_cursor, seconds)
    done = [
        {"state": "failed", "request_id": each.request}
        if each.size is None
        else {"state": "finished", "request_id": each.request, "response_payload_uncompressed_size": each.size}
        for each in found
    ]
    return {"completions": done, "cursor": found[-1].number if found else body.prev_cursor}


def cancel_future(front: ServerFront, body: b.CancelBody) -> Reply:
    """Cancel a request to a sampler."""
    tinker = front.check_tinker()
    tinker.cancel(tinker.promises.get(body.request_id, OWNER.get()))
    return Reply(status=204)
