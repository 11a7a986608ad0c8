"""The protocol of both sides of bench/engine: JSON lines, commands on stdin, answers on stdout.

Commands: {"do": "prefill", "tokens": n}, {"do": "begin", "batch": n, "context": n}, {"do": "decode", "steps": n},
{"do": "end"}, and of ours {"do": "read", "amount": n}. An answer is {"seconds": ...} or {"error": ...}. A process is
idle between commands. Standard library only, because vLLM's side has another environment.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

#: Most tokens that a cell decodes beyond its context.
MOST_NEW_TOKENS = 2000
#: Ids below this are special tokens.
_FIRST_ID = 3


def prompt(seed: int, tokens: int, vocabulary: int) -> list[int]:
    """Random token ids; different seeds share no prefix."""
    draw = random.Random(seed)
    return [draw.randrange(_FIRST_ID, vocabulary) for _ in range(tokens)]


def arguments() -> dict[str, Any]:
    """The parent's settings from the command line: model, threads, kv_gib, max_batch, vocabulary and others."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    return settings


def serve(commands: dict[str, Callable[..., float]], ready: dict[str, Any]) -> None:
    """Answer commands until stdin ends. Sends other output of the program to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    out.write(json.dumps({"ready": ready}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer: dict[str, Any] = {"seconds": commands[command.pop("do")](**command)}
        except Exception as e:
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}"}
        out.write(json.dumps(answer) + "\n")
