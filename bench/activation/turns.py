"""First tokens of two models that do not fit on the device together: active, cold, and cold but hinted."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import httpx

from loadtest.stack import Stack
from worker.core.residency import IDLE_S

#: Tokens of a prompt.
PROMPT = 512
_LEAD_S = 2.0


def measure(models: dict[str, Path], repeats: int, hints: int, directory: Path) -> dict[str, list[float]]:
    """Seconds to the first token: pairs of a cold turn and one of the same model right after it; pairs of sessions that
    return after a rest, both hinted, to a model that has stayed and to one that has left."""
    found: dict[str, list[float]] = {"cold": [], "active": [], "hinted, cold": [], "hinted, active": []}
    dice = random.Random(1)
    # Weights are 250 MiB each.
    with Stack(models=models, nodes=1, directory=directory / "stack", hbm_gib=0.42, dram_gib=0.5) as stack:
        for name in models:
            first_token_s(stack.url, name, prompt(dice), "warm-up")
        for _ in range(repeats):
            for name in models:
                found["cold"].append(first_token_s(stack.url, name, prompt(dice), f"s{dice.random()}"))
                found["active"].append(first_token_s(stack.url, name, prompt(dice), f"s{dice.random()}"))
        for n in range(hints):
            stays, returns = (f"stays-{n}", prompt(dice)), (f"returns-{n}", prompt(dice))
            for session, said in (stays, returns):
                first_token_s(stack.url, "a", said, session)
            found["hinted, active"].append(after_rest_s(stack.url, "a", *stays, dice))
            first_token_s(stack.url, "b", prompt(dice), f"s{dice.random()}")
            found["hinted, cold"].append(after_rest_s(stack.url, "a", *returns, dice))
    return found


def after_rest_s(url: str, model: str, session: str, said: list[int], dice: random.Random) -> float:
    """Seconds to the first token of a hinted turn with 64 new tokens, after a rest in which weights may leave."""
    time.sleep(IDLE_S + 2)
    advise(url, model, session)
    time.sleep(_LEAD_S)
    return first_token_s(url, model, said + prompt(dice)[:64], session)


def prompt(dice: random.Random) -> list[int]:
    """Random token ids."""
    return [dice.randrange(10, 2000) for _ in range(PROMPT)]


def first_token_s(url: str, model: str, tokens: list[int], session: str) -> float:
    """Seconds to the first token of an answer of two."""
    body = {
        "model": model, "prompt": tokens, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    began, first = time.monotonic(), 0.0
    headers = {"X-Session-ID": session}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
        answer.read() if answer.status_code != 200 else None
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not first and line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                first = time.monotonic()
    return first - began


def advise(url: str, model: str, session: str) -> None:
    """The session's user begins to type."""
    body = {"session_id": session, "model_id": model, "expected_arrival": _LEAD_S}
    httpx.post(f"{url}/v1/advisory", json=body, timeout=10).raise_for_status()
