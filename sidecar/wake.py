"""The socket on which the connector asks its sidecar for something (vllm-plugin, `scheduler_side`). Nothing is
answered, and the directory keeps other users out.

An empty message: an idle vLLM engine must step, to evict the blocks of a session that was erased. Any other
(`contracts.warm_up`): a hinted session is in the arena, or was erased.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from contracts.kv import MAX_NOTE_BYTES

_READ_S = 5.0
_MOST_BYTES = MAX_NOTE_BYTES + (64 << 10)


class WakeSocket:
    """See the module."""

    def __init__(self, path: Path, woken: Callable[[], None], offered: Callable[[bytes], None]) -> None:
        """woken, offered: called on the event loop for each message of its kind."""
        self._path, self._woken, self._offered = path, woken, offered
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen. Raises OSError."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        self._path.chmod(0o600)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message = bytearray()
        try:
            async with asyncio.timeout(_READ_S):
                while len(message) <= _MOST_BYTES and (piece := await reader.read(_MOST_BYTES)):
                    message += piece
        except (TimeoutError, OSError):
            return
        finally:
            writer.close()
        if not message:
            self._woken()
        elif len(message) <= _MOST_BYTES:
            self._offered(bytes(message))

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
