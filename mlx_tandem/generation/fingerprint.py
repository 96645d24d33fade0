"""The `system_fingerprint` of replies: a digest of everything but the request that an answer depends on."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from mlx_tandem import files
from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.generation.prompts import Prompts
from mlx_tandem.kv.weights import folder_digest
from mlx_tandem.log import log
from mlx_tandem.types import AdapterRef, EngineInfo

PACKAGES = ("mlx-tandem", "mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "tokenizers")
"""Distributions whose versions are part of the fingerprint."""

MOST = 1024
"""Most fingerprints that are kept in memory."""


class Fingerprints:
    """The fingerprints of one server's replies.

    Replies with equal fingerprints come from equal model files, adapters, programs and settings. The same prompt,
    parameters and seed then give the same answer as reliably as on one server.

    A separate thread reads the model's files once, because that takes seconds for a large model. Until it has finished,
    replies have no fingerprint. A file in the cache folder keeps the result by the sizes and times of those files.
    """

    def __init__(self, config: Config, client: EngineClient, prompts: Prompts, defaults: Mapping[str, float | int]):
        self._config = config
        self._client = client
        self._prompts = prompts
        self._defaults = defaults
        self._weights = ""
        self._described: tuple[EngineInfo, bytes] | None = None
        self._known: dict[str, str] = {}  # by the adapter's digest

    def start(self) -> None:
        """Start to read the model's files. Replies of a model with random weights never get a fingerprint."""
        if not self._config.engine.model.random_weights:
            threading.Thread(target=self._read, name="fingerprint", daemon=True).start()

    def of(self, adapter: AdapterRef | None) -> str | None:
        """Return the fingerprint of answers under this adapter version; None while it is not known."""
        if not self._weights:
            return None
        engine = self._client.check_ready()
        if self._described is None or self._described[0] is not engine:
            self._described = engine, self._describe(engine)
            self._known.clear()
        digest = "" if adapter is None else adapter.digest
        if digest not in self._known:
            if len(self._known) >= MOST:
                self._known.clear()
            whole = hashlib.sha256(self._described[1] + msgspec.json.encode([self._weights, digest])).hexdigest()
            self._known[digest] = f"fp_{whole[:20]}"
        return self._known[digest]

    def _read(self) -> None:
        folder, memory = Path(self._config.engine.model.path), files.cache_folder() / "weights.json"
        try:
            self._weights = folder_digest(folder, memory)
        except OSError as e:
            log("replies have no fingerprint", error=type(e).__name__)

    def _describe(self, engine: EngineInfo) -> bytes:
        """Return an encoding of everything about the programs, the engine and the settings that affects answers."""
        server = self._config.server
        return msgspec.json.encode(
            [
                [_version(name) for name in PACKAGES],
                [engine.device, engine.attention_backend, engine.lora_backend, engine.products_reason],
                [engine.dtype, engine.kv_bits, self._config.engine.cache.kv_group_size, engine.max_model_len],
                [server.default_max_tokens, server.max_prompt_tokens, server.max_generation_tokens],
                sorted(self._defaults.items()),
                self._prompts.template.source,
            ]
        )


def _version(package: str) -> str:
    """Return the installed version of `package`; an empty string if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
