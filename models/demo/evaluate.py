"""How well the demo model remembers: answers about held-out words, asked in held-out phrasings, by length and by kind.

    .venv/bin/python models/demo/evaluate.py [--model DIR] [--answers 400]

Facts are told early, small talk fills the space, and the questions come at the end; some ask for JSON or call a tool.
No word and no phrasing that carries a fact was ever trained on (words.py, phrasings.toml). Two shares are counted, of
greedy decoding after the true history:

- exact: the answer is the wanted sentence to the last character. One forward pass over the conversation decides that
  for all its answers (every token of the answer is the most likely one).
- right: it names the wanted value whole and letter by letter (of two, both in the order asked) and no other value that
  was told; to a question about something never told it says so and names none. Exact answers are right; the others are
  generated.

In JSON and calls the worker's grammars give everything but values and the tool's name: these must be right, and are so
if and only if they are exact.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from conversations import NOT_TOLD, Course, told_first
from rows import HERE, Rendered, Renderer
from structured import in_values
from teller import Teller
from transformers import Qwen3ForCausalLM

#: Seeds that training never draws from.
HELD_OUT_SEED = 1_000_003
#: Kinds of answers whose form a grammar gives.
STRUCTURED = ("JSON", "tool call")
LENGTHS = ((20, 100), (100, 500), (500, 1000), (1000, 2000))


def held_out_conversation(rng: random.Random, length_tokens: int, renderer: Renderer) -> Course:
    """Facts, some corrected, then small talk up to the length, then questions: for each fact, for something not told,
    JSON, a call."""
    return told_first(Course(Teller(rng, held_out_only=True)), length_tokens, renderer.count)


def is_exact(kind: str, text: str, best: list[int], renderer: Renderer) -> bool:
    """Whether `best`, the most likely token at each place of the answer `text` and behind it, is that answer.

    In JSON and calls a grammar gives everything but the values, so that these must be right, and end where they end."""
    ids = renderer.encode(text + "<|im_end|>")
    if kind not in STRUCTURED:
        return best == ids
    inside, at = [*in_values(text), False], 0
    for token, chosen in zip(ids[:-1], best, strict=False):
        if inside[at] or any(inside[at : at + len(renderer.spelling(token))]):
            if chosen != token:
                return False
        elif (
            at
            and inside[at - 1]
            and renderer.spelling(chosen)[:1] != text[at]
            and (text[at] == '"' or renderer.spelling(chosen).isdigit())
        ):
            return False
        at += len(renderer.spelling(token))
    return True


def is_right(wanted: str, values: Sequence[str], told: Collection[str], answer: str) -> bool:
    """Whether `answer` names `values` in this order, and nothing else that was `told` unless the wanted answer has it,
    too."""
    at = 0
    for value in values:
        found = _whole(value).search(answer, at)
        if not found:
            return False
        at = found.end()
    if wanted == NOT_TOLD and "not told" not in answer:
        return False
    return not any(_whole(value).search(answer) and not _whole(value).search(wanted) for value in told)


def _whole(value: str) -> re.Pattern[str]:
    """Finds the value where it is no part of a longer word or number."""
    return re.compile(rf"(?<![^\W_]){re.escape(value)}(?![^\W_])")


def generated(model: Qwen3ForCausalLM, renderer: Renderer, ids: list[int]) -> str:
    """The greedy answer."""
    with torch.inference_mode():
        made = model.generate(torch.tensor([ids]), max_new_tokens=80, do_sample=False)[0, len(ids) :]
    return renderer.tok.decode(made, skip_special_tokens=True)


def shares(
    model: Qwen3ForCausalLM, renderer: Renderer, shortest: int, longest: int, count: int, show: int = 0
) -> dict[str, object]:
    """Shares of right and of exact answers, overall and by kind, over at least `count` answers. show: so many wrong
    ones are printed."""
    rng = random.Random(HELD_OUT_SEED + shortest)
    by_kind: dict[str, list[tuple[bool, bool]]] = collections.defaultdict(list)
    conversations = whole = tokens = 0
    while sum(map(len, by_kind.values())) < count:
        course = held_out_conversation(rng, rng.randint(shortest, longest), renderer)
        talk = course.talk
        made: Rendered = renderer.render(talk)
        with torch.inference_mode():
            best = model(input_ids=torch.tensor([made.ids]), use_cache=False).logits[0].argmax(-1).tolist()
        all_right = True
        for (begin, end), kind, index, values in zip(made.recalls, talk.kinds, talk.recalls, talk.values, strict=True):
            wanted = talk.messages[index]["content"]
            exact = right = is_exact(kind, wanted, best[begin - 1 : end - 1], renderer)
            if not exact and (kind not in STRUCTURED or show > 0):
                answer = generated(model, renderer, made.ids[:begin])
                right = kind not in STRUCTURED and is_right(wanted, values, course.told, answer)
                if not right and show > 0:
                    show -= 1
                    said = [m["content"] for m in talk.messages[:index] if m["role"] == "user"]
                    print(f"WRONG {kind} | {said} | {wanted} | {answer}", flush=True)
            by_kind[kind].append((right, exact))
            all_right &= right
        conversations, whole, tokens = conversations + 1, whole + all_right, tokens + len(made.ids)
    answers = [pair for kind in by_kind.values() for pair in kind]
    return {
        "conversations": conversations,
        "mean_tokens": round(tokens / conversations),
        "answers": len(answers),
        "right_answers": _share([right for right, _ in answers]),
        "exact_answers": _share([exact for _, exact in answers]),
        "right_conversations": round(whole / conversations, 4),
        "by_kind": {
            kind: {"answers": len(of), "right": _share([r for r, _ in of]), "exact": _share([e for _, e in of])}
            for kind, of in sorted(by_kind.items())
        },
    }


def _share(held: list[bool]) -> float:
    return round(sum(held) / len(held), 4)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, default=HERE)
    p.add_argument("--answers", type=int, default=400, help="at least so many in each range of lengths")
    p.add_argument("--show", type=int, default=0, help="print so many wrong answers in each")
    p.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    p.add_argument(
        "--lengths",
        type=int,
        nargs="*",
        default=range(len(LENGTHS)),
        help="which of the ranges of lengths; --out adds to a file",
    )
    a = p.parse_args()
    renderer = Renderer()
    model = Qwen3ForCausalLM.from_pretrained(a.model, dtype=torch.float32).train(False)
    result: dict[str, object] = {"parameters": sum(q.numel() for q in model.parameters())}
    if a.out and a.out.exists() and len(a.lengths) < len(LENGTHS):
        result |= json.loads(a.out.read_text())
    for shortest, longest in [LENGTHS[i] for i in a.lengths]:
        result[f"{shortest}-{longest} tokens"] = figures = shares(model, renderer, shortest, longest, a.answers, a.show)
        print(f"{shortest}-{longest} tokens:", json.dumps(figures), flush=True)
    if a.out:
        a.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
