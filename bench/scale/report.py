"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path

from write_figures import read, table

CALLS = {
    "placements": "placements",
    "hints": "hints",
    "reports": "reports",
    "ticks": "ticks",
    "joining": "a session that joins",
}


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    crowd, full = found["crowd"], found["every_core"]
    calls = [
        [text, f"{crowd['core_us_a_call'][name]:,.0f} us", f"{crowd['core_s'][name]:.1f} s"]
        for name, text in CALLS.items()
    ]
    home, there, loaded = (crowd["caches"][name] / crowd["turns"] for name in ("at home", "prefetched", "loaded"))
    settings = found["settings"]
    sizes = [
        f"{settings['nodes']:,.0f} nodes",
        f"{settings['sessions']:,.0f} sessions",
        f"{settings['turns_per_s']:,.0f} turns a second",
    ]
    head = [
        f"{settings['gpus']:.0f} GPUs",
        f"{full['sessions']:,.0f} sessions",
        f"{full['virtual_s']:.0f} virtual seconds",
        f"{full['requests']:,.0f} counted requests",
    ]
    rows = [
        ["mean TTFT, TPOT", f"{1000 * full['ttft_mean_s']:.0f} ms, {1000 * full['tpot_mean_s']:.1f} ms"],
        ["history found by returning turns", f"{100 * full['cached_share_returning']:.1f} %"],
        ["real time", f"{full['real_s']:.0f} s"],
        ["memory, at most", f"{full['memory_peak_bytes'] / 1e9:.2f} GB"],
        ["events of stores", f"{full['store_events']:,.0f}"],
    ]
    return f"""
`bench/scale/run`, 2026-11-23, two cores of an AMD EPYC (`result.json`).

{table((", ".join(sizes), "each", "together"), calls)}

In all **{100 * crowd["core_share_of_one_processor_core"]:.0f} % of a processor core** for these turns and hints; **{crowd["memory_bytes_a_session"]:.0f}
bytes a session**, {crowd["memory_peak_bytes"] / 1e9:.2f} GB in all. Turns waited {1000 * crowd["wait_mean_s"]:.0f} ms (mean),
{1000 * crowd["wait_p99_s"]:.0f} ms (p99). {100 * home:.0f} % ran where their cache was, {100 * there:.0f} % where a hint had brought it; turns that loaded it: {loaded * crowd["turns"]:.0f}.

{table((", ".join(head), "every core"), rows)}
"""
