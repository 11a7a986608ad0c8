"""Builds the gateway from its parts, lists its routes, and starts, drains and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable

from aiohttp import web

from contracts.api_keys import configured_digest, is_hashed
from gateway import metrics
from gateway.allowance import usage_of
from gateway.attainment import Attainments
from gateway.bodies import Bodies
from gateway.core.admission import Caller, Keys
from gateway.core.bodies import MOST_DECODED
from gateway.core.browser_limits import BrowserLimits
from gateway.core.browser_tokens import BrowserTokens
from gateway.core.callers import Callers
from gateway.core.deadlines import Limits
from gateway.core.hosts import Hosts
from gateway.core.limits import RateLimits
from gateway.core.retry import RetryLimits
from gateway.core.slots import Slots
from gateway.decoding import Decoding
from gateway.envelope import Handler, dress, envelope
from gateway.finetune.jobs import FineTuning
from gateway.fleet import Fleet
from gateway.generate import Generator
from gateway.hints import Hints
from gateway.https import https_context
from gateway.intake import expect_continue
from gateway.listener import Listener
from gateway.parts import PARTS, Parts
from gateway.responses.keeper import Keeper
from gateway.routes import (
    advisory,
    browser_pages,
    chat,
    client_secrets,
    completions,
    engine_routes,
    events,
    files,
    fine_tuning,
    messages,
    models,
    ops,
    responses,
    scale,
    sessions,
    tokens,
    web_sdk,
    workflows,
)
from gateway.sessions import Sessions
from gateway.siblings import Siblings
from gateway.slo_reports import tell_attainment
from gateway.slots import Turnstile
from gateway.turn_reports import TurnReports
from gateway.watching import Watches
from gateway.workers import Workers
from runtime import telemetry
from runtime.clock import Clock, RealClock
from runtime.config import Config
from runtime.config_checks import LOOPBACK
from runtime.config_file import cluster_secret
from runtime.gateway_config import GatewaySection
from runtime.service import Tasks

log = telemetry.logger("gateway")
#: Limit of the request line, and of each header line.
MAX_LINE_BYTES = 16 << 10
#: Requests that may wait for a slot, at least; as many as there are slots if that is more.
MIN_QUEUE = 64
#: So many seconds' worth of queries may come at once.
QUERY_BURST_S = 5.0
#: Erasures of one tenant that wait for the fleet at a time.
MOST_ERASURES = 16
#: How long `stop` waits for running answers to send their error.
LAST_WORDS_S = 1.0
#: How long a process serves the connections that it has after others took over its port, in seconds.
HAND_OVER_S = 1.0


def build(parts: Parts) -> web.Application:
    """The HTTP application. `gateway.bodies` limits bodies, because aiohttp's limits apply only to its readers."""
    app = web.Application(middlewares=[envelope])
    app[PARTS] = parts
    app.on_response_prepare.append(dress)
    add, get = app.router.add_route, app.router.add_get
    add("POST", "/v1/chat/completions", chat.create, expect_handler=expect_continue)
    add("POST", "/v1/completions", completions.create, expect_handler=expect_continue)
    for path, handler in (("/v1/advisory", advisory.advise), ("/v1/invalidate", advisory.invalidate)):
        add("POST", path, handler, expect_handler=expect_continue)
    add("POST", "/v1/client_secrets", client_secrets.create, expect_handler=expect_continue)
    get("/v1/sessions", sessions.index)
    get("/v1/sessions/{session_id}/placement", sessions.placement)
    get("/v1/sessions/{session_id}/events", events.follow)
    get("/v1/sessions/{session_id:.+}", sessions.show)
    add("DELETE", "/v1/sessions/{session_id:.+}", sessions.erase)
    get("/v1/workflows", workflows.index)
    get("/v1/workflows/{name:.+}", workflows.show)
    add("PUT", "/v1/workflows/{name:.+}", workflows.declare, expect_handler=expect_continue)
    add("DELETE", "/v1/workflows/{name:.+}", workflows.delete)
    get("/v1/models", models.index)
    get("/v1/models/{model:.+}/placement", models.placement)
    get("/v1/models/{model:.+}", models.show)
    add("DELETE", "/v1/models/{model:.+}", models.delete)
    relayed: tuple[tuple[str, Handler], ...] = (
        ("/v1/responses", responses.create),
        ("/v1/responses/{response_id}/cancel", responses.cancel),
        ("/v1/messages", messages.create),
        ("/v1/messages/count_tokens", messages.count_tokens),
        ("/v1/embeddings", engine_routes.embeddings),
        ("/tokenize", tokens.tokenize),
        ("/detokenize", tokens.detokenize),
    )
    for route, handles in relayed:
        add("POST", route, handles, expect_handler=expect_continue)
    get("/v1/responses/{response_id}", responses.show)
    get("/v1/responses/{response_id}/input_items", responses.input_items)
    add("DELETE", "/v1/responses/{response_id}", responses.delete)
    add("POST", "/v1/files", files.upload, expect_handler=files.expect)
    get("/v1/files", files.index)
    get("/v1/files/{file_id}", files.show)
    get("/v1/files/{file_id}/content", files.content)
    add("DELETE", "/v1/files/{file_id}", files.delete)
    add("POST", "/v1/fine_tuning/jobs", fine_tuning.create, expect_handler=expect_continue)
    get("/v1/fine_tuning/jobs", fine_tuning.index)
    get("/v1/fine_tuning/jobs/{job_id}", fine_tuning.show)
    add("POST", "/v1/fine_tuning/jobs/{job_id}/cancel", fine_tuning.cancel)
    get("/v1/fine_tuning/jobs/{job_id}/events", fine_tuning.events)
    get("/v1/fine_tuning/jobs/{job_id}/checkpoints", fine_tuning.checkpoints)
    get("/v1/fleet", ops.fleet)
    get("/v1/scale", scale.show)
    get("/health", ops.health)
    get("/ready", ops.ready)
    get("/version", ops.version)
    get("/metrics", ops.metrics)
    get("/openapi.json", ops.description)
    get("/docs", browser_pages.API_PAGE.page)
    get("/docs/{name}", browser_pages.API_PAGE.part)
    get("/upbeat.js", web_sdk.show)
    get("/upbeat.mjs", web_sdk.show)
    get("/", browser_pages.PLAYGROUND.page)
    get("/playground/{name}", browser_pages.PLAYGROUND.part)
    return app


def _token_secrets(config: Config) -> list[str]:
    """The secrets that sign browser tokens. With keys or a token secret configured, every gateway of a deployment has
    the same. Without keys everything is permitted anyway, so the cluster's secret, or a random one, is enough."""
    if config.gateway.token_secret:
        return [config.gateway.token_secret]
    if config.gateway.api_keys:
        return [configured_digest(k.key).hex() for k in config.gateway.api_keys]
    if (config.data / "secret").exists() or config.gateway.processes > 1:
        return [cluster_secret(config.data).hex()]
    return [secrets.token_hex(32)]


def _turnstile(section: GatewaySection, share: float) -> Turnstile:
    slots = -(-section.max_requests // section.processes)
    return Turnstile(Slots(slots, max(slots, MIN_QUEUE), share, section.weight), section.queue_s)


class Gateway:
    """One gateway process, the `number`th of `gateway.processes`. warm: start the body decoders with it."""

    def __init__(
        self,
        config: Config,
        tasks: Tasks,
        clock: Clock | None = None,
        retry_limits: RetryLimits | None = None,
        number: int = 0,
        *,
        warm: bool = False,
    ) -> None:
        self._config, self._tasks, self._clock, self._number, self._warm = (
            config,
            tasks,
            clock or RealClock(),
            number,
            warm,
        )
        self._retry_limits = retry_limits or RetryLimits(
            accept_s=config.gateway.accept_s, first_token_s=config.gateway.first_token_s
        )
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self.parts: Parts | None = None

    async def start(self) -> None:
        """Listen. Raises OSError naming the address when the port is taken."""
        config, clock, section = self._config, self._clock, self._config.gateway
        siblings = Siblings(section.port, self._number, section.processes)
        await siblings.open()
        workers = Workers(self._tasks, clock, self._retry_limits)
        fleet = Fleet(config, workers, clock, self._retry_limits)
        keys = Keys(
            ((k.key, Caller(k.tenant, section.max_priority(k))) for k in section.api_keys), secrets.token_bytes(32)
        )
        # A share protects other tenants; with one tenant there are none.
        share = section.tenant_share if len({key.tenant for key in section.api_keys}) > 1 else 1.0
        self.parts = parts = Parts(
            config=config,
            clock=clock,
            keys=keys,
            fleet=fleet,
            workers=workers,
            generator=Generator(fleet, workers, clock, self._retry_limits),
            hints=Hints(fleet, share),
            sessions=Sessions(),
            limits=RateLimits(section.max_advisories_per_s / section.processes),
            queries=RateLimits(
                section.max_queries_per_s / section.processes,
                QUERY_BURST_S * section.max_queries_per_s / section.processes,
            ),
            erasing=defaultdict(lambda: asyncio.Semaphore(MOST_ERASURES)),
            usage=usage_of(section),
            bodies=Bodies(
                section.body_memory_bytes // section.processes, share, section.tenant_share, section.max_body_bytes
            ),
            decoding=Decoding(section.decoders, MOST_DECODED * section.max_body_bytes),
            siblings=siblings,
            callers=Callers(k.key for k in section.api_keys),
            hosts=Hosts(section.host, section.hosts, section.cors_origins, has_keys=not keys.open),
            turnstile=_turnstile(section, share),
            turn_reports=TurnReports(fleet.schedulers, clock),
            attainments=Attainments(),
            browser_tokens=BrowserTokens(_token_secrets(config)),
            browser_limits=BrowserLimits(),
            watches=Watches(fleet, clock),
            fine_tuning=FineTuning(config, fleet),
            responses=Keeper(
                config.data,
                clock,
                section.responses_keep_s,
                section.responses_bytes,
                share,
                f"{section.host}:{section.port}:{self._number}",
            ),
        )
        metrics.BODY_BYTES.set_function(lambda: parts.bodies.held)
        self._tasks.start(fleet.watch(), "watch the fleet")
        self._tasks.start(workers.watch(), "watch the workers")
        self._tasks.start(parts.hints.run(), "tell hints")
        self._tasks.start(parts.turn_reports.run(), "tell where turns' time went")
        self._tasks.start(tell_attainment(parts.attainments, fleet.schedulers, clock), "tell attainment")
        self._tasks.start(parts.responses.watch(), "watch stored responses")
        if self._warm:
            parts.decoding.start()
        # Compressing the pages takes a tenth of a second, once. Do it now so that no stream waits for it.
        reads: tuple[Callable[[], object], ...] = (
            browser_pages.PLAYGROUND.read,
            browser_pages.API_PAGE.read,
            web_sdk.files,
        )
        await asyncio.gather(*map(asyncio.to_thread, reads))
        # aiohttp would log a traceback for every malformed request. `envelope` logs our errors.
        logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
        options = {
            "access_log": None,
            "max_line_size": MAX_LINE_BYTES,
            "max_field_size": MAX_LINE_BYTES,
            # `gateway.bodies` refuses compressed bodies: a small one could expand into a large one.
            "auto_decompress": False,
            # How long a client that got 413 may continue to send.
            "lingering_time": 5.0,
            "keepalive_timeout": section.idle_s,
            "tcp_keepalive": True,
        }
        self._runner = web.AppRunner(build(parts), handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        assert self._runner.server is not None
        limits = Limits(section.header_s, section.write_s)
        self._listener = Listener(
            self._runner.server, -(-section.max_connections // section.processes), section.tenant_share, limits, options
        )
        secure = None if section.https is None else https_context(section.https)
        await self._listener.open(section.host, section.port, secure, shared=section.processes > 1)
        self._tasks.start(self._listener.watch(), "watch connections")
        self._warn_of_plain_keys()
        log.info("serving", url=f"{section.scheme}://{section.host}:{section.port}", keys=not keys.open)

    def _warn_of_plain_keys(self) -> None:
        section = self._config.gateway
        plain = [k.tenant for k in section.api_keys if not is_hashed(k.key)]
        if plain and section.host not in LOOPBACK:
            log.warning(
                "API keys are in the configuration in full; `upbeat keys hash` makes what it needs of them",
                tenants=plain,
            )

    async def drain(self) -> None:
        """Refuse new requests for text and wait until the running ones have ended."""
        assert self.parts is not None
        if self._config.gateway.processes > 1:
            await self._hand_over(self.parts)
        self.parts.draining = True
        self.parts.turnstile.close()
        await self.parts.idle.wait()

    async def _hand_over(self, parts: Parts) -> None:
        """Let other processes of this gateway take new connections, and serve a little longer those that are open: a
        restart of one process after the other refuses no request."""
        assert self._listener is not None and self._runner is not None and self._runner.server is not None
        self._listener.close()
        parts.handing_over = True
        await parts.clock.sleep(HAND_OVER_S)
        self._runner.server.pre_shutdown()  # those that are idle

    async def stop(self) -> None:
        """Close everything. Running streams end with an error event, other requests with a 503."""
        if self._listener is not None:
            self._listener.close()
        if self.parts is not None:
            self.parts.generator.stopping = True
            await self.parts.workers.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self.parts.idle.wait()
        if self._runner is not None:
            await self._runner.cleanup()
        if self.parts is not None:
            self.parts.siblings.close()
            await self.parts.decoding.close()
            await self.parts.fine_tuning.close()
            await self._tasks.cancel()
            await self.parts.responses.close()
            with contextlib.suppress(Exception):
                await self.parts.fleet.stop()
