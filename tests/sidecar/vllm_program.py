"""What a test names as `vllm.python`: it takes a vLLM server's arguments, answers /health on its socket, and has an
engine process that no SIGTERM ends. BEHAVIOUR, a JSON in the environment, says how it misbehaves.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    place = Path(os.environ["FAKE_VLLM_PLACE"])
    behaviour = json.loads(os.environ.get("BEHAVIOUR", "{}"))
    engine = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
    told = {"pid": os.getpid(), "engine": engine.pid, "arguments": sys.argv[1:], "environment": dict(os.environ)}
    with (place / "journal").open("a") as journal:
        journal.write(json.dumps(told) + "\n")
    if "exit" in behaviour:
        print("error: unrecognized arguments", file=sys.stderr)
        sys.exit(behaviour["exit"])
    if behaviour.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(behaviour.get("starts_s", 0))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[sys.argv.index("--uds") + 1])
    listener.listen()
    until = time.monotonic() + behaviour.get("lives_s", 600)
    listener.settimeout(0.1)
    while time.monotonic() < until:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    sys.exit(behaviour.get("status", 1))


if __name__ == "__main__":
    main()
