"""Programs of their own, so that what they do delays no clock of the test.

`python -m tests.gateway.body_senders hostile PORT KEY SECONDS` sends bodies of 16 MiB of each kind, three at a time,
and prints the statuses by kind. `honest PORT KEY SECONDS` asks /health, sends hints and small chats, and prints the
times by what was asked.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections import defaultdict

SIZE = (16 << 20) - 16
_MESSAGE = b'{"role":"user","content":"'


def _filled(before: bytes, unit: bytes, after: bytes) -> bytes:
    return before + unit * ((SIZE - len(before) - len(after)) // len(unit)) + after


def _messages(count: int) -> bytes:
    one = _MESSAGE + b"a" * (SIZE // count - 40) + b'"}'
    return b'{"model":"toy","messages":[' + b",".join([one] * count) + b"]}"


#: name -> (path, body)
KINDS: dict[str, tuple[str, bytes]] = {
    "one long text": ("chat/completions", _filled(b'{"model":"toy","messages":[' + _MESSAGE, b"a", b'"}]}')),
    "escapes": ("chat/completions", _filled(b'{"model":"toy","messages":[' + _MESSAGE, b"\\u00e4", b'"}]}')),
    "16384 messages": ("chat/completions", _messages(16_384)),
    "empty messages": (
        "chat/completions",
        _filled(b'{"model":"toy","messages":[', _MESSAGE + b'"},', _MESSAGE + b'"}]}'),
    ),
    "tiny objects": ("chat/completions", _filled(b'{"model":"toy","messages":[],"metadata":[', b"{},", b"0]}")),
    "tiny lists": ("chat/completions", _filled(b'{"model":"toy","messages":[],"metadata":[', b"[],", b"0]}")),
    "tiny parts": (
        "chat/completions",
        _filled(
            b'{"model":"toy","messages":[{"role":"user","content":[',
            b'{"type":"text","text":""},',
            b'{"type":"text","text":""}]}]}',
        ),
    ),
    "a list without end": ("chat/completions", _filled(b'{"model":"toy","messages":[],"metadata":[', b"1e9,", b"0")),
    "a text without end": ("chat/completions", _filled(b'{"model":"toy","messages":[' + _MESSAGE, b"a", b'"}]')),
    "token ids": ("completions", _filled(b'{"model":"toy","prompt":[', b"1,", b"1]}")),
    "long token ids": ("completions", _filled(b'{"model":"toy","prompt":[', b"12345,", b"1]}")),
    "a long prompt": ("completions", _filled(b'{"model":"toy","prompt":"', b"a", b'"}')),
    "a label": ("completions", _filled(b'{"model":"toy","prompt":"x","user":"', b"u", b'"}')),
    "an unknown model": ("completions", _filled(b'{"model":"none","prompt":"', b"a", b'"}')),
}


def _ask(port: int, key: str, method: str, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0
    finally:
        connection.close()


def hostile(port: int, key: str, seconds: float) -> dict[str, list[int]]:
    """Statuses by kind; 0: the connection was closed while the body was sent."""
    found: dict[str, list[int]] = defaultdict(list)
    names, turn, ends_s = list(KINDS), iter(range(1 << 30)), time.monotonic() + seconds

    def send() -> None:
        while time.monotonic() < ends_s:
            name = names[next(turn) % len(names)]
            path, body = KINDS[name]
            found[name].append(_ask(port, key, "POST", f"/v1/{path}", body))

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def honest(port: int, key: str, seconds: float, beside: int) -> dict[str, list[float]]:
    """Seconds that each took, by what was asked; a refusal raises. beside: the port of a server that answers at once,
    asked in turn with the gateway."""
    took: dict[str, list[float]] = defaultdict(list)
    chat = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "hello"}]}).encode()
    asked = {
        "health": (port, "GET", "/health", b"", 200),
        "hint": (port, "POST", "/v1/advisory", b'{"session_id":"chat-1"}', 202),
        "chat": (port, "POST", "/v1/chat/completions", chat, 200),
        "beside": (beside, "GET", "/", b"", 200),
    }
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        for name, (where, method, path, body, wanted) in asked.items():
            began = time.monotonic()
            status = _ask(where, key, method, path, body)
            took[name].append(time.monotonic() - began)
            assert status == wanted, (name, status)
        time.sleep(0.02)
    return took


if __name__ == "__main__":
    what, port, key, seconds, *more = sys.argv[1:]
    given = int(port), key, float(seconds)
    print(json.dumps(hostile(*given) if what == "hostile" else honest(*given, int(more[0]))))
