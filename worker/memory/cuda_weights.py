"""Copies of weights from host memory to a CUDA device, on a stream of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch

from runtime import telemetry
from worker.memory.cuda_driver import CudaDriver, CudaError
from worker.memory.cuda_streams import CudaStream

log = telemetry.logger("worker.cuda")


class WeightCopies:
    """`copy` and `lock` are those of `worker.devices.device.Device`. Any thread."""

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._driver, self._stream = driver, CudaStream(driver, device)
        self._queueing = threading.Lock()

    def copy(self, to: int, source: int, bytes_: int) -> None:
        """Copies to device memory; returns when done. Two threads keep the link busy."""
        with self._queueing:
            self._stream.copy(np.array([to]), np.array([source]), bytes_)
            mark = self._stream.mark()
        mark.wait()

    def lock(self, address: int, bytes_: int) -> Callable[[], object]:
        """Page-locks host memory that is only read, and returns what undoes it. If the system refuses, copies are
        slower."""
        try:
            self._driver.register(address, bytes_, read_only=True)
        except CudaError as e:
            log.warning("weights in host memory are not page-locked: copies are slower", bytes=bytes_, error=str(e))
            return lambda: None
        return lambda: self._driver.unregister(address)
