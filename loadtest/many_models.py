"""Generates requests for many models as production sees them: bursty groups (Prism, sections 3.1, 3.2 and A.1). Pure.

Sporadic models belong to groups. A group is switched on and off for log-normal times; each time, some of its models
take part. Persistent models have their own switch, which is mostly on. A model that takes part gets bursts of requests
with gamma-distributed gaps, and log-normal pauses between bursts. The sizes of bursts vary with the model and the
on-time.

Prism's traces are not public. The profiles are fitted to their published statistics, which `loadtest.model_statistics`
measures; parameters are ours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from loadtest.bursts import Burstiness, answer_tokens
from loadtest.traces import TraceRequest

#: On-times before the trace's start that are generated and dropped, in mean cycles, so that it starts in mid-traffic.
_BEFORE_CYCLES = 8.0
#: A model's prompts have block ids from its number times two to this power.
_MODEL_BITS = 30
#: Log-normal spread of prompts' lengths.
_PROMPT_SIGMA = 0.7


@dataclass(frozen=True, slots=True)
class Times:
    """Log-normal times: mean in seconds, and the spread of their logarithm."""

    mean_s: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        """One time in seconds."""
        return self.mean_s * rng.lognormvariate(-(self.sigma**2) / 2, self.sigma)


@dataclass(frozen=True, slots=True)
class Profile:
    """Parameters of a trace.

    models: number in the published trace. persistent: share of models with their own switch. group: models a group.
    joins: chance that a model takes part when its group is on. on, off; long_on, long_off: of groups; of persistent
    models. requests: mean number a burst. gap: between requests of a burst. pause: between bursts. model_sigma, sigma:
    log-normal spread of a burst's mean size over models, and over a model's on-times.
    """

    models: int
    persistent: float
    group: int
    joins: float
    on: Times
    off: Times
    long_on: Times
    long_off: Times
    requests: float
    gap: Burstiness
    pause: Times
    model_sigma: float
    sigma: float


#: By the trace that they are fitted to. tests/loadtest/test_many_models.py says which statistics each has.
PROFILES: dict[str, Profile] = {
    "hyperbolic": Profile(
        24, 0.17, 4, 0.6, Times(240, 0.8), Times(420, 1.0), Times(1500, 0.8), Times(300, 0.8),
        3.0, Burstiness(0.6, 1.0), Times(15, 0.5), 0.5, 0.5,
    ),
    "novita": Profile(
        16, 0.19, 4, 0.6, Times(320, 0.8), Times(820, 1.0), Times(3000, 0.8), Times(600, 0.8),
        3.0, Burstiness(0.6, 1.0), Times(15, 0.5), 0.5, 0.5,
    ),
    "arena": Profile(
        84, 0.1, 6, 0.5, Times(155, 0.8), Times(155, 1.0), Times(1500, 0.8), Times(300, 0.8),
        1.3, Burstiness(0.8, 0.2), Times(45, 0.7), 0.5, 0.4,
    ),
}  # fmt: skip


def generate(
    models: int,
    seconds: float,
    seed: int,
    like: str = "hyperbolic",
    *,
    mean_prompt_tokens: float = 500.0,
    mean_answer_tokens: float = 100.0,
) -> list[TraceRequest]:
    """Requests in [0, seconds) by arrival, for models `m00`, `m01`, …, the persistent ones first. No two prompts share
    blocks.

    like: a name in `PROFILES`. A longer trace begins with the shorter one. Raises ValueError naming a wrong argument.
    """
    if like not in PROFILES:
        raise ValueError(f"like = {like!r}: there are {', '.join(PROFILES)}")
    if not 1 <= models <= 1000:
        raise ValueError(f"models = {models}: give 1 to 1000")
    for name, value in (
        ("seconds", seconds),
        ("mean_prompt_tokens", mean_prompt_tokens),
        ("mean_answer_tokens", mean_answer_tokens),
    ):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} = {value}: must be a number above 0")
    profile = PROFILES[like]
    requests: list[TraceRequest] = []
    for number, (name, spans) in enumerate(_spans(profile, models, seconds, seed)):
        block = number << _MODEL_BITS
        rng = random.Random(f"{seed} model {name}")
        own = profile.requests * rng.lognormvariate(0.0, profile.model_sigma)
        for begins_s, ends_s in spans:
            mean = own * rng.lognormvariate(0.0, profile.sigma)
            for at_s in _bursts(profile, mean, begins_s, ends_s, rng):
                asked = max(8, round(mean_prompt_tokens * rng.lognormvariate(-(_PROMPT_SIGMA**2) / 2, _PROMPT_SIGMA)))
                answered = answer_tokens(rng, mean_answer_tokens)
                if 0 <= at_s < seconds:
                    requests.append(TraceRequest(at_s, asked, answered, (block,), model=name))
                    block += 1
    return sorted(requests, key=lambda r: (r.arrival_s, r.model))


def multiplied(requests: Sequence[TraceRequest], factor: float, seed: int, within_s: float = 1.0) -> list[TraceRequest]:
    """`factor` times as many requests, to one, in the same pattern (Prism, section 7.1): each is repeated, within
    `within_s` after it, or left out, evenly. Block ids are new. Raises ValueError for a factor that is not above 0."""
    if not 0 < factor < math.inf:
        raise ValueError(f"factor = {factor}: must be a number above 0")
    rng = random.Random(f"{seed} multiplied")
    made: list[TraceRequest] = []
    total = rng.random()
    for request in requests:
        before, total = total, total + factor
        for copy in range(int(total) - int(before)):
            at_s = request.arrival_s + (rng.random() * within_s if copy else 0.0)
            made.append(replace(request, arrival_s=at_s, block_ids=(len(made),), conversation=None))
    return sorted(made, key=lambda r: (r.arrival_s, r.model))


def _spans(profile: Profile, models: int, seconds: float, seed: int) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Each model's name, and when it takes part: (begin, end) in order."""
    names = [f"m{n:02d}" for n in range(models)]
    persistent = round(profile.persistent * models)
    for name in names[:persistent]:
        yield name, list(_switched(profile.long_on, profile.long_off, seconds, random.Random(f"{seed} {name}")))
    for first in range(persistent, models, profile.group):
        group = list(_switched(profile.on, profile.off, seconds, random.Random(f"{seed} group {first}")))
        for name in names[first : first + profile.group]:
            rng = random.Random(f"{seed} {name}")
            yield name, [span for span in group if rng.random() < profile.joins]


def _switched(on: Times, off: Times, seconds: float, rng: random.Random) -> Iterator[tuple[float, float]]:
    at_s = -_BEFORE_CYCLES * (on.mean_s + off.mean_s) * rng.random()
    while at_s < seconds:
        ends_s = at_s + on.draw(rng)
        yield at_s, ends_s
        at_s = ends_s + off.draw(rng)


def _bursts(profile: Profile, mean: float, begins_s: float, ends_s: float, rng: random.Random) -> Iterator[float]:
    """Arrivals within [begins_s, ends_s)."""
    at_s = begins_s + profile.pause.draw(rng)
    while at_s < ends_s:
        yield at_s
        # Geometric: a further request follows with probability 1 - 1 / mean.
        again = rng.random() < 1 - 1 / max(mean, 1.0)
        at_s += profile.gap.gap(rng) if again else profile.pause.draw(rng)
