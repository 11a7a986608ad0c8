"""The gateway's wiring: parts, routes, and a process's life."""

from __future__ import annotations

import contextlib
import logging
import secrets

from aiohttp import web

from gateway.core.admission import Caller, Keys
from gateway.core.browser_limits import BrowserLimits
from gateway.core.browser_tokens import BrowserTokens
from gateway.core.callers import Callers
from gateway.core.limits import HintLimits
from gateway.core.retry import Patience
from gateway.envelope import envelope
from gateway.fleet import Fleet
from gateway.generate import Generator
from gateway.hints import Hints
from gateway.intake import expect_continue
from gateway.parts import PARTS, Parts
from gateway.routes import advisory, chat, client_secrets, completions, models, ops, sessions, web_sdk, workflows
from gateway.sessions import Sessions
from gateway.workers import Workers
from runtime import telemetry
from runtime.clock import Clock, RealClock
from runtime.config import Config, cluster_secret
from runtime.service import Tasks

log = telemetry.logger("gateway")
#: Header lines and the request line, each.
MAX_LINE_BYTES = 16 << 10


def build(parts: Parts) -> web.Application:
    """The HTTP application. Body limits are our own (`intake.read_json`): aiohttp's are for its own readers."""
    app = web.Application(middlewares=[envelope])
    app[PARTS] = parts
    add, get = app.router.add_route, app.router.add_get
    add("POST", "/v1/chat/completions", chat.create, expect_handler=expect_continue)
    add("POST", "/v1/completions", completions.create, expect_handler=expect_continue)
    for path, handler in (("/v1/advisory", advisory.advise), ("/v1/invalidate", advisory.invalidate)):
        add("POST", path, handler, expect_handler=expect_continue)
        add("OPTIONS", path, advisory.preflight)
    add("POST", "/v1/client_secrets", client_secrets.create, expect_handler=expect_continue)
    get("/v1/sessions", sessions.index)
    get("/v1/sessions/{session_id}/placement", sessions.placement)
    get("/v1/sessions/{session_id:.+}", sessions.show)
    add("DELETE", "/v1/sessions/{session_id:.+}", sessions.erase)
    get("/v1/workflows", workflows.index)
    get("/v1/workflows/{name:.+}", workflows.show)
    add("PUT", "/v1/workflows/{name:.+}", workflows.declare, expect_handler=expect_continue)
    add("DELETE", "/v1/workflows/{name:.+}", workflows.delete)
    get("/v1/models", models.index)
    get("/v1/models/{model:.+}", models.show)
    add("POST", "/v1/embeddings", models.embeddings)
    get("/v1/fleet", ops.fleet)
    get("/health", ops.health)
    get("/ready", ops.ready)
    get("/metrics", ops.metrics)
    get("/openapi.json", ops.description)
    get("/docs", ops.docs)
    get("/upbeat.js", web_sdk.show)
    get("/upbeat.mjs", web_sdk.show)
    get("/", ops.first_page)
    return app


def _token_secrets(config: Config) -> list[str]:
    """What browser tokens are signed with: the same on every gateway of a deployment, once keys or a secret are configured. Without keys
    a token permits nothing that is not permitted anyway; what the cluster knows, or what this process draws, is enough."""
    if config.gateway.token_secret:
        return [config.gateway.token_secret]
    if config.gateway.api_keys:
        return [k.key for k in config.gateway.api_keys]
    if (config.data / "secret").exists():
        return [cluster_secret(config.data).hex()]
    return [secrets.token_hex(32)]


class Gateway:
    """One gateway process."""

    def __init__(self, config: Config, tasks: Tasks, clock: Clock | None = None, patience: Patience | None = None) -> None:
        self._config, self._tasks, self._clock = config, tasks, clock or RealClock()
        self._patience = patience or Patience()
        self._runner: web.AppRunner | None = None
        self.parts: Parts | None = None

    async def start(self) -> None:
        """Listen. Raises OSError naming the address when the port is taken."""
        config, clock = self._config, self._clock
        workers = Workers(self._tasks, clock)
        fleet = Fleet(config, workers, clock, self._patience)
        keys = Keys((k.key, Caller(k.tenant, k.max_priority)) for k in config.gateway.api_keys)
        self.parts = parts = Parts(
            config=config,
            clock=clock,
            keys=keys,
            fleet=fleet,
            workers=workers,
            generator=Generator(fleet, workers, clock, self._patience),
            hints=Hints(fleet),
            sessions=Sessions(),
            limits=HintLimits(config.gateway.max_advisories_per_s),
            callers=Callers(k.key for k in config.gateway.api_keys),
            browser_tokens=BrowserTokens(_token_secrets(config)),
            browser_limits=BrowserLimits(),
        )
        self._tasks.start(fleet.watch(), "watch the fleet")
        self._tasks.start(parts.hints.run(), "tell hints")
        # What aiohttp would log with a traceback is a caller's broken HTTP; our own errors are logged by `envelope`.
        logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
        self._runner = web.AppRunner(
            build(parts),
            handler_cancellation=True,
            access_log=None,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            # Compressed bodies are refused (`intake.read_json`), so that no small body can become a large one.
            auto_decompress=False,
            # A client that was told 413 may finish sending, for this long.
            lingering_time=5.0,
            shutdown_timeout=0.5,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, config.gateway.host, config.gateway.port, reuse_port=False).start()
        log.info("serving", url=f"http://{config.gateway.host}:{config.gateway.port}", keys=not keys.open)

    async def drain(self) -> None:
        """Refuse new requests for text and let the running ones end."""
        assert self.parts is not None
        self.parts.draining = True
        await self.parts.idle.wait()

    async def stop(self) -> None:
        """Close everything."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self.parts is not None:
            await self.parts.workers.stop()
            await self._tasks.cancel()
            with contextlib.suppress(Exception):
                await self.parts.fleet.stop()
