"""The Prometheus metrics of learning, under this project's names and those that MLX ParaLLM documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from mlx_tandem.training.live.learning import Learning
    from mlx_tandem.training.online.serving import Recorded
    from mlx_tandem.training.tinker.service import Tinker


def families(learners: Sequence[Learning]) -> Iterator[Metric]:
    """Yield all families, with a label `adapter` where several adapters are trained.

    The counters of the learning loop continue over restarts of the server, except those whose text says otherwise.
    """
    stats = learners[0].stats
    yield _counter("tandem_training_device_seconds", "Device time of learning, this engine.", stats.training_ms / 1e3)
    yield _counter(
        "tandem_serving_device_seconds", "Device time of users' requests, this engine.", stats.serving_ms / 1e3
    )
    if len(learners) == 1:
        yield from _families(learners[0])
        return
    merged: dict[str, Metric] = {}
    for learning in learners:
        for family in _families(learning):
            whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {"adapter": learning.name} | sample.labels, sample.value)
    yield from merged.values()


def _families(learning: Learning) -> Iterator[Metric]:
    """Yield the families of one adapter, without a label for it."""
    learner = learning.learner
    status = learner.status()
    last = learner.history[-1] if learner.history else None
    dropped = {
        "stale": status.dropped_stale,
        "duplicate": status.dropped_duplicate,
        "overflow": status.dropped_overflow,
        "no_reward": status.dropped_no_reward,
    }
    pace = learning.updates_per_second()

    yield _counter("tandem_training_trajectories", "Trajectories collected.", status.trajectories_collected)
    yield _counter("tandem_training_siblings", "Answers that the server drew by itself.", status.siblings_drawn)
    yield _by("tandem_training_trajectories_dropped", "Trajectories never trained on.", "reason", dropped.items())
    yield _counter("tandem_training_groups_skipped", "Groups whose rewards were all the same.", status.skipped_groups)
    yield _by(
        "tandem_training_updates", "Updates by what came of them, this server.", "outcome", learning.outcomes.items()
    )
    yield _by(
        "tandem_training_reward_failures",
        "Completions without a score, this server.",
        "kind",
        learner.rewards.failures.items(),
    )
    yield _recorded(status.recorded_prompts)
    yield from _played(learning)
    yield _counter("tandem_training_publishes", "Versions published.", status.publishes)
    yield _counter(
        "tandem_training_rollbacks", "Times that training went back to an earlier version.", status.rollbacks
    )
    yield _counter("tandem_training_checkpoint_saves", "Checkpoints written.", status.checkpoint_saves)
    text = "Times that the trained name came to stand for a version, this server."
    yield _counter("tandem_training_swaps", text, learning.swaps)
    for name, text, value in (
        ("buffered", "Trajectories that wait.", status.buffered),
        ("recovering", "Updates to compute again after a crash.", status.recovering),
        ("running", "1 while the loop runs.", status.running),
        ("diverged", "1 while the last update was taken back or refused.", last is not None and last.outcome in BAD),
        ("step", "Steps of the optimiser.", status.step),
        ("version", "The version that is served.", status.version),
        ("loss", "Of the last update.", status.loss),
        ("mean_reward", "Of the last update.", status.mean_reward),
        ("kl", "Nats that the last update moved the policy.", status.kl),
        ("grad_norm", "Of the last update, before clipping.", status.grad_norm),
        ("updates_per_second", "Over five minutes.", pace),
    ):
        yield _gauge(f"tandem_training_{name}", text, value)

    # These are MLX ParaLLM's names. The number of trajectories is a gauge, since a counter's name would end in _total.
    yield _gauge("mlx_parallm_rl_trajectories_collected", "Trajectories collected.", status.trajectories_collected)
    yield _gauge("mlx_parallm_rl_training_loss", "Of the last update.", status.loss)
    yield _gauge("mlx_parallm_rl_updates_per_second", "Over five minutes.", pace)
    yield _counter("mlx_parallm_lora_swaps", "Times that the trained name came to stand for a version.", learning.swaps)
    yield _counter("mlx_parallm_checkpoint_saves", "Checkpoints written.", status.checkpoint_saves)


def _recorded(found: Recorded) -> Metric:
    """Return how many recorded prompts there are of each kind."""
    family = GaugeMetricFamily("tandem_training_recorded_prompts", "By what their answers were worth.", labels=["kind"])
    for kind in ("new", "solved", "hopeless", "between"):
        family.add_metric([kind], getattr(found, kind))
    return family


def _played(learning: Learning) -> Iterator[Metric]:
    """Yield the counters of what came from environments of Atropos and of verifiers, each if the server has one."""
    if learning.feed is not None:
        fed = learning.feed.status
        for name, text, count in (
            ("batches", "Batches taken from Atropos, this server.", fed.batches),
            ("trajectories", "Trajectories taken from Atropos, this server.", fed.trajectories),
            ("refused_groups", "Groups of Atropos that could not be learned from, this server.", fed.refused_groups),
        ):
            yield _counter(f"tandem_training_atropos_{name}", text, count)
    if learning.environment is not None:
        status = learning.environment.status
        for name, text, count in (
            ("rounds", "Rounds of the environment, this server.", status.rounds),
            ("episodes", "Episodes of the environment, this server.", status.episodes),
            ("failed_episodes", "Its episodes that ended with an error, this server.", status.failed_episodes),
            ("trajectories", "Trajectories of the environment, this server.", status.trajectories),
            ("refused_groups", "Its groups that could not be learned from, this server.", status.refused_groups),
        ):
            yield _counter(f"tandem_training_environment_{name}", text, count)


def tinker_families(tinker: Tinker) -> Iterator[Metric]:
    """Yield the gauges of what clients of Tinker's API hold. They have no labels, so no client adds series."""
    held = tinker.holdings()
    for name, text, value in (
        ("sessions", "Sessions, each with a lease.", held.sessions),
        ("models", "Models that are trained.", held.models),
        ("samplers", "Sampling sessions.", held.samplers),
        ("requests_waiting", "Requests whose results are not there.", held.waiting),
        ("results", "Results that are kept for clients to fetch.", held.results),
        ("result_bytes", "Bytes of these results.", held.result_bytes),
        ("checkpoints", "Checkpoints on the drive.", held.checkpoints),
        ("silent_seconds", "Silence of the client that is silent the longest.", held.silent_seconds),
    ):
        yield _gauge(f"tandem_tinker_{name}", text, value)
    yield _counter("tandem_tinker_sessions_lost", "Sessions whose lease ran out, this server.", tinker.lost)


BAD = ("rolled_back", "refused")
"""The outcomes of updates that were taken back or refused."""


def _gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    """Return a counter without labels."""
    return CounterMetricFamily(name, text, value=float(value))


def _by(name: str, text: str, label: str, values: Iterable[tuple[str, int]]) -> Metric:
    """Return a counter with a value for each value of its one label."""
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family
