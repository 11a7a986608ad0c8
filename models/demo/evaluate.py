"""How well the demo model remembers: exact answers on held-out words in held-out phrasings, by length and by kind.

    .venv/bin/python models/demo/evaluate.py [--model DIR] [--answers 400]

Facts are told early, small talk fills the space, and the questions come at the end; some ask for JSON or call a tool. No word and no
phrasing that carries a fact was ever trained on (words.py, phrasings.py). An answer is exact when greedy decoding after the true history
gives it to the last character; one forward pass over the conversation decides that for all its answers (every token of the answer is the
most likely one). In JSON and calls only values count: their keys are given by the schema, as the worker's grammars give them.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
from pathlib import Path

import torch
from conversations import Conversation, Course, Teller
from rows import HERE, Rendered, Renderer
from structured import Tools, wanted_as_json
from transformers import Qwen3ForCausalLM

#: Seeds that training never draws from.
HELD_OUT_SEED = 1_000_003
#: Kinds of answers whose form a grammar gives.
STRUCTURED = ("JSON", "tool call")
LENGTHS = ((20, 100), (100, 500), (500, 1000), (1000, 2000))


def held_out_conversation(rng: random.Random, length_tokens: int, renderer: Renderer) -> Conversation:
    """Facts, some corrected, then small talk up to the length, then questions: for each fact, for something not told, JSON, a call."""
    course = Course(Teller(rng, held_out_only=True))
    structured = length_tokens >= 100 and rng.random() < 0.3
    tools = Tools(course) if structured and rng.random() < 0.5 else None
    if tools:
        course.talk.tools = tools.described()
    wanted = rng.randint(1, max(1, min(8, length_tokens // 40)))
    while len(course.known) < wanted and renderer.count(course.talk.messages) < max(20, length_tokens * 0.6):
        course.tell(rng.choice((1, 1, 1, 2, 3)) if length_tokens > 100 else 1)
        if rng.random() < 0.2 and course.known:
            course.correct()
    while renderer.count(course.talk.messages) < length_tokens - 20 * len(course.known):
        course.chat()
    asks = list(course.known.values())
    rng.shuffle(asks)
    for fact in asks:
        course.ask(fact)
    if rng.random() < 0.2:
        course.ask_unknown()
    if len(asks) > 1 and rng.random() < 0.2:
        course.ask_two()
    if tools:
        tools.call()
    elif structured:
        wanted_as_json(course)
    return course.talk


def in_values(text: str) -> list[bool]:
    """Of each character of a JSON object, or of a call of a tool, whether it belongs to a value."""
    opening = text.find('"arguments": ')
    inside, after_colon, quoted = [], False, False
    for i, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif not quoted and character in ":,{}":
            after_colon = character == ":"
        belongs = character != '"' and after_colon and (quoted or character not in " :")
        inside.append(belongs and i > opening)
    return inside


def is_right(kind: str, text: str, best: list[int], renderer: Renderer) -> bool:
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
            at and inside[at - 1] and renderer.spelling(chosen)[:1] != text[at] and (text[at] == '"' or renderer.spelling(chosen).isdigit())
        ):
            return False
        at += len(renderer.spelling(token))
    return True


def exactness(model: Qwen3ForCausalLM, renderer: Renderer, shortest: int, longest: int, count: int, show: int = 0) -> dict[str, object]:
    """Shares of exact answers, overall and by kind, over at least `count` answers. show: so many wrong ones are printed."""
    rng = random.Random(HELD_OUT_SEED + shortest)
    by_kind: dict[str, list[bool]] = collections.defaultdict(list)
    conversations = whole = tokens = 0
    while sum(map(len, by_kind.values())) < count:
        talk = held_out_conversation(rng, rng.randint(shortest, longest), renderer)
        made: Rendered = renderer.render(talk)
        with torch.inference_mode():
            best = model(input_ids=torch.tensor([made.ids]), use_cache=False).logits[0].argmax(-1).tolist()
        right = []
        for (begin, end), kind, index in zip(made.recalls, talk.kinds, talk.recalls, strict=True):
            right.append(is_right(kind, talk.messages[index]["content"], best[begin - 1 : end - 1], renderer))
            by_kind[kind].append(right[-1])
            if not right[-1] and show > 0:
                show -= 1
                print(
                    "WRONG",
                    kind,
                    [m["content"] for m in talk.messages if m["role"] == "user"][:4],
                    "|",
                    talk.messages[index - 1]["content"],
                    "|",
                    talk.messages[index]["content"],
                    "|",
                    renderer.tok.decode(best[begin - 1 : end - 1]),
                )
        conversations, whole, tokens = conversations + 1, whole + all(right), tokens + len(made.ids)
    answers = [ok for kind in by_kind.values() for ok in kind]
    return {
        "conversations": conversations,
        "mean_tokens": round(tokens / conversations),
        "answers": len(answers),
        "exact_answers": round(sum(answers) / len(answers), 4),
        "exact_conversations": round(whole / conversations, 4),
        "by_kind": {kind: {"answers": len(r), "exact": round(sum(r) / len(r), 3)} for kind, r in sorted(by_kind.items())},
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, default=HERE)
    p.add_argument("--answers", type=int, default=400, help="at least so many in each range of lengths")
    p.add_argument("--show", type=int, default=0, help="print so many wrong answers in each")
    p.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    a = p.parse_args()
    renderer = Renderer()
    model = Qwen3ForCausalLM.from_pretrained(a.model, dtype=torch.float32).train(False)
    result: dict[str, object] = {"parameters": sum(q.numel() for q in model.parameters())}
    for shortest, longest in LENGTHS:
        result[f"{shortest}-{longest} tokens"] = figures = exactness(model, renderer, shortest, longest, a.answers, a.show)
        print(f"{shortest}-{longest} tokens:", json.dumps(figures), flush=True)
    if a.out:
        a.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
