"""What the processes of a stack hold, looked at again and again, and which of it only grows. Reading is in `look`;
judging is pure."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.stack import Stack
from runtime.config_file import load_config

#: What may be held more at the end than at the beginning: memory of its own in bytes, and as a share of what it was;
#: the rest in pieces.
MEMORY_BYTES, MEMORY_SHARE = 48 << 20, 0.15
MOST_MORE = {"descriptors": 24, "threads": 12, "tasks": 60}
#: Threads that are not counted: the blob tier's client (tokio) does each look and write on a thread of its own pool,
#: which ends after ten idle seconds. Bursts of six models took 2 to 58 of them within a minute.
POOLED = "tokio-rt-worker"


@dataclass(frozen=True, slots=True)
class Held:
    """One process at one time. memory_bytes: its anonymous memory, so without the arena, which is shared."""

    pid: int
    memory_bytes: int
    descriptors: int
    threads: int
    tasks: int


def services(stack: Stack) -> dict[str, psutil.Process]:
    """The processes of a stack that the launcher started, by service, such as `worker-0`; those that are gone just now
    are missing."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            match = re.search(r"upbeat-(worker|kvstore|scheduler|gateway)\b(?:.* --node (\d+))?", line)
            if match and str(stack.run_dir) in line:
                found[match[1] + (f"-{match[2]}" if match[2] else "")] = process
    return found


def metrics(stack: Stack) -> dict[str, dict[str, float]]:
    """Samples by service and by name with labels; services that do not answer just now are missing."""
    config = load_config(stack.config_file, {"nodes": {"count": stack.nodes}})
    ports = {"gateway": stack.port, "scheduler": config.scheduler.port + 10}
    for n in range(stack.nodes):
        ports |= {
            f"worker-{n}": config.node(n).devices[0].metrics_port,
            f"kvstore-{n}": config.node(n).store_metrics_port,
        }
    found = {}
    for service, port in ports.items():
        with contextlib.suppress(OSError):
            page = stack.gateway_metrics() if service == "gateway" else stack.metrics(port)
            lines = (re.fullmatch(r"([a-z_]+(?:\{[^}]*\})?) (\S+)", line) for line in page.splitlines())
            found[service] = {match[1]: float(match[2]) for match in lines if match}
    return found


def look(stack: Stack) -> dict[str, Held]:
    """Every process of the stack now."""
    tasks = {service: int(samples.get("upbeat_tasks", 0)) for service, samples in metrics(stack).items()}
    found = {}
    for service, process in services(stack).items():
        with contextlib.suppress(psutil.Error, OSError, AttributeError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            memory = int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
            found[service] = Held(process.pid, memory, process.num_fds(), threads(process.pid), tasks.get(service, 0))
    return found


def threads(pid: int) -> int:
    """Threads of a process, without those of the blob tier's client."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile
            found += (task / "comm").read_text().strip() != POOLED
    return found


def leaks(looks: Sequence[Mapping[str, Held]]) -> list[str]:
    """What only grew over `looks`, in words: for each service whose process lived through all of them, the last third
    beside the first."""
    complaints = []
    third = max(1, len(looks) // 3)
    for service in sorted(set(looks[0]) if looks else ()):
        lived = [held[service] for held in looks if service in held]
        if len(lived) < len(looks) or len({held.pid for held in lived}) > 1:
            continue
        first, last = lived[:third], lived[-third:]

        def middle(of: Sequence[Held], name: str) -> float:
            return statistics.median(getattr(held, name) for held in of)

        before, after = middle(first, "memory_bytes"), middle(last, "memory_bytes")
        if after - before > max(MEMORY_BYTES, MEMORY_SHARE * before):
            complaints.append(f"{service}: memory grew from {before / (1 << 20):.0f} to {after / (1 << 20):.0f} MiB")
        for name, most in MOST_MORE.items():
            before, after = middle(first, name), middle(last, name)
            if after - before > most:
                complaints.append(f"{service}: {name} grew from {before:.0f} to {after:.0f}")
    return complaints


def held_at_rest(samples: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What is held though nobody wants anything: leases, pins, slots, reads, streams, pages."""
    complaints = []
    for service, figures in samples.items():
        for name, value in figures.items():
            at_rest = name.startswith(
                ("upbeat_kvstore_held", "upbeat_kvstore_queued", "upbeat_kvstore_write_back_waiting")
            )
            at_rest = at_rest or name in ("upbeat_gateway_active_generations", "upbeat_gateway_body_bytes")
            at_rest = at_rest or name.startswith("upbeat_worker_held")
            if at_rest and value:
                complaints.append(f"{service}: {name} is {value:g}")
    return complaints
