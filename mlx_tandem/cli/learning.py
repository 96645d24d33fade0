"""Checks the settings of learning against each other, and refuses senseless combinations before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mlx_tandem import limits
from mlx_tandem.cli.console import warn
from mlx_tandem.cli.options import LEARNING
from mlx_tandem.config import Config, RLTrainingConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server.keys import is_loopback
from mlx_tandem.training.atropos.client import check_url
from mlx_tandem.training.cluster.client import check_url as check_leader
from mlx_tandem.training.metrics.writer import require
from mlx_tandem.training.own_settings import own_settings
from mlx_tandem.training.verifiers.environment import check as check_environment

ALONE = ("enable_rl_training", "mode", "training_share", "enable_tinker", "checkpoint_dir")
"""Options that mean something whether or not the server trains an adapter by itself."""

RELAYED = ("train_adapter", "scoring_function", "trajectory_buffer_size", "scoring_batch_size")
"""Options that mean something on a server whose answers are learned from on another machine."""

TINKER = ("tinker_trainers", "tinker_rank", "tinker_dir", "tinker_lease_s")
"""Options that mean something only with `enable_tinker`."""


def resolve(config: Config, options: Mapping[str, object]) -> Config:
    """Return the settings with everything filled in that follows from them; warn about each setting without effect.

    Raise InvalidRequest that says which settings contradict each other, and why.
    """
    if config.engine.duty.inference + config.engine.duty.training <= 0:
        raise InvalidRequest("one of 'duty.inference' and 'duty.training' must be above 0")
    if config.feedback.learn:
        config = _with_feedback(config)
    if config.rl_training.enabled:
        config = _scored(config)
        own = [each.config for each in own_settings(config)]
    else:
        own = []
    if config.tinker.enabled:
        config = _with_tinker(config, own)
    elif not config.rl_training.enabled and config.engine.duty.mode == "training_only":
        raise InvalidRequest(
            "the mode is training_only, but nothing is trained: "
            "add --enable-rl-training, or 'enabled: true' under 'rl_training'"
        )
    if config.cluster.trainers > 1 and not config.cluster.share:
        raise InvalidRequest(
            f"'cluster.trainers' is {config.cluster.trainers}, which needs 'cluster.share' (--share-model): only a "
            "leader averages what trainers learn"
        )
    is_one_of_several = config.cluster.share or bool(config.cluster.connect_to)
    if is_one_of_several:
        _check_cluster(config)
    trains = config.rl_training.enabled or config.engine.duty.trainer_rank
    if config.adapters or config.adapter_root or trains or is_one_of_several:
        config = _prepared(config)
    _warn(config, options)
    if not own:
        return _relaying(config) if is_one_of_several else config
    for each in own:
        try:
            _check(each)
        except InvalidRequest as e:
            where = f"the adapter '{each.rl_training.adapter}': " if len(own) > 1 else ""
            raise InvalidRequest(f"{where}{e.message}") from None
    _check_checkpoints(config)
    _check_files(own)
    return _with_room(config, own)


def _check_cluster(config: Config) -> None:
    """Refuse settings of several machines that contradict each other; say who can reach a leader."""
    cluster, server = config.cluster, config.server
    if cluster.share and cluster.connect_to:
        raise InvalidRequest("'cluster.share' and 'cluster.connect_to' exclude each other: a leader follows nobody")
    if cluster.share and config.rl_training.enabled:
        raise InvalidRequest(
            "'cluster.share' and 'rl_training.enabled' exclude each other: a leader's adapter is trained by another "
            "process, tandem train rl --connect-to HOST:PORT"
        )
    if cluster.connect_to and len(config.rl_training.trained) > 1 and config.rl_training.enabled:
        raise InvalidRequest(
            "'rl_training.adapters' names several adapters, and a trainer for another machine trains one: start one "
            "trainer for each adapter"
        )
    if config.engine.lora.max_loras == 0:
        raise InvalidRequest("'lora.max_loras' is 0, which leaves no room on the device for adapters of other machines")
    if cluster.connect_to:
        check_leader(cluster.connect_to)
    elif is_loopback(server.host) or server.uds:
        warn(
            "--share-model reaches this machine only; for others set an address and a key: export TANDEM_HOST=0.0.0.0 "
            "TANDEM_API_KEY=$(openssl rand -hex 24)"
        )


def _relaying(config: Config) -> Config:
    """Return the settings of a server whose answers are learned from elsewhere: it draws no siblings itself."""
    training = msgspec.structs.replace(config.rl_training, siblings=0, group_size=0)
    return _scored(msgspec.structs.replace(config, rl_training=training))


def _warn(config: Config, options: Mapping[str, object]) -> None:
    """Warn about each given option that has no effect."""
    relays = config.cluster.share or config.cluster.connect_to
    if options.get("cluster_dir") and not relays:
        warn("--cluster-dir has no effect without --share-model or --connect-to")
    if options.get("wait_for_leader") and not config.cluster.connect_to:
        warn("--wait-for-leader has no effect without --connect-to")
    for name, flag in LEARNING.items():
        if options.get(name) in (None, [], ()):
            continue
        if name in TINKER:
            if not config.tinker.enabled:
                warn(f"{flag} has no effect without --enable-tinker")
        elif not config.rl_training.enabled and name not in ALONE and not (relays and name in RELAYED):
            warn(f"{flag} has no effect without --enable-rl-training")
        elif not config.rl_training.enabled and name == "training_share" and not config.tinker.enabled:
            warn(f"{flag} has no effect without --enable-rl-training or --enable-tinker")


def _with_feedback(config: Config) -> Config:
    """Return the settings with the adapter that learns from feedback as a trained one.

    Raise InvalidRequest if only others are trained, or none can be.
    """
    replace, name, training = msgspec.structs.replace, config.feedback.learn, config.rl_training
    if config.engine.duty.mode == "inference_only":
        raise InvalidRequest("'feedback.learn' needs a mode that trains: 'duty.mode' is 'inference_only'")
    if training.adapters:
        if name not in training.trained:
            raise InvalidRequest(
                f"'feedback.learn' is '{name}', which is not among 'rl_training.adapters': "
                f"{', '.join(training.trained)}"
            )
        return replace(config, rl_training=replace(training, enabled=True))
    if training.adapter != name and (training.enabled or training.adapter != RLTrainingConfig().adapter):
        raise InvalidRequest(
            f"'feedback.learn' is '{name}', but 'rl_training.adapter' is '{training.adapter}': give both the same "
            "name, or name both adapters in 'rl_training.adapters'"
        )
    source = name if not training.init_from and name in {adapter for adapter, _ in config.adapters} else ""
    training = replace(training, enabled=True, adapter=name, init_from=training.init_from or source)
    return replace(config, rl_training=training)


def _with_tinker(config: Config, trained: Sequence[Config]) -> Config:
    """Return the settings with memory reserved for the trainers of Tinker's clients. Raise InvalidRequest for settings
    under which these clients could not train or sample. `trained` are those of the adapters that the server trains.
    """
    replace, duty, lora, tinker = msgspec.structs.replace, config.engine.duty, config.engine.lora, config.tinker
    if duty.mode == "inference_only":
        raise InvalidRequest("'tinker.enabled' needs a mode that trains: 'duty.mode' is 'inference_only'")
    if lora.max_loras == 0:
        raise InvalidRequest("'lora.max_loras' is 0, which leaves no room on the device for what 'tinker' trains")
    if tinker.rank > lora.max_lora_rank:
        raise InvalidRequest(
            f"'tinker.rank' is {tinker.rank}, over 'lora.max_lora_rank', {lora.max_lora_rank}: what is trained could "
            "not be sampled from"
        )
    ranks = [each.rl_training.lora_rank for each in trained]
    duty = replace(
        duty,
        trainer_rank=max(duty.trainer_rank, tinker.rank, *ranks),
        trainers=max(duty.trainers, tinker.trainers + len(trained)),
        trains_head=True,
    )
    return replace(config, engine=replace(config.engine, duty=duty))


def _prepared(config: Config) -> Config:
    """Return the settings with the kernels of adapters made ready at start."""
    replace, engine = msgspec.structs.replace, config.engine
    return replace(config, engine=replace(engine, lora=replace(engine.lora, prepare=True)))


def _check(config: Config) -> None:
    training, lora = config.rl_training, config.engine.lora
    name, source = limits.check_name(training.adapter, "'rl_training.adapter'"), training.init_from
    adapters = {adapter for adapter, _ in config.adapters}
    if lora.max_loras == 0:
        raise InvalidRequest(f"'lora.max_loras' is 0, which leaves no room on the device for '{name}', the trained one")
    if training.lora_rank > lora.max_lora_rank:
        raise InvalidRequest(
            f"'rl_training.lora_rank' is {training.lora_rank}, over 'lora.max_lora_rank', {lora.max_lora_rank}: "
            "what is trained could not be served"
        )
    if training.update_frequency > training.trajectory_buffer_size:
        raise InvalidRequest(
            f"'rl_training.update_frequency' is {training.update_frequency}, over "
            f"'rl_training.trajectory_buffer_size', {training.trajectory_buffer_size}: no update would ever come"
        )
    if training.schedule != "constant" and not training.decay_steps:
        raise InvalidRequest(
            f"'rl_training.schedule' is '{training.schedule}', which needs 'rl_training.decay_steps': the rate would "
            "never fall"
        )
    if training.learning_rate == "auto" and training.target_kl > training.guard_kl:
        raise InvalidRequest(
            f"'rl_training.target_kl' is {training.target_kl:g}, over 'rl_training.guard_kl', {training.guard_kl:g}: "
            "updates that moved so far would be taken back"
        )
    if name.casefold() in limits.BASE_NAMES or name in {alias for alias, _ in config.aliases}:
        raise InvalidRequest(f"'{name}' is an alias or the base itself; give 'rl_training.adapter' a name of its own")
    if name in adapters and source != name:
        raise InvalidRequest(
            f"adapter '{name}' is read from a folder; to train it further set 'rl_training.init_from: {name}', "
            "else give 'rl_training.adapter' another name"
        )
    if source and source not in adapters and not config.adapter_root:
        raise InvalidRequest(f"'rl_training.init_from' is '{source}', but no adapter of this name is served")
    if training.kl_reference == "init" and not source:
        raise InvalidRequest(
            "'rl_training.kl_reference' is 'init', which needs 'rl_training.init_from': a fresh adapter is the base"
        )
    if training.kl_reference == "accepted" and not (training.guard_prompts or training.validation_prompts):
        raise InvalidRequest(
            "'rl_training.kl_reference' is 'accepted', but no version is ever accepted without "
            "'rl_training.guard_prompts' or 'rl_training.validation_prompts'"
        )
    if training.kl_reference != "base" and not training.kl_coef:
        warn("'rl_training.kl_reference' has no effect without 'rl_training.kl_coef'")
    _check_environments(config)
    require(training.report_to)
    _check_scoring(config)


def _check_environments(config: Config) -> None:
    """Refuse settings of environments that contradict each other; warn about those without effect."""
    training = config.rl_training
    if training.atropos_url:
        check_url(training.atropos_url)
        if training.atropos_api:
            raise InvalidRequest(
                "'rl_training.atropos_api' makes this server Atropos' API, and 'rl_training.atropos_url' names one "
                "elsewhere: give one of them"
            )
    if training.verifiers:
        check_environment(config)
    else:
        for name in ("verifiers_python", "verifiers_variables"):
            if getattr(training, name):
                warn(f"'rl_training.{name}' has no effect without 'rl_training.verifiers'")
    for name in ("verifiers", "atropos_url", "atropos_api"):
        if getattr(training, name) and config.engine.duty.mode == "inference_only":
            warn(f"'rl_training.{name}' has no effect in the mode inference_only, in which nothing is trained")


def _check_checkpoints(config: Config) -> None:
    """Refuse names of adapters that belong to checkpoints, existing ones or those that get their name automatically."""
    from mlx_tandem.training.store.checkpoints import AUTOMATIC, Checkpoints

    trained = config.rl_training.trained
    named = [
        *((name, "rl_training.adapters" if len(trained) > 1 else "rl_training.adapter") for name in trained),
        *((name, "adapters") for name, _ in config.adapters),
        *((name, "aliases") for name, _ in config.aliases),
    ]
    for own in own_settings(config):
        folder, prefix = own.config.checkpointing.checkpoint_dir, own.prefix.casefold()
        there = {info.name.casefold() for info in Checkpoints(Path(folder), 1).list()}
        for name, setting in named:
            if not name.casefold().startswith(prefix):
                continue
            rest = name.casefold()[len(prefix) :]
            if rest in there or AUTOMATIC.fullmatch(rest):
                raise InvalidRequest(
                    f"'{name}' in '{setting}' is the name of a checkpoint: give it another name, or name another "
                    f"folder than {folder} with --checkpoint-dir"
                    if rest in there
                    else f"'{name}' in '{setting}' is a name that checkpoints get by themselves: give it another name"
                )


def _check_files(own: Sequence[Config]) -> None:
    """Refuse a file of metrics that several adapters would write."""
    named: dict[str, str] = {}
    for training in (each.rl_training for each in own):
        other = named.setdefault(training.metrics_file, training.adapter)
        if training.metrics_file and other != training.adapter:
            raise InvalidRequest(
                f"'{other}' and '{training.adapter}' have the same 'metrics_file', {training.metrics_file}: give each "
                "its own under 'rl_training.adapters', or none ('')"
            )


def _with_room(config: Config, own: Sequence[Config]) -> Config:
    """Return the settings with memory reserved for the trainers of these adapters, and for those of references."""
    replace, duty = msgspec.structs.replace, config.engine.duty
    trained = [each.rl_training for each in own]
    if not duty.trainer_rank:
        duty = replace(duty, trainer_rank=max(training.lora_rank for training in trained))
    several = sum(training.steps_per_update > 1 for training in trained)
    references = sum(
        training.adapter == config.feedback.learn or (bool(training.kl_coef) and training.kl_reference != "base")
        for training in trained
    )
    # `several_steps` keeps the state before several steps of one trainer; the room of another trainer has that, too.
    count = len(trained) + references + max(several - 1, 0)
    if count > 1:
        duty = replace(duty, trainers=max(duty.trainers, count + config.tinker.trainers * config.tinker.enabled))
    if several:
        duty = replace(duty, several_steps=True)
    return replace(config, engine=replace(config.engine, duty=duty))


def _check_scoring(config: Config) -> None:
    """Refuse a scoring function that nobody knows."""
    from mlx_tandem.training.rewards import LATER, RewardPool

    names, training = [*RewardPool(config.rl_training).names, LATER], config.rl_training
    if training.scoring_function and training.scoring_function not in names:
        raise InvalidRequest(
            f"'rl_training.scoring_function' is '{training.scoring_function}'; known are: {', '.join(names)}"
        )


def _scored(config: Config) -> Config:
    """Return the settings with the environment's name as scoring function, if it is one and no other is set."""
    from mlx_tandem.training.rewards import LATER, RewardPool

    training = config.rl_training
    if training.scoring_function or not training.environment:
        return config
    if training.environment not in [*RewardPool(training).names, LATER]:
        if training.atropos_url or training.atropos_api:
            return config  # a label: Atropos' environment scores
        warn(f"'rl_training.environment' has no effect here: '{training.environment}' is no scoring function")
        return config
    training = msgspec.structs.replace(training, scoring_function=training.environment)
    return msgspec.structs.replace(config, rl_training=training)
