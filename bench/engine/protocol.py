"""What both sides of bench/engine are told, on stdin, and answer, on stdout: a JSON line each. Standard library only, because the
other side lives in an environment of its own.

Commands: {"do": "prefill", "tokens": n}, {"do": "begin", "batch": n, "context": n}, {"do": "decode", "steps": n}, {"do": "end"}; an answer
is {"seconds": ...} or {"error": ...}. A process that has answered uses no processor until it is asked again.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

#: No cell decodes longer than this beyond its context.
MOST_NEW_TOKENS = 2000
#: Ids below this are special ones.
_FIRST_ID = 3


def prompt(seed: int, tokens: int, vocabulary: int) -> list[int]:
    """Token ids that no other seed begins with."""
    draw = random.Random(seed)
    return [draw.randrange(_FIRST_ID, vocabulary) for _ in range(tokens)]


def arguments() -> dict[str, Any]:
    """What the parent says on the command line: model, threads, kv_gib, max_batch, vocabulary."""
    said: dict[str, Any] = json.loads(sys.argv[1])
    return said


def serve(commands: dict[str, Callable[..., float]], ready: dict[str, Any]) -> None:
    """Answer commands until stdin ends. What the program prints meanwhile goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    out.write(json.dumps({"ready": ready}) + "\n")
    for line in sys.stdin:
        said = json.loads(line)
        try:
            answer: dict[str, Any] = {"seconds": commands[said.pop("do")](**said)}
        except Exception as e:
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}"}
        out.write(json.dumps(answer) + "\n")
