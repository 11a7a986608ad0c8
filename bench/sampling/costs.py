"""Costs of sampling: the sampler on random logits, and grammars on a vocabulary of real size.

Times are the thread's processor time, so other load counts only through the caches.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from contracts.request import GenerateRequest, Sampling, ToolUse
from worker.sampling.grammars import GrammarCompiler, GrammarConstraint
from worker.sampling.output import Guide
from worker.sampling.sampler import SamplingState, choose
from worker.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from worker.text.codec import TextCodec

EOS = 0
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["person", "place", "thing"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
DOCUMENT = json.dumps(
    {
        "name": "The session that returns",
        "age": 42,
        "tags": ["prefetch", "layer by layer", "evict the last layers first"] * 4,
        "kind": "thing",
    }
)
TOOLS = json.dumps([{"type": "function", "function": {"name": f"tool_{i}", "parameters": SCHEMA}} for i in range(8)])
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "greedy, penalties": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "temperature 1": {"temperature": 1.0, "seed": 1},
    "temperature 1, top_p 0.9": {"temperature": 1.0, "seed": 1, "top_p": 0.9},
    "temperature 1, top_k 50": {"temperature": 1.0, "seed": 1, "top_k": 50},
    "temperature 1, min_p 0.05": {"temperature": 1.0, "seed": 1, "min_p": 0.05},
}


def codec(vocab_size: int, root: Path) -> TextCodec:
    """A byte-level BPE tokenizer of `size` tokens, trained on this repository's text and random syllables."""
    rng = random.Random(0)
    text = " ".join(
        p.read_text(encoding="utf-8") for p in sorted(root.glob("docs/**/*.md")) + sorted(root.glob("worker/**/*.py"))
    )
    words = (
        "".join(rng.choice("bcdfglmnprst") + rng.choice("aeiou") for _ in range(rng.randrange(2, 6)))
        for _ in range(3 * vocab_size)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text, *(f"{w} {w} {w}" for w in words)], trainer)
    return TextCodec(tokenizer, json.loads(tokenizer.to_str()), ChatTemplate(PLAIN_TEMPLATE, {}))


def microseconds(work: Callable[[], object], rounds: int) -> float:
    """Median microseconds of `rounds` rounds, after a few to warm up."""
    for _ in range(3):
        work()
    took = []
    for _ in range(rounds):
        begun = time.thread_time()
        work()
        took.append(time.thread_time() - begun)
    return round(statistics.median(took) * 1e6, 1)


def sampling(vocab_size: int, batches: list[int], rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds per row, by setting and batch; all rows have the same setting."""
    generator = torch.Generator().manual_seed(1)
    figures: dict[str, dict[str, float]] = {}
    for name, settings in SETTINGS.items():
        figures[name] = {}
        for batch in batches:
            logits = torch.randn(batch, vocab_size, generator=generator) * 3
            states = [SamplingState.start(Sampling(**settings), range(2000), range(300)) for _ in range(batch)]
            work = partial(_choose_all, logits.numpy(), states)
            figures[name][str(batch)] = round(microseconds(work, rounds) / batch, 1)
    return figures


def _choose_all(rows: Any, states: list[SamplingState]) -> None:
    for row, state in zip(rows, states, strict=True):
        choose(row, state)


def grammars(vocab_size: int, made: TextCodec) -> dict[str, dict[str, float]]:
    """Costs of grammars: a schema, any object, and text in which calls may begin.

    Milliseconds to compile; per token the microseconds for the mask, for the tensor, for taking the token, and of a
    greedy choice with a grammar over one without.
    """
    compiler = GrammarCompiler(made, vocab_size, {EOS})
    begun = time.thread_time()
    _guide(compiler, _request(json_schema='{"type":"null"}'))
    tables_ms = (time.thread_time() - begun) * 1e3
    text = (DOCUMENT + " and more of the same. ") * 4
    asked = {
        "json_schema": (_request(json_schema=json.dumps(SCHEMA)), DOCUMENT),
        "json_object": (_request(json_schema='{"type":"object"}'), DOCUMENT),
        "8 tools, auto, text": (_request(tool_use=ToolUse(TOOLS)), text),
        "8 tools, none, text": (_request(tool_use=ToolUse(TOOLS, "none")), text),
    }
    figures: dict[str, dict[str, float]] = {"vocabulary": {"tables_ms": round(tables_ms, 1)}}
    for name, (request, said) in asked.items():
        begun = time.thread_time()
        guide = _guide(compiler, request)
        compiled_ms = (time.thread_time() - begun) * 1e3
        assert isinstance(guide.constraint, GrammarConstraint)
        figures[name] = {
            "compile_ms": round(compiled_ms, 1),
            **_walk(guide.constraint, made.plain_tokens(said), vocab_size),
        }
    return figures


def _guide(compiler: GrammarCompiler, request: GenerateRequest) -> Guide:
    spec = compiler.spec(request)
    assert spec is not None
    return compiler.guide(request, compiler.matcher(spec.grammar(), spec.param))


def _walk(constraint: GrammarConstraint, tokens: list[int], vocab_size: int) -> dict[str, float]:
    greedy = Sampling(temperature=0.0)
    free = SamplingState.start(greedy, [1])
    masks, takes, choices, bare = [], [], [], []
    for token in tokens:
        logits = torch.full((1, vocab_size), -5.0)
        logits[0, token] = 5.0
        guided = SamplingState(greedy, 1, 0, constraint=constraint)
        times = [time.thread_time()]
        constraint.allowed()
        times.append(time.thread_time())
        choice = choose(logits.numpy()[0], guided)
        times.append(time.thread_time())
        choose(logits.numpy()[0], free)
        times.append(time.thread_time())
        constraint.took(choice.token)
        times.append(time.thread_time())
        assert choice.token == token and not constraint.error
        for into, a, b in ((masks, 0, 1), (choices, 1, 2), (bare, 2, 3), (takes, 3, 4)):
            into.append((times[b] - times[a]) * 1e6)
    added = [c - b for c, b in zip(choices, bare, strict=True)]
    total = [m + a + t for m, a, t in zip(masks, added, takes, strict=True)]
    return {
        "tokens": len(tokens),
        "mask_us": round(statistics.median(masks), 1),
        "mask_p99_us": round(sorted(masks)[int(len(masks) * 0.99)], 1),
        "apply_us": round(statistics.median(added), 1),
        "take_us": round(statistics.median(takes), 1),
        "total_us": round(statistics.median(total), 1),
    }


def _request(json_schema: str | None = None, tool_use: ToolUse | None = None) -> GenerateRequest:
    return GenerateRequest("r", "t", "s", "m", Sampling(), messages=[], json_schema=json_schema, tool_use=tool_use)
