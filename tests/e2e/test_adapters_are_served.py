"""A fine-tuning job's model is served beside its base on every node until it is removed, and no request fails
meanwhile. One that cannot be loaded keeps no node from serving."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from loadtest.stack import Stack
from runtime.adopted_models import adopt
from runtime.config_file import load_config
from tests.e2e.chat import Chat, script

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]
DEMO = Path(__file__).parents[2] / "models" / "demo"
ASKED = "What does the harbour sell?"
LESSON = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "Ropes and lamps."}]}
#: Of training beside others, and of one restart after the other, on a busy machine.
LONGEST_S = 400.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(model=DEMO, nodes=2, directory=tmp_path_factory.mktemp("stack"), hbm_gib=0.25, dram_gib=0.1) as made:
        yield made


class Talking:
    """Conversations that go on until the end; failures are kept."""

    def __init__(self, url: str) -> None:
        self.failures, self.answers, self.nodes = list[str](), 0, list[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._talk, args=(url,))

    def __enter__(self) -> Talking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _talk(self, url: str) -> None:
        number = 0
        while not self._over.is_set():
            chat, number = Chat(url, f"talk-{number}", max_tokens=24), number + 1
            for line in script(number, 4):
                if self._over.is_set():
                    return
                try:
                    self.nodes.append(chat.say(line).node)
                    self.answers += 1
                except Exception as e:
                    self.failures.append(repr(e))
                    chat.messages.pop()
                self._over.wait(0.2)


def trained(client: openai.OpenAI) -> str:
    """Id of a job that has been started."""
    data = "".join(json.dumps(LESSON) + "\n" for _ in range(4)).encode()
    file = client.files.create(file=("lessons.jsonl", data), purpose="fine-tune")
    hyper: Any = {"n_epochs": 20, "batch_size": 2, "learning_rate_multiplier": 100.0}
    job = client.fine_tuning.jobs.create(
        model="upbeat-demo",
        training_file=file.id,
        method={"type": "supervised", "supervised": {"hyperparameters": hyper}},
        seed=1,
        suffix="harbour",
    )
    return job.id


def shown(stack: Stack, name: str) -> list[Any]:
    fleet = httpx.get(f"{stack.url}/v1/fleet", timeout=30).json()
    return [model for node in fleet["nodes"] for model in node["models"] if model["name"] == name]


def events(client: openai.OpenAI, job_id: str) -> list[str]:
    return [event.message for event in client.fine_tuning.jobs.list_events(job_id, limit=100)]


@pytest.mark.sample
def test_what_was_trained_is_served_on_every_node_and_removed_while_conversations_go_on(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)
    with Talking(stack.url) as talking:
        job_id, until = trained(client), time.monotonic() + LONGEST_S
        while (job := client.fine_tuning.jobs.retrieve(job_id)).status not in ("succeeded", "failed"):
            assert time.monotonic() < until, (job.status, events(client, job_id), stack.last_words())
            time.sleep(1)
        assert job.status == "succeeded", events(client, job_id)
        name = job.fine_tuned_model
        assert name is not None and name.startswith("upbeat-demo:harbour-")
        before, until = talking.answers, time.monotonic() + LONGEST_S
        while len(shown(stack, name)) < 2:
            assert time.monotonic() < until, (events(client, job_id), stack.last_words())
            time.sleep(0.5)
        time.sleep(2)
        known = {model["fingerprint"] for model in shown(stack, "upbeat-demo")}
        own = {model["fingerprint"] for model in shown(stack, name)}
        assert len(known) == len(own) == 1 and not known & own, "models of unequal weights share no KV"
        said = {model: Chat(stack.url, f"ask-{model}", model=model, max_tokens=12).say(ASKED) for model in (name, "")}
        assert said[name].text != said[""].text
        again = Chat(stack.url, "talk-0", model=name, max_tokens=4)  # the session of another model
        assert again.say(script(1, 4)[0]).cached_tokens == 0
        words = stack.log.read_text()
        assert words.count("to be started again") == 2, words
        assert client.models.delete(name).deleted
        until = time.monotonic() + LONGEST_S
        while name in (model.id for model in client.models.list().data):
            assert time.monotonic() < until, (events(client, job_id), stack.last_words())
            time.sleep(0.5)
        with pytest.raises(openai.NotFoundError):
            Chat(stack.url, model=name).say(ASKED)
    assert not talking.failures and talking.answers > before
    told = events(client, job_id)
    assert {f"served as {name} on node-{n}" for n in range(2)} <= set(told), told
    words = stack.log.read_text()
    assert words.count("to be started again") == 4 and "ended with status" not in words, words


def test_a_model_that_cannot_be_loaded_is_left_out_and_its_base_is_served(tmp_path: Path) -> None:
    damaged = tmp_path / "merged"
    shutil.copytree(DEMO, damaged)
    said = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(said | {"upbeat_adapter": "a" * 64}))
    (damaged / "model.safetensors").write_bytes(b"no weights")
    stack = Stack(model=DEMO, nodes=1, directory=tmp_path / "stack", hbm_gib=0.25, dram_gib=0.1)
    adopt(load_config(None, {"model": str(DEMO), "data": stack.data}), "upbeat-demo:bad", "upbeat-demo", damaged)
    with stack:
        assert Chat(stack.url, "s", max_tokens=4).say("Hello.").text
        assert shown(stack, "upbeat-demo") and not shown(stack, "upbeat-demo:bad")
        words = stack.log.read_text()
        assert words.count("to be started again") == 1 and "ended with status" not in words
