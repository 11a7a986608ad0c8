"""Checks training files in helper processes, so that a large file delays nobody and costs bounded memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from contracts.errors import InvalidRequest, Unavailable
from runtime import niceness
from runtime.children import ChildCannotStart, ChildDied, Children, ChildrenBusy, ChildTimeout

#: Seconds that a file may take, and may wait for a helper.
DEADLINE_S, WAIT_S = 300.0, 120.0
_MEMORY_BYTES = 512 << 20
_WAITING = 4


class Checking:
    """The helpers of one gateway process, started with the first file; a tenant has one at a time."""

    def __init__(self) -> None:
        program = (sys.executable, "-m", "gateway.finetune.checker")
        self._children = Children(
            program, count=2, memory_bytes=_MEMORY_BYTES, per_owner=_WAITING, nice=niceness.DECODER
        )

    async def check(self, tenant: str, path: Path, param: str) -> int:
        """How many examples the file has. Raises InvalidRequest that names `param` and the line, Unavailable."""
        try:
            told = json.loads(await self._children.call(tenant, json.dumps(str(path)).encode(), DEADLINE_S, WAIT_S))
        except ChildrenBusy:
            raise Unavailable("too many files are being checked at the moment; try again", code="overloaded") from None
        except ChildCannotStart:
            raise Unavailable("files cannot be checked at the moment; try again") from None
        except (ChildTimeout, ChildDied):
            raise InvalidRequest(
                f"{param}: the file could not be checked in time and memory; split it", param=param
            ) from None
        if "gone" in told:
            raise Unavailable(f"the file cannot be read ({told['gone']}); try again")
        if "error" in told:
            raise InvalidRequest(f"{param}: {told['error']}", param=param, code="invalid_training_data")
        return int(told["examples"])

    async def close(self) -> None:
        """Stop the helpers."""
        await self._children.close()
