"""The YAML files of a comparison: targets and workloads. Errors name file, key, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from contracts.errors import ConfigError
from loadtest.balance import Balance
from runtime.gateway_config import STRICT

_Share = Annotated[float, Field(ge=0, le=1)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NAME = r"^[A-Za-z0-9._+ -]{1,48}$"


class UpbeatSection(BaseModel):
    """A stack of ours, started afresh for each repeat."""

    model_config = STRICT
    #: recompute, sticky or balanced (loadtest/policies.py), or a placement policy, then with cache and without hints.
    policy: str = "balanced"
    #: Override the policy.
    hints: bool | None = None
    cache: bool | None = None
    nodes: int = Field(default=2, ge=1, le=256)
    #: A Hugging Face directory; the bundled model when left out.
    model: Path | None = None
    hbm_gib: _Positive | None = None
    dram_gib: _Positive | None = None
    #: As in the stack's configuration file.
    settings: dict[str, Any] = {}
    ready_s: _Positive = 300.0


class ProcessSection(BaseModel):
    """A program to start, in `count` instances. Placeholders: docs/bench.md."""

    model_config = STRICT
    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")
    command: list[str] = Field(min_length=1)
    count: int = Field(default=1, ge=1, le=64)
    env: dict[str, str] = {}
    #: Environment variables that it does not inherit.
    unset: list[str] = []
    #: A URL that answers 200 once it serves.
    ready: str = ""
    ready_s: _Positive = 600.0
    #: URL of its OpenAI API; empty: it has none.
    serves: str = ""


class TargetFile(BaseModel):
    """A target: `url`, `upbeat` or `start`, and settings of its requests."""

    model_config = STRICT
    name: str = Field(default="", pattern=r"^$|" + _NAME)
    url: str | list[str] | None = None
    upbeat: UpbeatSection | None = None
    start: list[ProcessSection] | None = None
    #: The model's name in the API; empty: the first that the target lists.
    model: str = ""
    #: How requests are distributed over several addresses.
    balance: Balance = "round-robin"
    #: Whether it accepts advisories, the field `priority`, and agents' headers. Default: no; of `upbeat`: by the
    #: policy, yes, and as `hints`.
    hints: bool | None = None
    priorities: bool | None = None
    workflows: bool | None = None
    #: Fields that every request has, such as `chat_template_kwargs`.
    body: dict[str, Any] = {}
    #: Environment variable of the API key, and those by the workload's tenants.
    api_key_env: str = ""
    tenant_key_envs: dict[str, str] = {}
    #: The target's names for the workload's models.
    models: dict[str, str] = {}
    timeout_s: _Positive = 900.0
    #: Added to the report.
    versions: dict[str, str] = {}
    workload: WorkloadSection | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in ("url", "upbeat", "start") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a target has one of url, upbeat and start; this one has {' and '.join(given) or 'none'}")
        if self.start is not None and not any(process.serves for process in self.start):
            raise ValueError("no process of start has serves; give the address at which one serves the OpenAI API")
        return self

    @field_validator("url")
    @classmethod
    def _addresses(cls, value: str | list[str] | None) -> str | list[str] | None:
        for url in [value] if isinstance(value, str) else value or []:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no address; give one such as http://127.0.0.1:8000 (without /v1)")
        return value


class HintsSection(BaseModel):
    """Imperfect hints: shares of requests (loadtest/habits.py)."""

    model_config = STRICT
    missed: _Share = 0.0
    late: _Share = 0.0
    late_s: _Positive = 5.0
    early: _Share = 0.0
    early_s: _Positive = 30.0
    #: Hints without a request, per request.
    spurious: float = Field(default=0.0, ge=0, le=100)
    #: Whether hints give the expected arrival.
    expected: bool = True


class GenerateSection(BaseModel):
    """Generated conversations (loadtest/generate_trace.py)."""

    model_config = STRICT
    sessions: int = Field(default=200, ge=1)
    sessions_per_s: _Positive = 0.4
    mean_turns: float = Field(default=3.0, ge=1)
    mean_prompt_tokens: _Positive = 3000.0
    #: The shape of the gamma distribution of gaps: 1 is Poisson, less is burstier.
    burstiness: float = Field(default=1.0, gt=0, le=100)
    lengths: Literal["log-normal", "zipf"] = "log-normal"


class AgentsSection(BaseModel):
    """Projects of a team of agents (loadtest/agents.py)."""

    model_config = STRICT
    projects: int = Field(default=8, ge=1)
    files: int = Field(default=4, ge=1, le=64)
    every_s: float = Field(default=0.0, ge=0)


class PrefillHeavySection(BaseModel):
    """Fixed prompt and answer lengths of every turn (SYMPHONY, figure 18)."""

    model_config = STRICT
    prompt_tokens: int = Field(default=1024, ge=2)
    answer_tokens: int = Field(default=1, ge=1)


class SloSection(BaseModel):
    """Latency objective of requests that count for goodput."""

    model_config = STRICT
    ttft_s: _Positive | None = None
    tpot_s: _Positive | None = None


class WorkloadSection(BaseModel):
    """A workload: exactly one of `trace`, `generate` and `agents`. Several `users` or `time_scales` are
    several loads."""

    model_config = STRICT
    trace: Path | None = None
    generate: GenerateSection | None = None
    agents: AgentsSection | None = None
    #: open: jobs begin at their times. closed: a fixed number of users.
    loop: Literal["open", "closed"] = "open"
    users: list[Annotated[int, Field(ge=1)]] = []
    #: About this many requests a user of a closed loop, in whole conversations; the same for every target. None: all.
    requests_per_user: int | None = Field(default=None, ge=1)
    #: All times are multiplied by this: arrivals, reading and typing.
    time_scales: list[_Positive] = Field(default=[1.0], min_length=1)
    #: No request starts later.
    seconds: _Positive | None = None
    #: A target whose mean end-to-end time at one load exceeds this skips the later loads.
    give_up_s: _Positive | None = None
    #: Users of a closed loop start within this time; None: 10 s of the trace's time.
    begin_within_s: float | None = Field(default=None, ge=0)
    #: Requests sent earlier are not counted.
    warm_up_s: float = Field(default=0.0, ge=0)
    requests: int = Field(default=200, ge=1)
    min_turns: int = Field(default=1, ge=1)
    #: Words a trace token; None: the longest session just fits `max_context_tokens`, or else the model's limit.
    length_scale: _Positive | None = None
    max_context_tokens: int | None = Field(default=None, ge=64)
    max_answer_tokens: int | None = Field(default=None, ge=1)
    #: words: derived from block ids. trace: the trace's own texts, if it has any.
    text: Literal["words", "trace"] = "words"
    prefill_heavy: PrefillHeavySection | None = None
    hints: HintsSection = HintsSection()
    #: Share of jobs with priority -1.
    urgent: _Share = 0.0
    #: Shares of the jobs, by name.
    tenants: dict[str, _Positive] = {}
    models: dict[str, _Positive] = {}
    slo: SloSection | None = None
    #: Directory of the tested model: gives its context limit, and a word of its tokenizer that all answers repeat, so
    #: that they have fixed lengths and tokenise alike in the next prompt. None: the models' own answers.
    model_directory: Path | None = None
    seed: int = 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("trace", "generate", "agents") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a workload has one of trace, generate and agents; this one has {' and '.join(given) or 'none'}"
            )
        if (self.loop == "closed") != bool(self.users):
            raise ValueError(
                "users are given with loop: closed, and only then; give, say, loop: closed and users: [4, 8]"
            )
        if self.loop == "open" and self.begin_within_s is not None:
            raise ValueError(
                "begin_within_s is of users in a closed loop; in an open one jobs begin at their times: leave it out"
            )
        if self.loop == "closed" and len(self.time_scales) > 1:
            raise ValueError("time_scales has several values in a closed loop; give one, and several users")
        if (
            self.agents is None
            and self.length_scale is None
            and self.max_context_tokens is None
            and self.model_directory is None
        ):
            raise ValueError(
                "nothing says how long prompts may be; give length_scale, max_context_tokens or model_directory"
            )
        return self


TargetFile.model_rebuild()


def load_target(path: Path) -> TargetFile:
    """A target from `path`; its default name is the file's. Raises ConfigError."""
    target = _parsed(TargetFile, _read(path), path)
    return target if target.name else target.model_copy(update={"name": path.stem})


def load_workload(path: Path) -> WorkloadSection:
    """A workload from `path`: at the top level, or under `workload`. Raises ConfigError."""
    data = _read(path)
    return _parsed(WorkloadSection, data["workload"] if isinstance(data.get("workload"), dict) else data, path)


def one_workload(targets: list[TargetFile], given: WorkloadSection | None) -> WorkloadSection:
    """The workload of a comparison: `given`, or else the one that the targets have. Raises ConfigError if
    they differ."""
    if given is not None:
        return given
    found = [(t.name, t.workload) for t in targets if t.workload is not None]
    if not found:
        raise ConfigError("no target has a workload section; give --workload FILE, or one target a workload section")
    for name, workload in found[1:]:
        if workload != found[0][1]:
            raise ConfigError(f"the workloads of {found[0][0]} and {name} differ; keep one, or give --workload FILE")
    return found[0][1]


_Section = TypeVar("_Section", bound=BaseModel)
#: Keys with paths relative to their file.
_PATHS = {"trace", "model_directory", "model"}


def _parsed(kind: type[_Section], data: dict[str, Any], path: Path) -> _Section:
    try:
        return kind.model_validate(_beside(data, path.absolute().parent))
    except ValidationError as e:
        lines = []
        for item in e.errors():
            key = ".".join(str(part) for part in item["loc"]) or "the file"
            remedy = (
                "is no key here; remove it or correct its spelling"
                if item["type"] == "extra_forbidden"
                else item["msg"]
            )
            lines.append(
                f"{key} = {str(item['input'])[:120]!r}: {remedy.removeprefix('Value error, ')}"
                if item["loc"]
                else remedy
            )
        raise ConfigError(f"{path}: " + "; ".join(lines)) from e


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}; give a readable YAML file") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not YAML: {e}") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping, such as `url: http://127.0.0.1:8000`")
    return data


def _beside(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`data` with the paths of the workload and of `upbeat` made relative to `folder`."""
    made = dict(data)
    for key, value in data.items():
        if key in ("workload", "upbeat") and isinstance(value, dict):
            made[key] = _beside(value, folder)
        elif key in _PATHS and isinstance(value, str) and not (key == "model" and _is_target(data)):
            made[key] = folder / Path(value).expanduser()
    return made


def _is_target(data: dict[str, Any]) -> bool:
    """Whether `model` in `data` is a name, not a directory."""
    return any(name in data for name in ("url", "upbeat", "start"))
