"""Ranges of a request's parameters. Gateway and worker both check them, as the worker does not trust the gateway.

Bounds keep values well within float32, the type of logits: a repetition penalty of 1e-300, for example, would be 0.
"""

from __future__ import annotations

from typing import Final

TEMPERATURE: Final = (0.0, 2.0)
#: top_p and min_p.
UNIT: Final = (0.0, 1.0)
#: Presence and frequency penalties.
PENALTY: Final = (-2.0, 2.0)
REPETITION_PENALTY: Final = (0.01, 10.0)
BIAS: Final = (-100.0, 100.0)
PRIORITY: Final = (-1000, 1000)
#: A tenant's weight among tenants that compete for a device.
WEIGHT: Final = (0.001, 1000.0)
SEED: Final = (-(1 << 63), (1 << 63) - 1)
#: Limit of max_tokens and top_k.
MOST_TOKENS: Final = 1 << 30
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_STOP_TOKENS: Final = 64
MAX_BIASES: Final = 4096
MAX_TOP_LOGPROBS: Final = 20
