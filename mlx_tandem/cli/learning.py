"""Checks the settings of learning against each other, and refuses senseless combinations before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from mlx_tandem import limits
from mlx_tandem.cli.console import warn
from mlx_tandem.cli.options import LEARNING
from mlx_tandem.config import Config
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.atropos.client import check_url
from mlx_tandem.training.metrics.writer import require

ALONE = ("enable_rl_training", "mode", "training_share", "enable_tinker")
"""Options that mean something whether or not the server trains an adapter by itself."""

TINKER = ("tinker_trainers", "tinker_rank", "tinker_dir", "tinker_lease_s")
"""Options that mean something only with `enable_tinker`."""


def resolve(config: Config, options: Mapping[str, object]) -> Config:
    """Return the settings with everything filled in that follows from them; warn about each setting without effect.

    Raise InvalidRequest that says which settings contradict each other, and why.
    """
    if config.engine.duty.inference + config.engine.duty.training <= 0:
        raise InvalidRequest("one of 'duty.inference' and 'duty.training' must be above 0")
    if config.tinker.enabled:
        config = _with_tinker(config)
    elif not config.rl_training.enabled and config.engine.duty.mode == "training_only":
        raise InvalidRequest(
            "the mode is training_only, but nothing is trained: "
            "add --enable-rl-training, or 'enabled: true' under 'rl_training'"
        )
    if config.adapters or config.adapter_root or config.rl_training.enabled or config.engine.duty.trainer_rank:
        config = _prepared(config)
    _warn(config, options)
    if not config.rl_training.enabled:
        return config
    _check(config)
    return _with_room(_scored(config))


def _warn(config: Config, options: Mapping[str, object]) -> None:
    """Warn about each given option that has no effect."""
    for name, flag in LEARNING.items():
        if options.get(name) in (None, [], ()):
            continue
        if name in TINKER:
            if not config.tinker.enabled:
                warn(f"{flag} has no effect without --enable-tinker")
        elif not config.rl_training.enabled and name not in ALONE:
            warn(f"{flag} has no effect without --enable-rl-training")
        elif not config.rl_training.enabled and name == "training_share" and not config.tinker.enabled:
            warn(f"{flag} has no effect without --enable-rl-training or --enable-tinker")


def _with_tinker(config: Config) -> Config:
    """Return the settings with memory reserved for the trainers of Tinker's clients. Raise InvalidRequest for settings
    under which these clients could not train or sample.
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
    own = 1 if config.rl_training.enabled else 0
    duty = replace(
        duty,
        trainer_rank=max(duty.trainer_rank, tinker.rank, config.rl_training.lora_rank * own),
        trainers=max(duty.trainers, tinker.trainers + own),
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
    if training.atropos_url:
        check_url(training.atropos_url)
    require(training.report_to)
    _check_checkpoints(config)


def _check_checkpoints(config: Config) -> None:
    """Refuse names of adapters that belong to checkpoints, existing ones or those that get their name automatically."""
    from mlx_tandem.training.store.checkpoints import AUTOMATIC, Checkpoints

    folder = config.checkpointing.checkpoint_dir
    there = {info.name.casefold() for info in Checkpoints(Path(folder), 1).list()}
    named = [
        (config.rl_training.adapter, "rl_training.adapter"),
        *((name, "adapters") for name, _ in config.adapters),
        *((name, "aliases") for name, _ in config.aliases),
    ]
    for name, setting in named:
        if name.casefold() in there or AUTOMATIC.fullmatch(name.casefold()):
            raise InvalidRequest(
                f"'{name}' in '{setting}' is the name of a checkpoint: give it another name, or name another folder "
                f"than {folder} with --checkpoint-dir"
                if name.casefold() in there
                else f"'{name}' in '{setting}' is a name that checkpoints get by themselves: give it another name"
            )


def _with_room(config: Config) -> Config:
    """Return the settings with memory reserved for the trainer, and for that of the reference."""
    replace, duty, training = msgspec.structs.replace, config.engine.duty, config.rl_training
    if not duty.trainer_rank:
        duty = replace(duty, trainer_rank=training.lora_rank)
    if training.kl_coef and training.kl_reference != "base":
        duty = replace(duty, trainers=max(duty.trainers, 2 + config.tinker.trainers * config.tinker.enabled))
    if training.steps_per_update > 1:
        duty = replace(duty, several_steps=True)
    return replace(config, engine=replace(config.engine, duty=duty))


def _scored(config: Config) -> Config:
    """Return the settings with the environment's name as scoring function, if it is one and no other is set."""
    from mlx_tandem.training.rewards import LATER, RewardPool

    training = config.rl_training
    names = [*RewardPool(training).names, LATER]
    if training.scoring_function:
        if training.scoring_function not in names:
            raise InvalidRequest(
                f"'rl_training.scoring_function' is '{training.scoring_function}'; known are: {', '.join(names)}"
            )
        return config
    if not training.environment:
        return config
    if training.environment not in names:
        if training.atropos_url:
            return config  # a label: Atropos' environment scores
        warn(f"'rl_training.environment' has no effect here: '{training.environment}' is no scoring function")
        return config
    training = msgspec.structs.replace(training, scoring_function=training.environment)
    return msgspec.structs.replace(config, rl_training=training)
