"""What a codec does to greedy answers: conversations whose KV went through the SSD by each codec, against raw.

Each arm is a separate node. It serves every conversation up to its last question, saves the KV, and restarts with only
its SSD (the blob tier has just the manifests). Then every question is asked: all but the last tokens of each prompt
come from the SSD, through the codec.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from transformers import AutoTokenizer

from kvstore.tiers import objects
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.format import BLOCK, decode_header
from loadtest.client import Endpoint, Outcome, ask
from loadtest.stack import Stack, StackError
from runtime.clock import RealClock
from runtime.config_file import cluster_secret, load_config

ANSWER_TOKENS = 64
HBM_GIB, DRAM_GIB = 0.25, 0.25
#: Unseen: training of the demo model uses small seeds, its evaluation those from 10^6 on (models/demo).
SEED = 3_000_000
CLOCK = RealClock()


@dataclass(frozen=True)
class Question:
    """A question after its messages, and the right answer."""

    session_id: str
    messages: list[dict[str, str]]
    answer: str


@dataclass
class Arm:
    """One codec's answers in the questions' order, and where the KV came from."""

    codec: str
    texts: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    read_bytes: dict[str, int] = field(default_factory=dict)
    stored_bytes: int = 0
    file_bytes: int = 0
    raw_bytes: int = 0


def questions(model: Path, count: int, shortest: int, longest: int) -> list[Question]:
    """The recall questions of `count` conversations."""
    sys.path.insert(0, str(model))
    from conversations import conversation

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(SEED + count)

    def length(messages: list[dict[str, str]]) -> int:
        return sum(len(tokenizer(m["content"], add_special_tokens=False)["input_ids"]) + 5 for m in messages)

    made = []
    for number in range(count):
        talk = conversation(rng, rng.randint(shortest, longest), length)
        made += [Question(f"codec-{number}", talk.messages[:i], talk.messages[i]["content"]) for i in talk.recalls]
    return made


def run_arm(codec: str, asked: Sequence[Question], model: Path, dtype: str, directory: Path, concurrency: int) -> Arm:
    """Save with the codec, restart, ask. Raises StackError if a request fails or the KV is not from the SSD."""
    arm = Arm(codec)
    settings = {"kv": {"ssd_codec": codec}, "worker": {"dtype": dtype}}
    stack = Stack(model=model, nodes=1, hbm_gib=HBM_GIB, dram_gib=DRAM_GIB, directory=directory, settings=settings)
    with stack:
        longest = {q.session_id: q for q in asked}  # the last question of each session
        asyncio.run(speak(stack, list(longest.values()), 1, concurrency))
        stack.stop()
        bare = directory / "blob-without-chunks"
        shutil.copytree(stack.data / "blob" / objects.ROOT / "manifests", bare / objects.ROOT / "manifests")
        stack.start({**settings, "kv": {**settings["kv"], "blob_url": bare.as_uri()}})
        measure_files(arm, stack.data / "node-0" / "ssd", ClusterKeys(cluster_secret(stack.data)))
        outcomes = asyncio.run(speak(stack, asked, ANSWER_TOKENS, concurrency))
        arm.read_bytes = read_bytes(stack)
    arm.texts = [o.text for o in outcomes]
    arm.cached_tokens, arm.prompt_tokens = (
        sum(o.cached_tokens or 0 for o in outcomes),
        sum(o.prompt_tokens for o in outcomes),
    )
    if not arm.read_bytes.get("ssd") or arm.read_bytes.get("blob"):
        raise StackError(f"the KV of {codec} did not come from the SSD alone: {arm.read_bytes}")
    return arm


async def speak(stack: Stack, asked: Sequence[Question], tokens: int, concurrency: int) -> list[Outcome]:
    """Ask `concurrency` questions at a time; outcomes in the questions' order. Raises StackError."""
    endpoint, gate = Endpoint(stack.url, stack.model_name()), asyncio.Semaphore(concurrency)

    async with aiohttp.ClientSession() as http:

        async def one(question: Question) -> Outcome:
            async with gate:
                outcome = Outcome(question.session_id, 0, 0.0, sent_s=CLOCK.now())
                await ask(http, endpoint, question.messages, tokens, question.session_id, outcome, CLOCK.now)
            if outcome.error is not None:
                raise StackError(f"{question.session_id}: {outcome.error}")
            return outcome

        return list(await asyncio.gather(*(one(q) for q in asked)))


def measure_files(arm: Arm, root: Path, keys: ClusterKeys) -> None:
    """Add up the SSD's files by their headers into `arm`. Raises StackError for another codec."""
    for path in (p for p in root.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            header = decode_header(keys, file.read(BLOCK))
        if header.layout.codec != arm.codec:
            raise StackError(f"{path.name} is {header.layout.codec} where {arm.codec} was configured")
        arm.stored_bytes += sum(header.layout.lengths)
        arm.file_bytes += path.stat().st_size
        arm.raw_bytes += header.shape.chunk_bytes


def read_bytes(stack: Stack) -> dict[str, int]:
    """Arena bytes the store has loaded since its start, by source."""
    places = load_config(stack.config_file, {"nodes": {"count": 1}}).node(0)
    lines = stack.metrics(places.store_metrics_port).splitlines()
    found = (re.fullmatch(r'upbeat_kvstore_read_bytes_total\{source="(\w+)"\} (.+)', line) for line in lines)
    return {match[1]: int(float(match[2])) for match in found if match}


def compare(asked: Sequence[Question], arms: Sequence[Arm]) -> dict[str, Any]:
    """Figures by codec; the first arm is raw."""
    raw = arms[0]
    figures: dict[str, Any] = {}
    for arm in arms:
        exact = [text.strip() == q.answer for text, q in zip(arm.texts, asked, strict=True)]
        same = [a == b for a, b in zip(arm.texts, raw.texts, strict=True)]
        figures[arm.codec] = {
            "answers": len(asked),
            "exact_rate": round(sum(exact) / len(asked), 4),
            "identical_to_raw_rate": round(sum(same) / len(asked), 4),
            "cached_share": round(arm.cached_tokens / arm.prompt_tokens, 3),
            "piece_ratio": round(arm.raw_bytes / arm.stored_bytes, 3),
            "file_ratio": round(raw.file_bytes / arm.file_bytes, 3),
            "read_bytes": arm.read_bytes,
        }
    return figures


def run(
    model: Path,
    dtype: str,
    codecs: Sequence[str],
    asked: Sequence[Question],
    scratch: Path,
    concurrency: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run all arms of one dtype."""
    arms = []
    for codec in codecs:
        say(f"{dtype}, {codec}: {len(asked)} questions")
        arms.append(run_arm(codec, asked, model, dtype, scratch / f"{dtype}-{codec}", concurrency))
    return compare(asked, arms)
