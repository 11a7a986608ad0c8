"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import read, table


def percent(share: Any) -> str:
    return f"{100 * share:.2f} %"


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    greedy, speed = found["greedy"], {name: of for name, of in found["speed"].items() if name.startswith("8B")}
    answers = [
        [
            f"{dtype}, {codec}",
            percent(of["exact_rate"]),
            percent(of["identical_to_raw_rate"]),
            f"{of['piece_ratio']:.2f} x",
            f"{of['file_ratio']:.2f} x",
        ]
        for dtype, codecs in greedy.items()
        for codec, of in codecs.items()
    ]
    rates = [
        [
            f"{shape}, {codec}",
            f"{of['encode_gb_s']:.2f}",
            f"{of['decode_gb_s']:.2f}",
            f"{100 * of['relative_rms_error']:.1f} %",
        ]
        for shape, codecs in speed.items()
        for codec, of in codecs.items()
        if codec in ("fp8", "k16v8")
    ]
    raw, count = found["speed"]["8B bfloat16"]["raw"], greedy["float32"]["raw"]["answers"]
    changed = [(1 - greedy["float32"][codec]["identical_to_raw_rate"]) * count for codec in ("fp8", "k16v8")]
    return f"""
`bench/codecs/run`, 2026-11-21, two cores under heavy other load, so speeds are lower bounds (`result.json`):

{table((f"{count:.0f} answers", "exact", "identical to raw", "KV smaller", "files smaller"), answers)}

fp8 changed {changed[0]:.0f} answers, k16v8 {changed[1]:.0f}. Files shrink less than KV because the demo
model's pieces are small and aligned to 4 KiB, and each chunk has a header of 4 KiB.

{table(("one thread, GB/s of KV", "encode", "decode", "error"), [*rates, ["a copy; a checksum", f"{raw['copy_gb_s']:.0f}", f"{raw['checksum_gb_s']:.0f}", ""]])}

A codec on the host is slower than an SSD: use it for remote blob stores and for small disks. CacheGen was not run.
"""
