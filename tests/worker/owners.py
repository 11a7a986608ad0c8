"""Owners of device memory in tests, where there is one model."""

from __future__ import annotations

from worker.core.granules import Owner, Use

KV = Owner(Use.KV, "model")
WEIGHTS = Owner(Use.WEIGHTS, "model")
