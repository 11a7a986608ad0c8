"""Serves a target: given addresses, a stack of ours, or programs that are started and ended here."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from contracts.errors import ConfigError
from loadtest.client import Endpoint
from loadtest.compare.settings import ProcessSection, TargetFile
from loadtest.policies import POLICIES, Policy
from loadtest.stack import Stack, StackError, die_with_parent, free_ports, members

_STOP_S = 30.0
_LAST_WORDS = 1500


@dataclass(frozen=True, slots=True)
class Served:
    """A target in service. nodes: number that can take requests. found: facts for the report."""

    endpoints: tuple[Endpoint, ...]
    nodes: int
    found: Mapping[str, Any]


@contextlib.contextmanager
def opened(
    target: TargetFile,
    body: Mapping[str, Any],
    folder: Path,
    launcher: list[str] | None = None,
) -> Iterator[Served]:
    """Serve `target` during the block; afterwards everything it started has ended.

    body: fields of every request, in addition to the target's. folder: of the target's file. Raises StackError if it
    does not serve, ConfigError for an error in its file.
    """
    if target.url is not None:
        urls = [target.url] if isinstance(target.url, str) else target.url
        yield _served(target, body, urls)
    elif target.upbeat is not None:
        with _stack(target, launcher) as stack:
            yield _served(target, body, [stack.url], stack.nodes)
    else:
        with Programs(target, folder) as programs:
            yield _served(target, body, programs.addresses)


def policy_of(target: TargetFile) -> Policy:
    """Placement, cache and hints of an `upbeat` target."""
    section = target.upbeat
    assert section is not None
    known = POLICIES.get(section.policy) or Policy(section.policy, placement=section.policy, cache=True, hints=False)
    cache = known.cache if section.cache is None else section.cache
    hints = known.hints if section.hints is None else section.hints
    return Policy(known.name, known.placement, cache, hints)


def _stack(target: TargetFile, launcher: list[str] | None) -> Stack:
    section, policy = target.upbeat, policy_of(target)
    assert section is not None
    return Stack(
        model=section.model,
        nodes=section.nodes,
        policy=policy.placement,
        cache=policy.cache,
        hbm_gib=section.hbm_gib,
        dram_gib=section.dram_gib,
        settings=section.settings,
        ready_s=section.ready_s,
        launcher=launcher,
    )


def _served(target: TargetFile, body: Mapping[str, Any], urls: list[str], nodes: int | None = None) -> Served:
    ours = policy_of(target) if target.upbeat is not None else None
    hints = target.hints if target.hints is not None else ours is not None and ours.hints
    key = _key(target.api_key_env, f"{target.name}: api_key_env")
    model = target.model or _first_model(urls[0], key)
    endpoint = Endpoint(
        base_url="",
        model=model,
        api_key=key,
        hints=hints,
        body=dict(body) | target.body,
        timeout_s=target.timeout_s,
        priorities=target.priorities if target.priorities is not None else ours is not None,
        workflows=target.workflows if target.workflows is not None else ours is not None and hints,
        models=target.models,
        api_keys={
            tenant: _key(name, f"{target.name}: tenant_key_envs.{tenant}") or ""
            for tenant, name in target.tenant_key_envs.items()
        },
    )
    endpoints = tuple(replace(endpoint, base_url=url.rstrip("/")) for url in urls)
    return Served(
        endpoints, nodes or len(urls), {"model": model, "addresses": len(urls), "hints": hints} | dict(target.versions)
    )


def _key(variable: str, where: str) -> str | None:
    if not variable:
        return None
    if variable not in os.environ:
        raise ConfigError(f"{where} = {variable!r}: the environment has no such variable; set it, or remove the key")
    return os.environ[variable]


def _first_model(url: str, key: str | None) -> str:
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as e:
        raise StackError(f"{url}/v1/models names no model ({e}); is it served there? or give `model`") from e


class Programs:
    """The programs of a `start` target: each starts when the one before serves; all end with the block."""

    def __init__(self, target: TargetFile, folder: Path) -> None:
        self._target, self._folder = target, folder
        self._scratch = Path(tempfile.mkdtemp(prefix="upbeat-compare-"))
        self._running: list[subprocess.Popen[bytes]] = []
        instances = [f"{section.name}_{n}" for section in target.start or [] for n in range(section.count)]
        first = free_ports(2 * len(instances))
        #: First of two ports, by instance.
        self._ports = {name: first + 2 * i for i, name in enumerate(instances)}
        self.addresses: list[str] = []

    def __enter__(self) -> Programs:
        try:
            # Instances of one program start together, as each may load for a minute.
            for section in self._target.start or []:
                begun = [self._start(section, number) for number in range(section.count)]
                for process, log, ready in begun:
                    self._wait(section, process, log, ready)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for process in reversed(self._running):
            while (process.poll() is None or members(process.pid)) and time.monotonic() < deadline:
                time.sleep(0.05)
            for pid in members(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        self._running.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start(self, section: ProcessSection, number: int) -> tuple[subprocess.Popen[bytes], Path, str]:
        values = self._placeholders(section, number)

        def filled(text: str, key: str) -> str:
            try:
                return Template(text).substitute(values)
            except (KeyError, ValueError) as e:
                known = ", ".join(sorted(values))
                raise ConfigError(
                    f"{self._target.name}: start.{section.name}.{key} = {text!r}: {e} is no placeholder; there are "
                    f"{known}"
                ) from e

        command = [filled(word, "command") for word in section.command]
        env = {name: value for name, value in os.environ.items() if name not in section.unset}
        env |= {name: filled(value, f"env.{name}") for name, value in section.env.items()}
        log = self._scratch / f"{section.name}-{number}.log"
        with log.open("wb") as out:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd=self._scratch,
                    start_new_session=True,
                    preexec_fn=die_with_parent if threading.current_thread() is threading.main_thread() else None,
                )
            except OSError as e:
                raise StackError(f"{self._target.name}: {command[0]} cannot be started: {e.strerror}") from e
        self._running.append(process)
        if section.serves:
            self.addresses.append(filled(section.serves, "serves"))
        return process, log, filled(section.ready, "ready")

    def _placeholders(self, section: ProcessSection, number: int) -> dict[str, str]:
        """Values of the placeholders in instance `number` of `section`."""
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // section.count)
        mine = [cores[(number * share + i) % len(cores)] for i in range(share)]
        ports = {f"port_{name}": str(port) for name, port in self._ports.items()}
        ports |= {
            f"port_{name.removesuffix('_0')}": str(port) for name, port in self._ports.items() if name.endswith("_0")
        }
        return ports | {
            "n": str(number),
            "port": str(self._ports[f"{section.name}_{number}"]),
            "port2": str(self._ports[f"{section.name}_{number}"] + 1),
            "threads": str(share),
            "cores": ",".join(map(str, mine)),
            "scratch": str(self._scratch),
            "here": str(self._folder),
        }

    def _wait(self, section: ProcessSection, process: subprocess.Popen[bytes], log: Path, ready: str) -> None:
        deadline = time.monotonic() + section.ready_s
        while ready and time.monotonic() < deadline:
            if process.poll() is not None:
                raise StackError(
                    f"{self._target.name}: {section.name} ended with status {process.returncode}\n{_last_words(log)}"
                )
            try:
                with urllib.request.urlopen(ready, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        if ready:
            raise StackError(
                f"{self._target.name}: {section.name} did not serve within {section.ready_s:g} s\n{_last_words(log)}"
            )


def _last_words(log: Path) -> str:
    try:
        return log.read_text(errors="replace")[-_LAST_WORDS:]
    except OSError:
        return "(no log)"
