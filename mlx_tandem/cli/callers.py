"""The names by which `tandem` can be called, and what differs under each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlx_tandem.config import Config


@dataclass(frozen=True)
class Difference:
    """A default of another program that does not apply here for a reason. `says` is the end of a sentence about it."""

    is_so: Callable[[Config], bool]  # whether these settings differ from that program's
    says: str


@dataclass(frozen=True)
class CalledName:
    """A name by which `tandem` can be called, with what differs under it."""

    also_called: str = ""  # a further name of the base, which that program's clients use for any model
    defaults: Mapping[str, object] = field(default_factory=dict)  # that program's, by path of the setting in config.py
    differences: tuple[Difference, ...] = ()
    ready: str = ""  # beginning of the line on standard output from which that program's callers know that it is ready
    weights_file: bool = False  # whether that program's callers name the model by a file of its folder

    def said(self, config: Config) -> Iterator[str]:
        """Yield the defaults of that program that do not apply under these settings."""
        return (difference.says for difference in self.differences if difference.is_so(config))

    def options(self, given: Mapping[str, object]) -> Mapping[str, object]:
        """Return the options that were given, with the model's folder in place of a file in it.

        If no name for the model is given, the options get the name by which Jan knows it: its path below the folder
        `models`.
        """
        model = given.get("model")
        if not self.weights_file or not isinstance(model, str) or not Path(model).is_file():
            return given
        folder = Path(model).parent
        below = [parent for parent in folder.parents if parent.name == "models"]
        name = str(folder.relative_to(below[0])) if below else folder.name
        return {**given, "model": str(folder), "served_model_name": given.get("served_model_name") or [name]}


CALLERS = {
    "tandem": CalledName(),
    "mola": CalledName(
        defaults={
            "adapter_root": ".",
            "engine.scheduler.max_num_seqs": 128,
            "engine.scheduler.prefill_batch_size": 32,
            "engine.scheduler.max_inflight_tokens": 131_072,
        }
    ),
    "mlx_lm_server": CalledName(
        defaults={
            "engine.model.path": "mlx-community/Qwen3-4B-4bit",
            "engine.cache.kv_bits": 8,
            "engine.scheduler.max_num_seqs": 8,
            "engine.scheduler.prefill_batch_size": 4,
            "engine.speculation.disable_batch_size": 8,
            "engine.speculation.ngram_max": 4,
            "engine.speculation.ngram_min": 1,
            "server.max_prompt_tokens": 32_768,
            "server.max_generation_tokens": 32_768,
            "server.max_queue_size": 128,
            "server.max_concurrent_requests": 64,
            "server.request_timeout_s": 120.0,
        },
        differences=(
            Difference(
                lambda config: config.server.host == "127.0.0.1" and not config.server.uds,
                "it listens on 127.0.0.1 (for other machines: --host 0.0.0.0 and --api-key-file FILE)",
            ),
            Difference(lambda config: not config.engine.disk.on, "it keeps no prompts on the drive (--ssd does)"),
            Difference(
                lambda config: not config.engine.cache.num_blocks,
                "its KV cache takes what memory is left (--num-blocks sets another size)",
            ),
        ),
    ),
    "mlx-server": CalledName(
        also_called="model",
        defaults={
            "server.port": 8080,
            "server.default_max_tokens": 2048,
            "server.drain_seconds": 4.0,  # Jan kills what has not ended after 5 seconds
            "engine.model.max_model_len": 4096,
        },
        differences=(
            Difference(
                lambda config: config.engine.scheduler.max_num_seqs > 1,
                "requests share batches (--max-batch-size 0: one at a time)",
            ),
            Difference(
                lambda config: config.engine.cache.prefix_caching,
                "common beginnings of prompts are kept (--no-enable-prefix-caching)",
            ),
        ),
        ready="http server listening on",
        weights_file=True,
    ),
    "mlx_parallm_serve": CalledName(also_called="base-model"),
}
