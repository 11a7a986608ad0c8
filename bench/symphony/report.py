"""The results in README.md, from results/figure-*.json: the paper's statement, then ours and the ratios over ours."""

from __future__ import annotations

from report_busy import busy
from report_more import arms, headlines
from report_tables import E2E, NAMES, TPOT, TTFT, by, equal, figure, over, peaks, requests_per_gpu
from write_figures import table


def one_and_two() -> str:
    rows = {int(row["requests_at_a_time"]): row for row in figure(2)["rows"]}
    step, token = (rows[32][name] / rows[8][name] for name in ("decode_step_s", "tpot_s"))
    return f"""
## Figures 1 and 2: why balance matters

![figure 1](pictures/figure-1.png)

Paper, 1,024 users: GPUs differ by up to 300 requests with InferCept. Here, requests per GPU:
{requests_per_gpu(figure(1)["systems"])}.

![figure 2](pictures/figure-2.png)

Paper: 32 requests at a time instead of 8 "can lead to almost double the latency". Here a token takes {token:.1f} x with prompts between
decode steps, {step:.1f} x without.
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

{table(("tokens of history", "recomputed", "loaded from DRAM", "loaded layer by layer", "already in HBM"), lines)}

![figure 5](pictures/figure-5.png)

Prompt tokens that an earlier turn already computed. Paper: over 50 % after three turns, over 99 % in all. Here, at the second, third and
eighth turn: {shares}; {100 * found["share_of_recomputed_tokens_all"]:.0f} % over the first twenty turns.
"""


def six() -> str:
    found = figure(6)
    systems = ("recompute", "infercept-migration")
    return f"""
## Figure 6: recompute, swap, swap with migration

![figure 6](pictures/figure-6.png)

Paper, fastest first: recompute, InferCept, InferCept that migrates a session's KV when its request arrives. **Here recompute is slowest**. 8B:

{over(found["8b"], (E2E,), "infercept", systems)}

13B:

{over(found["13b"], (E2E,), "infercept", systems)}
"""


def eleven_and_twelve() -> str:
    first, second = figure(11), figure(12)
    at = by(second["rows"])
    return f"""
## Figures 11 and 12: TPOT, TTFT, requests/s against users

![figure 11](pictures/figure-11.png)

Llama-3.1-8B. Paper, over SYMPHONY: TPOT 1.4 to 1.9 x (vLLM), up to 2.5 x (InferCept), 1.8 x (Llumnix), 1.6 x (both); TTFT up to 2.4 x; four to
eight times vLLM's users at equal TPOT. Here: {equal(first, (512, 1024))}.

{over(first["rows"], (TPOT, TTFT, E2E), users=(512, 1024, 1536, 2048))}

The curves separate once InferCept's host memory is full. TTFT differs more than in the paper: tokeniser and HTTP are not simulated.

![figure 12](pictures/figure-12.png)

Llama-2-13B. Paper: TPOT of vLLM 1.31 to 1.9 x (2.6 x at most), TTFT up to 2.56 x. Here, at equal TPOT:
{equal(second, (256, 384, 512))}.

{over(second["rows"], (TPOT, TTFT, E2E), users=(256, 384, 512, 640, 1024))}

TPOT gains are smaller than the paper's: part of the history is on the SSD, and at 1.5 GB/s per GPU (our assumption) recomputing is as fast as
loading. **At 1,024 users, past saturation, ours is
behind** in time to the first token: HBM bounds the batch of every system, so a cache saves no time, and requests/s are level ({at[1024, "balanced"]["requests_per_s"]:.1f}, vLLM {at[1024, "recompute"]["requests_per_s"]:.1f}).
"""


def thirteen() -> str:
    return f"""
## Figure 13: bursts

![figure 13](pictures/figure-13.png)

Llama-3.1-8B, longer prompts, shorter answers, bursts. Paper: up to 2.5 x. Here:

{over(figure(13)["rows"], (TPOT, E2E))}

Past saturation the factors measure queues.
"""


def fourteen() -> str:
    found = by(figure(14)["rows"])
    users = sorted({n for n, _ in found})
    systems = sorted({system for _, system in found if system != "lmcache"})
    lines = [
        [system, *(f"{100 * (1 - found[n, system][E2E] / found[n, 'lmcache'][E2E]):.0f} % sooner" for n in users)]
        for system in systems
    ]
    return f"""
## Figure 14: a slow link, with and without a codec

![figure 14](pictures/figure-14.png)

Llama-2-13B, 10 Gbit/s per GPU to remote storage; only "all tiers" also uses SSDs and peers. Paper: 47 % less normalised latency than LMCache with the codec, 35 % without. Here, end to end:

{table(("ours", *(f"{n} users" for n in users)), lines)}

Gains are smaller: the first token is a small part of an answer.
"""


def fifteen() -> str:
    return f"""
## Figure 15: imbalance

![figure 15](pictures/figure-15.png)

256 users: highest load of any GPU over the median. Paper, Llama-3.1-8B: 3.1 x with InferCept. Here, with few requests per GPU and much chance:

{peaks(figure(15)["systems"], ("recompute", "infercept", "llumnix-infercept", "balanced"))}

Llumnix + InferCept is the most even, but no faster.
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

Llama-3.1-8B, eight GPUs: MetaGPT-like teams (`agents.py`, the load of bench/agents with longer answers). Paper, seconds per project over SYMPHONY's: vLLM 2.8 x, Parrot 1.7 x. Here, over ours:

{table(("", *(f"{teams} teams, {files} files" for teams, files in cells)), lines)}

Factors are smaller: agents write 400 to 900 tokens, which no cache speeds up. **Hints do not pay here**:
sessions stay close to their KV. bench/agents finds the same.
"""


def seventeen() -> str:
    rows = figure(17)["rows"]
    systems = [system for system in dict.fromkeys(row["system"] for row in rows) if system != "balanced"]
    return f"""
## Figure 17: each mechanism switched off

![figure 17](pictures/figure-17.png)

Llama-2-13B. Paper: 7 x slower without cooperative memory, throughput 21.7 % lower without layer priority, 18.4 % without layer-wise loading. Here:

{over(rows, (E2E, TTFT), systems=systems)}

End to end only hints matter ("no balancing" has none either): loads from DRAM are short, and below saturation users set
the pace.
"""


def eighteen() -> str:
    return f"""
## Figure 18: prompts of 1,024 tokens, answers of one

![figure 18](pictures/figure-18.png)

Llama-3.1-8B. Paper: InferCept "struggles", and Llumnix does not help. Here too:

{over(figure(18)["rows"], (TTFT,))}

The paper blames imbalance; here the cause is memory: what InferCept's DRAM evicted is recomputed.
"""


def nineteen_and_twenty() -> str:
    missed, spurious = figure(19), figure(20)
    rows = [*missed["rows"], *missed["stateful"]]
    head = [f"{100 * row['missed']:.0f} % missed" for row in missed["rows"]] + [
        row["system"] for row in missed["stateful"]
    ]
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
## Figures 19 and 20: missed hints and spurious hints

![figure 19](pictures/figure-19.png)

Llama-2-13B, 512 users. Paper: 21.3 ms a token become 24.4 with 10 % of hints missed, as long as InferCept's with all. Here:

{table(("", *head), lines)}

Without hints ours equals the stateful systems.

![figure 20](pictures/figure-20.png)

The same with spurious hints. Paper: 60 % spurious hints cost 2.1 % of throughput. Here:

{table(("spurious hints per request", "fewer output tokens/s", "end to end, mean"), costs)}

A closed loop hides the cost in throughput.
"""


def twenty_one() -> str:
    rows = {(round(float(r["share"]), 1), r["system"], r["who"]): r for r in figure(21)["rows"]}
    lines = [
        [
            NAMES[system],
            who,
            *(
                f"{1000 * rows[share, system, who][TPOT]:.1f} ms, {rows[share, system, who][TTFT]:.2f} s"
                for share in (0.1, 0.3, 0.5)
            ),
        ]
        for system in ("recompute", "balanced")
        for who in ("prioritised", "regular")
    ]
    return f"""
## Figure 21: priorities

![figure 21](pictures/figure-21.png)

Llama-2-13B, 512 users. Paper: more tokens per second than vLLM, most for prioritised sessions. Here, TPOT and TTFT by share of prioritised
conversations:

{table(("", "sessions", "10 %", "30 %", "50 %"), lines)}

**Priority shows in TTFT, not in TPOT**: every request in the batch gets a token in every step.
"""


def result() -> str:
    told = (
        headlines,
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
        busy,
        arms,
    )
    return "\n\n".join(text for part in told if (text := part().strip()))
