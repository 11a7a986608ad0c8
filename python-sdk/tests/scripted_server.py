"""A small local server for tests: takes hints as Upbeat does, answers chat completions from a script, and keeps the
order of everything.

An answer may be held back until a hint came (`Reply.after_hint`). So a test passes only when that hint left before this
answer, and with it before whatever request follows from it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HELD_S = 10.0


@dataclass(frozen=True)
class Reply:
    """One answer of the model. calls: (function, arguments) each. after_hint: a session whose hint must have come
    first."""

    text: str | None = None
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    after_hint: str | None = None


@dataclass(frozen=True)
class Event:
    """What came: `advise`, `invalidate` or `request`, of which session, with which body."""

    kind: str
    session: str | None
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)


class ScriptedServer:
    """`replies` are given in turn. `refuse`: what a hint is answered with instead of 202, called for each; None:
    202."""

    def __init__(self, replies: list[Reply] | None = None) -> None:
        self.replies = list(replies or [])
        self.events: list[Event] = []
        self.posts = 0
        self.problems: list[str] = []
        self.refuse: Callable[[], tuple[int, dict[str, str]] | None] = lambda: None
        self._came = threading.Condition()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def start(self) -> None:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def note(self, *events: Event) -> None:
        with self._came:
            self.events += events
            self._came.notify_all()

    def wait(self, what: Callable[[list[Event]], Any], limit_s: float = HELD_S) -> bool:
        """Whether it came to that in time."""
        with self._came:
            return bool(self._came.wait_for(lambda: what(self.events), limit_s))

    def wait_hint(self, session: str, times: int = 1) -> bool:
        """Whether this session was advised so often, in time."""
        return self.wait(lambda events: sum(e.kind == "advise" and e.session == session for e in events) >= times)

    def order(self, *kinds: str) -> list[tuple[str, str | None]]:
        """What came, in its order: kind and session."""
        with self._came:
            return [(e.kind, e.session) for e in self.events if not kinds or e.kind in kinds]

    def requests(self) -> list[Event]:
        return [e for e in self.events if e.kind == "request"]

    def next_reply(self) -> Reply:
        reply = self.replies.pop(0) if self.replies else Reply("nothing more is scripted")
        if reply.after_hint is not None and not self.wait_hint(reply.after_hint):
            self.problems.append(f"no hint for {reply.after_hint} came while its predecessor was answered")
        return reply


@contextmanager
def serving(*replies: Reply) -> Iterator[ScriptedServer]:
    """A running server; at the end, every hint that answers waited for must have come."""
    server = ScriptedServer(list(replies))
    server.start()
    try:
        yield server
        assert not server.problems, server.problems
        assert not server.replies, f"never asked for: {server.replies}"
    finally:
        server.stop()


def _message(reply: Reply) -> dict[str, Any]:
    calls = [
        {
            "index": i,
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(reply.calls)
    ]
    return {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}


def _handler(server: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None: ...

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            if self.path.startswith("/v1/advisory"):
                self._hint([Event("advise", h["session_id"], headers, h) for h in body.get("advisories", [body])])
            elif self.path == "/v1/invalidate":
                self._hint([Event("invalidate", body.get("session_id"), headers, body)])
            elif self.path == "/v1/chat/completions":
                server.note(Event("request", headers.get("x-session-id"), headers, body))
                self._complete(server.next_reply(), body)
            else:
                self._answer(404, {"error": {"message": f"no such route: {self.path}"}})

        def _hint(self, events: list[Event]) -> None:
            server.posts += 1
            refused = server.refuse()
            if refused is not None:
                self._answer(refused[0], {"error": {"message": "as the test wants it"}}, refused[1])
                return
            server.note(*events)
            self._answer(202, {"status": "accepted"})

        def _complete(self, reply: Reply, body: dict[str, Any]) -> None:
            message, end = _message(reply), "tool_calls" if reply.calls else "stop"
            head = {"id": "c", "created": int(time.time()), "model": body["model"]}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            if not body.get("stream"):
                for call in message.get("tool_calls", ()):
                    del call["index"]
                choice = {"index": 0, "message": message, "finish_reason": end}
                self._answer(200, {**head, "object": "chat.completion", "choices": [choice], "usage": usage})
                return
            chunks = [
                {"index": 0, "delta": message, "finish_reason": None},
                {"index": 0, "delta": {}, "finish_reason": end},
            ]
            lines = [json.dumps({**head, "object": "chat.completion.chunk", "choices": [c]}) for c in chunks] + [
                "[DONE]"
            ]
            self._send(
                200, "".join(f"data: {line}\n\n" for line in lines).encode(), {"Content-Type": "text/event-stream"}
            )

        def _answer(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
            self._send(status, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
