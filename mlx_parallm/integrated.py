"""A server and its learning loop as one object, to be run on the caller's event loop."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from mlx_tandem.cli import hub
from mlx_tandem.cli.callers import CALLERS
from mlx_tandem.cli.settings import build
from mlx_tandem.config import LearningRate
from mlx_tandem.engine.client.process import process_launch
from mlx_tandem.errors import TandemError
from mlx_tandem.server.checks import check
from mlx_tandem.server.sockets import bind

if TYPE_CHECKING:
    from mlx_tandem.dialects.front import ServerFront
    from mlx_tandem.server.serve import Server
    from mlx_tandem.training.online.online import OnlineLearner

CALLED_AS = "mlx_parallm_serve"
"""The program whose defaults apply."""


@dataclass(frozen=True)
class LoRAConfig:
    """The adapter that is trained. Without `target_modules` it changes every linear layer."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ()  # last parts of the layers' names


@dataclass(frozen=True)
class RLConfig:
    """The way to learn from rewards. The settings file of a server has more of it."""

    algorithm: str = "grpo"
    learning_rate: LearningRate = "auto"  # auto: the server finds it
    batch_size: int = 32  # completions per update
    scoring_function: str = ""  # of requests that collect and name none
    checkpoint_dir: str = "./checkpoints"


class RLIntegratedServer:
    """A server whose adapter `policy` learns from requests while it answers others.

    `run_inference` serves; `run_training_loop` beside it learns from what requests collect. The two run on one event
    loop. Methods raise the errors of `tandem serve`.
    """

    def __init__(
        self, base_model: str, lora_config: LoRAConfig | None = None, rl_config: RLConfig | None = None
    ) -> None:
        """Take over the settings. `base_model` is a folder, or an id of the Hugging Face hub, which is fetched.

        Raises SettingsError and HubError.
        """
        lora, learning = lora_config or LoRAConfig(), rl_config or RLConfig()
        given = {
            "model": base_model,
            "enable_rl_training": True,
            "lora_rank": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_target_modules": list(lora.target_modules),
            "algorithm": learning.algorithm,
            "learning_rate": learning.learning_rate,
            "update_frequency": learning.batch_size,
            "scoring_function": learning.scoring_function,
            "checkpoint_dir": learning.checkpoint_dir,
        }
        caller = CALLERS[CALLED_AS]
        config = build(None, given, caller.defaults)
        engine, model = hub.find_models(config.engine)
        names = (model.id or model.folder.resolve().name, caller.also_called)
        server = replace(config.server, served_model_names=names)
        self._config = replace(config, engine=engine, server=server)
        self._server: Server | None = None
        self._ready: asyncio.Future[tuple[ServerFront, int]] | None = None
        self._ended = asyncio.Event()
        self._learns = False

    async def run_inference(self, port: int = 8000, host: str = "127.0.0.1") -> None:
        """Serve until `stop`, SIGINT or SIGTERM; port 0 is any free one. Raises OSError for a port in use."""
        from mlx_tandem.dialects.front import ServerFront
        from mlx_tandem.server.serve import Server

        config = replace(self._config, server=replace(self._config.server, host=host, port=port))
        try:
            check(config.server)
            with bind(host, port) as sock:
                self._server = Server(ServerFront(config, process_launch(config.engine)), sock, self._on_ready)
                await self._server.serve(sockets=[sock])
        finally:
            self._ended.set()
        if self._server.failure is not None:
            raise self._server.failure

    async def ready(self) -> int:
        """Return the port once requests are accepted. Raises TandemError when the server ends before."""
        return (await self._started())[1]

    async def run_training_loop(self) -> None:
        """Learn from what requests collect, until the server ends or the call is cancelled."""
        self._learns = True
        try:
            learner = self._learner((await self._started())[0])
            learner.start()
            await self._ended.wait()
        finally:
            self._learns = False
            if self._ready is not None and self._ready.done() and not self._ended.is_set():
                self._learner(self._ready.result()[0]).stop()

    def stop(self) -> None:
        """Let running requests finish, then end the server."""
        if self._server is not None:
            self._server.handle_exit(signal.SIGTERM, None)

    def _on_ready(self, front: ServerFront, port: int) -> None:
        if not self._learns:
            self._learner(front).stop()
        self._announced().set_result((front, port))

    def _announced(self) -> asyncio.Future[tuple[ServerFront, int]]:
        """Return the future that gets the front and the port when the server is ready."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
        return self._ready

    async def _started(self) -> tuple[ServerFront, int]:
        """Return the front and the port once the server is ready. Raises TandemError when it ends before."""
        announced, ended = self._announced(), asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((announced, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not announced.done():
            raise TandemError("the server has ended before it was ready")
        return announced.result()

    @staticmethod
    def _learner(front: ServerFront) -> OnlineLearner:
        return front.check_learning("the training loop").default.learner
