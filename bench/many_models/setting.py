"""The models, their memory and their requests. Pure, except for writing the models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.many_models import generate, multiplied
from loadtest.plans import PlannedSession
from loadtest.random_model import SHAPES, make_random_model, weight_bytes
from loadtest.sessions import find_sessions
from loadtest.traces import TraceRequest
from loadtest.workload import plan, salted

#: Tokens of the longest request, and means.
LONGEST, PROMPT, ANSWER = 800, 250, 100
#: Seconds of the load a second of the trace.
TIME_SCALE = 1 / 20
LIKE = "hyperbolic"
_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """shapes: of the models, by name. at_once: longest requests of each model that are counted as its KV. share: of
    weights and KV that fits."""

    shapes: dict[str, str]
    at_once: int
    share: float
    seconds: float

    @property
    def weight_bytes(self) -> int:
        """Weights of all models."""
        return sum(_weight_bytes(shape) for shape in self.shapes.values())

    @property
    def kv_bytes(self) -> int:
        """KV of `at_once` longest requests of each model."""
        return sum(self.at_once * LONGEST * token_bytes(shape) for shape in self.shapes.values())

    @property
    def hbm_bytes(self) -> int:
        """The device's memory: `share` of weights and KV."""
        return round(self.share * (self.weight_bytes + self.kv_bytes))

    def check(self) -> None:
        """Raises ValueError if `static`, with all weights and an equal part for each model, could not serve the longest
        request."""
        each = (self.hbm_bytes - self.weight_bytes) // len(self.shapes)
        for name, shape in self.shapes.items():
            if each < 1.1 * LONGEST * token_bytes(shape):
                raise ValueError(
                    f"{name} ({shape}) would get {each / 2**20:.0f} MiB for KV with equal parts, and a request of "
                    f"{LONGEST} tokens needs {LONGEST * token_bytes(shape) / 2**20:.0f}; give a larger --at-once"
                )

    def make_models(self, directory: Path) -> dict[str, Path]:
        """Write random weights, different for each model."""
        found = {}
        for number, (name, shape) in enumerate(self.shapes.items()):
            config, dtype = SHAPES[shape]
            found[name] = make_random_model(directory / name, config, number, dtype)
        return found

    def requests(self, per_s: float, seed: int, seconds: float) -> list[TraceRequest]:
        """The trace of a seed for `seconds` of the load, with `per_s` requests a second of it on average; each has at
        most `LONGEST` tokens."""
        made = generate(
            len(self.shapes), seconds / TIME_SCALE, seed, LIKE, mean_prompt_tokens=PROMPT, mean_answer_tokens=ANSWER
        )
        return [_cut(request) for request in multiplied(made, per_s * seconds / len(made), seed)]

    @property
    def names(self) -> dict[str, str]:
        """The models' names by those of the trace."""
        return dict(zip((f"m{n:02d}" for n in range(len(self.shapes))), self.shapes, strict=True))


def planned(requests: list[TraceRequest], names: dict[str, str], salt: int) -> list[PlannedSession]:
    """The requests as a plan. names: of the models in the stack, by those of the trace."""
    sessions = salted(find_sessions(replace(r, model=names[r.model]) for r in requests if r.model in names), salt)
    return plan(sessions, length_scale=1.0, time_scale=TIME_SCALE, seed=1)


def token_bytes(shape: str) -> int:
    """KV of a token."""
    config, dtype = SHAPES[shape]
    size = {"float32": 4, "bfloat16": 2}[dtype]
    return 2 * size * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def _weight_bytes(shape: str) -> int:
    config, dtype = SHAPES[shape]
    return weight_bytes(config, 4 if dtype == "float32" else 2)


def _cut(request: TraceRequest) -> TraceRequest:
    answered = min(request.output_tokens, LONGEST // 2)
    return replace(request, input_tokens=min(request.input_tokens, LONGEST - answered - 32), output_tokens=answered)
