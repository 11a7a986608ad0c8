"""Layers with a sliding window: what their pages take of HBM, what is loaded, and what a hint brings; and that answers
are those of a cold run whatever happens."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.worker.test_engine_scheduling import anything
from tests.worker.virtual_model import Windows

#: Some layers have a window, as Gemma's; the first has none, as Qwen2's; all have, as Mistral's; a short and a long one.
MODELS: list[Windows] = [(9, 9, None), (None, 6, 6), (5, 5, 5), (2, None, 30)]


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_happens_every_request_ends_with_its_tokens_and_every_page_comes_back(seed: int) -> None:
    anything(seed, requests=14, windows=random.Random(seed).choice(MODELS)).finish()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_happens_for_long_every_request_ends_with_its_tokens_and_every_page_comes_back(seed: int) -> None:
    anything(seed, requests=30, windows=random.Random(seed).choice(MODELS)).finish()
