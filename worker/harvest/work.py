"""What a trainer's process does, once it is out of the way: hears its worker, says what it needs, trains, and says how
it ended."""

from __future__ import annotations

import os
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import torch

from contracts.errors import ConfigError, RequestError
from contracts.finetune import Job, Settings
from runtime.directory_lock import DirectoryLock
from runtime.model_config import ModelConfig, load_config
from worker.harvest import wire
from worker.harvest.data import Examples
from worker.harvest.gate import Stopped
from worker.harvest.job import Reached, Running, read_data
from worker.harvest.partition import MOST_ROWS, Partition, head_rows
from worker.harvest.training import TrainingFailed, trainer_bytes
from worker.harvest.window import Window
from worker.harvest.word_gate import WordGate
from worker.memory.exports import receive
from worker.models.checkpoint import Checkpoint
from worker.models.digest import cached_weights_digest, model_digest
from worker.models.weights import Layout, layer_parts, top_parts

#: What a unit allocates for milliseconds, and what the allocator keeps, beside `trainer_bytes`.
_BRIEF_BYTES = 64 << 20
#: Memory beyond its need at which its allocations fail: the job fails, not the machine.
_LIMIT_FACTOR, _LIMIT_BYTES = 2, 512 << 20


def work(begin: wire.Begin, worker: socket.socket, gate: WordGate) -> None:
    """Train the job, and say how it ended."""
    said = _Said(worker)
    try:
        _train(begin, worker, gate, said)
    except Stopped:
        said.put(wire.Ended("stopped"))
    except _Elsewhere as error:
        said.put(wire.Ended("failed", str(error)))
    except (ConfigError, RequestError, TrainingFailed) as error:
        said.put(wire.Ended("failed", str(error), ours=True))
    except (MemoryError, RuntimeError) as error:
        beyond = isinstance(error, MemoryError) or "alloc" in str(error)
        why = "it needs more memory than it said; train with a smaller batch_size or max_tokens" if beyond else ""
        said.put(wire.Ended("failed", why or f"the trainer failed: {error}", ours=beyond))
    except OSError as error:
        said.put(wire.Ended("failed", f"{error.strerror or error}: {error.filename or 'a file of the job'}"))
    else:
        said.put(wire.Ended("succeeded"))


class _Elsewhere(Exception):
    """Another trainer has this job's directory."""


def _train(begin: wire.Begin, worker: socket.socket, gate: WordGate, said: _Said) -> None:
    torch.set_num_threads(1)
    job = Job(**begin.job | {"settings": Settings(**begin.job["settings"])})
    base = Path(begin.model)
    config, checkpoint, dtype = load_config(base), Checkpoint(base), getattr(torch, begin.dtype)
    layouts = [Layout(layer_parts(checkpoint, config, n), dtype) for n in range(config.layers)]
    top = Layout(top_parts(checkpoint, config), dtype)
    window = Window(layouts, top, lambda slots: said.put(wire.Returned(slots)))
    threading.Thread(target=_listen, args=(worker, window, gate), name="worker", daemon=True).start()
    data = read_data(job, base, gate)
    own = _own_bytes(config, job.settings, data, dtype, begin.lanes)
    said.put(wire.Needs(config.layers, top.bytes, max(layout.bytes for layout in layouts), own))
    baseline = _anonymous_bytes()
    _limit(_LIMIT_FACTOR * own + _LIMIT_BYTES)

    def report(reached: Reached) -> None:
        said.put(
            wire.Stepped(
                reached.step,
                reached.steps,
                wire.known(reached.loss),
                wire.known(reached.validation_loss),
                reached.tokens,
                list(reached.checkpoints),
                max(_anonymous_bytes() - baseline, 0),
            )
        )

    lock = DirectoryLock(Path(job.out) / ".lock", "trainer")
    try:
        lock.take()
    except ConfigError:
        raise _Elsewhere(f"another trainer, perhaps of a worker that is cut off, still writes to {job.out}") from None
    window.top()
    digest = model_digest(cached_weights_digest(checkpoint, Path(begin.digests)), config)
    Running(job, base, digest, data, window, gate, begin.lanes, report=report).train()


def _own_bytes(
    config: ModelConfig, settings: Settings, data: tuple[Examples, Examples | None], dtype: torch.dtype, lanes: int
) -> int:
    """Of a trainer with the largest units."""
    largest = Partition(MOST_ROWS, head_rows(config, MOST_ROWS), config.vocab_size)
    return trainer_bytes(config, settings, *data, largest, dtype.itemsize, lanes) + _BRIEF_BYTES


def _listen(worker: socket.socket, window: Window, gate: WordGate) -> None:
    """Do what the worker says; end with it."""
    try:
        while True:
            match wire.receive(worker):
                case wire.Grant(slot):
                    window.grant(slot, receive(worker))
                case wire.Revoke(count):
                    window.revoke(count)
                case wire.Wake():
                    if gate.stopped:
                        window.end(Stopped("the worker wants it"))
                    gate.wake()
    finally:
        os._exit(1)


class _Said:
    """What the trainer says, from several threads."""

    def __init__(self, worker: socket.socket) -> None:
        self._worker, self._lock = worker, threading.Lock()

    def put(self, message: wire.Message) -> None:
        with self._lock:
            wire.send(self._worker, message)


def _limit(bytes_: int) -> None:
    """Let allocations fail that exceed what it has now by more than this."""
    data = int(_status()["VmData"].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (data + bytes_, data + bytes_))


def _anonymous_bytes() -> int:
    return int(_status()["RssAnon"].split()[0]) << 10


def _status() -> dict[str, Any]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
