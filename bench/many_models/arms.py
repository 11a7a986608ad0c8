"""An arm on a real stack, and what the machine does with memory for everything."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.many_models.setting import LONGEST, Setting, planned, token_bytes
from loadtest.client import Endpoint, Outcome
from loadtest.figures import Slo
from loadtest.plans import PlannedSession, PlannedTurn
from loadtest.policies import fixed_answers
from loadtest.prompts import block_words
from loadtest.stack import Stack, StackError
from loadtest.traces import TraceRequest
from loadtest.users import Loop, run_load
from runtime.clock import RealClock

ARMS = ("static", "elastic", "swap", "serverless", "prism")
#: A request that takes longer has failed.
_TIMEOUT_S = 15.0
_GIB = float(1 << 30)
#: Words of the prompt that warms a model up.
_WARM_UP_WORDS = 200
#: Users who saturate the machine, and about how many requests they send.
_USERS, _MEASURED = 16, 80.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine does with memory for everything. per_s: requests a second of all models. slos: the P95 of TTFT
    and TPOT of requests that are alone (Prism, section 7.1), by model."""

    per_s: float
    slos: dict[str, Slo]


def measure(setting: Setting, models: dict[str, Path], alone: int) -> Machine:
    """Measure `_USERS` users of all models together, and `alone` requests to one model of each shape, one after the
    other."""
    memory = setting.weight_bytes + _USERS * LONGEST * sum(map(token_bytes, setting.shapes.values()))
    with Arm("elastic", setting, models, memory) as arm:
        outcomes = all_good(arm.send(setting.requests(_MEASURED, 0, 1.0), 1, Loop(users=_USERS)))
        per_s = len(outcomes) / (max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes))
        slos: dict[str, Slo] = {}
        for number, shape in enumerate(dict.fromkeys(setting.shapes.values())):
            same = [name for name, each in setting.shapes.items() if each == shape]
            one = next(theirs for theirs, name in setting.names.items() if name == same[0])
            drawn = [replace(r, model=one) for r in setting.requests(float(alone), number, 1.0)]
            lone = all_good(arm.send(drawn, 2 + number, Loop(users=1)))
            tpots = [o.tpot_s for o in lone if o.tpot_s is not None]
            p95 = Slo(*(float(np.percentile(each, 95)) for each in ([o.ttft_s for o in lone], tpots)))
            slos |= dict.fromkeys(same, p95)
    return Machine(per_s, slos)


class Arm:
    """A stack of all models; within `with`. sharing: as in the configuration. hbm_bytes: default: the setting's."""

    def __init__(self, sharing: str, setting: Setting, models: dict[str, Path], hbm_bytes: int | None = None) -> None:
        self._setting, self._names = setting, list(models)
        self._body = fixed_answers(models[self._names[0]])
        self._stack = Stack(
            models=models,
            nodes=1,
            hbm_gib=(setting.hbm_bytes if hbm_bytes is None else hbm_bytes) / _GIB,
            dram_gib=2 * setting.kv_bytes / _GIB,
            settings={"sharing": sharing},
        )

    def __enter__(self) -> Arm:
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._stack)
            for number, name in enumerate(self._names):
                turn = PlannedTurn(" ".join(block_words(-1 - number, _WARM_UP_WORDS)), 8, 0.0, 0.0)
                all_good(self._sent([PlannedSession(f"warm-up-{name}", (turn,), model=name)]))
            opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def send(self, requests: list[TraceRequest], salt: int, loop: Loop | None = None) -> list[Outcome]:
        """The outcomes of a load. salt: another one for each load, so that nothing is cached."""
        return self._sent(planned(requests, self._setting.names, salt), loop)

    def _sent(self, sessions: list[PlannedSession], loop: Loop | None = None) -> list[Outcome]:
        endpoint = Endpoint(
            self._stack.url,
            self._names[0],
            body=self._body,
            timeout_s=_TIMEOUT_S,
            models={name: name for name in self._names},
        )
        return asyncio.run(run_load(endpoint, sessions, RealClock(), loop=loop))


def all_good(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes. Raises StackError if one failed, or there are none."""
    failed = [o.error for o in outcomes if o.error is not None]
    if failed or not outcomes:
        raise StackError(f"{len(failed)} of {len(outcomes)} requests failed: {failed[:1]}")
    return outcomes
