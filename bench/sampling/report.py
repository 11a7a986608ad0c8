"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path

from write_figures import read, table

GRAMMARS = {
    "json_schema": "`json_schema`, four properties",
    "json_object": "`json_object`",
    "8 tools, auto, text": "eight tools, `auto`, text",
    "8 tools, none, text": "eight tools, `none`, text",
}
PARTS = ("mask_us", "mask_p99_us", "apply_us", "take_us", "total_us")


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    chosen = [
        [quoted_setting, *(f"{us:.0f}" for us in of.values())]
        for quoted_setting, of in found["sampling_us_per_row"].items()
    ]
    batches = [f"batch {size}" for size in next(iter(found["sampling_us_per_row"].values()))]
    of = found["grammars"]
    grammars = [
        [text, *(f"{of[name][part]:.0f}" for part in PARTS), f"{of[name]['compile_ms']:.0f} ms"]
        for name, text in GRAMMARS.items()
    ]
    return f"""
`bench/sampling/run`, 2026-11-21, one thread under heavy other load, so these are upper bounds (`result.json`):

{table(("microseconds a row", *batches), chosen)}

{table(("microseconds a token", "mask", "mask, p99", "applying it", "taking the token", "in all", "compiled in"), grammars)}

The vocabulary's tables take {of["vocabulary"]["tables_ms"]:.0f} ms once. Random logits are the worst case for top_p:
with a model's, far fewer tokens reach 0.9.
"""
