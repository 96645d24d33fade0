"""The `tinker` package, unmodified."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import threading

import numpy as np
import pytest

from tests.clients import lazily
from tests.serving import serving
from tests.tinker_server import let_go, tinker_config
from tests.waiting import until

tinker = lazily.imported("tinker")

# The SDK leaves the connections of its first requests to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEY = "tml-test"
PROMPT = [5, 6, 7, 8]
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


@pytest.fixture(scope="module", autouse=True)
def connections():
    """Nothing that the SDK has left open is found while later modules run."""
    yield
    let_go()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def server(folder):
    with serving(tinker_config(folder)) as running:
        yield running


@pytest.fixture
def service(server):
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as made:
        yield made


def datum(tokens, **inputs):
    arrays = {name: np.array(own, np.int64 if name == "target_tokens" else np.float32) for name, own in inputs.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=arrays)


def taught(seed=0, count=4):
    """Sentences of one pattern, each shifted by one."""
    rng = np.random.default_rng(seed)
    rows = [[int(start) + i for i in range(9)] for start in rng.integers(10, 200, count)]
    return [datum(row[:-1], target_tokens=row[1:], weights=[0.0] * 3 + [1.0] * 5) for row in rows]


def drawn(rng, length=6):
    """One example of a loss over what was drawn, with ratios around 1."""
    tokens = rng.integers(10, 200, length).tolist()
    return {
        "tokens": tokens,
        "target_tokens": rng.integers(10, 200, length).tolist(),
        "advantages": rng.normal(size=length).round(2).tolist(),
        "noise": rng.normal(size=length, scale=0.4).round(2).tolist(),
    }


def by_hand(loss, config, p, q, a):
    r = np.exp(p - q)
    if loss == "cross_entropy":
        return -(a * p).sum()
    if loss == "importance_sampling":
        return -(r * a).sum()
    if loss == "dro":
        return -(a * p - config.get("beta", 0.05) / 2 * (p - q) ** 2).sum()
    low, high = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}[loss]
    low, high = config.get("clip_low_threshold", low), config.get("clip_high_threshold", high)
    clipped = np.clip(r, low, high)
    return -np.minimum(r * a, clipped * a).sum() if loss == "ppo" else -(clipped * p * a).sum()


def step(model, rate=1e-3, **more):
    return model.optim_step(tinker.AdamParams(learning_rate=rate, **more))


def test_a_model_learns_and_is_sampled(server, service):
    listed = tinker.RestClient(base_url=server.url, api_key=KEY).get_server_capabilities().result()
    assert "tandem-demo" in [own.model_name for own in listed.supported_models]
    model = service.create_lora_training_client(base_model="tandem-demo", rank=8, seed=1).result()
    info = model.get_info()
    assert (info.lora_rank, info.model_name, info.model_id) == (8, "tandem-demo", model.model_id)
    losses = []
    for _ in range(12):
        passed, stepped = model.forward_backward(taught(), "cross_entropy"), step(model, 5e-3)
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm:mean"] > 0
    assert losses[-1] < 0.5 * losses[0]
    sampler = model.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=5, seed=3, temperature=0.7)
    asked = {"num_samples": 3, "sampling_params": params, "include_prompt_logprobs": True}
    found = sampler.sample(tinker.ModelInput.from_ints(PROMPT), **asked, topk_sample_logprobs=2).result()
    assert [len(own.tokens) for own in found.sequences] == [5] * 3
    assert len({tuple(own.tokens) for own in found.sequences}) > 1
    assert len({own.sequence_id for own in found.sequences}) == 3
    assert all(len(own.topk_logprobs) == 5 and len(own.topk_logprobs[0]) == 2 for own in found.sequences)
    again = sampler.sample(tinker.ModelInput.from_ints(PROMPT), **asked).result()
    assert [own.tokens for own in again.sequences] == [own.tokens for own in found.sequences]
    # The trainer and the sampler agree about the prompt, and about the distribution that was drawn from.
    whole = PROMPT + found.sequences[0].tokens
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(whole)).result()
    (trained,) = model.forward([datum(whole[:-1], target_tokens=whole[1:])], "cross_entropy").result().loss_fn_outputs
    assert scored[0] is None and np.allclose(scored[1:], trained["logprobs"].data, atol=1e-3)
    last = sampler.compute_logprobs(tinker.ModelInput.from_ints(whole), prompt_logprobs_last_n=2).result()
    assert last[:-2] == [None] * (len(whole) - 2) and np.allclose(last[-2:], scored[-2:], atol=1e-3)
    asked = {"num_samples": 1, "sampling_params": tinker.SamplingParams(max_tokens=1), "include_prompt_logprobs": True}
    likely = sampler.sample(tinker.ModelInput.from_ints(whole), **asked, topk_prompt_logprobs=3).result()
    assert likely.topk_prompt_logprobs[0] is None
    assert [len(row) for row in likely.topk_prompt_logprobs[1:]] == [3] * (len(whole) - 1)
    for token, logprob, row in zip(whole[1:], scored[1:], likely.topk_prompt_logprobs[1:], strict=True):
        assert row[0][1] >= row[1][1] >= row[2][1] and dict(row).get(token, logprob) == pytest.approx(logprob, abs=1e-3)
    assert np.allclose(found.prompt_logprobs[1:], scored[1 : len(PROMPT)], atol=1e-3)
    assert not np.allclose(found.sequences[0].logprobs, scored[len(PROMPT) :], atol=1e-2)  # another temperature


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_sums_of_their_formulas(service, loss):
    """Of examples in one request and in several: the gradients add up until the step."""
    rng = np.random.default_rng(LOSSES.index(loss))
    model = service.create_lora_training_client(base_model="base", rank=4, seed=1).result()
    rows = [drawn(rng) for _ in range(3)]
    plain = [datum(row["tokens"], target_tokens=row["target_tokens"]) for row in rows]
    for config in ({}, *({"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},) * (loss in ("ppo", "cispo"))):
        ps = [own["logprobs"].to_numpy() for own in model.forward(plain, "cross_entropy").result().loss_fn_outputs]
        qs = [p + np.array(row["noise"], np.float32) for p, row in zip(ps, rows, strict=True)]
        data = []
        for row, q in zip(rows, qs, strict=True):
            own = {"target_tokens": row["target_tokens"]}
            more = {"weights": row["advantages"]} if loss == "cross_entropy" else {"advantages": row["advantages"]}
            data.append(datum(row["tokens"], **own, **more, **({} if "weights" in more else {"logprobs": q})))
        found = model.forward_backward(data, loss, config or None).result()
        wanted = sum(
            by_hand(loss, config, p, q, np.array(row["advantages"])) for p, q, row in zip(ps, qs, rows, strict=True)
        )
        assert found.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-3, abs=1e-3)
        together = step(model, 0.0).result().metrics["grad_norm:mean"]
        for own in data:
            model.forward_backward([own], loss, config or None)
        assert step(model, 0.0).result().metrics["grad_norm:mean"] == pytest.approx(together, rel=1e-3)


def test_several_targets_at_a_position_and_a_loss_of_ones_own(service):
    """A loss of one's own is a forward pass, and a cross entropy with its gradients as weights."""
    model = service.create_lora_training_client(base_model="base", rank=4, seed=1).result()
    targets, weights = [[11, 12], [13, 14], [15, 16]], [[0.5, 0.5], [1.0, 0.0], [0.0, 0.25]]
    wide = model.forward_backward([datum([10, 11, 12], target_tokens=targets, weights=weights)], "cross_entropy")
    p = wide.result().loss_fn_outputs[0]["logprobs"].to_numpy().reshape(3, 2)
    assert wide.result().metrics["loss:sum"] == pytest.approx(-(p * np.array(weights)).sum(), rel=1e-4)
    at_once = step(model, 0.0).result().metrics["grad_norm:mean"]
    for k in (0, 1):
        columns = {"target_tokens": [row[k] for row in targets], "weights": [row[k] for row in weights]}
        (own,) = model.forward_backward([datum([10, 11, 12], **columns)], "cross_entropy").result().loss_fn_outputs
        assert np.allclose(own["logprobs"].to_numpy(), p[:, k], atol=1e-5)
    assert step(model, 0.0).result().metrics["grad_norm:mean"] == pytest.approx(at_once, rel=1e-3)


def test_reinforcement_raises_a_reward(service):
    """Even tokens are rewarded. The sampler's logprobs are those that the loss corrects by."""
    model = service.create_lora_training_client(base_model="base", rank=8, seed=1).result()
    rewards = []
    for turn in range(14):
        sampler = model.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=6, seed=turn, stop=[])
        found = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 24, params).result().sequences
        scores = np.array([np.mean([token % 2 == 0 for token in own.tokens]) for own in found])
        rewards.append(scores.mean())
        data = []
        for own, advantage in zip(found, scores - scores.mean(), strict=True):
            tokens, ahead = PROMPT + own.tokens, len(PROMPT) - 1
            data.append(
                datum(
                    tokens[:-1],
                    target_tokens=tokens[1:],
                    logprobs=[0.0] * ahead + own.logprobs,
                    advantages=[0.0] * ahead + [float(advantage)] * len(own.tokens),
                )
            )
        passed, stepped = model.forward_backward(data, "importance_sampling"), step(model, 2e-2)
        passed.result(), stepped.result()
    assert np.mean(rewards[:2]) < 0.75 and np.mean(rewards[-2:]) > 0.95, rewards


def test_training_goes_on_from_what_was_saved(server, service, folder):
    model = service.create_lora_training_client(base_model="base", rank=8, seed=1, user_metadata={"a": "b"}).result()
    for _ in range(2):
        model.forward_backward(taught(), "cross_entropy")
        step(model, 5e-3)
    path = model.save_state("half", user_metadata={"epoch": "1"}).result().path
    assert path == f"tinker://{model.model_id}/weights/half"
    with_moments = service.create_training_client_from_state_with_optimizer(path).result()
    without = service.create_training_client_from_state(path).result()
    losses = []
    for own in (model, with_moments, without):
        before = own.forward(taught(), "cross_entropy")
        own.forward_backward(taught(), "cross_entropy")
        step(own, 5e-3)
        losses.append((before.result().metrics["loss:sum"], own.forward(taught(), "cross_entropy").result()))
    assert losses[0][0] == losses[1][0] == pytest.approx(losses[2][0], abs=1e-4)
    afterwards = [own.metrics["loss:sum"] for _, own in losses]
    assert afterwards[0] == afterwards[1] != pytest.approx(afterwards[2], abs=1e-4)
    with pytest.raises(tinker.RequestFailedError, match="there is a checkpoint"):
        model.save_state("half").result()
    assert model.save_state("half", overwrite=True).result().path == path
    named = model.save_weights_for_sampler("now", ttl_seconds=7200).result().path
    sampler = service.create_sampling_client(model_path=named).result()
    asked = {"num_samples": 1, "sampling_params": tinker.SamplingParams(max_tokens=4, temperature=0)}
    tokens = sampler.sample(tinker.ModelInput.from_ints(PROMPT), **asked).result().sequences[0].tokens
    now = model.save_weights_and_get_sampling_client().result()
    assert now.sample(tinker.ModelInput.from_ints(PROMPT), **asked).result().sequences[0].tokens == tokens
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    run = rest.get_training_run(model.model_id).result()
    assert (run.lora_rank, run.base_model, run.user_metadata) == (8, "base", {"a": "b"})
    assert run.last_checkpoint.tinker_path == path and run.last_sampler_checkpoint.tinker_path == named
    found = {own.tinker_path: own for own in rest.list_checkpoints(model.model_id).result().checkpoints}
    assert set(found) == {path, named} and found[named].expires_at is not None
    assert found[path].size_bytes > found[named].size_bytes
    rest.set_checkpoint_ttl_from_tinker_path(named, None).result()
    assert path in [own.tinker_path for own in rest.list_user_checkpoints().result().checkpoints]
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        service.create_training_client_from_state(path).result()


def test_stops(service):
    sampler = service.create_sampling_client(base_model="base").result()
    prompt = tinker.ModelInput.from_ints(PROMPT)

    def sample(stop, count=40):
        params = tinker.SamplingParams(max_tokens=count, temperature=0, stop=stop)
        return sampler.sample(prompt, 1, params).result().sequences[0]

    through = sample([])
    assert len(through.tokens) == 40 and through.stop_reason == "length"
    end = next(i for i, token in enumerate(through.tokens) if token == 2)  # the model's own
    plain = sample(None)
    assert plain.tokens == through.tokens[: end + 1] and plain.stop_reason == "stop"
    token = plain.tokens[2]
    by_id = sample([token])
    assert by_id.tokens == plain.tokens[: plain.tokens.index(token) + 1] and by_id.stop_reason == "stop"
    assert len(by_id.logprobs) == len(by_id.tokens)
    by_text = sample("Zq never said")
    assert by_text.tokens == plain.tokens


def test_an_inflight_sampler_moves(service):
    model = service.create_lora_training_client(base_model="base", rank=8, seed=1).result()
    prompt, params = tinker.ModelInput.from_ints(PROMPT), tinker.SamplingParams(max_tokens=1)
    moving = model.save_weights_and_get_sampling_client(kind="inflight").result()
    fixed = model.save_weights_and_get_sampling_client().result()

    def scores(sampler):
        return sampler.compute_logprobs(prompt).result()[1:]

    before = scores(fixed)
    assert np.allclose(scores(moving), before, atol=1e-5)
    for _ in range(3):
        model.forward_backward(taught(), "cross_entropy")
        step(model, 1e-2)
    newer = model.save_weights_and_get_sampling_client(kind="inflight").result()
    assert np.allclose(scores(moving), scores(newer), atol=1e-5)
    assert not np.allclose(scores(moving), before, atol=1e-2)
    assert np.allclose(scores(fixed), before, atol=1e-5)
    assert moving.sample(prompt, 1, params).result().sequences[0].tokens


def test_a_sample_is_cancelled(server, service):
    """The engine is told: the rest of its 8,000 tokens is not made."""
    sampler = service.create_sampling_client(base_model="base").result()
    params = tinker.SamplingParams(max_tokens=1000, stop=[])

    def running():
        (line,) = (
            own for own in server.client.get("/metrics").text.splitlines() if own.startswith("active_sequences ")
        )
        return float(line.split()[1])

    def made():
        return server.client.get("/debug/metrics").json()["decode_tokens_total"]

    before = made()
    future = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 8, params)
    until(running)
    future.future().cancel()
    until(lambda: not running())
    assert made() - before < 4000


def test_a_step_counts_all_its_gradients_or_none(service):
    model = service.create_lora_training_client(base_model="base", rank=4, seed=1).result()
    before = model.forward(taught(), "cross_entropy").result().metrics["loss:sum"]
    good = model.forward_backward(taught(), "cross_entropy")
    bad = model.forward_backward([datum([10, 5000], target_tokens=[11, 12], weights=[1, 1])], "cross_entropy")
    stepped = step(model, 0.1)
    assert good.result().metrics["loss:sum"] == before
    with pytest.raises(tinker.BadRequestError, match="5000 is not in the vocabulary"):
        bad.result()
    with pytest.raises(tinker.RequestFailedError, match="no step is taken"):
        stepped.result()
    assert model.forward(taught(), "cross_entropy").result().metrics["loss:sum"] == before
    model.forward_backward(taught(), "cross_entropy").result()
    step(model, 1e-3).result()
    assert model.forward(taught(), "cross_entropy").result().metrics["loss:sum"] < before


def test_numbers_that_are_not_finite_harm_nobody(service):
    model = service.create_lora_training_client(base_model="base", rank=4, seed=1).result()
    for loss, name, value in (("cross_entropy", "weights", math.nan), ("ppo", "advantages", math.inf)):
        more = {} if loss == "cross_entropy" else {"logprobs": [0.0, 0.0]}
        with pytest.raises(tinker.BadRequestError, match="must be numbers between"):
            data = [datum([10, 11], target_tokens=[11, 12], **{name: [value, 1.0]}, **more)]
            model.forward_backward(data, loss).result()
        with pytest.raises(tinker.RequestFailedError, match="no step is taken"):
            step(model).result()
    far = [datum([10, 11], target_tokens=[11, 12], logprobs=[-1000.0] * 2, advantages=[1e6] * 2)]
    assert math.isfinite(model.forward_backward(far, "importance_sampling").result().metrics["loss:sum"])


def test_clients_of_several_ranks_train_beside_chats(server):
    """Each is what it would be alone: the same losses, whatever else runs."""

    def course(rank):
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as own:
            model = own.create_lora_training_client(base_model="base", rank=rank, seed=rank).result()
            losses = []
            for _ in range(2):
                passed = model.forward_backward(taught(rank), "cross_entropy")
                step(model, 5e-3)
                losses.append(passed.result().metrics["loss:sum"])
            return losses

    ranks = (4, 8, 16)
    alone = [course(rank) for rank in ranks]
    done = threading.Event()

    def chat():
        for i in itertools.count():
            reply = server.chat(f"What is {i} + 2?")
            assert reply.status_code == 200
            if done.is_set():
                return i

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        chats = threads.submit(chat)
        beside = list(threads.map(course, ranks))
        done.set()
        assert chats.result() > 0
    for one, other in zip(alone, beside, strict=True):
        assert np.allclose(one, other, rtol=1e-3)
