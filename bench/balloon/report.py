"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median
from typing import Any

from write_figures import Figure, quoted, read, stretch, table

_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT"}


def result() -> str:
    path = Path(__file__).with_name("result.json")
    if not path.exists():
        return "Not measured yet."
    found = read(path)
    settings, machine, stretches = found["settings"], found["machine"], found["stretches"]
    pairs = Figure(1 + max(s["pair"] for s in stretches))
    return f"""
`bench/balloon/run`, {quoted(str(found["date"])[:10])}, {machine["cores"]:.0f} cores of {quoted(machine["cpu"])}
({quoted(", ".join(machine["kernels_for"]))}), commit {quoted(found["commit"])}: two `{settings["shape"]}` models, each
{settings["per_s_each"]:.2f} requests a second of {settings["prompt_tokens"]:.0f} and {settings["answer_tokens"]:.0f} tokens,
{settings["kv_bytes_each"] / 2**20:.0f} MiB of KV each with equal parts; {pairs:.0f} pairs of {settings["seconds"]:.0f} s. {quoted(found["note"])}

{table(("means over stretches, ms", "alone", "elastic", "static", "elastic ÷ static", f"{100 * settings['confidence']:.0f} % interval"), rows(found))}

{verdict(found)}

{table((f"a granule of {settings['granule_bytes'] / 2**20:.0f} MiB", "median, µs", "runs"), [granule(name, of) for name, of in found["granule_us"].items()])}

{growth(found)}
"""


def rows(found: Any) -> list[list[str]]:
    made = []
    for metric, name in _NAMES.items():
        middle, low, high = found["ratio"][metric]
        alone = 1e3 * found["alone"]["static"][metric]["mean"]
        each = [
            1e3 * fmean(s[metric]["mean"] for s in found["stretches"] if s["arm"] == arm)
            for arm in ("elastic", "static")
        ]
        cells = [f"{Figure(ms):.2f}" for ms in (alone, *each)]
        made.append([name, *cells, f"{middle:.3f}", f"{low:.3f} to {high:.3f}"])
    return made


def verdict(found: Any) -> str:
    """Whether each ratio is within the bound."""
    bound = 100 * (found["settings"]["bound"] - 1)
    said = {True: "kept", False: "exceeded", None: "not decided by these pairs"}
    each = [f"{name}: {said[found['within_bound'][metric]]}" for metric, name in _NAMES.items()]
    return f"At most {bound:.0f} % above `static`: {'; '.join(each)}."


def granule(name: str, of: Any) -> list[str]:
    return [name, f"{Figure(median(of)):.0f}", stretch(of, ".0f")]


def growth(found: Any) -> str:
    """What growing in fresh memory would add to a prompt."""
    settings, us = found["settings"], {name: Figure(median(of)) for name, of in found["granule_us"].items()}
    granules = settings["prompt_tokens"] * settings["token_bytes"] / settings["granule_bytes"]
    fresh_ms, warm_ms = (1e-3 * granules * us[name] for name in ("map, fresh", "map, prepared"))
    ttft_ms = 1e3 * found["alone"]["static"]["ttft_s"]["mean"]
    return (
        f"KV of a prompt here fills {granules:.1f} granules. Mapping these takes {fresh_ms:.1f} ms in fresh memory and "
        f"{warm_ms:.1f} ms in prepared memory, beside {ttft_ms:.1f} ms to the first token."
    )
