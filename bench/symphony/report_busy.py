"""The results in README.md with users as busy as the paper's: they type as soon as an answer ends."""

from __future__ import annotations

from report_tables import E2E, TPOT, TTFT, by, equal, figure, over, peaks, requests_per_gpu


def busy() -> str:
    """Of the figures that were simulated; empty if none was."""
    parts = [text for part in (_one, _curves, _fifteen, _seventeen) if (text := part())]
    if not parts:
        return ""
    return "\n\n".join(
        (
            "## Users as busy as the paper's",
            "They type as soon as an answer ends, so that more of them have a request under way. One draw each.",
            *parts,
        )
    )


def _one() -> str:
    if (found := figure("1-busy")) is None:
        return ""
    return f"""
![figure 1](pictures/figure-1-busy.png)

Figure 1, {found["users"]:,.0f} users, requests per GPU: {requests_per_gpu(found["systems"])}.
""".strip()


def _curves() -> str:
    parts = []
    for name, model in (("11-busy", "Llama-3.1-8B"), ("12-busy", "Llama-2-13B")):
        if (found := figure(name)) is None:
            continue
        rows = by(found["rows"])
        loads = sorted({n for n, _ in rows})
        shares = ", ".join(f"{100 * rows[n, 'recompute']['under_way']:.0f} %" for n in loads)
        parts.append(
            f"""
![figure {name.removesuffix("-busy")}](pictures/figure-{name}.png)

{model}. Users with a request under way, with vLLM, by load: {shares}. At equal TPOT: {equal(found)}.

{over(found["rows"], (TPOT, TTFT, E2E))}
""".strip()
        )
    return "\n\n".join(parts)


def _fifteen() -> str:
    if (found := figure("15-busy")) is None:
        return ""
    return f"""
![figure 15](pictures/figure-15-busy.png)

Highest load of any GPU over the median, {found["users"]:,.0f} users:

{peaks(found["systems"], ("recompute", "infercept", "llumnix-infercept", "balanced"))}
""".strip()


def _seventeen() -> str:
    if (found := figure("17-busy")) is None:
        return ""
    systems = [system for system in dict.fromkeys(row["system"] for row in found["rows"]) if system != "balanced"]
    return f"""
![figure 17](pictures/figure-17-busy.png)

Llama-2-13B without one mechanism each:

{over(found["rows"], (E2E, TTFT), systems=systems)}
""".strip()
