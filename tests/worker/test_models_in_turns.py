"""Models that share a real device: what fails on the way of one model's weights is said, and the others go on."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.errors import ConfigError
from contracts.frames import StepFrame
from contracts.models import ModelState
from contracts.request import GenerateRequest, Sampling
from runtime.config_file import load_config
from runtime.registry import as_only
from tests.worker.engine_harness import CHUNK, tiny_model
from tests.worker.virtual_links import Pace, PacedLink
from worker.devices.device import choose_device
from worker.engine import failpoints
from worker.engine.device_loop import DeviceLoop
from worker.engine.engine import Cancel, Submit
from worker.memory.preparing import Preparing
from worker.models import filling
from worker.models.other_links import OtherLinks
from worker.models.weights import WeightSpan
from worker.serving import Served, present, serve_all

#: By default the device holds one of the models at a time.
GRANULE = 64 << 10
MODELS = ("one", "two")
#: Bytes per second of a link.
_PACE = 2e7
_numbers = itertools.count()


class Answers:
    """A gateway's stream: tokens by request, and how each ended."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self._changed = threading.Condition()

    def put(self, frame: StepFrame) -> None:
        with self._changed:
            for output in frame.outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.tokens)
                if output.finish_reason:
                    self.ends[output.request_id] = output.finish_reason
            for failed in frame.failed:
                self.ends[failed.request_id] = str(failed.error)
            self._changed.notify_all()

    def wait(self, name: str) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self.ends, 30), f"{name} is not answered"
        assert self.ends[name] == "length", self.ends[name]
        return self.tokens[name]


class Running:
    """Models on a device, whose loop runs."""

    def __init__(self, served: Served, loop: DeviceLoop) -> None:
        assert served.placing is not None
        self.served, self.loop, self.placing, self.answers = served, loop, served.placing, Answers()
        self.residency = served.placing.residency

    def submit(self, model: str, tokens: int = 8, prompt: list[int] | None = None) -> str:
        name = f"r{next(_numbers)}"
        prompt = prompt or [5 + n % 60 for n in range(40)]
        sampling = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = GenerateRequest(name, "t", name, model, sampling, prompt_tokens=prompt)
        self.engine(model).inbox.put(Submit(request, prompt, tokens, self.answers))
        return name

    def engine(self, model: str) -> Any:
        return next(each.engine for each in self.served.servings if each.image.name == model)

    def ask(self, model: str) -> list[int]:
        return self.answers.wait(self.submit(model))

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline, {m.name: m.state for m in self.residency.models.values()}
            time.sleep(0.005)

    def state(self, model: str) -> ModelState:
        return self.residency.models[model].state


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def running(
    directory: Path,
    tmp_path: Path,
    *,
    hbm_mib: float = 3.5,
    pinned: str = "",
    shm_dir: Path | None = None,
    links: Sequence[PacedLink] = (),
    **worker: Any,
) -> Iterator[Running]:
    """Two models with their own files; `worker`: settings. links: of other devices, each as fast as the own one."""
    models: dict[str, Any] = {}
    for name in MODELS:
        shutil.copytree(directory, tmp_path / name)
        models[name] = {"path": str(tmp_path / name), "pinned": name == pinned}
    config = load_config(
        None,
        {
            "models": models, "sharing": "prism", "data": tmp_path / "data", "run_dir": tmp_path / "run",
            "shm_dir": shm_dir or tmp_path / "shm",
            "kv": {"hbm_gib": hbm_mib / 1024, "cache": False, "chunk_tokens": CHUNK},
            "worker": {"granule_bytes": GRANULE, "device": "cpu", "profile": "off", "kernels": "torch"} | worker,
        },
    )  # fmt: skip
    torch.set_grad_enabled(False)
    each = as_only(config, 0)
    device = choose_device(config, 1, [of.model for of in each.values()])
    if links:
        device.others, device.copy = OtherLinks(links), Pace(_PACE).copy
    served = serve_all(each, device, 1, lambda tenant: b"salt")
    preparing = Preparing(device.memory)

    def prepare() -> bool:
        assert all(serving.engine.core.quiet for serving in served.servings), "a request waits meanwhile"
        return preparing.turn()

    engines = [serving.engine for serving in served.servings]
    loop = DeviceLoop(engines, placing=served.placing, prepare=prepare)
    crashes = list[BaseException]()
    loop.on_crash = crashes.append
    loop.start()
    for serving in served.servings:
        serving.loader.start()
    try:
        yield Running(served, loop)
        assert not crashes
    finally:
        loop.stop()
        for serving in served.servings:
            serving.loader.stop()
        served.close()
    device.memory.validate()
    assert not list((tmp_path / "shm").glob("*"))


def test_models_answer_in_turns_with_images(directory: Path, tmp_path: Path) -> None:
    with running(directory, tmp_path) as r:
        memory = r.served.servings[0].executor.kv.memory
        assert memory.free
        r.until(lambda: memory.ledger.warm == memory.free)  # idle time is used
        assert len(r.served.images) == 2 or r.served.images[0].bytes, "same weights may share one image"
        said = [r.ask(name) for _ in range(2) for name in MODELS]
        assert all(each == said[0] for each in said), "they have the same weights"
        assert sum(each.evictions for each in r.residency.models.values()) >= 3


def test_weights_that_come_over_several_links_answer_the_same(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES", 1)
    with running(directory, tmp_path / "one link") as r:
        said = r.ask("one")
    links = [PacedLink("a", _PACE), PacedLink("b", _PACE, fails_after=10)]
    with running(directory, tmp_path / "three links", links=links) as r:
        assert all(r.ask(name) == said for _ in range(3) for name in MODELS)
        assert links[1].left == 0, "one failed on the way"
    assert not any(link.buffers for link in links)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_pages_of_an_answer_that_goes_on_move_out_of_the_way_of_weights(
    directory: Path, tmp_path: Path, kernels: str
) -> None:
    """Two answers fill slabs together. When one has ended, weights get the memory of its half; nobody is preempted."""
    prompts = [[7 + (n * k) % 60 for n in range(40)] for k in (1, 3)]

    def said(r: Running, disturbed: bool) -> list[list[int]]:
        short, long = (r.submit("one", n, prompt) for n, prompt in zip((400, 700), prompts, strict=True))
        r.until(lambda: short in r.answers.ends)
        if disturbed:
            r.ask("two")
            assert long not in r.answers.ends
        return [r.answers.wait(name) for name in (short, long)]

    with running(directory, tmp_path / "alone", hbm_mib=16, kernels=kernels) as r:
        expected = said(r, disturbed=False)
        weights = r.residency.models["one"].granules
    slabs = 4 * -(-2 * 440 // CHUNK // 16)
    memory = 2 * weights + slabs // 2 + 4
    with running(directory, tmp_path / "shared", hbm_mib=memory * GRANULE / 2**20, kernels=kernels) as r:
        assert said(r, disturbed=True) == expected
        one = r.engine("one")
        assert one.executor.moves and not one.core.scheduling.preemptions


@pytest.mark.parametrize(("failing", "images_gib"), [("no room", 0), ("no directory", None), ("no directory", 1)])
def test_without_images_weights_come_from_the_checkpoint_also_when_it_has_vanished(
    directory: Path, tmp_path: Path, failing: str, images_gib: float | None
) -> None:
    (tmp_path / "file").touch()
    settings: dict[str, Any] = (
        {"images_gib": 0}
        if failing == "no room"
        else {"shm_dir": tmp_path / "file" / "below", "images_gib": images_gib}
    )
    with running(directory, tmp_path, **settings) as r:
        assert not r.served.images
        said = [r.ask(name) for name in MODELS]
        shutil.rmtree(tmp_path / "one")
        assert [r.ask(name) for _ in range(2) for name in MODELS] == said * 2


def test_weights_that_cannot_come_are_tried_again_and_the_other_model_goes_on(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(directory, tmp_path, images_gib=0) as r:
        said = r.ask("two")
        r.ask("one")
        r.ask("two")
        broken, pack = threading.Event(), WeightSpan.pack_into
        broken.set()

        def pack_into(span: WeightSpan, views: dict[str, torch.Tensor]) -> None:
            if broken.is_set() and span.span.owner.name == "one":
                raise OSError(5, "Input/output error")
            pack(span, views)

        monkeypatch.setattr(WeightSpan, "pack_into", pack_into)
        waiting = r.submit("one")
        r.until(lambda: r.residency.models["one"].failures >= 2)
        assert waiting not in r.answers.ends
        assert r.ask("two") == said
        broken.clear()
        assert r.answers.wait(waiting) == said


def test_a_request_that_leaves_while_its_weights_come_leaves_a_device_that_serves(
    directory: Path, tmp_path: Path
) -> None:
    failpoints.arm({"model.piece": "delay:100"})
    try:
        with running(directory, tmp_path) as r:
            said = r.ask("two")
            for _ in range(2):
                name = r.submit("one")
                r.until(lambda: r.state("one") is ModelState.LOADING)
                r.engine("one").inbox.put(Cancel(name))
                other = r.submit("two")
                assert r.answers.wait(other) == said
                assert r.answers.ends[name] == "cancelled"
    finally:
        failpoints.arm({})


def test_a_model_that_could_never_be_here_stops_the_start_with_the_remedy(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"beside one, which is pinned, .* raise it, or pin fewer"):  # noqa: SIM117
        with running(directory, tmp_path, pinned="one"):
            pass


def test_no_request_may_be_longer_than_memory_beside_its_own_weights(directory: Path, tmp_path: Path) -> None:
    with running(directory, tmp_path) as r:
        for serving in r.served.servings:
            rest = r.residency.balloon.granules - r.residency.models[serving.image.name].granules
            assert serving.max_tokens * serving.image.shape.chunk_bytes // CHUNK <= rest * GRANULE


def test_a_start_goes_on_without_a_model_whose_directory_is_gone_unless_it_is_the_only_one(tmp_path: Path) -> None:
    models = {name: {"path": str(tmp_path / name)} for name in MODELS}
    config = load_config(None, {"models": models, "data": tmp_path, "run_dir": tmp_path})
    (tmp_path / "one").mkdir()
    assert list(present(as_only(config, 0))) == ["one"]
    (tmp_path / "one").rmdir()
    assert list(present(as_only(config, 0))) == ["one", "two"], "the start then says what is missing"
