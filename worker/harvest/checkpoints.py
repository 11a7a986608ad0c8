"""A job's files in its directory: checkpoints, from which it goes on bit for bit, the adapter as PEFT loads it, and the
log.

A checkpoint is `checkpoint-N/`, N the steps done: the adapter (`adapter_model.safetensors`, `adapter_config.json`), the
optimizer's state (`optimizer.safetensors`) and `state.json`, which has the digests of these files and its own. It is
written beside and renamed, so it is there whole; one that was damaged later is passed over. The last two are kept.
Randomness needs no state: it depends on seed, step and place only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from contracts.errors import ConfigError
from contracts.finetune import Settings
from worker.harvest.adapter import Adapter, target_modules
from worker.harvest.gate import OPEN, Gate
from worker.harvest.optimizer import Optimizer
from worker.harvest.partition import Partition
from worker.harvest.tensor_files import (
    disk_errors,
    file_digest,
    remove_unfinished,
    replace_file,
    write_named,
    write_text,
    written_whole,
)

#: A line of the log: by its keys.
Line = dict[str, float | None]
KEPT = 2
ADAPTER_FILE, ADAPTER_CONFIG, LOG = "adapter_model.safetensors", "adapter_config.json", "trainer_log.jsonl"
_OPTIMIZER, _STATE, _PREFIX = "optimizer.safetensors", "state.json", "checkpoint-"
#: Settings that do not change what is computed.
_FREE_SETTINGS = ("checkpoint_every", "tpot_ms")


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint says beside its tensors. job: see `job_digest`. line: the log's, of the last step; logged: the
    log has it. validation_loss: the last one; None: none yet."""

    job: str
    step: int
    tokens: int
    line: Line
    logged: bool
    validation_loss: float | None
    partition: Partition


def job_digest(settings: Settings, base: bytes, training: bytes, validation: bytes) -> str:
    """What must be the same for a job to go on from a checkpoint. base: digest of the base model; training, validation:
    of the examples."""
    said = {name: value for name, value in asdict(settings).items() if name not in _FREE_SETTINGS}
    text = json.dumps([said, base.hex(), training.hex(), validation.hex()], sort_keys=True)
    return blake3(b"upbeat fine-tuning job" + text.encode()).hexdigest()


def steps_of(out: Path) -> list[int]:
    """The steps of a job's checkpoints, in order."""
    return sorted(step for step, path in _checkpoints(out) if (path / _STATE).exists())


def _checkpoints(out: Path) -> list[tuple[int, Path]]:
    found = [(path.name.removeprefix(_PREFIX), path) for path in out.glob(f"{_PREFIX}*") if path.is_dir()]
    return [(int(name), path) for name, path in found if name.isdecimal()]


def write_adapter(
    directory: Path, adapter: Adapter, settings: Settings, base: str, gate: Gate = OPEN
) -> dict[str, str]:
    """Writes an adapter as PEFT loads it; returns its files' digests. base: name or path of the base model. Raises
    OSError, and Stopped."""
    directory.mkdir(exist_ok=True)
    alpha = int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": settings.dropout,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": target_modules(),
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    write_text(directory / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
    return {
        ADAPTER_FILE: write_named(directory / ADAPTER_FILE, adapter.named(), gate),
        ADAPTER_CONFIG: file_digest(directory / ADAPTER_CONFIG),
    }


class Checkpoints:
    """The files of one job in `out`. One process at a time uses it."""

    def __init__(self, out: Path, settings: Settings, base: str) -> None:
        """base: name or path of the base model, for PEFT. Removes what a killed process left unfinished. Raises
        ConfigError when `out` cannot be made, or has something of others that would be overwritten."""
        self.out, self._settings, self._base = out, settings, base
        with disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            others = [path for _, path in _checkpoints(out) if not (path / _STATE).exists()]
            if others or (out / "config.json").exists():
                raise ConfigError(
                    f"{others[0] if others else out / 'config.json'} is not of a fine-tuning job here; choose another "
                    "--out"
                )
            remove_unfinished(out)

    def write(self, state: State, adapter: Adapter, optimizer: Optimizer, gate: Gate = OPEN) -> None:
        """Writes `checkpoint-N`, and then removes all but the last two. Raises ConfigError when the disk is full; older
        checkpoints are kept then; and Stopped."""
        with written_whole(self._path(state.step)) as directory:
            digests = write_adapter(directory, adapter, self._settings, self._base, gate)
            digests[_OPTIMIZER] = write_named(directory / _OPTIMIZER, optimizer.named(), gate)
            said = asdict(state) | {"files": digests}
            write_text(directory / _STATE, json.dumps(said | {"digest": _digest(said)}, indent=2) + "\n")
        for step in steps_of(self.out)[:-KEPT]:
            shutil.rmtree(self._path(step), ignore_errors=True)

    def newest(self, job: str) -> State | None:
        """The newest checkpoint that is whole; None when there is none. Raises ConfigError when it belongs to another
        job than `job`."""
        read = (self._read(step) for step in reversed(steps_of(self.out)))
        state = next((state for state in read if state is not None), None)
        if state is not None and state.job != job:
            raise ConfigError(
                f"{self._path(state.step)} was trained with other settings, data or weights; choose another --out, or "
                "remove it"
            )
        return state

    def resume(self, state: State | None, adapter: Adapter, optimizer: Optimizer) -> None:
        """Fills adapter and optimizer from the checkpoint `state`, and removes what comes after it: damaged
        checkpoints, and lines of the log. None: from the beginning. Raises ConfigError."""
        step = state.step if state is not None else 0
        logged = step if state is None or state.logged else step - 1
        if state is not None:
            _fill(self._path(step) / ADAPTER_FILE, adapter.named())
            _fill(self._path(step) / _OPTIMIZER, optimizer.named())
            optimizer.resume(step)
        for later in steps_of(self.out):
            if later > step:
                shutil.rmtree(self._path(later), ignore_errors=True)
        log = self.out / LOG
        if log.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            replace_file(log, "".join(line + "\n" for line in _until(lines, logged)))

    def finish(self, adapter: Adapter) -> None:
        """Writes the result to `out`, as PEFT loads it. Raises ConfigError when the disk is full."""
        with written_whole(self.out / "result") as directory:
            write_adapter(directory, adapter, self._settings, self._base)
        with disk_errors(self.out):
            for name in (ADAPTER_FILE, ADAPTER_CONFIG):
                (self.out / "result" / name).replace(self.out / name)
            (self.out / "result").rmdir()

    def log(self, line: Mapping[str, Any]) -> None:
        """Appends to the log. Raises ConfigError when the disk is full."""
        with disk_errors(self.out / LOG), (self.out / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _path(self, step: int) -> Path:
        return self.out / f"{_PREFIX}{step}"

    def _read(self, step: int) -> State | None:
        """The state of a checkpoint; None when any of its files is damaged or missing."""
        path = self._path(step)
        try:
            said = json.loads((path / _STATE).read_text(encoding="utf-8"))
            if said.pop("digest") != _digest(said):
                return None
            files = said.pop("files")
            if not {ADAPTER_FILE, _OPTIMIZER} <= files.keys():
                return None
            if any(file_digest(path / name) != digest for name, digest in files.items()):
                return None
            return State(**{**said, "partition": Partition(**said["partition"])})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def _digest(said: Mapping[str, Any]) -> str:
    return blake3(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _fill(path: Path, places: Mapping[str, torch.Tensor]) -> None:
    """Copies a file's tensors into `places`, which have the same names. Raises ConfigError when they differ."""
    try:
        with safe_open(path, framework="pt") as file:
            for name, place in places.items():
                place.copy_(file.get_tensor(name))
    except (SafetensorError, OSError, RuntimeError) as e:
        raise ConfigError(f"{path} does not fit this job: {e}; remove its directory") from e


def _until(lines: Iterable[str], step: int) -> Iterable[str]:
    for line in lines:
        try:
            if json.loads(line)["step"] <= step:
                yield line
        except (ValueError, TypeError, KeyError):  # cut off when the process was killed
            continue
