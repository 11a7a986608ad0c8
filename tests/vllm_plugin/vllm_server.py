"""A vLLM server with Upbeat's connector, as a process of its own in `.cache/vllm` (`make vllm`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm_plugin.checked_connector import FOLDER

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "vllm" / "bin" / "python"
BLOCK_TOKENS = 64
CHECKED = "tests.vllm_plugin.checked_connector"
#: It starts in half a minute on an idle core.
_START_S = 600.0
#: From the copy of the last block to the store's knowing of it.
_SETTLE_S = 1.0


class Answer(NamedTuple):
    """Token ids, and for each the log probabilities of the two best tokens."""

    tokens: list[int]
    best: list[tuple[float, float]]

    def gap(self, at: int) -> float:
        """By how much the token was the best."""
        first, second = self.best[at]
        return first - second


class VllmServer:
    """See the module. extra: of the connector; None: without a connector. more: further arguments. records: the folder
    for `checked_connector`, which then is the connector. compiled: begin with a compilation, for minutes."""

    def __init__(
        self,
        model: Path,
        port: int,
        log: Path,
        extra: dict[str, Any] | None,
        *more: str,
        environment: dict[str, str] | None = None,
        records: Path | None = None,
        compiled: bool = False,
    ) -> None:
        self.url, self.log, self._connected = f"http://127.0.0.1:{port}", log, extra is not None
        command = [
            *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)),
            *("--block-size", str(BLOCK_TOKENS), "--dtype", "float32", "--max-model-len", "4096"),
            *("--max-num-batched-tokens", "2048", *more),
        ]
        if not compiled:
            command.append("--enforce-eager")
        if extra is not None:
            transfer = {
                "kv_connector": "UpbeatRecordedConnector" if records else "UpbeatConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": CHECKED if records else "upbeat_vllm.connector",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        } | (environment or {})
        if records:
            env[FOLDER] = str(records)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=env, cwd=log.parent, start_new_session=True
            )

    def wait(self) -> VllmServer:
        """Until it serves, and is attached to its store."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1)
                if not self._connected or "attached store=" in self.log.read_text():
                    return self
            except (OSError, urllib.error.URLError):
                time.sleep(0.25)
        raise AssertionError(f"vLLM does not serve: {self.log.read_text()[-2000:]}")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer's JSON, or its text."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=180) as answer:
            data, kind = answer.read(), answer.headers.get_content_type()
        return json.loads(data) if kind == "application/json" and data else data.decode()

    def complete(
        self, tokens: list[int], session: str, tenant: str = "t", sources: Sequence[str] = (), **more: Any
    ) -> Answer:
        """A greedy answer of six tokens."""
        params = {"upbeat": {"session": session, "tenant": tenant, "sources": list(sources)}}
        body = {"model": "m", "prompt": tokens, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        # By id: tokens without text would be one.
        body |= {"return_tokens_as_token_ids": True, "return_token_ids": True, "kv_transfer_params": params} | more
        choice = self.post("/v1/completions", body)["choices"][0]
        best = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        return Answer(choice["token_ids"], [(b[0], b[1]) for b in best])

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, once the store has all that is being saved."""
        end = time.monotonic() + 60
        while not self.post("/reset_prefix_cache", {})["success"]:
            assert time.monotonic() < end, "blocks are held for ever"  # until they are copied
            time.sleep(0.05)
        time.sleep(_SETTLE_S)

    def hits(self) -> tuple[float, float]:
        """Prompt tokens that the connector was asked for, and that it brought, since the start."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        found = {}
        for line in text.splitlines():
            for name in ("queries", "hits"):
                if line.startswith(f"vllm:external_prefix_cache_{name}_total{{"):
                    found[name] = float(line.rpartition(" ")[2])
        return found.get("queries", 0.0), found.get("hits", 0.0)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it and everything that it started: its engine's processes outlive a server that is killed."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
