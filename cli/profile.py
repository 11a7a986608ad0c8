"""`upbeat profile`: starts stores and the measuring process, stores the profile, and prints it.

The stores use the configuration with their own data, ports and arena; all of it is deleted afterwards. The measuring is
done by `python -m worker.measure.make_profile`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.client import CallFailed
from cli.core.plan import compute_threads
from cli.core.secrets import passed_on
from cli.fleet import table
from cli.process import Process, log_end
from contracts.corun import CorunFit
from contracts.errors import ConfigError
from contracts.latency_profile import LOAD_SOURCES, Profile, Surface, misfit
from loadtest.stack import free_ports
from runtime.config import Config
from runtime.config_file import changed, dump_config
from runtime.profile_files import cores, processor, read, stored
from runtime.secret_settings import public
from storelink.arena_sharing import arenas_of, remove_dead

#: Size of the arena for measuring loads: a large load takes 2/5 of it.
_ARENA_GIB, _QUICK_ARENA_GIB = 0.25, 0.125
#: A higher load average, a core, gets a warning.
_BUSY = 0.5
#: Batches, and tokens of context of each sequence, for which steps beside training are shown.
_BATCHES, _CONTEXT = (1, 8, 32), 256
_SOURCES = {
    "dram": "this node's DRAM",
    "ssd": "this node's SSD",
    "ssd_cold": "this node's SSD, page cache dropped",
    "peer": "another node's DRAM",
}
assert _SOURCES.keys() == set(LOAD_SOURCES)


def measure(config: Config, quick: bool, corun: bool, quiet: bool) -> Profile:
    """Measure the configured model on this machine: minutes, or half a minute if `quick`. corun: also steps beside
    fine-tuning. quiet: print no progress.

    Raises ConfigError when the model or a setting is wrong, CallFailed when measuring failed.
    """
    busy = os.getloadavg()[0]
    if busy > _BUSY * cores():
        print(
            f"upbeat: this machine is busy (load average {busy:.1f} on {cores()} cores), and so are the figures",
            file=sys.stderr,
        )
    work = config.data / f"profiling-{os.getpid()}"
    nodes = min(2, config.nodes.count)
    first = free_ports(10 * nodes + 2)
    own = changed(
        config,
        {
            "data": work / "data",
            "run_dir": work / "run",
            "gateway": {"port": first},
            "scheduler": {"port": first + 1},
            "nodes": {
                "base_port": first + 2,
                "store_host": "127.0.0.1",
                "listen_host": "",
                "count": nodes,
                "devices": 1,
            },
            # As many threads as a worker of the profiled stack has, not of this one with its few nodes.
            "worker": {"threads": compute_threads(config.worker.threads, os.cpu_count() or 1, config.devices)},
            "kv": {
                "dram_gib": min(config.kv.dram_gib, _QUICK_ARENA_GIB if quick else _ARENA_GIB),
                "layer_priority": False,
                "blob_url": "",
                "blob_options": {},
                "prefetch_mb_s": 0.0,
                "failpoints": {},
            },
        },
    )
    try:
        for folder in (own.data, own.run_dir):
            folder.mkdir(parents=True)
        written, found = work / "config.yaml", work / "profile.json"
        written.write_text(dump_config(public(own)))
        with _stores(own, written, work, nodes):
            _run_worker(own, written, found, work, quick, corun, quiet)
        return read(found)
    except OSError as e:
        raise ConfigError(
            f"data = {config.data}: measuring needs to write there ({e.strerror}); give another --data"
        ) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _environment(config: Config, **more: str) -> dict[str, str]:
    # The written configuration includes the environment's settings: do not apply them twice.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UPBEAT__")}
    return passed_on(kept, os.path.isfile) | {"OMP_NUM_THREADS": str(config.worker.threads)} | more


@contextlib.contextmanager
def _stores(config: Config, written: Path, work: Path, nodes: int) -> Iterator[None]:
    """Run a store process a node during the block, then kill them and delete their arenas."""
    running = []
    try:
        for node in range(nodes):
            # The second store must read from the first one's DRAM only: its own blob tier, hardly any SSD writes.
            alone = (
                {"UPBEAT__KV__BLOB_URL": (work / "blob").as_uri(), "UPBEAT__KV__WRITE_BACK_LIMIT_BYTES": str(1 << 20)}
                if node
                else {}
            )
            command = ["-m", "kvstore", "--config", str(written), "--node", str(node)]
            log = work / f"kvstore-{node}.log"
            running.append(
                Process(Path(sys.executable), command, log=log, environment=_environment(config, **alone), keep_open=())
            )
        yield
    finally:
        for process in running:
            process.send(signal.SIGKILL)
            process.wait()
        for node in range(nodes):
            remove_dead(arenas_of(config.node(node).arena_stem))


def _run_worker(config: Config, written: Path, found: Path, work: Path, quick: bool, corun: bool, quiet: bool) -> None:
    errors = work / "profiling.log"
    command = [
        sys.executable,
        "-m",
        "worker.measure.make_profile",
        "--config",
        str(written),
        "--out",
        str(found),
        *(["--quick"] if quick else []),
        *(["--corun"] if corun else []),
    ]
    with errors.open("wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            stderr=log,
            env=_environment(config),
        )
        try:
            status = child.wait()
        finally:
            child.kill()
            child.wait()
    if status:
        said = log_end(errors, 1) or [f"it ended with status {status}"]
        reason = said[0].removeprefix("upbeat: ")
        if status == 2:
            raise ConfigError(reason)
        tails = [line for node in range(config.nodes.count) for line in log_end(work / f"kvstore-{node}.log", 2)]
        raise CallFailed("\n  ".join([f"measuring failed: {reason}", *tails]))


def known(config: Config) -> list[tuple[Path, Profile]]:
    """Stored profiles of the configured model that hold on this machine. Raises ConfigError with reasons if
    none does."""
    model = config.served_model
    found = [(path, read(path)) for path in stored(config)]
    ours = [(path, profile) for path, profile in found if path.parent == config.model or profile.model == model]
    refused = [(path, profile, why) for path, profile in ours if (why := _not_here(profile))]
    fits = [(path, profile) for path, profile in ours if not _not_here(profile)]
    if not fits:
        reasons = "; ".join(f"{path} is not of this machine: {why}" for path, _, why in refused)
        raise ConfigError(
            f"no profile of {model} holds here{reasons and ' (' + reasons + ')'}; make one with `upbeat profile`"
        )
    return fits


def _not_here(profile: Profile) -> str:
    """Why a profile does not hold on this machine; empty if it does. Workers check the weights when they start."""
    if profile.subject.computes == "cuda":
        return ""
    return misfit(profile, replace(profile.subject, device=processor(), cores=cores()))


def show(console: Console, profile: Profile, path: Path) -> None:
    """Print a profile as tables."""
    s = profile.subject
    console.print(
        f"{profile.model} ({s.fingerprint[:12]}, {s.dtype}), {s.computes} with {s.threads} of {s.cores} cores, "
        f"{s.device}"
    )
    console.print(
        f"measured on {profile.measured_on}, {', '.join(f'{name} {v}' for name, v in profile.versions.items())}\n"
    )
    console.print(_surface("decode: batch", "tokens of context", profile.decode_step_s, profile.decode_layer_s))
    console.print(_surface("prefill: tokens", "tokens before", profile.prefill_step_s, profile.prefill_layer_s))
    loads = table("load from", "GB/s", "after", "1,000 tokens", "6,000 tokens")
    for name in (source for source in LOAD_SOURCES if source in profile.loads):
        rate = profile.loads[name]
        times = (f"{1000 * profile.load_s(name, tokens):.1f} ms" for tokens in (1000, 6000))
        loads.add_row(_SOURCES[name], f"{rate.bytes_per_s / 1e9:.2f}", f"{1000 * rate.first_s:.1f} ms", *times)
    if profile.loads:
        console.print(loads)
    if profile.corun is not None:
        console.print(_corun(profile.corun))
    console.print(f"\nkept in {path}")


def _corun(fit: CorunFit) -> Any:
    """Decode steps by part of the device. Errors are of steps that nothing was fitted to."""
    splits = [*((solo.share, 0) for solo in fit.solo), *((pair.infer, pair.training) for pair in fit.pairs)]
    rates = {(pair.infer, pair.training): pair.trained_tokens_s for pair in fit.pairs}
    errors = {False: fit.solo_errors, True: fit.corun_errors}
    made = table(
        f"serving + training, of {fit.shares}",
        *(f"batch {n}" for n in _BATCHES),
        "trained tokens/s",
        "error: mean, worst",
    )
    for infer, training in splits:
        steps = (f"{1e3 * fit.step_of(infer, training).seconds(n, n * _CONTEXT):.1f} ms" for n in _BATCHES)
        rate, error = rates.get((infer, training)), errors[training > 0]
        said = f"{100 * error.mean:.1f} %, {100 * error.worst:.1f} %" if error else "-"
        made.add_row(f"{infer} + {training}", *steps, f"{rate:,.0f}" if rate else "-", said)
    return made


def _surface(rows: str, columns: str, steps: Surface, layers: Surface) -> Any:
    made = table(rows, *(f"{column:,} {columns}" for column in steps.columns), "a layer")
    for i, row in enumerate(steps.rows):
        cells = (f"{1000 * s:.1f} ms, {row / s:,.0f} tokens/s" if s else "-" for s in steps.seconds[i])
        made.add_row(str(row), *cells, f"{1000 * layers.seconds[i][0]:.2f} to {1000 * layers.seconds[i][-1]:.2f} ms")
    return made
