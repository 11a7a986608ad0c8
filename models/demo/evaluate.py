"""How well the demo model remembers: exact answers on held-out conversations, by length.

    .venv/bin/python models/demo/evaluate.py [--model DIR] [--conversations 200]

An answer is exact when greedy decoding after the true history gives it to the last character; one forward pass over the
conversation decides that for all its answers (every token of the answer is the most likely one).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from conversations import conversation
from transformers import AutoTokenizer, LlamaForCausalLM

HERE = Path(__file__).parent
#: Seeds that training never draws from.
HELD_OUT_SEED = 1_000_003
LENGTHS = ((200, 600), (600, 1000), (1000, 1500))


def exactness(model: LlamaForCausalLM, tok: AutoTokenizer, shortest: int, longest: int, count: int) -> dict[str, float]:
    """Shares of exact answers, and of conversations with nothing but exact answers, over `count` conversations."""
    rng = random.Random(HELD_OUT_SEED + shortest)

    def encode(text: str) -> list[int]:
        return tok(text, add_special_tokens=False)["input_ids"]

    def length(messages: list[dict[str, str]]) -> int:
        return sum(len(encode(m["content"])) + 5 for m in messages)

    answers = exact = whole = tokens = 0
    for _ in range(count):
        talk = conversation(rng, rng.randint(shortest, longest), length)
        ids: list[int] = []
        spans = []
        for i, m in enumerate(talk.messages):
            ids += encode(f"<|im_start|>{m['role']}\n")
            start = len(ids)
            ids += encode(m["content"] + "<|im_end|>")
            if i in talk.recalls:
                spans.append((start, len(ids)))
            ids += encode("\n")
        with torch.inference_mode():
            best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()
        right = [all(best[j - 1] == ids[j] for j in range(a, b)) for a, b in spans]
        answers, exact, whole, tokens = answers + len(right), exact + sum(right), whole + all(right), tokens + len(ids)
    return {"conversations": count, "mean_tokens": round(tokens / count), "answers": answers, "exact_answers": round(exact / answers, 4),
            "exact_conversations": round(whole / count, 4)}  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", type=Path, default=HERE)
    p.add_argument("--conversations", type=int, default=200)
    p.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    a = p.parse_args()
    tok = AutoTokenizer.from_pretrained(a.model)
    model = LlamaForCausalLM.from_pretrained(a.model, dtype=torch.float32).train(False)
    result = {"parameters": sum(q.numel() for q in model.parameters())}
    for shortest, longest in LENGTHS:
        result[f"{shortest}-{longest} tokens"] = figures = exactness(model, tok, shortest, longest, a.conversations)  # type: ignore[assignment]
        print(f"{shortest}-{longest} tokens:", json.dumps(figures), flush=True)
    if a.out:
        a.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
