"""The requests, and the arms on real stacks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from loadtest.client import Endpoint, Outcome
from loadtest.figures import spread
from loadtest.plans import PlannedSession, PlannedTurn
from loadtest.policies import fixed_answers
from loadtest.prompts import block_words
from loadtest.random_model import SHAPES, weight_bytes
from loadtest.sessions import find_sessions
from loadtest.stack import Stack, StackError
from loadtest.traces import TraceRequest, read_trace
from loadtest.users import Loop, run_load
from loadtest.workload import plan, salted
from runtime.clock import RealClock
from runtime.config_file import load_config

#: 24 layers: with few layers none can be lent (docs/design/0037).
SHAPE = "200m"
_GIB = float(1 << 30)
#: Settings of the arms, beside those of all.
ARMS: dict[str, dict[str, Any]] = {
    "recompute": {"kv": {"cache": False}},
    "preempt": {},
    "remap": {"worker": {"remap": "auto"}},
}
#: Mean tokens of prompts and answers, and the standard deviation of their logarithms.
MIXES = {
    "chat": ((220, 0.9), (180, 0.7)),
    "instruct": ((40, 0.6), (120, 0.7)),
    "long": ((700, 0.3), (150, 0.4)),
    "short": ((120, 0.3), (60, 0.4)),
}
#: The worker's metrics, by the start of their lines; those of all models are added.
_COUNTERS = {
    "preemptions": "upbeat_worker_preemptions_total",
    "lent": 'upbeat_worker_layers_moved_total{model="a",way="lent"',
    "lent_too": 'upbeat_worker_layers_moved_total{model="b",way="lent"',
    "copies": "upbeat_worker_layer_copies_total",
    "waited_s": "upbeat_worker_layer_wait_seconds_total",
    "now": "upbeat_worker_layers_lent{",
    "now_a": 'upbeat_worker_layers_lent{model="a"',
}
#: Tokens of a request at most, and of a chunk.
LONGEST, CHUNK_TOKENS = 1400, 64


def token_bytes() -> int:
    """KV of a token."""
    config, _ = SHAPES[SHAPE]
    return 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def weights() -> int:
    """Bytes of a model's weights."""
    return weight_bytes(SHAPES[SHAPE][0], 2)


@dataclass(frozen=True, slots=True)
class Load:
    """per_s: requests a second of all models. turns_s: models get requests in turn, for so long each; 0: all at once.
    trace: whose arrivals are kept, scaled; None: Poisson arrivals."""

    mix: str
    models: tuple[str, ...]
    per_s: float
    seconds: float
    turns_s: float = 0.0
    trace: Path | None = None

    def requests(self, seed: int) -> list[TraceRequest]:
        """Those of a seed."""
        rng = random.Random(f"{seed} {self.mix}")
        found = []
        for number, at_s in enumerate(self._arrivals(rng)):
            turn = int(at_s / self.turns_s) if self.turns_s else rng.randrange(len(self.models))
            prompt, answer = (_drawn(rng, *of) for of in MIXES[self.mix])
            prompt = min(max(prompt, 8), LONGEST - 400)
            answer = min(max(answer, 4), 400)
            model = self.models[turn % len(self.models)]
            found.append(TraceRequest(at_s, prompt, answer, (number,), LONGEST, model=model))
        return found

    def _arrivals(self, rng: random.Random) -> list[float]:
        count = round(self.per_s * self.seconds)
        if self.trace is None:
            return sorted(rng.random() * self.seconds for _ in range(count))
        read = [r.arrival_s for r in read_trace(self.trace)]
        first = rng.randrange(max(len(read) - count, 1))
        part = read[first : first + count]
        span_s = max(part[-1] - part[0], 1e-9)
        return [(at_s - part[0]) / span_s * self.seconds for at_s in part]


def _drawn(rng: random.Random, mean: float, sigma: float) -> int:
    return round(rng.lognormvariate(0.0, sigma) * mean / 2.718281828 ** (sigma**2 / 2))


def figures(outcomes: list[Outcome]) -> dict[str, Any]:
    """Of a stretch. tbt_s: from each token to the next, of all answers."""
    span_s = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes)
    return {
        "requests": len(outcomes),
        "ttft_s": spread(o.ttft_s for o in outcomes),
        "tbt_s": spread(gap for o in outcomes for gap in o.gaps_s),
        "tokens_s": round(sum(o.output_tokens for o in outcomes) / span_s, 2),
        "lateness_s": spread(o.sent_s - o.planned_s for o in outcomes),
    }


def fits_from_s(outcomes: list[Outcome], tokens: int) -> float:
    """From when on KV of all running requests fits into memory for so many tokens, with a chunk more for each, on the
    load's clock. When each has its first token, nobody waits for memory."""
    times = sorted(at_s for o in outcomes for at_s in (o.first_s, *_token_times(o), o.end_s))
    over = [at_s for at_s in times if sum(_held(o, at_s) for o in outcomes) > tokens]
    return max([*over, *(o.first_s for o in outcomes)])


def _held(outcome: Outcome, at_s: float) -> int:
    """Tokens of the chunks that a request holds at this time, and of the next one."""
    if not outcome.first_s <= at_s < outcome.end_s:
        return 0
    here = outcome.prompt_tokens + 1 + sum(each <= at_s for each in _token_times(outcome))
    return (here // CHUNK_TOKENS + 2) * CHUNK_TOKENS


def _token_times(outcome: Outcome) -> list[float]:
    return list(accumulate(outcome.gaps_s, initial=outcome.first_s))[1:]


async def _unless(
    holds: Callable[[], bool], load: Coroutine[Any, Any, list[Outcome]], every_s: float = 0.05
) -> list[Outcome] | None:
    """The load's outcomes; None: it was cancelled, as `holds` did."""
    running = asyncio.create_task(load)
    while not (await asyncio.wait({running}, timeout=every_s))[0]:
        if holds():
            running.cancel()
            await asyncio.wait({running})
            return None
    return running.result()


class Arm:
    """A stack; within `with`. kv_mib: of the device's memory beside the weights."""

    def __init__(self, name: str, models: dict[str, Path], kv_mib: int, threads: int) -> None:
        self.name, self._models = name, models
        settings = {part: dict(of) for part, of in ARMS[name].items()}
        settings["worker"] = {"threads": threads} | settings.get("worker", {})
        settings["kv"] = {"dram_gib": 2.0} | settings.get("kv", {})
        self._stack = Stack(
            models=models, nodes=1, hbm_gib=(len(models) * weights() + kv_mib * 2**20) / _GIB, settings=settings
        )

    def __enter__(self) -> Arm:
        self._stack.__enter__()
        for name in self._models:
            self.send_now(name, 1, words=200, answer=8, salt=-1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def samples(self) -> dict[str, float]:
        """Of the worker: preemptions, layers lent, copies, and seconds that steps waited for them, since its start; and
        layers that are lent `now`, by all models and by `a`."""
        port = load_config(self._stack.config_file, {"nodes": {"count": 1}}).node(0).devices[0].metrics_port
        lines = self._stack.metrics(port).splitlines()
        found = dict.fromkeys(_COUNTERS, 0.0)
        for line in lines:
            for name, start in _COUNTERS.items():
                if line.startswith(start):
                    found[name] += float(line.rpartition(" ")[2])
        return found

    def send(self, requests: list[TraceRequest], salt: int, loop: Loop | None = None) -> list[Outcome]:
        """The outcomes. salt: another one for each load, so that nothing is cached. Raises StackError if one failed."""
        sessions = salted(find_sessions(requests), salt)
        return self._sent(plan(sessions, length_scale=1.0, time_scale=1.0, seed=1), loop or Loop())

    def send_now(
        self,
        model: str,
        count: int,
        *,
        words: int,
        answer: int,
        salt: int,
        until: Callable[[], bool] = lambda: False,
    ) -> list[Outcome]:
        """The outcomes of so many requests for a model, all sent at once. salt: as in `send`. until: the clients leave
        when it holds; it is asked every 50 ms."""
        sessions = []
        for number in range(count):
            text = " ".join(block_words(1000 * salt + number, words))
            sessions.append(
                PlannedSession(f"{model}-{salt}-{number}", (PlannedTurn(text, answer, 0.0, 0.0),), model=model)
            )
        return self._sent(sessions, Loop(), until)

    def _sent(
        self, sessions: list[PlannedSession], loop: Loop, until: Callable[[], bool] = lambda: False
    ) -> list[Outcome]:
        names = list(self._models)
        endpoint = Endpoint(
            self._stack.url,
            names[0],
            body=fixed_answers(self._models[names[0]]),
            timeout_s=120.0,
            models={name: name for name in names},
        )
        outcomes = asyncio.run(_unless(until, run_load(endpoint, sessions, RealClock(), loop=loop)))
        if outcomes is None:
            return []
        failed = [o.error for o in outcomes if o.error is not None]
        if failed or not outcomes:
            raise StackError(f"{self.name}: {len(failed)} of {len(outcomes)} requests failed: {failed[:1]}")
        return outcomes
