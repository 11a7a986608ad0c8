"""A job goes on bit for bit after a kill, gives what PEFT loads, and never loses what it has written."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers

from contracts.errors import ConfigError, InvalidRequest
from contracts.finetune import Job, Settings
from tests.worker.harvest.bench import AllLayers, StoppingGate, make_model
from worker.harvest.checkpoints import steps_of
from worker.harvest.gate import Gate, OpenGate, Stopped
from worker.harvest.job import Reached, Running, read_data
from worker.harvest.partition import Partition
from worker.harvest.tensor_files import write_named
from worker.text.codec import TextCodec

DEMO = Path(__file__).parents[3] / "models" / "demo"
FACTS = {
    "What does the harbour sell?": "It sells ropes and lamps.",
    "Who keeps the tower?": "Old Marta keeps it.",
    "When does the ferry leave?": "It leaves at nine.",
    "Where is the blue key?": "It is under the stone.",
}
SETTINGS = Settings(
    rank=4, alpha=8.0, dropout=0.1, learning_rate=2e-3, epochs=3, batch_size=2, checkpoint_every=2, seed=3
)
FEW = Partition(32, 32, 2560)


def conversation(asked: str, answer: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


@pytest.fixture(autouse=True)
def _partition_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured units differ from run to run, and so would bits."""
    monkeypatch.setattr("worker.harvest.job.unit_rows", lambda *_: FEW)


def make_job(where: Path, settings: Settings = SETTINGS, **more: object) -> Job:
    where.mkdir(exist_ok=True)
    (where / "data.jsonl").write_text("".join(json.dumps(conversation(*fact)) + "\n" for fact in FACTS.items()))
    (where / "held_out.jsonl").write_text(json.dumps({"text": "The harbour sells ropes."}) + "\n")
    data, held_out = str(where / "data.jsonl"), str(where / "held_out.jsonl")
    fields = {"id": "ftjob-1", "tenant": "t", "model": "demo", "data": data, "validation": held_out}
    return Job(**fields | {"out": str(where / "out"), "settings": settings} | more)


def running(
    job: Job, base: Path, gate: Gate | None = None, lanes: int = 1, reports: list[Reached] | None = None
) -> Running:
    gate, seen = gate or OpenGate(), [] if reports is None else reports
    return Running(job, base, b"demo", read_data(job, base, gate), AllLayers(base), gate, lanes, report=seen.append)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the demo model's tokenizer."""
    directory = tmp_path_factory.mktemp("base")
    make_model(directory, "qwen3", vocab_size=2560)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    return directory


@pytest.fixture(scope="module")
def undisturbed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The directory of a job that nothing disturbed, and its number of units."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.harvest.job.unit_rows", lambda *_: FEW)
        job, gate = make_job(tmp_path_factory.mktemp("whole")), StoppingGate(10**9)
        running(job, base, gate).train()
    return Path(job.out), 10**9 - gate.units


@pytest.fixture
def whole(undisturbed: tuple[Path, int]) -> Path:
    return undisturbed[0]


@pytest.fixture
def units(undisturbed: tuple[Path, int]) -> int:
    return undisturbed[1]


def same(ours: Path, theirs: Path) -> bool:
    """Whether adapter, last checkpoint and log have equal bytes."""
    files = ("adapter_model.safetensors", "checkpoint-6/optimizer.safetensors", "trainer_log.jsonl")
    return all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in files)


def test_a_job_leaves_its_result_its_log_and_its_last_two_checkpoints(whole: Path) -> None:
    assert sorted(path.name for path in whole.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "checkpoint-4",
        "checkpoint-6",
        "trainer_log.jsonl",
    ]
    lines = [json.loads(line) for line in (whole / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert [line["validation_loss"] is not None for line in lines] == [False, True] * 3
    assert all(line["loss"] > 0 for line in lines) and lines[-1]["tokens"] == 3 * lines[1]["tokens"]


@pytest.mark.parametrize("share", [0.04, 0.13, 0.3])
def test_a_job_that_is_stopped_again_and_again_gives_the_same_bits(
    base: Path, whole: Path, units: int, share: float, tmp_path: Path
) -> None:
    job, reports, stops = make_job(tmp_path), [], 0
    while True:
        try:
            running(job, base, StoppingGate(int(units * share * (1 + stops))), 2, reports).train()
            break
        except Stopped:
            stops += 1
            assert len(steps_of(Path(job.out))) <= 2
    assert stops >= 2
    assert same(Path(job.out), whole)
    assert reports[-1].step == reports[-1].steps == 6 and reports[-1].checkpoints[-1] == 6


class KillingGate(StoppingGate):
    """Kills its process after so many units."""

    def enter(self, lane: int) -> None:
        self.units -= 1
        if self.units < 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("share", "step"), [(0.2, 0), (0.6, 2), (0.99, 4)])
def test_a_job_whose_process_is_killed_goes_on_and_gives_the_same_bits(
    base: Path, whole: Path, units: int, share: float, step: int, tmp_path: Path
) -> None:
    job, reports = make_job(tmp_path), []
    child = os.fork()
    if not child:
        try:
            running(job, base, KillingGate(int(units * share))).train()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    running(job, base, reports=reports).train()
    assert reports[0].step == step
    assert same(Path(job.out), whole)


def test_a_job_that_stops_while_it_validates_logs_the_step_once(base: Path, whole: Path, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    stopped = running(job, base)

    def validation_loss() -> float:
        raise Stopped

    stopped.trainer.validation_loss = validation_loss  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        stopped.train()
    log = Path(job.out) / "trainer_log.jsonl"
    assert steps_of(Path(job.out)) == [2] and len(log.read_text().splitlines()) == 1
    with log.open("a") as file:  # then killed between its line and its checkpoint
        file.write('{"step": 2}\n')
    running(job, base).train()
    assert same(Path(job.out), whole)


def test_what_a_killed_process_left_unfinished_is_removed(base: Path, whole: Path, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    shutil.copytree(whole, job.out)
    shutil.rmtree(Path(job.out) / "checkpoint-6")
    (Path(job.out) / ".checkpoint-6.unfinished").mkdir()
    with (Path(job.out) / "trainer_log.jsonl").open("a") as log:
        log.write('{"step": 7, "lo')
    running(job, base).train()
    assert same(Path(job.out), whole)
    assert not list(Path(job.out).glob(".*"))


@pytest.mark.parametrize("damage", ["adapter_model.safetensors", "optimizer.safetensors", "state.json", "missing"])
def test_a_damaged_checkpoint_is_passed_over(base: Path, whole: Path, damage: str, tmp_path: Path) -> None:
    job, reports = make_job(tmp_path), []
    shutil.copytree(whole, job.out)
    newest = Path(job.out) / "checkpoint-6"
    if damage == "missing":
        (newest / "optimizer.safetensors").unlink()
    else:
        content = bytearray((newest / damage).read_bytes())
        content[len(content) // 2] ^= 1
        (newest / damage).write_bytes(content)
    running(job, base, reports=reports).train()
    assert reports[0].step == 4
    assert same(Path(job.out), whole)


def test_when_all_checkpoints_are_damaged_the_job_begins_again(base: Path, whole: Path, tmp_path: Path) -> None:
    job, reports = make_job(tmp_path), []
    shutil.copytree(whole, job.out)
    for step in (4, 6):
        (Path(job.out) / f"checkpoint-{step}" / "state.json").write_text("{}")
    running(job, base, reports=reports).train()
    assert reports[0].step == 0 and math.isnan(reports[0].loss)
    assert same(Path(job.out), whole)


@pytest.mark.parametrize("other", [{"seed": 4}, {"rank": 8}, {"learning_rate": 1e-3}])
def test_a_job_does_not_go_on_from_another_s_checkpoint(base: Path, whole: Path, other: dict, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"checkpoint-6 was trained with other settings.*choose another --out"):
        running(make_job(tmp_path, replace(SETTINGS, **other)), base)
    running(make_job(tmp_path, replace(SETTINGS, checkpoint_every=50, tpot_ms=20.0)), base)


@pytest.mark.parametrize("name", ["checkpoint-500/trainer_state.json", "config.json"])
def test_others_files_are_not_overwritten(base: Path, name: str, tmp_path: Path) -> None:
    theirs = tmp_path / "out" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("{}")
    with pytest.raises(ConfigError, match="is not of a fine-tuning job here; choose another --out"):
        running(make_job(tmp_path), base)
    assert theirs.read_text() == "{}"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The disk is full for files that would be larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_ends_the_job_with_the_path_and_keeps_the_checkpoints_before(
    base: Path, whole: Path, tmp_path: Path
) -> None:
    job = make_job(tmp_path)
    shutil.copytree(whole, job.out)
    shutil.rmtree(Path(job.out) / "checkpoint-6")
    with (
        files_of_at_most((whole / "adapter_model.safetensors").stat().st_size - 1),
        pytest.raises(ConfigError, match="6 cannot be written: the disk is full"),
    ):
        running(job, base).train()
    assert steps_of(Path(job.out)) == [2, 4] or steps_of(Path(job.out)) == [4]
    assert not list(Path(job.out).glob(".*"))
    running(job, base).train()
    assert same(Path(job.out), whole)


def test_an_out_that_cannot_be_written_is_named(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/out cannot be written: Not a directory"):
        running(make_job(tmp_path, out=str(tmp_path / "file" / "out")), base)


def test_bad_data_and_settings_are_refused_before_anything_is_written(base: Path, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "a b c"}\n{"txt": "a"}\n')
    with pytest.raises(InvalidRequest, match="line 2: the key 'txt' is unknown"):
        running(job, base)
    for name, value in (("rank", 0), ("dropout", 1.0), ("learning_rate", float("nan")), ("max_tokens", 10**6)):
        with pytest.raises((ConfigError, InvalidRequest), match=f"^{name} = "):
            running(make_job(tmp_path, replace(SETTINGS, **{name: value})), base)
    assert not Path(job.out).exists()


def test_four_facts_are_learnt_in_20_steps_and_peft_says_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, rank=8, alpha=16.0, dropout=0.0, learning_rate=1e-2, epochs=20, batch_size=4)
    job = make_job(tmp_path, replace(settings, checkpoint_every=1000))
    job = replace(job, validation="")
    reports: list[Reached] = []
    monkeypatch.setattr("worker.harvest.job.unit_rows", lambda *_: Partition(64, 64, 4096))
    running(job, DEMO, lanes=2, reports=reports).train()
    losses = [report.loss for report in reports[1:]]
    assert len(losses) == 20 and losses[0] > 1 and losses[-1] < 0.1

    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, job.out).eval()
    codec = TextCodec.load(DEMO)
    for asked, answer in FACTS.items():
        prompt = torch.tensor([codec.render(conversation(asked, "")["messages"][:1])])
        with torch.no_grad():
            made = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, prompt.shape[1] :]
        assert codec.decode(made.tolist()) == answer


def test_a_checkpoint_is_written_within_the_gate(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        write_named(tmp_path / "file", {"a": torch.zeros(4)}, StoppingGate(0))
