"""Access control: the keys, and a check of the Host header against DNS rebinding."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_tandem.config import ServerConfig
from mlx_tandem.dialects.openai.errors import error_body
from mlx_tandem.dialects.tinker.errors import PREFIX as TINKER
from mlx_tandem.errors import Forbidden, Overloaded, TandemError, Unauthorized
from mlx_tandem.generation.caller import ANYONE, CALLER
from mlx_tandem.generation.metrics import Metrics
from mlx_tandem.generation.prompted import CLIENT, OWNER
from mlx_tandem.server.body import refusal_headers
from mlx_tandem.server.error_log import note
from mlx_tandem.server.error_reply import ERRORS, ErrorReply
from mlx_tandem.server.keyring import Keyring
from mlx_tandem.server.keys import is_loopback

TINKER_KEY = b"tml-"
"""Beginning of every key that the SDK of Tinker sends: it refuses to send others."""

NEEDED = "a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY"
EXPIRED = "this API key has expired"

_HOST = re.compile(rb"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,255})(:[0-9]{1,5})?")


class Gate:
    """ASGI middleware that checks the Host header and the key of each request before its body is read.

    It sets CALLER, `scope["key_shown"]` to whether the request has a key, or the server asks for none, and
    `scope[ERRORS]` for a path whose errors have the form of another dialect than OpenAI's. Scopes are checked where the
    route is known (`app.py`).
    """

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        server: ServerConfig,
        metrics: Metrics,
        errors: Mapping[str, Callable[[TandemError], bytes]],
        public: Sequence[re.Pattern[str]],
    ):
        """Guard `app` with the keys of `keyring`. Refusals are counted in `metrics`.

        `errors` has the functions that write errors, by path. A path below one of these has the same form, whether or
        not there is such a route; OpenAI's form is that of all other paths. `public` matches the paths whose GET needs
        no key.
        """
        self._app = app
        self._errors = errors
        self._metrics = metrics
        self._keyring = keyring
        self._public = public
        # A web page can make a browser send a request with a foreign Host, but such a request does not have a key.
        if server.allowed_hosts or (keyring.is_open and is_loopback(server.host)):
            self._hosts: frozenset[str] | None = frozenset(h.lower() for h in (server.host, *server.allowed_hosts))
        else:
            self._hosts = None
        self._is_ours = lru_cache(64)(self._takes_host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on to the application, or refuse it."""
        if scope["type"] != "http":
            return
        for path, write in self._errors.items():
            if scope["path"] == path or scope["path"].startswith(f"{path}/"):
                scope[ERRORS] = write
        hosts: list[bytes] = []
        credentials: list[bytes] = []
        keys: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"authorization":
                credentials.append(value)
            elif name == b"x-api-key":
                keys.append(value)
        if self._hosts is not None and not (len(hosts) == 1 and self._is_ours(hosts[0])):
            await self._refuse(_foreign(hosts), scope, receive, send)
            return
        is_tinker = scope["path"].startswith(f"{TINKER}/")
        caller, expired = ANYONE, False
        is_open = self._keyring.is_open
        if not is_open:
            known, expired = self._keyring.find(_shown(credentials, keys, is_tinker))
            if known is None and not self._is_public(scope):
                error = Unauthorized(EXPIRED if expired else NEEDED)
                await self._refuse(error, scope, receive, send, (b"www-authenticate", b"Bearer"))
                return
            caller, is_open = known or ANYONE, known is not None
        scope["key_shown"] = is_open
        CALLER.set(caller)
        CLIENT.set(hash(caller.tenant) if caller.tenant else _client(scope, credentials or keys))
        if is_tinker:
            OWNER.set(_owner(caller.tenant, self._keyring.is_open, keys or credentials))
        try:
            caller.check_request()
        except Overloaded as e:
            await self._refuse(e, scope, receive, send)
            return
        with caller.request():
            await self._app(scope, receive, send)

    async def _refuse(
        self, error: TandemError, scope: Scope, receive: Receive, send: Send, *extra: tuple[bytes, bytes]
    ) -> None:
        """Count and log `error`, and send it as the reply with the headers `extra`."""
        note(self._metrics, error, scope)
        headers = [*refusal_headers(error, scope["headers"]), *extra]
        await ErrorReply(error, headers, scope.get(ERRORS, error_body))(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        """Return whether a request needs no key."""
        return scope["method"] == "GET" and any(path.match(scope["path"]) for path in self._public)

    def _takes_host(self, value: bytes) -> bool:
        """Return whether this Host header names this server."""
        found = _HOST.fullmatch(value.lower())
        if found is None or self._hosts is None:
            return False
        name = found[1].decode()
        return is_loopback(name.strip("[]")) or name in self._hosts or found[0].decode() in self._hosts


def _shown(credentials: Sequence[bytes], keys: Sequence[bytes], is_tinker: bool) -> Sequence[bytes]:
    """Return the keys in the request's only Authorization and its only X-Api-Key header.

    One of the two is enough, because a proxy may have added the other. On paths of Tinker's API a key may stand behind
    TINKER_KEY.
    """
    shown = list(keys) if len(keys) == 1 else []
    if len(credentials) == 1:
        scheme, _, key = credentials[0].partition(b" ")
        if scheme.lower() == b"bearer":
            shown.append(key)
    if is_tinker:
        shown += [key.removeprefix(TINKER_KEY) for key in shown if key.startswith(TINKER_KEY)]
    return shown


def _owner(tenant: str, is_open: bool, keys: Sequence[bytes]) -> str:
    """Return the owner of what a request to Tinker's API makes: the tenant, or a digest of the key that is shown on a
    server that asks for none. Whoever has the server's single key is one owner, whose name is empty.
    """
    return hashlib.sha256(b"".join(keys[:1])).hexdigest() if is_open else tenant


def _client(scope: Scope, keys: list[bytes]) -> int:
    """Return a number for the client: for its address and its key, whether the server asks for one or not.

    Programs on one machine have one address, and clients behind a proxy have that of the proxy.
    """
    return hash((*(scope.get("client") or ("",))[:1], *keys[:1]))


def _foreign(hosts: list[bytes]) -> Forbidden:
    """Return the refusal of a request with these Host headers, of which it quotes at most 100 escaped bytes."""
    code = "host_not_allowed"
    if len(hosts) != 1:
        return Forbidden(f"the request has {len(hosts) or 'no'} Host headers; one is needed", code=code)
    shown = f"the Host {hosts[0][:100].decode('latin-1')!a}"
    if (found := _HOST.fullmatch(hosts[0].lower())) is None:
        return Forbidden(f"{shown} is not the name of a host", code=code)
    option = f"--allowed-host {found[1].decode()}"
    return Forbidden(f"{shown} is not served here; if it is this server's, start it with {option}", code=code)
