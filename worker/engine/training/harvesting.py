"""Runs fine-tuning jobs beside the engines of one device: carries out what `worker.core.harvest` and
`worker.core.loan` decide.

One job trains at a time. Its trainer says what it needs; when that memory is there beside the reserve, it gets it and
trains. When serving takes the memory, or the trainer crashes, the job goes on later from its last checkpoint.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from contracts.finetune import Job, JobState, Progress
from runtime import telemetry
from runtime.clock import Clock
from worker.core.balloon import Balloon
from worker.core.granules import Owner, Use
from worker.core.harvest import Harvest, Split
from worker.devices.partition import Partition
from worker.engine.training.trainer_memory import TrainerMemory
from worker.engine.training.trainer_process import TrainerProcess
from worker.harvest import wire
from worker.memory.device_memory import DeviceMemory

log = telemetry.logger("worker.engine.training")
#: HARLI's target where neither the job nor the model names one, in seconds a token.
TPOT_S = 0.04
#: Interval of looking at memory and progress, in seconds.
_LOOK_S = 0.1
#: Wait before a job goes on that lost its memory or whose trainer crashed, in seconds.
_AGAIN_S = 5.0
_NEEDED = "serving needs the memory"
#: Crashes without a new checkpoint after which the job fails.
_MOST_CRASHES = 3


@dataclass(frozen=True, slots=True)
class Trainable:
    """A served model that may be trained. directory: its checkpoint. dtype: in which it trains. tpot_s: its target; 0:
    none. token_bytes: KV of a token. harvest: chooses the splits of its steps."""

    directory: Path
    dtype: str
    tpot_s: float
    token_bytes: int
    harvest: Harvest


@dataclass(slots=True)
class _Run:
    """The job that is here. trainer: None: not started, or it goes on at `again_s`. needs: None: it has not said."""

    job: Job
    trainer: TrainerProcess | None = None
    needs: wire.Needs | None = None
    stopping: bool = False
    cancelled: bool = False
    #: Why its last trainer ended before the job did; empty: none has, or it goes on.
    lost: str = ""
    again_s: float = -math.inf
    crashes: int = 0
    #: When its last step ended, how long it took, and its tokens; pauses included.
    stepped_s: float = math.inf
    step_s: float = 0.0
    step_tokens: int = 0

    def noted(self, now: float, tokens: int) -> None:
        """A step of so many tokens has ended."""
        if tokens > 0:
            self.step_s, self.step_tokens = max(now - self.stepped_s, 0.0), tokens
        self.stepped_s = now

    def tokens_per_s(self, now: float) -> float:
        """Tokens trained a second, lately."""
        return self.step_tokens / took_s if (took_s := max(self.step_s, now - self.stepped_s)) > 0 else 0.0


class Harvesting:
    """See the module; `contracts.finetune.Trains`. All but that protocol: on the device's thread.

    make_way: unmaps what engines have given up.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        balloon: Balloon,
        models: Mapping[str, Trainable],
        partition: Partition,
        max_batch: int,
        logs: Path,
        clock: Clock,
    ) -> None:
        self._memory, self._models = memory, dict(models)
        self._partition, self._logs, self._clock = partition, logs, clock
        token_bytes = max(model.token_bytes for model in self._models.values())
        self._held = TrainerMemory(memory, balloon, max_batch * token_bytes)
        #: Wakes the device's thread. Any thread.
        self.woken: Callable[[], object] = lambda: None
        #: Called when progress has changed.
        self.on_progress: Callable[[], object] = lambda: None
        self._asked: queue.SimpleQueue[Job | tuple[str, bool]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._progress: dict[str, Progress] = {}
        self._run: _Run | None = None
        self._looked_s = -math.inf
        #: Of the model that computed last.
        self._harvest = next(iter(self._models.values())).harvest
        self._let: Split | None = None
        self._spare = 0.0
        #: Seconds of the other engines' last steps, by model: a token waits for one step of each.
        self._last: dict[str, tuple[float, float]] = {}
        self._tpot_s = 0.0

    # ---- `Trains`: any thread ----------------------------------------------------------------------------------
    def start(self, job: Job) -> None:
        """See `Trains.start`."""
        with self._lock:
            known = self._progress.get(job.id)
            if known is None or known.state.ended:
                self._progress[job.id] = Progress(job.id, JobState.QUEUED)
        self._asked.put(job)
        self.woken()

    def stop(self, job_id: str, cancelled: bool) -> None:
        """See `Trains.stop`."""
        self._asked.put((job_id, cancelled))
        self.woken()

    def progress(self) -> list[Progress]:
        """See `Trains.progress`."""
        with self._lock:
            return list(self._progress.values())

    def spare(self) -> float:
        """See `Trains.spare`."""
        return self._spare

    def refuses(self) -> str:
        """See `Trains.refuses`."""
        return ""

    # ---- steps -------------------------------------------------------------------------------------------------
    @property
    def active(self) -> bool:
        """See `Beside.active`."""
        return self._run is not None

    def before(self, model: str, batch: int, tokens: int, prefill_tokens: int) -> None:
        """A step of this model begins: choose the split, and set it."""
        if (run := self._run) is None:
            return
        now = self._clock.now()
        served = self._models[model]
        target_s = run.job.settings.tpot_ms / 1e3 or served.tpot_s or TPOT_S
        others_s = sum(s for name, (at, s) in self._last.items() if name != model and now - at < target_s + s)
        self._harvest = served.harvest
        self._use(self._harvest.plan(now, batch, tokens, prefill_tokens, max(target_s - others_s, 1e-6)))

    def after(self, model: str, seconds: float, batch: int) -> None:
        """The step took so long."""
        if self._run is None:
            return
        now = self._clock.now()
        self._harvest.stepped(now, seconds)
        self._last[model] = (now, seconds)
        if batch:
            self._tpot_s += 0.05 * (seconds - self._tpot_s) if self._tpot_s else seconds

    def _use(self, split: Split) -> None:
        if split == self._let:
            return
        self._let = split
        if split.infer:
            self._partition.use(split.infer)
        if self._run is not None and self._run.trainer is not None:
            self._run.trainer.let(split.training, self._partition.others(split.infer, split.training) or None)

    # ---- turns -------------------------------------------------------------------------------------------------
    def turn(self, idle: bool, make_way: Callable[[], None]) -> float:
        """Take orders, hear the trainer, move memory. idle: no engine has anything to do. Returns seconds until the
        next turn; infinite: not without an order."""
        now = self._clock.now()
        while not self._asked.empty():
            self._order(self._asked.get(), now)
        if (run := self._run) is None:
            self._spare = 1.0
            return math.inf
        if run.trainer is not None:
            for message in run.trainer.take():
                self._hear(run, message)
        if self._run is not run:
            return 0.0
        if run.trainer is not None and run.trainer.ended:
            self._crashed(run, now)
        elif run.trainer is None and now >= run.again_s:
            self._begin(run)
        if idle:
            self._use(self._harvest.rest(now))
        if now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            self._look(run, now, make_way)
        return _LOOK_S

    def make_way(self) -> None:
        """Serving maps memory now: what it took from the trainer must be back."""
        run = self._run
        if run is None or run.trainer is None:
            return
        self._reconcile(run, run.trainer)
        if run.trainer.owes:
            heard = list[wire.Message]()
            run.trainer.settle(heard.append)
            for message in heard:
                self._hear(run, message)

    def close(self) -> None:
        """The worker ends: the trainer too. Its job goes on from its last checkpoint."""
        if self._run is not None and self._run.trainer is not None:
            self._run.trainer.end()

    # ---- orders ------------------------------------------------------------------------------------------------
    def _order(self, asked: Job | tuple[str, bool], now: float) -> None:
        if isinstance(asked, Job):
            self._take(asked)
            return
        job_id, cancelled = asked
        run = self._run
        if run is None or run.job.id != job_id:
            if not cancelled:
                with self._lock:
                    self._progress.pop(job_id, None)
            return
        run.stopping, run.cancelled = True, cancelled
        if run.trainer is None:
            self._over(run, JobState.CANCELLED if cancelled else None)
        else:
            run.trainer.stop()

    def _take(self, job: Job) -> None:
        if self._run is not None and self._run.job.id == job.id:
            return
        if self._run is not None:
            self._tell(job.id, Progress(job.id, JobState.QUEUED, waits=f"{self._run.job.id} trains here"))
            return
        if job.model not in self._models:
            self._tell(job.id, Progress(job.id, JobState.FAILED, error=f"{job.model} is not served here"))
            return
        self._run = _Run(job)

    def _begin(self, run: _Run) -> None:
        model = self._models[run.job.model]
        begin = wire.Begin(
            asdict(run.job), str(model.directory), str(self._logs / "digests"), model.dtype, self._partition.shares
        )
        owner = Owner(Use.TRAINER, run.job.id)
        try:
            run.trainer = TrainerProcess(begin, self._memory, owner, self._logs / "trainer.log", self.woken)
        except OSError as error:
            log.exception("no trainer", job=run.job.id)
            self._say(run, retry=True)
            self._over(run, JobState.FAILED, f"its trainer cannot be started: {error}")
            return
        run.needs, run.lost, self._let = None, "", None
        log.info("a trainer begins", job=run.job.id, model=run.job.model)

    # ---- what the trainer says ---------------------------------------------------------------------------------
    def _hear(self, run: _Run, message: wire.Message) -> None:
        match message:
            case wire.Needs():
                run.needs = message
                self._say(run, layers=message.layers)
            case wire.Stepped():
                if len(message.checkpoints) > len(self._progress[run.job.id].checkpoints):
                    run.crashes = 0
                run.noted(self._clock.now(), message.tokens - self._progress[run.job.id].tokens)
                if run.trainer is not None and not self._held.count(run.trainer, message.own_bytes):
                    self._displaced(run)
                self._say(
                    run,
                    state=JobState.RUNNING,
                    step=message.step,
                    steps=message.steps,
                    loss=wire.number(message.loss),
                    validation_loss=wire.number(message.validation_loss),
                    tokens=message.tokens,
                    checkpoints=tuple(message.checkpoints),
                )
            case wire.Ended(how, error, ours):
                self._ended(run, how, error, ours)
            case _:
                log.error("a trainer says what only a worker says", message=type(message).__name__)

    def _ended(self, run: _Run, how: str, error: str, ours: bool) -> None:
        assert run.trainer is not None
        run.trainer.end()
        self._held.clear()
        if how == "succeeded":
            self._over(run, JobState.SUCCEEDED)
        elif run.stopping:
            self._over(run, JobState.CANCELLED if run.cancelled else None)
        elif how == "failed" and ours:
            self._over(run, JobState.FAILED, error)
        else:
            log.warning("a trainer failed", job=run.job.id, error=error)
            self._say(run, error=error)

    def _crashed(self, run: _Run, now: float) -> None:
        """Its process has ended without a word, or serving has taken its memory."""
        run.trainer, run.needs, run.again_s = None, None, now + _AGAIN_S
        self._held.clear()
        if run.stopping:
            self._over(run, JobState.CANCELLED if run.cancelled else None)
            return
        self._partition.use(self._partition.shares)
        if run.lost:
            return
        run.lost, run.crashes = "its trainer crashed, and begins again", run.crashes + 1
        error = self._progress[run.job.id].error or f"its trainer crashed; the log is {self._logs / 'trainer.log'}"
        if run.crashes >= _MOST_CRASHES:
            self._say(run, retry=True)
            self._over(run, JobState.FAILED, f"{error} ({run.crashes} times without a checkpoint between)")
        else:
            self._say(run, state=JobState.QUEUED, waits=run.lost, error="")

    def _over(self, run: _Run, state: JobState | None, error: str = "") -> None:
        """The job ends here; state None: it goes on elsewhere, and is forgotten."""
        if run.trainer is not None:
            run.trainer.end()
        self._held.clear()
        self._partition.use(self._partition.shares)
        self._run = self._let = None
        if state is None:
            with self._lock:
                self._progress.pop(run.job.id, None)
            self.on_progress()
        else:
            self._say(run, state=state, error=error, waits="", tokens_per_s=0.0, window=0, split=0)

    def _say(self, run: _Run, **changed: object) -> None:
        with self._lock:
            before = self._progress.get(run.job.id) or Progress(run.job.id, JobState.QUEUED)
        self._tell(run.job.id, replace(before, **changed))  # type: ignore[arg-type]

    def _tell(self, job_id: str, progress: Progress) -> None:
        with self._lock:
            before, self._progress[job_id] = self._progress.get(job_id), progress
        if before is None or (before.state, before.step) != (progress.state, progress.step):
            self.on_progress()

    # ---- memory ------------------------------------------------------------------------------------------------
    def _look(self, run: _Run, now: float, make_way: Callable[[], None]) -> None:
        """Move memory, and note what the job has."""
        self._spare = self._harvest.spare
        waits = self._move(run, now, make_way) or self._harvest.waits
        if self._run is not run:
            return
        supplied = self._held.supplied
        reads = run.trainer is not None and run.needs is None
        for model in self._models.values():
            model.harvest.starved(now, not supplied and not reads, "it has no memory")
        self._say(
            run,
            state=JobState.RUNNING if supplied else JobState.QUEUED,
            tokens_per_s=run.tokens_per_s(now),
            window=self._held.window,
            split=self._let.training if self._let is not None and supplied else 0,
            shares=self._partition.shares,
            tpot_s=self._tpot_s,
            waits=waits,
        )

    def _move(self, run: _Run, now: float, make_way: Callable[[], None]) -> str:
        """Give the trainer its memory, or fit its window. Returns why it waits for memory; empty: it does not."""
        trainer, needs, held = run.trainer, run.needs, self._held
        if trainer is None or needs is None:
            return run.lost
        if held.supplied:
            self._reconcile(run, trainer)
            if held.supplied:
                held.resize(trainer, needs.layers, make_way)
        elif why := held.never(needs):
            self._over(run, JobState.FAILED, why)
        elif held.supply(trainer, needs, now, make_way):
            self._let = None
        return "" if held.supplied else _NEEDED

    def _reconcile(self, run: _Run, trainer: TrainerProcess) -> None:
        if not self._held.reconcile(trainer):
            self._displaced(run)

    def _displaced(self, run: _Run) -> None:
        """Serving has taken the trainer's memory."""
        log.info("serving takes the trainer's memory", job=run.job.id)
        run.lost = _NEEDED
        self._say(run, state=JobState.QUEUED, waits=run.lost)
