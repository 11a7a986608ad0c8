"""What tests of kernels share."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.harness import CUDA


@pytest.fixture
def rows_multiplied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU Triton's interpreter multiplies by numpy, whose BLAS on some processors gives a row other bits in
    another place of its block: every row by itself, then."""
    if not CUDA:
        product = np.matmul
        monkeypatch.setattr(
            np, "matmul", lambda a, b, **more: np.concatenate([product(row[None], b, **more) for row in a])
        )
