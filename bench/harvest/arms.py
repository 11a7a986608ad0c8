"""The arms on real stacks, and what trains in each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cli.finetune_calls import Jobs
from contracts.finetune import Job, Settings
from contracts.finetune_wire import job_to_wire
from loadtest.client import Endpoint, Outcome
from loadtest.plans import PlannedSession, PlannedTurn
from loadtest.policies import fixed_answers
from loadtest.prompts import block_words
from loadtest.sessions import find_sessions
from loadtest.stack import Stack, StackError
from loadtest.traces import TraceRequest, read_trace
from loadtest.users import Loop, run_load
from loadtest.workload import plan, salted
from runtime.clock import RealClock
from runtime.config_file import load_config
from worker.core.granules import Owner, Use
from worker.engine.training.trainer_process import TrainerProcess
from worker.harvest import wire
from worker.memory.device_memory import host_memory

#: Of every job: two short examples a step, so that two cores can train, and steps are short beside a stretch.
JOB = Settings(epochs=1000, batch_size=2, max_tokens=64, learning_rate=1e-4, checkpoint_every=1_000_000)
_HBM_GIB, _GRANULE, _WAIT_S = 2.5, 2 << 20, 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of a trace: its arrivals, `per_s` in the mean, its lengths times `scale`."""

    trace: Path | None
    per_s: float
    seconds: float
    scale: float

    def requests(self, seed: int) -> list[TraceRequest]:
        """Those of a seed: another part of the trace; Poisson arrivals and log-normal lengths without one."""
        dice, count = random.Random(seed), round(self.per_s * self.seconds)
        if self.trace is None:
            times = sorted(dice.random() * self.seconds for _ in range(count))
            sizes = [(dice.lognormvariate(6.5, 0.8), dice.lognormvariate(5.0, 0.8)) for _ in times]
        else:
            read = read_trace(self.trace)
            first = dice.randrange(max(len(read) - count, 1))
            part = read[first : first + count]
            span_s = max(part[-1].arrival_s - part[0].arrival_s, 1e-9)
            times = [(r.arrival_s - part[0].arrival_s) / span_s * self.seconds for r in part]
            sizes = [(r.input_tokens, r.output_tokens) for r in part]
        return [
            TraceRequest(at, max(round(a * self.scale), 8), max(round(b * self.scale), 2), (number,), 2048)
            for number, (at, (a, b)) in enumerate(zip(times, sizes, strict=True))
        ]


class Arm:
    """A stack, and its trainer; within `with`. cores: of serving. trains: of the trainer beside it, `None`: the stack
    trains by itself; []: nothing does."""

    def __init__(self, name: str, model: Path, cores: list[int], trains: list[int] | None, target_s: float) -> None:
        self.name, self._model, self._cores, self._trains, self._target_s = name, model, cores, trains, target_s
        share = len(cores) / len(os.sched_getaffinity(0))
        worker = {"threads": len(cores), "mixed_step_s": target_s / 2, "harvest": "auto" if trains is None else "off"}
        self._stack = Stack(model=model, nodes=1, hbm_gib=_HBM_GIB * share, dram_gib=1.0, settings={"worker": worker})
        self.scratch = Path(tempfile.mkdtemp(prefix=f"upbeat-harvest-{name}-"))
        self._data = self.scratch / "data.jsonl"
        text = " ".join(f"the square of {n} is {n * n}." for n in range(200))
        self._data.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(16)))

    def __enter__(self) -> Arm:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        try:
            self._stack.__enter__()
        finally:
            os.sched_setaffinity(0, before)
        self._send([PlannedSession("warm-up", (PlannedTurn(" ".join(block_words(-1, 200)), 8, 0.0, 0.0),))])
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stretch(self, requests: list[TraceRequest], salt: int, seconds: float) -> tuple[list[Outcome], Any]:
        """Outcomes of these requests while its trainer trains, and what that did: tokens/s, and how windows and splits
        changed. Takes at least `seconds`."""
        with self._training(salt) as trained:
            began, before = time.monotonic(), trained()
            seen, over = list[dict[str, float]](), threading.Event()

            def look() -> None:
                while not over.wait(0.5):
                    seen.append({"at_s": round(time.monotonic() - began, 2)} | trained())

            watching = threading.Thread(target=look)
            watching.start()
            try:
                sessions = salted(find_sessions(requests), salt)
                outcomes = self._send(plan(sessions, length_scale=1.0, time_scale=1.0, seed=1))
                time.sleep(max(began + seconds - time.monotonic(), 0))
            finally:
                over.set()
                watching.join()
            tokens = trained()["tokens"] - before["tokens"]
            return outcomes, {"tokens_s": tokens / (time.monotonic() - began), "seen": seen}

    def _send(self, sessions: list[PlannedSession]) -> list[Outcome]:
        endpoint = Endpoint(self._stack.url, self._stack.model_name(), body=fixed_answers(self._model), timeout_s=120.0)
        outcomes = asyncio.run(run_load(endpoint, sessions, RealClock(), loop=Loop()))
        failed = [o.error for o in outcomes if o.error is not None]
        if failed or not outcomes:
            raise StackError(f"{self.name}: {len(failed)} of {len(outcomes)} requests failed: {failed[:1]}")
        return outcomes

    # ---- what trains -------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _training(self, salt: int) -> Iterator[Any]:
        """A function that says how far training is; a trainer trains meanwhile."""
        out = str(self.scratch / f"out-{salt}")
        job = Job(f"ftjob-{secrets.token_hex(8)}", "", self._stack.model_name(), str(self._data), out, settings=JOB)
        if self._trains == []:
            yield lambda: {"tokens": 0.0, "window": 0.0, "split": 0.0}
        elif self._trains is None:
            yield from self._harvested(job)
        else:
            yield from _alone(job, self._model, self._trains, self.scratch)

    def _harvested(self, job: Job) -> Iterator[Any]:
        config = load_config(self._stack.config_file, {"nodes": {"count": 1}})
        jobs = Jobs(config.scheduler_addresses[0], self._stack.operator)
        settings = {**asdict(JOB), "tpot_ms": 1e3 * self._target_s}
        jobs.submit(job_to_wire(Job(**{**_fields(job), "settings": Settings(**settings)})))

        def look() -> dict[str, float]:
            found = jobs.get(job.id).progress
            return {"tokens": found.tokens, "window": found.window, "split": found.split}

        try:
            _until(lambda: jobs.get(job.id).progress.step >= 2)
            yield look
        finally:
            jobs.cancel(job.id)
            _until(lambda: jobs.get(job.id).progress.state == "cancelled")


def _fields(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in Job.__slots__}


def _alone(job: Job, model: Path, cores: list[int], scratch: Path) -> Iterator[Any]:
    """The same trainer, in a process of its own with these cores and memory, beside nothing."""
    memory, woken, state = host_memory(1 << 30, _GRANULE), threading.Event(), {"tokens": 0.0, "step": 0.0}
    begin = wire.Begin(asdict(job), str(model), str(scratch), "float32", len(cores))
    process = TrainerProcess(begin, memory, Owner(Use.TRAINER, job.id), scratch / "trainer.log", woken.set)

    def hear() -> bool:
        for message in process.take():
            match message:
                case wire.Needs(layers, top, layer, _):
                    process.grant_top(-(-top // _GRANULE))
                    for _ in range(layers):
                        process.grant(-(-layer // _GRANULE))
                case wire.Stepped():
                    state.update(tokens=message.tokens, step=message.step)
                case wire.Ended(how, error):
                    raise StackError(f"the trainer ended: {error or how}")
        return state["step"] >= 2

    def look() -> dict[str, float]:
        hear()
        return {"tokens": state["tokens"], "window": 0.0, "split": float(len(cores))}

    try:
        process.let(len(cores), cores)
        _until(hear)
        process.let(len(cores), cores)  # its lanes, too
        yield look
    finally:
        process.end()
        memory.close()


def _until(holds: Any) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise StackError(f"no training after {_WAIT_S:.0f} s")
        time.sleep(0.1)
