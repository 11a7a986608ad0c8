"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import read, table


def result() -> str:
    found, links = (read(Path(__file__).with_name(name)) for name in ("result.json", "links.json"))
    alone = links["arms"]["own link"]["all_ms"][0]
    ratio = found["cold_over_active"]
    return f"""
`bench/activation/run`, 2026-11-26, two cores of an Intel Xeon with AMX. Medians and their intervals:

{table(("ms until all weights are there", "median", "interval"), rows(found["weights_ms"]))}

{table(("ms to the first token", "median", "interval"), rows(found["first_token_ms"]))}

Cold ÷ active: {ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f}), so a little more than wanted. Copying and computing
share two cores. "Warm memory" above includes unmapping the same model's weights first, which are unmapped on another
thread once others are there. {of_hints(found)}

`bench/activation/run --links`, over a stand-in for links; the machine was busy with other work. Medians of
{links["settings"]["repeats"]}; all loads brought the same bytes (digests).

{table(("links", "ms to the first layer", "ms to all", "own link ÷ this", "over other links"), by_links(links["arms"], alone))}
"""


def of_hints(found: dict[str, Any]) -> str:
    ratio = found["hinted_over_active"]
    return f"{found['settings']['hints']} pairs of turns after a rest, both hinted; first token of a model that has to come ÷ one that is here: {ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})."


def by_links(arms: dict[str, Any], alone: float) -> list[list[str]]:
    return [
        [
            name,
            f"{of['first_layer_ms'][0]:.0f}",
            f"{of['all_ms'][0]:.0f}",
            f"{alone / of['all_ms'][0]:.2f}",
            f"{100 * of['others_share']:.0f} %",
        ]
        for name, of in arms.items()
    ]


def rows(figures: dict[str, Any]) -> list[list[str]]:
    return [[name, f"{of[0]:.0f}", f"{of[1]:.0f} to {of[2]:.0f}"] for name, of in figures.items()]
