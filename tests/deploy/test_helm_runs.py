"""What the chart makes is run for real: every pod's commands, files, certificates and probes, as processes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from contracts.api_keys import hashed
from tests.deploy.helm import Rendered, helm, template
from tests.deploy.kubelet import GATEWAY, Kubelet

pytestmark = [pytest.mark.slow, pytest.mark.sample, pytest.mark.stack, pytest.mark.timeout(600)]
KEY = "upb-a-key-that-only-this-test-knows-of"
URL = f"http://{GATEWAY}:8080"
#: Two nodes in two pools, small, on one disk.
VALUES = {
    "gateway": {"replicas": 1, "apiKeys": [{"key": hashed(KEY)}]},
    "nodes": {
        "pools": [{"name": "a", "count": 1}, {"name": "b", "count": 1}],
        "dramGib": 0.25,
        "hbmGib": 0.25,
        "disk": {"sizeGib": 4},
        "worker": {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "0.5", "memory": "1Gi"}}},
    },
    "blob": {"volume": {"persistentVolumeClaim": {"claimName": "blob"}}},
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    folder = tmp_path_factory.mktemp("helm")
    (folder / "values.yaml").write_text(yaml.safe_dump(VALUES))
    done = template("minimal", "--values", str(folder / "values.yaml"))
    assert done.returncode == 0, done.stderr
    shm = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else folder
    arenas = Path(tempfile.mkdtemp(prefix="upbeat-helm-", dir=shm))
    made = Kubelet(Rendered(done.stdout), folder, arenas)
    try:
        made.start()
        yield made
    finally:
        made.stop(60)
        shutil.rmtree(arenas)


def ask(method: str, path: str, **sent: object) -> httpx.Response:
    with httpx.Client(timeout=120, trust_env=False) as client:
        return client.request(method, URL + path, headers={"authorization": f"Bearer {KEY}"}, json=sent or None)


def wait_until_all_serve(fleet: Kubelet) -> None:
    until = time.monotonic() + 300
    while True:
        ended = [one.name for one in fleet.running if one.process.poll() is not None]
        assert not ended and time.monotonic() < until, f"{ended}\n{fleet.logs()}"
        try:
            if ask("GET", "/ready?all=1").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)


def test_pods_find_each_other_answer_pass_their_probes_and_stop(fleet: Kubelet) -> None:
    wait_until_all_serve(fleet)
    model = ask("GET", "/v1/models").json()["data"][0]["id"]
    said = [{"role": "user", "content": "My name is Ada. " * 40}]
    nodes = set()
    for turn in range(2):
        answer = ask(
            "POST", "/v1/chat/completions", model=model, messages=said, max_tokens=8, temperature=0, session_id="s"
        )
        assert answer.status_code == 200, answer.text + fleet.logs()
        nodes.add(answer.headers["x-upbeat-node"])
        usage = answer.json()["usage"]
        assert turn == 0 or usage["prompt_tokens_details"]["cached_tokens"] > 0
        said += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    assert nodes <= {"node-0", "node-1"}
    without = httpx.get(f"{URL}/v1/models", trust_env=False)
    assert without.status_code == 401, "keys come from the secret, not from the configuration"
    for one in fleet.running:
        if "exec" in one.container["readinessProbe"]:
            assert one.probe("readiness") and (one.name != "up-upbeat-a-0/kvstore" or one.probe("liveness")), one.name
    other = next(one for one in fleet.running if one.name.endswith("a-0/kvstore"))
    wrong = [part.replace("node-$NODE", "node-9") for part in other.container["readinessProbe"]["exec"]["command"]]
    other.container = other.container | {"readinessProbe": {"exec": {"command": wrong}}}
    assert not other.probe("readiness"), "another node's certificate is not accepted"
    assert set(fleet.stop(60).values()) == {0}, fleet.logs()


def test_the_chart_can_be_packaged(tmp_path: Path) -> None:
    done = helm("package", "deploy/helm/upbeat", "--destination", str(tmp_path))
    assert done.returncode == 0 and len(list(tmp_path.glob("upbeat-*.tgz"))) == 1
