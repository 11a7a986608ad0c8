"""Trains the demo model from scratch on generated conversations, with a growing length, on a CPU.

    .venv/bin/python models/demo/train.py --minutes 45 --processes 2

Rows grow from 128 to 2,048 tokens in stages of the training's time. Matrices are trained by Muon, embeddings and norms
by AdamW. Each core has a process of its own, and they average their gradients at each step: threads that share every
operation wait for each other most of the time where other programs run. A checkpoint is written every two minutes, with
the weights as they are then in `--out`; an interrupted run goes on from it. `--begin WEIGHTS` trains a model on: with
long rows from the start, and at a lower learning rate. Stages and learning rate go by the processes' processor time, so
that other programs make a run longer and not worse, and a new run differs.

The weights beside this file come from two runs on two cores: the command above from scratch (8,925 steps), then
`--begin` these with `--minutes 65 --seed 2` (6,325 steps).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing
from rows import HERE, RECALL, Renderer, training_row
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

#: (share of the time, tokens in a step of all processes, lengths in tokens of which each step draws one)
STAGES: tuple[tuple[float, int, tuple[int, ...]], ...] = (
    (0.18, 4096, (128,)),
    (0.20, 4096, (128, 256)),
    (0.34, 4096, (128, 256, 512, 512)),
    (0.28, 4096, (128, 256, 512, 1024, 1024, 2048)),
)
#: Of a model that is trained on.
STAGES_ON: tuple[tuple[float, int, tuple[int, ...]], ...] = (
    (0.40, 4096, (128, 256, 512, 512, 1024)),
    (0.60, 4096, (128, 512, 512, 1024, 1024, 2048, 2048)),
)
MAX_POSITION = 16384
#: Plain matrix products are faster than flash attention for short rows.
EAGER_LENGTH = 256
MUON_LR, ADAM_LR = 0.02, 4e-3
WARMUP_STEPS = 60
#: From this share of the time on, the learning rate falls to nothing; of a model that is trained on from the start, and
#: from this factor.
DECAY_FROM = 0.35
FACTOR_ON = 0.6
#: What each optimiser remembers of a parameter, beside the step.
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def config(vocab_size: int, eos: int) -> Qwen3Config:
    """2.3 M parameters in 5 layers."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
        dtype="float32",
    )


def draw(rng: random.Random, renderer: Renderer, length: int, count: int) -> tuple[torch.Tensor, ...]:
    """A batch `(ids, positions, targets, weights)`, each `[count, length]`."""
    ids, pos, tgt = (torch.zeros(count, length, dtype=torch.long) for _ in range(3))
    weights = torch.zeros(count, length)
    for i in range(count):
        row_ids, row_pos, row_w = training_row(rng, renderer, length)
        k = len(row_ids) - 1
        ids[i, :k], tgt[i, :k] = torch.tensor(row_ids[:-1]), torch.tensor(row_ids[1:])
        pos[i, :k], weights[i, :k] = torch.tensor(row_pos[:-1]), torch.tensor(row_w[1:])
    return ids, pos, tgt, weights


def stage_at(share: float, on: bool) -> tuple[int, tuple[int, ...]]:
    """Step and lengths, in tokens, of the stage that covers this share of the run. on: of a model that was trained
    before."""
    stages = STAGES_ON if on else STAGES
    for part, step_tokens, lengths in stages:
        if share < part:
            return step_tokens, lengths
        share -= part
    return stages[-1][1:]


def rate_at(share: float, step: int, on: bool) -> float:
    """What the learning rates are times at this share of the run."""
    begin, factor = (0.0, FACTOR_ON) if on else (DECAY_FROM, 1.0)
    return factor * min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, max(0.01, (1 - share) / (1 - begin)))


class Optimisers:
    """Muon for the matrices, AdamW for embeddings and norms, with one schedule."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._named = dict(model.named_parameters())
        matrices = [q for name, q in self._named.items() if q.dim() == 2 and "embed" not in name]
        rest = [q for name, q in self._named.items() if q.dim() != 2 or "embed" in name]
        self._muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.02, momentum=0.95)
        self._adam = torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, factor: float) -> None:
        """One step with the learning rates times `factor`."""
        for optimiser, lr in ((self._muon, MUON_LR), (self._adam, ADAM_LR)):
            for group in optimiser.param_groups:
                group["lr"] = lr * factor
            optimiser.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and moments by name."""
        found = {f"model/{name}": q.detach() for name, q in self._named.items()}
        for optimiser in (self._muon, self._adam):
            for name, q in self._named.items():
                found |= {
                    f"{moment}/{name}": optimiser.state[q][moment]
                    for moment in MOMENTS
                    if q in optimiser.state and moment in optimiser.state[q]
                }
        return found

    def load(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        """Take what `tensors` gave."""
        for name, q in self._named.items():
            q.data.copy_(tensors[f"model/{name}"])
            moments = {moment: tensors[f"{moment}/{name}"] for moment in MOMENTS if f"{moment}/{name}" in tensors}
            if "momentum_buffer" in moments:
                self._muon.state[q] = moments
            elif moments:
                self._adam.state[q] = {"step": torch.tensor(float(step)), **moments}


def checkpoint(path: Path, optimisers: Optimisers, spent_s: float, step: int) -> None:
    """Write parameters and moments, under a temporary name first: an interrupted write loses nothing."""
    save_file(optimisers.tensors(), path.with_suffix(".new"), metadata={"spent_s": str(spent_s), "step": str(step)})
    path.with_suffix(".new").rename(path)


def restore(path: Path, optimisers: Optimisers) -> tuple[float, int]:
    """Read what `checkpoint` wrote; returns (seconds spent, steps done)."""
    with safe_open(path, "pt") as f:
        step = int(f.metadata()["step"])
        optimisers.load({name: f.get_tensor(name) for name in f.keys()}, step)  # noqa: SIM118
        return float(f.metadata()["spent_s"]), step


def average(model: Qwen3ForCausalLM, figures: list[float], processes: int) -> list[float]:
    """Replaces the gradients by their mean over all processes; returns the means of the figures."""
    grads = [q.grad for q in model.parameters()]
    flat = torch.cat([*(g.flatten() for g in grads), torch.tensor(figures)])
    torch.distributed.all_reduce(flat)
    flat /= processes
    for g, mean in zip(grads, flat.split([*(g.numel() for g in grads), len(figures)]), strict=False):
        g.copy_(mean.view_as(g))
    return flat[-len(figures) :].tolist()


def work(rank: int, a: argparse.Namespace, meeting: str) -> None:
    """One process of the training. meeting: a file's name by which they find each other."""
    torch.set_num_threads(1)
    torch.manual_seed(a.seed)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=a.processes)
    renderer = Renderer()
    model = Qwen3ForCausalLM(config(len(renderer.tok), renderer.tok.eos_token_id))
    if a.begin is not None:
        model.load_state_dict(load_file(a.begin), strict=False)  # the tied head is not in the file
    optimisers = Optimisers(model)
    spent, step = restore(a.checkpoint, optimisers) if a.checkpoint.exists() else (0.0, 0)
    if rank == 0:
        print(
            f"{sum(q.numel() for q in model.parameters()) / 1e6:.2f} M parameters; step {step}, {spent / 60:.1f} "
            "min spent",
            flush=True,
        )
    total, saved, took = a.minutes * 60, time.monotonic(), 0.0
    while spent < total:
        began, share = time.process_time(), spent / total
        step_tokens, lengths = stage_at(share, a.begin is not None)
        length = random.Random(f"{a.seed} {step}").choice(lengths)
        rng = random.Random(f"{a.seed} {step} {rank}")
        ids, pos, tgt, weights = draw(rng, renderer, length, max(1, step_tokens // length // a.processes))
        wanted = weights > 0
        model.set_attn_implementation("eager" if length <= EAGER_LENGTH else "sdpa")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            # Without a mask, transformers takes a gap in the positions for another sequence's beginning.
            hidden = model.model(
                input_ids=ids, position_ids=pos, attention_mask=torch.ones_like(ids), use_cache=False
            ).last_hidden_state
            logits = model.lm_head(hidden[wanted])
        tgt, weights = tgt[wanted], weights[wanted]
        each = torch.nn.functional.cross_entropy(logits.float(), tgt, reduction="none")
        loss = (each * weights).sum() / weights.sum()
        model.zero_grad(set_to_none=True)
        loss.backward()
        recalls = weights == RECALL
        exact = (logits.argmax(-1) == tgt)[recalls].float().mean().item()
        took, *figures = average(model, [took, loss.item(), each[recalls].mean().item(), exact], a.processes)
        spent += took
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimisers.step(rate_at(share, step, a.begin is not None))
        step += 1
        took = time.process_time() - began
        if rank == 0 and step % 25 == 0:
            named = {
                n: round(v, 4) for n, v in zip(("loss", "recall_loss", "recall_token_accuracy"), figures, strict=True)
            }
            print(json.dumps({"step": step, "min": round(spent / 60, 2), "length": length, **named}), flush=True)
        if rank == 0 and time.monotonic() - saved > 120:
            checkpoint(a.checkpoint, optimisers, spent, step)
            model.save_pretrained(a.out, safe_serialization=True)
            saved = time.monotonic()
    if rank == 0:
        checkpoint(a.checkpoint, optimisers, spent, step)
        model.save_pretrained(a.out, safe_serialization=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=45, help="of processor time, each process")
    p.add_argument("--processes", type=int, default=2, help="one a core")
    p.add_argument("--begin", type=Path, default=None, help="weights to train on, of an earlier run")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--checkpoint", type=Path, default=Path("/tmp/upbeat-demo-training.safetensors"))
    p.add_argument("--out", type=Path, default=HERE)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(work, (a, f"{directory}/meeting"), nprocs=a.processes)


if __name__ == "__main__":
    main()
