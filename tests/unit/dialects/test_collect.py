"""The fields of a request that concern learning, without a server: which task they make, and what is refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.adapters.aliases import AliasArm
from mlx_tandem.config import Config, EngineConfig, ModelConfig, RewardSpec, RLTrainingConfig
from mlx_tandem.dialects.openai.bodies import CompletionBody
from mlx_tandem.dialects.openai.collect import check_metadata, collect_fields, control_arm, follows, shown_version
from mlx_tandem.dialects.openai.trajectories import text_prompt
from mlx_tandem.engine.learning import WHOLE, Truncation
from mlx_tandem.errors import Conflict, InvalidRequest
from mlx_tandem.generation.adapters.model_names import Selection
from mlx_tandem.limits import MAX_METADATA_BYTES, MAX_METADATA_DEPTH
from mlx_tandem.training.live.recorder import Collect, Continued, Talk
from mlx_tandem.training.rewards import Scoring
from mlx_tandem.types import AdapterRef, SamplingParams

PARAMS = SamplingParams(9, temperature=1.0)
VERSIONS = {None: 0, "policy": 3, "coder": 3, "other": None}
"""The version that learning knows for a model of each name."""
OWNERS = {None: "policy", "policy": "policy", "coder": "coder"}
"""The adapter whose learner takes answers of a model of each name."""


def model(name: str | None, version: int = 3, arm: AliasArm | None = None) -> Selection:
    if name is None:
        return Selection(None, arm)
    entry: Any = SimpleNamespace(ref=AdapterRef(name, version, "d"), counters=None)
    return Selection(entry, arm)


def front(pair: Any = None, learns: bool = True, found: Any = None, **training: Any) -> Any:
    def check(function: Any, metadata: dict[str, Any]) -> Scoring:
        return Scoring(str(function), (RewardSpec(str(function)),), metadata)

    def get(id: str) -> Any:
        assert id == "traj-1"
        return found

    rewards = SimpleNamespace(names=("gsm8k", "contains"), check=check)
    learner = SimpleNamespace(rewards=rewards, choose=lambda ref: pair, later=SimpleNamespace(get=get))
    config = Config(
        EngineConfig(ModelConfig(str(demo.MODEL_PATH))), rl_training=RLTrainingConfig(enabled=True, **training)
    )
    each = {name: SimpleNamespace(name=name, learner=learner, config=config) for name in ("policy", "coder")}
    learners = SimpleNamespace(
        names=tuple(each),
        default=each["policy"],
        of=each.__getitem__,
        of_version=lambda ref: each.get(OWNERS.get(ref and ref.name, "")),
        keeping=lambda id: each["coder" if id == "traj-2" else "policy"],
        version_of=lambda ref: VERSIONS[ref and ref.name],
    )

    def check_learning(what: str, param: str | None = None) -> Any:
        if not learns:
            raise InvalidRequest(f"{what} needs a server that learns", param=param, code="learning_disabled")
        return learners

    def entry(label: str) -> Any:
        name, _, number = label.partition("@")
        return model(name, int(number)).entry

    return SimpleNamespace(
        config=config,
        check_learning=check_learning,
        relay=None,
        collector=lambda adapter: learners.of(adapter),
        learning=learners if learns else None,
        collecting=learners if learns else None,
        models=SimpleNamespace(registry=SimpleNamespace(entry=entry)),
    )


def body(**fields: Any) -> CompletionBody:
    return CompletionBody(prompt="x", **fields)


def task(
    *,
    asked: Selection | None = None,
    params: SamplingParams = PARAMS,
    prompts: Any = ((1, 2),),
    n: int = 1,
    silent: bool = False,
    talk: Talk | None = None,
    at: Any = None,
    **fields: Any,
) -> Collect | None:
    texts = [f"text of {prompt}" for prompt in prompts]
    model_ = model("policy") if asked is None else asked
    return collect_fields(at or front(), body(**fields), model_, params, prompts, texts, n=n, silent=silent, talk=talk)


KEEP: dict[str, Any] = {"collect_trajectory": True, "scoring_function": "gsm8k"}
GOING = Talk(3, b"r", Continued("traj-1", 2, 20, 1.0, WHOLE))


# --- the task ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "talk", "made"),
    [
        ({}, None, None),
        ({"metadata": {"answer": "1"}}, None, None),
        ({"collect_trajectory": False}, None, None),
        ({"scoring_function": "gsm8k"}, None, {"shown": True, "scoring": "gsm8k"}),
        (KEEP, None, {"keep": True, "shown": True, "scoring": "gsm8k"}),
        ({"collect_trajectory": True}, None, {"keep": True, "scoring": "contains"}),
        (KEEP | {"scoring_function": "later"}, None, {"keep": True, "later": True, "scoring": "later"}),
        ({"trajectory_id": "traj-1"}, GOING, {"keep": True, "later": True, "scoring": "later"}),
        (
            {"trajectory_id": "traj-1", "scoring_function": "gsm8k"},
            GOING,
            {"keep": True, "shown": True, "scoring": "gsm8k"},
        ),
    ],
)
def test_the_task_of_a_request(fields: dict[str, Any], talk: Talk | None, made: dict[str, Any] | None) -> None:
    metadata = fields.get("metadata", {})
    found = task(talk=talk, at=front(scoring_function="contains"), **fields)
    if made is None:
        assert found is None
        return
    assert found is not None
    name = made.pop("scoring")
    expected = {
        "keep": False, "shown": False, "later": False, "metadata": metadata, "shared": False, "params": PARAMS,
        "prompts": ("text of (1, 2)",), "talk": talk, "pair": None,
        "scoring": Scoring(name, (RewardSpec(name),), metadata),
    } | made  # fmt: skip
    assert {key: getattr(found, key) for key in expected} == expected
    assert found.compared == (found.keep and not found.later and talk is None)


@pytest.mark.parametrize(
    ("what", "fields", "param", "code"),
    [
        ({"at": front(learns=False)}, KEEP, "collect_trajectory", "learning_disabled"),
        ({"at": front(learns=False)}, {"scoring_function": "gsm8k"}, "scoring_function", "learning_disabled"),
        ({"at": front(learns=False), "talk": GOING}, {}, "trajectory_id", "learning_disabled"),
        ({"silent": True}, KEEP, "collect_trajectory", "invalid_value"),
        ({"silent": True}, {"scoring_function": "gsm8k"}, "scoring_function", "invalid_value"),
        ({}, {"collect_trajectory": True}, "scoring_function", "missing_required_parameter"),
        ({}, {"scoring_function": "later"}, "scoring_function", "invalid_value"),
        ({"params": structs.replace(PARAMS, temperature=0.0)}, KEEP, "temperature", "invalid_value"),
        ({"params": structs.replace(PARAMS, top_p=0.0)}, KEEP, "top_p", "invalid_value"),
        ({"asked": model("other")}, KEEP, "collect_trajectory", "invalid_value"),
        ({"talk": GOING, "params": structs.replace(PARAMS, temperature=0.5)}, {}, "temperature", "invalid_value"),
        ({"talk": GOING, "params": structs.replace(PARAMS, min_p=0.5)}, {}, "min_p", "invalid_value"),
        ({}, KEEP | {"metadata": {"group": 5}}, "metadata.group", "invalid_type"),
        ({}, KEEP | {"metadata": {"group": "a b"}}, "metadata.group", "invalid_value"),
    ],
)
def test_what_is_refused(what: dict[str, Any], fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        task(**what, **fields)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_scores_that_are_shown_need_nothing_of_the_draw() -> None:
    for what in ({"asked": model("other")}, {"params": structs.replace(PARAMS, temperature=0.0)}):
        assert task(**what, scoring_function="gsm8k") is not None  # type: ignore[arg-type]


# --- groups --------------------------------------------------------------------------------------------------------


def groups(alone: bool, **what: Any) -> tuple[str, ...]:
    training = {"siblings": 0} if alone else {}
    found = task(at=front(**training), **KEEP | what)
    assert found is not None
    return found.groups


def test_groups_of_answers_that_are_alike() -> None:
    """Two requests are siblings where the prompt, the metadata and the scoring are the same and each has one answer."""
    plain = groups(False)
    assert plain == groups(False)
    for other in (
        {"prompts": ((1, 3),)}, {"metadata": {"answer": "2"}}, {"scoring_function": "contains"}, {"n": 2},
    ):  # fmt: skip
        assert groups(False, **other) != plain
    assert groups(False, n=2) != groups(False, n=2), "several answers are siblings of each other alone"
    assert len(set(groups(False, prompts=((1, 2), (1, 2))))) == 2, "two prompts of a request are two groups"
    assert len(set(groups(False, prompts=((1, 2), (1, 2)), n=2))) == 2


def test_groups_of_answers_that_the_server_adds_nothing_to() -> None:
    """They are compared with answers to other prompts that are scored alike."""
    across = groups(True)
    assert across == groups(True, prompts=((1, 3),)) == groups(True, metadata={"answer": "2"})
    assert across[0].startswith("across:gsm8k:")
    assert groups(True, prompts=((1,), (2,))) == across * 2
    assert groups(True, scoring_function="contains") != across
    assert groups(False, scoring_function="later")[0].startswith("across:later:")
    for training, is_across in (
        ({"siblings": 0, "group_size": 1}, True), ({"siblings": 0, "group_size": 2}, False), ({"siblings": 1}, False),
    ):  # fmt: skip
        found = task(at=front(**training), **KEEP)
        assert found is not None
        assert found.groups[0].startswith("across:") == is_across


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_groups_that_requests_name(alone: bool, n: int) -> None:
    named = groups(alone, n=n, metadata={"group": "mine"}, prompts=((1,), (2,)))
    assert named == groups(alone, n=n, metadata={"group": "mine", "answer": "3"}, prompts=((1,), (2,)))
    assert len(set(named)) == 2, "answers to different prompts are no siblings"
    assert not set(named) & set(groups(alone, n=n, metadata={"group": "other"}, prompts=((1,), (2,))))
    assert all(group.startswith("named:mine:") for group in named)
    found = task(**KEEP, metadata={"group": "mine"})
    assert found is not None
    assert found.shared


# --- metadata ------------------------------------------------------------------------------------------------------


def test_the_largest_metadata() -> None:
    assert check_metadata(None) == {}
    largest = {"a": "x" * (MAX_METADATA_BYTES - len('{"a":""}'))}
    assert check_metadata(largest) == largest
    value: Any = 1
    for _ in range(MAX_METADATA_DEPTH):
        value = {"a": value}
    assert check_metadata(value) == value
    for wrong in ({"a": largest["a"] + "x"}, {"a": value}, {"a": 2**63}, {"a": float("nan")}):
        with pytest.raises(InvalidRequest) as refused:
            check_metadata(wrong)
        assert (refused.value.param or "").startswith("metadata")


# --- which version answers -----------------------------------------------------------------------------------------

PAIR = SimpleNamespace(first=AdapterRef("policy", 2, "d"))
ARM = AliasArm("split", "policy", 1.0)


def test_whose_learner_takes_an_answer() -> None:
    """The adapter that answers, or the default one for the base. A trajectory stays where it began."""
    for asked, adapter in ((model("coder"), "coder"), (model("policy"), "policy"), (model(None), "policy")):
        found = task(asked=asked, **KEEP)
        assert found is not None and found.adapter == adapter
    shown = task(asked=model("other"), scoring_function="gsm8k")
    assert shown is not None and shown.adapter == "policy", "it is scored, and learned from by nobody"
    with pytest.raises(InvalidRequest, match="trajectories are collected of policy, coder and of the base"):
        task(asked=model("other"), **KEEP)
    going = Talk(3, b"r", Continued("traj-2", 2, 20, 1.0, WHOLE))
    for asked in (model("coder"), model(None)):
        found = task(asked=asked, talk=going, trajectory_id="traj-2")
        assert found is not None and found.adapter == "coder"
    with pytest.raises(InvalidRequest, match="one of coder: only it and the base go on with it"):
        task(asked=model("policy"), talk=going, trajectory_id="traj-2")


@pytest.mark.parametrize(
    ("fields", "asked", "is_compared"),
    [
        ({"model": "policy"}, model("policy"), True),
        ({"lora_adapter": "policy"}, model("policy"), True),
        ({"model": "base", "lora_adapter": "policy"}, model("policy"), True),
        ({"model": "policy@3"}, model("policy"), False),
        ({"model": "policy", "lora_adapter": "policy@3"}, model("policy"), False),
        ({"model": "split"}, model("policy", arm=ARM), False),
        ({"model": "policy"}, model("policy", arm=ARM), False),
        ({}, model("policy"), False),
        ({"model": "base"}, model(None), False),
    ],
)
def test_the_control_arm_is_for_requests_to_the_trained_adapter(
    fields: dict[str, Any], asked: Selection, is_compared: bool
) -> None:
    collect = task(**KEEP)
    assert collect is not None
    found, own = control_arm(front(PAIR), body(**fields), asked, collect)
    if is_compared:
        assert (found.ref, own.pair) == (AdapterRef("policy", 2, "d"), PAIR)
    else:
        assert (found, own) == (asked, collect)
    assert control_arm(front(None), body(**fields), asked, collect) == (asked, collect), "there is no pair now"
    for other in (task(scoring_function="gsm8k"), task(**KEEP | {"scoring_function": "later"})):
        assert other is not None
        assert control_arm(front(PAIR), body(**fields), asked, other) == (asked, other)


@pytest.mark.parametrize(
    ("fields", "asked", "follow"),
    [
        ({"model": "policy"}, model("policy"), False),
        ({"model": "policy", "swap_policy": "pin"}, model("policy"), False),
        ({"model": "policy", "swap_policy": "inflight_keep"}, model("policy"), True),
        ({"lora_adapter": "policy", "swap_policy": "inflight_keep"}, model("policy"), True),
        ({"model": "policy@3", "swap_policy": "inflight_keep"}, model("policy"), None),
        ({"model": "policy", "lora_adapter": "policy@3", "swap_policy": "inflight_keep"}, model("policy"), None),
        ({"model": "other", "swap_policy": "inflight_keep"}, model("other"), None),
        ({"model": "base", "swap_policy": "inflight_keep"}, model(None), None),
        ({"model": "coder", "swap_policy": "inflight_keep"}, model("coder"), True),
    ],
)
def test_who_follows_newer_versions(fields: dict[str, Any], asked: Selection, follow: bool | None) -> None:
    if follow is not None:
        assert follows(front(), body(**fields), asked) == follow
        return
    with pytest.raises(InvalidRequest) as refused:
        follows(front(), body(**fields), asked)
    assert refused.value.param == "swap_policy"


@pytest.mark.parametrize(
    ("asked", "fields", "version"),
    [
        (model("policy"), {}, None),
        (model("policy"), {"return_token_ids": True}, 3),
        (model("policy"), {"collect_trajectory": True}, 3),
        (model("policy"), {"trajectory_id": "traj-1"}, 3),
        (model(None), {"return_token_ids": True}, 0),
        (model("other", 7), {"return_token_ids": True}, 7),
    ],
)
def test_the_version_that_a_reply_names(asked: Selection, fields: dict[str, Any], version: int | None) -> None:
    assert shown_version(front(), body(**fields), asked) == version
    assert shown_version(front(learns=False), body(**fields), asked) is None


# --- requests that go on -------------------------------------------------------------------------------------------


def kept() -> Any:
    exchanges = (
        SimpleNamespace(given=(1, 2), tokens=(3,), messages=1, rendered=b"a"),
        SimpleNamespace(given=(4,), tokens=(5, 6), messages=3, rendered=b"b"),
    )
    begun = SimpleNamespace(temperature=0.5, truncation=Truncation(0.5, 3, 0.25))
    return SimpleNamespace(exchanges=exchanges, begun=begun)


async def _goes_on(prompts: Any, **fields: Any) -> Talk | None:
    return await text_prompt(front(found=kept()), body(**fields), prompts)


def goes_on(*prompts: Any, **fields: Any) -> Talk | None:
    return asyncio.run(_goes_on(prompts, **fields))


def test_a_prompt_that_goes_on_with_a_trajectory() -> None:
    assert goes_on([1, 2]) is None
    found = goes_on([1, 2, 3, 4, 5, 6, 7], trajectory_id="traj-1")
    assert found == Talk(0, b"", Continued("traj-1", 2, 6, 0.5, Truncation(0.5, 3, 0.25)))
    for prompt in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8], [1, 2, 3], [2, 1, 3, 4, 5, 6, 7]):
        with pytest.raises(Conflict) as refused:
            goes_on(prompt, trajectory_id="traj-1")
        assert refused.value.code == "conversation_changed"


@pytest.mark.parametrize(
    ("prompts", "fields", "param"),
    [
        (([1], [2]), {}, "prompt"),
        (([1],), {"n": 2}, "n"),
        (([1],), {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (([1],), {"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        (([1],), {"collect_trajectory": False}, "collect_trajectory"),
    ],
)
def test_what_cannot_go_on(prompts: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        goes_on(*prompts, trajectory_id="traj-1", **fields)
    assert refused.value.param == param


def test_one_answer_may_be_asked_for_in_words() -> None:
    assert goes_on([1, 2, 3, 4, 5, 6, 7], trajectory_id="traj-1", n=1, collect_trajectory=True) is not None
