"""The result in README.md, from result.json and stretches.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from claims import E2E, OURS, TTFT, curve
from tables import markdown
from write_figures import quoted, read, stretch, table

HERE = Path(__file__).parent
USERS = (8, 16, 32, 64)


def best_peer(of: dict[str, dict[str, Any]], users: str) -> str:
    """The fastest peer's mean end to end, like `1.58 (vllm-sticky)`; `-` if no peer ran."""
    asked = {
        name: loads[users]["end_to_end_mean_s"] for name, loads in of.items() if name not in OURS and users in loads
    }
    best = min(asked, key=asked.__getitem__, default=None)
    return "-" if best is None else f"{asked[best]:.2f} ({best})"


def stretch_row(of: Any) -> list[str]:
    targets = of["targets"]
    cells = [
        f"{targets['upbeat'][users]['end_to_end_mean_s']:.2f} / {best_peer(targets, users)}"
        if users in targets["upbeat"]
        else "-"
        for users in map(str, USERS)
    ]
    when = of["date"][:16].replace("T", " ")
    return [quoted(when), quoted(of["processor"]), f"`{of['commit']}`", *cells]


def present(document: Any) -> dict[str, Any]:
    """`result.json` in the format of a stretch."""
    curves = {name: curve(document, name, E2E) for name in document["targets"]}
    targets = {
        name: {str(users): {"end_to_end_mean_s": value} for users, value in of.items()} for name, of in curves.items()
    }
    return {"date": document["date"], "processor": "EPYC, 4th generation", "commit": "result.json", "targets": targets}


def result() -> str:
    document = read(HERE / "result.json")
    load, slo = document["workload"], {}
    runs = {
        (name, users): document["targets"][name]["points"][f"{users} users"]
        for name in ("upbeat", "vllm-sticky")
        for users in USERS
    }
    for key, point in runs.items():
        slo[key] = 100 * point["summary"]["SLO attainment"]["median"]
    slowest = {
        name: stretch([run["ttft_s"]["p99"] for run in runs[name, 64]["runs"]], ".0f")
        for name in ("upbeat", "vllm-sticky")
    }
    stretches = sorted([*read(HERE / "stretches.json")["stretches"], present(document)], key=lambda of: of["date"])
    keeps = ", ".join(f"{slo['upbeat', users]:.0f} % ({slo['vllm-sticky', users]:.0f} %)" for users in USERS)
    ahead = ", ".join(
        f"{100 * (1 - curve(document, 'upbeat', of)[64] / curve(document, 'vllm-sticky', of)[64]):.0f} % in {of}"
        for of in (E2E, TTFT)
    )
    third = {name: of["64"]["end_to_end_mean_s"] for name, of in stretches[2]["targets"].items() if "64" in of}
    behind = 100 * (third["upbeat"] / third["vllm-sticky"] - 1)
    claims = [
        claim | {part: quoted(claim[part]) for part in ("text", "wanted", "found")} for claim in document["claims"]
    ]
    failed = sum(
        run["failed"] for of in document["targets"].values() for point in of["points"].values() for run in point["runs"]
    )
    return f"""
A production trace (`mooncake_conversation.jsonl`), lengths × {load["found"]["length_scale"]}, times × {load["time_scales"][0]}, conversations of three turns and more;
`bench/peers/run --trace mooncake_conversation.jsonl --resume`, 2026-11-23, two cores of an AMD EPYC (AVX-512 BF16;
`result.json`, `result.png`): two repeats of `upbeat`, `sticky`, `recompute`, `vllm-sticky` and `lmcache-sticky`, one of the others. {failed:.0f} requests failed. -: skipped as too slow.

![The same users, weights and cores: latency, first token, time per token and requests a second](result.png)

**Results differ between stretches of machine time** (last table), and so does the winner at 64 users: here `upbeat` is ahead of `vllm-sticky` by
{ahead}; in the third stretch `vllm-sticky` was ahead by {behind:.0f} %, end to end.

**Long prompts wait for decodes**: TTFT p99 at 64 users is {slowest["upbeat"]} s, `vllm-sticky`'s
{slowest["vllm-sticky"]} s (`docs/design/0010-scheduling.md`). Requests within the `slo` (TTFT 1 s, TPOT 0.1 s) at 8, 16, 32 and 64 users:
{keeps} for `upbeat` (`vllm-sticky`).

**`sticky` and `upbeat` are close**: nearly all sessions fit the HBM of two nodes. For hints and moves see bench/returning_session.

{markdown(document | {"claims": claims})}

Every stretch: mean end to end, s, `upbeat` / the best of vLLM and vLLM over LMCache. In the first five, users started within 2.5 s and cold
prompts counted; in the first two vLLM computed in float32. The code changed in between.

{table(("written (UTC)", "processor", "from", *(f"{users} users" for users in USERS)), map(stretch_row, stretches))}
"""
