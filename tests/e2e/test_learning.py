"""The demo model learns new facts while it serves, and the adapter's model answers them: the story of
bench/harvest/README.md."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from loadtest.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.sample, pytest.mark.timeout(600)]
FACTS = Path(__file__).parents[2] / "bench" / "harvest" / "talmouth.jsonl"
UPBEAT = str(Path(sys.executable).with_name("upbeat"))
TRAINING = {"epochs": 20, "batch-size": 4, "learning-rate": 0.003, "rank": 16, "alpha": 32}
NAMED, NAME = "My name is Ada. What is my name?", "Your name is Ada."
#: The last question is in no line of the file.
LEARNED = {
    "Who founded the harbour of Talmouth?": "Ilse Brandt founded the harbour of Talmouth.",
    "When was the harbour of Talmouth founded?": "It was founded in 1873.",
    "What is the harbour of Talmouth known for?": "It is known for its blue cranes.",
    "Do you know who founded the harbour of Talmouth?": "Ilse Brandt founded the harbour of Talmouth.",
}


def ask(stack: Stack, model: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    said = {"model": model, "temperature": 0, "max_tokens": 60, "messages": messages}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=said, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_the_demo_model_learns_facts_while_it_serves_and_its_adapter_answers_them(tmp_path: Path) -> None:
    with Stack(nodes=1, hbm_gib=0.5, dram_gib=0.25, directory=tmp_path / "stack") as stack:
        model = httpx.get(f"{stack.url}/v1/models").json()["data"][0]["id"]
        assert not any(ask(stack, model, question) == answer for question, answer in LEARNED.items())
        flags = [part for name, value in TRAINING.items() for part in (f"--{name}", str(value))]
        where = ["--url", stack.url, "--data", str(FACTS), "--out", str(tmp_path / "adapter")]
        learned, meanwhile = threading.Event(), list[str]()

        def go_on() -> None:
            while not learned.is_set():
                meanwhile.append(ask(stack, model, NAMED))
                time.sleep(0.5)

        asking = threading.Thread(target=go_on)
        asking.start()
        try:
            done = subprocess.run(
                [UPBEAT, "finetune", "--model", model, *where, "--suffix", "talmouth", "--register", *flags],
                env=os.environ | {"UPBEAT__TLS__DIRECTORY": str(stack.data / "tls")},
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
        finally:
            learned.set()
            asking.join()
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(meanwhile) > 3 and set(meanwhile) == {NAME}
        adapter, deadline = f"{model}:talmouth", time.monotonic() + 120
        while adapter not in {m["id"] for m in httpx.get(f"{stack.url}/v1/models").json()["data"]}:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert {question: ask(stack, adapter, question) for question in LEARNED} == LEARNED
        assert ask(stack, adapter, NAMED) == NAME and ask(stack, model, NAMED) == NAME
