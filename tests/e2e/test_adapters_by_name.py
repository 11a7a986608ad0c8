"""Two LoRA adapters of the demo model, asked by name beside it and each other: the texts of the merged models, and a
hinted session's cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]
DEMO = Path(__file__).parents[2] / "models" / "demo"
_DRAW = random.Random(1)
PROMPT, TOKENS = [_DRAW.randrange(3, 2560) for _ in range(150)], 12


@pytest.fixture(scope="module")
def texts_and_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, list[int]], Stack]]:
    """The tokens that each gives, by an independent merge, and a stack that serves all."""
    # Not above: transformers imports triton, which tests/gpu/harness.py must be asked for first.
    import torch
    import transformers

    from tests.worker.lora import Lora, make_adapter, merged

    kinds = {"first": Lora(rank=8, size=0.05), "second": Lora(rank=4, targets=("q_proj", "v_proj"), seed=2, size=0.2)}
    directory = tmp_path_factory.mktemp("adapters")
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    models, paths = {"demo": base}, dict[str, str]()
    for name, kind in kinds.items():
        path = make_adapter(directory / name, base, kind)
        models[name], paths[name] = merged(base, path, kind), str(path)
    asked = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    expected = {
        name: model.generate(torch.tensor([PROMPT]), **asked)[0, len(PROMPT) :].tolist()
        for name, model in models.items()
    }
    settings = {"models": {"demo": {"path": str(DEMO), "adapters": paths}}, "kv": {"chunk_tokens": 32}}
    with Stack(nodes=1, hbm_gib=0.25, dram_gib=0.1, settings=settings) as stack:
        yield expected, stack


@pytest.mark.slow
@pytest.mark.sample
def test_adapters_answer_by_name_and_a_hinted_return_is_cached(
    texts_and_stack: tuple[dict[str, list[int]], Stack],
) -> None:
    expected, stack = texts_and_stack
    client = httpx.Client(base_url=stack.url, timeout=60)

    def said(name: str, prompt: list[int] = PROMPT) -> dict[str, Any]:
        body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "min_tokens": TOKENS}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers={"X-Session-Id": f"s-{name}"}, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def text(tokens: list[int]) -> str:
        prompt: str = client.post("/detokenize", json={"model": "first", "tokens": tokens}).json()["prompt"]
        return prompt

    listed = client.get("/v1/models").json()["data"]
    assert [(m["id"], m.get("parent")) for m in listed] == [("demo", None), ("first", "demo"), ("second", "demo")]
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    with ThreadPoolExecutor(3) as together:
        answers = dict(zip(expected, together.map(said, expected), strict=True))
    for name, tokens in expected.items():
        assert answers[name]["model"] == name and answers[name]["choices"][0]["text"] == text(tokens)
        assert not answers[name]["usage"]["prompt_tokens_details"]["cached_tokens"], "none uses another's KV"
    for name, tokens in expected.items():
        hint = client.post("/v1/advisory", json={"session_id": f"s-{name}", "model_id": name, "expected_arrival": 0.5})
        assert hint.status_code == 202
        usage = said(name, [*PROMPT, *tokens])["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == (len(PROMPT) + TOKENS - 1) // 32 * 32
    assert client.post("/v1/completions", json={"model": "third", "prompt": "a"}).status_code == 404
