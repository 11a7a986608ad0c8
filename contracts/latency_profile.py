"""Measured times of computing and loading one model on one machine, and interpolation between them.

`upbeat profile` makes a profile; the worker, the load plan and simulators read it. It is valid for one model, machine
and number of threads (`Subject`) and refused elsewhere (`misfit`). Files: `runtime.profile_files`. Method:
docs/design/0011.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

from contracts.corun import CorunFit, corun_from
from contracts.errors import ConfigError

#: Version of the document that `encode` writes, and those that `decode` reads (1 has no `corun`). A profile of another
#: version is refused: measuring takes a minute.
FORMAT = 2
READABLE = (1, 2)


@dataclass(frozen=True, slots=True)
class Subject:
    """What a profile is valid for. Equal subjects have equal times, up to noise; paths and dates are not part of it.

    computes: `native` (compiled CPU kernels), `torch` or `cuda`. device: the processor's or accelerator's name.
    fingerprint: hex.
    """

    fingerprint: str
    dtype: str
    device: str
    cores: int
    threads: int
    computes: str

    @property
    def key(self) -> str:
        """16 hex digits, used in the profile's file name."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds at rows x columns, interpolated linearly between them.

    `seconds[i][j]` belongs to `rows[i]` and `columns[j]`, both ascending. Times never fall along a row or a column, so
    `at` is never negative and grows with both arguments. Below the first row or column, the first one's values hold;
    beyond the last, the last slope continues.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Raises ValueError for anything but a full, ascending, monotone grid of finite times."""
        for name, axis in (("rows", self.rows), ("columns", self.columns)):
            if not axis or any(type(n) is not int or n < 0 for n in axis) or any(a >= b for a, b in pairwise(axis)):
                raise ValueError(f"{name} {axis} must be ascending whole numbers")
        if len(self.seconds) != len(self.rows) or any(len(row) != len(self.columns) for row in self.seconds):
            raise ValueError("seconds must have one row a row and one figure a column")
        if any(
            isinstance(s, bool) or not isinstance(s, int | float) or not math.isfinite(s) or s < 0
            for row in self.seconds
            for s in row
        ):
            raise ValueError("seconds must be finite and not negative")
        lines = [*self.seconds, *zip(*self.seconds, strict=True)]
        if any(a > b for line in lines for a, b in pairwise(line)):
            raise ValueError("seconds must not fall along a row or a column")

    @classmethod
    def measured(cls, rows: Sequence[int], columns: Sequence[int], seconds: Sequence[Sequence[float]]) -> Surface:
        """From raw medians. A time below that of less work is noise, and is raised to it."""
        along = [list(accumulate(row, max)) for row in seconds]
        for above, row in pairwise(along):
            row[:] = [max(a, b) for a, b in zip(above, row, strict=True)]
        return cls(tuple(rows), tuple(columns), tuple(map(tuple, along)))

    def at(self, row: float, column: float) -> float:
        """Seconds at `row` and `column`, interpolated."""
        last_row, last_column = self.rows[-1], self.columns[-1]
        inside_row, inside_column = min(row, last_row), min(column, last_column)
        seconds = _between(
            self.rows, [_between(self.columns, line, inside_column) for line in self.seconds], inside_row
        )
        if row > last_row:
            slopes = [_slope(self.rows, [line[j] for line in self.seconds]) for j in range(len(self.columns))]
            seconds += (row - last_row) * _between(self.columns, list(accumulate(slopes, max)), inside_column)
        if column > last_column:
            slopes = [_slope(self.columns, line) for line in self.seconds]
            seconds += (column - last_column) * _between(self.rows, list(accumulate(slopes, max)), inside_row)
        return seconds


def _between(axis: Sequence[int], values: Sequence[float], at: float) -> float:
    """Linear interpolation between the points of `axis`; constant outside."""
    if at <= axis[0]:
        return values[0]
    for (left, low), (right, high) in pairwise(zip(axis, values, strict=True)):
        if at < right:
            return min(high, low + (high - low) * ((at - left) / (right - left)))
    return values[-1]


def _slope(axis: Sequence[int], values: Sequence[float]) -> float:
    """Slope between the last two points; of a single point, its slope from the origin."""
    if len(axis) == 1:
        return values[0] / axis[0] if axis[0] else 0.0
    return (values[-1] - values[-2]) / (axis[-1] - axis[-2])


@dataclass(frozen=True, slots=True)
class LoadRate:
    """Time from requesting a session's KV until all of it is in HBM: a latency and a rate."""

    first_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        """Raises ValueError for impossible values."""
        if not (
            math.isfinite(self.first_s)
            and self.first_s >= 0
            and math.isfinite(self.bytes_per_s)
            and self.bytes_per_s > 0
        ):
            raise ValueError(f"a load of {self.first_s} s and {self.bytes_per_s} bytes/s is none")

    @classmethod
    def measured(cls, small_bytes: int, small_s: float, large_bytes: int, large_s: float) -> LoadRate:
        """The line through two loads. Latency 0 and the larger load's rate where noise would make the latency negative
        or the slope not positive."""
        if small_s >= large_s:
            return cls(0.0, large_bytes / large_s)
        a_byte_s = (large_s - small_s) / (large_bytes - small_bytes)
        first_s = small_s - small_bytes * a_byte_s
        return cls(first_s, 1 / a_byte_s) if first_s >= 0 else cls(0.0, large_bytes / large_s)

    def seconds(self, bytes_: float) -> float:
        """Seconds to load `bytes_`; 0 for 0 bytes."""
        return self.first_s + bytes_ / self.bytes_per_s if bytes_ > 0 else 0.0


#: Sources of KV. `ssd_cold`: the files are not in the page cache.
LOAD_SOURCES = ("dram", "ssd", "ssd_cold", "peer")


@dataclass(frozen=True, slots=True)
class Profile:
    """The measured times of one subject.

    decode_step_s: a step of one token each for `row` sequences with `column` tokens of context. prefill_step_s: a step
    of `row` tokens of one sequence after `column` tokens. *_layer_s: one layer of the same. loads: by measured source
    (LOAD_SOURCES). versions, measured_on (a date): information for users. corun: steps by part of the device, beside
    training; None: not measured (`upbeat profile --corun`).
    """

    subject: Subject
    model: str
    layers: int
    token_bytes: int
    decode_step_s: Surface
    decode_layer_s: Surface
    prefill_step_s: Surface
    prefill_layer_s: Surface
    loads: dict[str, LoadRate]
    versions: dict[str, str]
    measured_on: str = ""
    corun: CorunFit | None = None

    def decode_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of a decode step of `batch` sequences with `context_tokens` each; 0 for an empty batch."""
        return self.decode_step_s.at(batch, context_tokens) if batch > 0 else 0.0

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Seconds to prefill `tokens` after a context, in steps of at most the longest measured one."""
        longest, seconds, done = self.prefill_step_s.rows[-1], 0.0, 0
        while done < tokens:
            step = min(longest, tokens - done)
            seconds += self.prefill_step_s.at(step, context_tokens + done)
            done += step
        return seconds

    def load_s(self, source: str, tokens: float) -> float:
        """Seconds to load the KV of `tokens`. Raises KeyError for a source that was not measured."""
        return self.loads[source].seconds(tokens * self.token_bytes)


def encode(profile: Profile) -> str:
    """The profile as JSON; `decode` is the inverse."""
    return json.dumps({"format": FORMAT} | asdict(profile), indent=1, sort_keys=True) + "\n"


def decode(text: str, where: str) -> Profile:
    """The profile in `text`. Raises ConfigError naming `where`, what is wrong with it, and the remedy."""
    remedy = "measure again with `upbeat profile`, or delete it"
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise TypeError("it holds no object")
        if data.pop("format", None) not in READABLE:
            raise ValueError(f"it is not of format {' or '.join(map(str, READABLE))}")
        data["subject"] = Subject(**_typed(Subject, data["subject"]))
        for field in fields(Profile):
            if field.name.endswith("_s"):
                surface = data[field.name]
                rows, columns = tuple(surface["rows"]), tuple(surface["columns"])
                data[field.name] = Surface(rows, columns, tuple(map(tuple, surface["seconds"])))
        data["loads"] = {name: LoadRate(**rate) for name, rate in data["loads"].items()}
        if not data["loads"].keys() <= set(LOAD_SOURCES):
            raise ValueError(f"loads are from {', '.join(data['loads'])}; known: {', '.join(LOAD_SOURCES)}")
        if data.get("corun") is not None:
            data["corun"] = corun_from(data["corun"])
        return Profile(**_typed(Profile, data))
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ConfigError(f"{where} is not a profile ({e}); {remedy}") from e


def _typed(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    """Returns `data` if its str and int fields have the types that `kind` declares. Raises TypeError otherwise."""
    plain = {"str": str, "int": int}
    for field in fields(kind):
        wanted = plain.get(str(field.type))
        if wanted is not None and field.name in data and type(data[field.name]) is not wanted:
            raise TypeError(f"{field.name} = {data[field.name]!r} must be {wanted.__name__}")
    return data


def misfit(profile: Profile, subject: Subject) -> str:
    """Why the profile is not valid for `subject`; empty when it is."""
    found, wanted = asdict(profile.subject), asdict(subject)
    differs = [name for name in found if found[name] != wanted[name]]
    return "; ".join(f"{name} is {_short(found[name])} there and {_short(wanted[name])} here" for name in differs)


def best(profiles: Iterable[Profile], subject: Subject) -> Profile | None:
    """The profile that is valid for `subject`, if any."""
    return next((p for p in profiles if p.subject == subject), None)


def _short(value: object) -> str:
    return repr(value)[:40]
