"""Files that browsers load from a gateway: compressed once, sent in an encoding that the browser accepts.

Each encoding has its own entity tag, because its bytes differ. Brotli is in the extra [gateway]; without it gzip is
used.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import hdrs, web
from blake3 import blake3

from gateway.core.encodings import IDENTITY, choose, is_known

#: By Content-Encoding, the smallest first.
_ENCODERS: dict[str, Callable[[bytes], bytes]] = {}
try:
    import brotli
except ModuleNotFoundError:
    pass
else:
    _ENCODERS["br"] = lambda content: bytes(brotli.compress(content, quality=11))
_ENCODERS["gzip"] = lambda content: gzip.compress(content, compresslevel=9, mtime=0)


@dataclass(frozen=True, slots=True)
class Asset:
    """One file. encoded: its bytes by Content-Encoding, smallest first; only encodings smaller than the file. tag: the
    entity tag of the plain file."""

    content: bytes
    encoded: Mapping[str, bytes]
    tag: str

    @classmethod
    def read(cls, path: Path) -> Asset:
        """Read the file and encode it, which takes milliseconds. Raises OSError."""
        content = path.read_bytes()
        encoded = {name: encode(content) for name, encode in _ENCODERS.items()}
        smaller = {name: bytes_ for name, bytes_ in encoded.items() if len(bytes_) < len(content)}
        return cls(content, smaller, blake3(content).hexdigest(16))

    @classmethod
    def read_gzip(cls, path: Path) -> Asset:
        """Read a file stored as gzip, which is sent as stored because compressing it well takes seconds. Raises
        OSError."""
        stored = path.read_bytes()
        content = gzip.decompress(stored)
        return cls(content, {"gzip": stored}, blake3(content).hexdigest(16))

    def answer(self, request: web.Request, headers: Mapping[str, str]) -> web.Response:
        """The response in the encoding that the request accepts, with `headers`; 304 when the client has it."""
        encoding = choose(",".join(request.headers.getall(hdrs.ACCEPT_ENCODING, ())), self.encoded)
        tag = f'"{self.tag}"' if encoding == IDENTITY else f'"{self.tag}-{encoding}"'
        said = {**headers, "ETag": tag, "Vary": "Accept-Encoding"}
        if is_known(",".join(request.headers.getall(hdrs.IF_NONE_MATCH, ())), tag):
            return web.Response(status=304, headers=said)
        if encoding == IDENTITY:
            return web.Response(body=self.content, headers=said)
        return web.Response(body=self.encoded[encoding], headers=said | {"Content-Encoding": encoding})
