"""The results of README.md, from results/figure-*.json: beside what the paper says, ours and the others' over ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telling import read, table

HERE = Path(__file__).parent
NAMES = {
    "recompute": "vLLM",
    "infercept": "InferCept",
    "llumnix": "Llumnix",
    "llumnix-infercept": "Llumnix + InferCept",
    "balanced": "ours",
}
OTHERS = ("recompute", "infercept", "llumnix", "llumnix-infercept")
E2E, TPOT, TTFT = "end_to_end_s", "tpot_s", "ttft_s"


def figure(number: int) -> Any:
    return read(HERE / "results" / f"figure-{number}.json")


def by(rows: Sequence[Any]) -> dict[tuple[int, str], Any]:
    """Rows by users and system."""
    return {(int(row["users"]), row["system"]): row for row in rows}


def over(rows: Sequence[Any], of: Sequence[str], base: str = "balanced", systems: Sequence[str] = OTHERS, users: Sequence[int] = ()) -> str:
    """A table: how many times `base`'s each system's figures are, by users."""
    found = by(rows)
    loads = users or sorted({n for n, _ in found})
    titles = {E2E: "end to end", TPOT: "TPOT", TTFT: "TTFT"}
    lines = [
        [f"{titles[name]}, {NAMES.get(system, system)}", *(f"{found[n, system][name] / found[n, base][name]:.2f} x" for n in loads)]
        for name in of
        for system in systems
    ]
    return table((f"over {NAMES.get(base, base)}", *(f"{n:,} users" for n in loads)), lines)


def equal(document: Any, users: Sequence[int]) -> str:
    """Users of ours at vLLM's TPOT."""
    rows = {int(row["users"]): row for row in document["users_at_equal_tpot"] if row["system"] == "recompute"}
    told = [f"{rows[n]['users']:,.0f} are {'at least ' if rows[n]['at_least'] else ''}{rows[n]['ours']:,.0f} of ours" for n in users]
    return ", ".join(told)


def one_and_two() -> str:
    first, rows = figure(1)["systems"], {int(row["requests_at_a_time"]): row for row in figure(2)["rows"]}
    spread = ", ".join(f"{min(of['least']):.1f} to {max(of['most']):.1f} ({NAMES[name]})" for name, of in first.items())
    step, token = (rows[32][name] / rows[8][name] for name in ("decode_step_s", "tpot_s"))
    return f"""
## Figures 1 and 2: why balance matters

![figure 1](pictures/figure-1.png)

Paper: up to 300 requests between the most and the least loaded GPU with InferCept, at 1,024 users. Here the requests on a GPU, means of ten
seconds, are {spread}. In the paper the most loaded GPU alone has more requests than all eight here.

![figure 2](pictures/figure-2.png)

Paper: 32 requests at a time instead of 8 "can lead to almost double the latency". Here a token takes {token:.1f} x when every prompt is computed on
the way, and {step:.1f} x for decoding alone: it is the prompts of the others that make a token late.
"""


def four_and_five() -> str:
    rows = figure(4)["rows"]
    lines = [
        [
            f"{row['history_tokens']:,.0f}",
            *(f"{1000 * row[name]:.0f} ms" for name in ("recompute_s", "swap_s", "layerwise_s", "already_there_s")),
        ]
        for row in rows
    ]
    found = figure(5)
    turns = {int(row["turn"]): row["wasted_share"] for row in found["rows"]}
    shares = ", ".join(f"{100 * turns[turn]:.0f} %" for turn in (2, 3, 8))
    return f"""
## Figures 4 and 5: why KV is kept

![figure 4](pictures/figure-4.png)

Paper: prefill is 4.9 x faster with swapping. Here, Llama-2-7B on one A100:

{table(("tokens of history", "computed again", "loaded from DRAM", "layer by layer", "in HBM before"), lines)}

![figure 5](pictures/figure-5.png)

Paper: over 50 % of the tokens were computed before after three turns, over 99 % in all of ShareGPT. Here, of the second, third and eighth turn's
prompt: {shares}; {100 * found["share_of_recomputed_tokens_all"]:.0f} % over all turns up to the twentieth (conversations have {found["longest_turns"]:.0f} turns at
most, there over 400).
"""


def six() -> str:
    found = figure(6)
    systems = ("recompute", "infercept-migration")
    return f"""
## Figure 6: recompute, swap, swap with migration

![figure 6](pictures/figure-6.png)

Paper: on eight GPUs recomputing is fastest, InferCept behind it, and InferCept that migrates a session's KV when its request comes last. **Here
recompute is slowest**: sticky sessions lose in the paper because they are out of balance, and ours are not. With Llama-3.1-8B:

{over(found["8b"], (E2E,), "infercept", systems)}

With Llama-2-13B:

{over(found["13b"], (E2E,), "infercept", systems)}
"""


def eleven_and_twelve() -> str:
    first, second = figure(11), figure(12)
    return f"""
## Figures 11 and 12: TPOT, TTFT, requests/s against users

![figure 11](pictures/figure-11.png)

Llama-3.1-8B. Paper, over SYMPHONY: TPOT of vLLM 1.4 to 1.9 x, of InferCept up to 2.5 x, of Llumnix up to 1.8 x, of both together up to 1.6 x; TTFT up to
2.4 x; four to eight times vLLM's users at its TPOT. Here, with vLLM's TPOT: {equal(first, (512, 1024))}.

{over(first["rows"], (TPOT, TTFT, E2E), users=(512, 1024, 1536, 2048))}

The ranking is the paper's. The curves part when InferCept's host memory no longer holds every session; at the most users the others are past what eight
GPUs can serve and we are not. TTFT differs by more than in the paper, since here nothing else is on the way: no tokeniser, no HTTP.

![figure 12](pictures/figure-12.png)

Llama-2-13B, means of three seeds. Paper: TPOT of vLLM 1.31 to 1.9 x (2.6 x at most), TTFT up to 2.56 x. Here, with vLLM's TPOT:
{equal(second, (256, 384, 512))}.

{over(second["rows"], (TPOT, TTFT, E2E), users=(256, 384, 512, 640, 1024))}

Gains in TPOT are smaller than the paper's: a part of the returning history is computed again because it lies on the SSD, and 1.5 GB/s a GPU (our
assumption; the paper names no rate) bring a long cache no sooner than it is computed. Past saturation memory decides, not what is cached. All
systems are given our order of prompts and of admission, by when each is due, where vLLM's own is that of arrival.
"""


def thirteen() -> str:
    return f"""
## Figure 13: bursts

![figure 13](pictures/figure-13.png)

Llama-3.1-8B, longer prompts, shorter answers, pauses in bursts (BurstGPT-like). Paper: up to 2.5 x, "very similar" to ShareGPT. Here:

{over(figure(13)["rows"], (TPOT, E2E))}

The others saturate sooner than on the other load: prompts are longer, so there is more to compute again and host memory is full at fewer users. Past
that the factors are queues, not speed.
"""


def fourteen() -> str:
    found = by(figure(14)["rows"])
    users = sorted({n for n, _ in found})
    systems = sorted({system for _, system in found if system != "lmcache"})
    lines = [
        [system, *(f"{100 * (1 - found[n, system][E2E] / found[n, 'lmcache'][E2E]):.0f} % sooner" for n in users)] for system in systems
    ]
    return f"""
## Figure 14: a slow link, with and without a codec

![figure 14](pictures/figure-14.png)

Llama-2-13B, every GPU 10 Gbit/s to remote storage; nothing on an SSD or from a peer but in "all tiers". LMCache: its codec, loaded when the request has come.
Paper: 47 % less normalised latency than LMCache with its codec, 35 % without. Here, end to end:

{table(("ours", *(f"{n} users" for n in users)), lines)}

Hints hide the way, the codec makes it shorter. The gains are smaller than the paper's: the first token comes much sooner, but it is a small part of an
answer.
"""


def fifteen() -> str:
    systems = figure(15)["systems"]
    names = ("recompute", "infercept", "llumnix-infercept", "balanced")
    lines = [[model, *(f"{systems[f'{model} {name}']['peak_to_median']['whole_run']:.1f} x" for name in names)] for model in ("8b", "13b")]
    return f"""
## Figure 15: imbalance

![figure 15](pictures/figure-15.png)

256 users: the highest load that a GPU ever had over the median, in requests, means of ten seconds. Paper, Llama-3.1-8B: 3.1 x with InferCept, and vLLM and
SYMPHONY "load-balanced". Here, of few requests a GPU, so much is chance:

{table(("model", *(NAMES[name] for name in names)), lines)}

Llumnix + InferCept is the most even, since it moves requests while they run. It is no faster for it.
"""


def sixteen() -> str:
    rows = {(int(r["teams"]), int(r["files"]), r["system"]): r for r in figure(16)["rows"]}
    cells = sorted({(teams, files) for teams, files, _ in rows})
    others = [system for system in dict.fromkeys(system for _, _, system in rows) if system != "balanced"]
    lines = [
        [
            NAMES.get(system, system),
            *(f"{rows[*at, system]['project_mean_s'] / rows[*at, 'balanced']['project_mean_s']:.2f} x" for at in cells),
        ]
        for system in others
    ]
    return f"""
## Figure 16: agents

![figure 16](pictures/figure-16.png)

Llama-3.1-8B: MetaGPT-like teams (`agents.py`, the load of bench/agents with longer answers) on eight GPUs, two projects each. The call graph has learned from
projects that are not counted. Paper, seconds a project over SYMPHONY's: vLLM 2.8 x, Parrot 1.7 x. Here, over ours:

{table(("", *(f"{teams} teams, {files} files" for teams, files in cells)), lines)}

The ranking is the paper's. The factors are smaller, as an agent here writes 400 to 900 tokens, which no cache makes faster, and tools take a part of a
project's time. **Hints do not pay here**: nothing is far away, as threads stay on their nodes. bench/agents finds the same for real.
"""


def seventeen() -> str:
    rows = figure(17)["rows"]
    systems = [system for system in dict.fromkeys(row["system"] for row in rows) if system != "balanced"]
    return f"""
## Figure 17: each mechanism switched off

![figure 17](pictures/figure-17.png)

Llama-2-13B, means of three seeds. Paper: without cooperative memory 7 x slower, throughput 21.7 % lower without layer priority and 18.4 % without
layer-wise loading. Here:

{over(rows, (E2E,), systems=systems)}

Hints carry it. Of the mechanisms below the placement hardly any shows: a load into HBM from DRAM is short, and in a closed loop below saturation people set the
pace.
"""


def eighteen() -> str:
    return f"""
## Figure 18: prompts of 1,024 tokens, answers of one

![figure 18](pictures/figure-18.png)

Llama-3.1-8B. Paper: InferCept "struggles", and Llumnix changes nothing about it, for there is no decoding during which requests could move. Here too:

{over(figure(18)["rows"], (TTFT,))}

The paper blames imbalance; here it is memory: sessions have long histories, and what InferCept's DRAM dropped is computed again on the one node that
the session may go to.
"""


def nineteen_and_twenty() -> str:
    missed, spurious = figure(19), figure(20)
    rows = [*missed["rows"], *missed["stateful"]]
    head = [f"{100 * row['missed']:.0f} % missed" for row in missed["rows"]] + [row["system"] for row in missed["stateful"]]
    lines = [
        ["end to end, mean", *(f"{row[E2E]:.2f} s" for row in rows)],
        ["TTFT, mean", *(f"{row[TTFT]:.2f} s" for row in rows)],
        ["returning history found", *(f"{100 * row['cached_share_returning']:.0f} %" for row in rows)],
    ]
    base = spurious["rows"][0]
    costs = [
        [
            f"{100 * row['spurious']:.0f} %",
            f"{100 * (1 - row['output_tokens_per_s'] / base['output_tokens_per_s']):.1f} %",
            f"{row[E2E]:.2f} s",
        ]
        for row in spurious["rows"]
    ]
    return f"""
## Figures 19 and 20: hints that are missed, and hints for nothing

![figure 19](pictures/figure-19.png)

Llama-2-13B, 512 users, means of three seeds. Paper: a token takes 15 % more where 10 % of the hints are missed, and is level with InferCept where all are. Here:

{table(("", *head), lines)}

The paper's shape: without any hint we are level with the stateful systems.

![figure 20](pictures/figure-20.png)

The same with hints for nothing. Paper: 60 % of them cost 2.1 % of the throughput. Here:

{table(("hints for nothing, a request", "fewer output tokens a second", "end to end, mean"), costs)}

SSDs that are busy bring caches for people who do not speak. People set the pace in a closed loop, so throughput hides it.
"""


def twenty_one() -> str:
    rows = {(round(float(r["share"]), 1), r["system"], r["who"]): r for r in figure(21)["rows"]}
    lines = [
        [
            NAMES[system],
            who,
            *(f"{1000 * rows[share, system, who][TPOT]:.1f} ms, {rows[share, system, who][TTFT]:.2f} s" for share in (0.1, 0.3, 0.5)),
        ]
        for system in ("recompute", "balanced")
        for who in ("prioritised", "regular")
    ]
    return f"""
## Figure 21: priorities

![figure 21](pictures/figure-21.png)

Llama-2-13B, 512 users. Paper: better tokens per second than vLLM's priority scheduling for both kinds of session, and better for the prioritised. Here,
TPOT and TTFT by the share of conversations that have priority:

{table(("", "sessions", "10 %", "30 %", "50 %"), lines)}

**TPOT does not tell the two kinds apart**, with vLLM or with us: once it is in the batch every request has its token in every step. TTFT does.
"""


def result() -> str:
    told = (
        one_and_two,
        four_and_five,
        six,
        eleven_and_twelve,
        thirteen,
        fourteen,
        fifteen,
        sixteen,
        seventeen,
        eighteen,
        nineteen_and_twenty,
        twenty_one,
    )
    return "\n\n".join(part().strip() for part in told)
