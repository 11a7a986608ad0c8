"""Trains the demo model from scratch on generated conversations, with a growing length, on a CPU.

    .venv/bin/python models/demo/train.py --minutes 120 --threads 2

The length grows from 128 to 1,024 tokens in stages of wall time, and is mixed at the end. In a third of the conversations
random gaps are put between the positions of neighbouring messages, so that the rotary embedding meets distances far beyond the
trained lengths (randomised positions; it is why answers hold up past 1,024 tokens). A checkpoint is written every two
minutes, and an interrupted run goes on from it. The weights beside this file were trained in three such runs, one going on
from the other, with the lengths, learning rate and conversations adjusted in between: a new run will differ in its last digits.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from conversations import conversation
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
#: (share of the time, lengths in tokens of which each step draws one)
STAGES: tuple[tuple[float, tuple[int, ...]], ...] = (
    (0.25, (128,)),
    (0.12, (256,)),
    (0.28, (512,)),
    (0.17, (1024,)),
    (0.18, (256, 512, 512, 1024)),
)
STEP_TOKENS = 4096
MAX_POSITION = 16384
USER_WEIGHT = 0.05
RECALL_WEIGHT = 2.0
#: AdamW's state of a parameter, beside the step.
MOMENTS = ("exp_avg", "exp_avg_sq")


def config(vocab_size: int, eos: int) -> LlamaConfig:
    """2.7 M parameters in 6 layers."""
    return LlamaConfig(
        vocab_size=vocab_size, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=MAX_POSITION, rope_theta=100000.0, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=eos, pad_token_id=0, dtype="float32",
    )  # fmt: skip


class Batches:
    """Draws batches `(ids, positions, targets, weights)`, each `[conversations, length]`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tok = AutoTokenizer.from_pretrained(HERE)
        self._lengths: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return self.tok(text, add_special_tokens=False)["input_ids"]

    def count(self, messages: list[dict[str, str]]) -> int:
        """Rendered length in tokens, with the per-message counts remembered."""
        total = 0
        for m in messages:
            text = m["content"]
            if text not in self._lengths:
                if len(self._lengths) > 100_000:
                    self._lengths.clear()
                self._lengths[text] = len(self.encode(text)) + 5
            total += self._lengths[text]
        return total

    def row(self, length: int) -> tuple[list[int], list[int], list[float]]:
        talk = conversation(self.rng, self.rng.randint(length * 2 // 3, length), self.count)
        ids: list[int] = []
        weights: list[float] = []
        positions: list[int] = []
        stretch = self.rng.random() < 0.3
        spare = self.rng.randint(0, max(2048 - length, length)) if stretch else 0
        at = 0
        recalls = set(talk.recalls)
        for i, m in enumerate(talk.messages):
            head = self.encode(f"<|im_start|>{m['role']}\n")
            body = self.encode(m["content"] + "<|im_end|>")
            tail = self.encode("\n")
            speaks = m["role"] == "assistant"
            w = RECALL_WEIGHT if i in recalls else 0.5 if speaks else USER_WEIGHT
            piece = head + body + tail
            weights += [0.0] * len(head) + [w] * len(body) + [0.0] * len(tail)
            if spare and not speaks and self.rng.random() < 0.3:
                gap = self.rng.randint(0, spare)
                spare -= gap
                at += gap
            ids += piece
            positions += range(at, at + len(piece))
            at += len(piece)
        return ids[: length + 1], positions[: length + 1], weights[: length + 1]

    def draw(self, length: int, count: int) -> tuple[torch.Tensor, ...]:
        rows = [self.row(length) for _ in range(count)]
        n = max(len(r[0]) for r in rows) - 1
        ids, pos, tgt = (torch.zeros(count, n, dtype=torch.long) for _ in range(3))
        weights = torch.zeros(count, n)
        for i, (row_ids, row_pos, row_w) in enumerate(rows):
            k = len(row_ids) - 1
            ids[i, :k], tgt[i, :k] = torch.tensor(row_ids[:-1]), torch.tensor(row_ids[1:])
            pos[i, :k], weights[i, :k] = torch.tensor(row_pos[:-1]), torch.tensor(row_w[1:])
        return ids, pos, tgt, weights


def lengths_at(share: float) -> tuple[int, ...]:
    """The lengths of the stage that covers this share of the run."""
    for part, lengths in STAGES:
        if share < part:
            return lengths
        share -= part
    return STAGES[-1][1]


def checkpoint(path: Path, model: LlamaForCausalLM, opt: torch.optim.Optimizer, spent_s: float, step: int) -> None:
    """Write parameters and moments, under a temporary name first: an interrupted write loses nothing."""
    tensors = {}
    for name, q in model.named_parameters():
        tensors[f"model/{name}"] = q.detach()
        tensors |= {f"{moment}/{name}": opt.state[q][moment] for moment in MOMENTS if q in opt.state}
    save_file(tensors, path.with_suffix(".new"), metadata={"spent_s": str(spent_s), "step": str(step)})
    path.with_suffix(".new").rename(path)


def restore(path: Path, model: LlamaForCausalLM, opt: torch.optim.Optimizer) -> tuple[float, int]:
    """Read what `checkpoint` wrote into model and optimiser; returns (seconds spent, steps done)."""
    with safe_open(path, "pt") as f:
        step = int(f.metadata()["step"])
        for name, q in model.named_parameters():
            q.data.copy_(f.get_tensor(f"model/{name}"))
            opt.state[q] = {"step": torch.tensor(float(step))} | {m: f.get_tensor(f"{m}/{name}") for m in MOMENTS}
        return float(f.metadata()["spent_s"]), step


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--minutes", type=float, default=110)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--checkpoint", type=Path, default=Path("/tmp/upbeat-demo-training.safetensors"))
    p.add_argument("--out", type=Path, default=HERE)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    batches = Batches(a.seed)
    model = LlamaForCausalLM(config(len(batches.tok), batches.tok.eos_token_id))
    decay = [q for q in model.parameters() if q.dim() >= 2]
    rest = [q for q in model.parameters() if q.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.98))
    spent, step = restore(a.checkpoint, model, opt) if a.checkpoint.exists() else (0.0, 0)
    batches.rng.seed(a.seed + step)
    print(f"{sum(q.numel() for q in model.parameters()) / 1e6:.2f} M parameters; step {step}, {spent / 60:.1f} min spent", flush=True)
    total, saved = a.minutes * 60, time.monotonic()
    recall_loss = recall_exact = 0.0
    while spent < total:
        began = time.monotonic()
        share = spent / total
        length = batches.rng.choice(lengths_at(share))
        count = max(4, STEP_TOKENS // length)
        lr = a.lr * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
        for group in opt.param_groups:
            group["lr"] = lr
        ids, pos, tgt, weights = batches.draw(length, count)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, position_ids=pos, use_cache=False).logits
        each = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tgt.flatten(), reduction="none").view_as(weights)
        loss = (each * weights).sum() / weights.sum()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        step += 1
        spent += min(time.monotonic() - began, 10.0)  # a pause of the machine does not count
        if step % 50 == 0:
            mask = weights == RECALL_WEIGHT
            recall_loss = each[mask].mean().item()
            recall_exact = (logits.argmax(-1) == tgt)[mask].float().mean().item()
            figures = {"loss": loss.item(), "recall_loss": recall_loss, "recall_token_accuracy": recall_exact}
            rounded = {name: round(value, 4) for name, value in figures.items()}
            print(json.dumps({"step": step, "min": round(spent / 60, 2), "length": length, **rounded}), flush=True)
        if time.monotonic() - saved > 120:
            checkpoint(a.checkpoint, model, opt, spent, step)
            saved = time.monotonic()
    checkpoint(a.checkpoint, model, opt, spent, step)
    model.save_pretrained(a.out, safe_serialization=True)


if __name__ == "__main__":
    main()
