"""Reads an upload (`multipart/form-data`) onto the disk, piece by piece, within limits of size, time and number.

`core.uploads` decides what its fields may be and when it is too slow, `files` where it goes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeVar, cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from contracts.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, Unavailable, WrongMediaType
from gateway.core.shares import Shares
from gateway.core.uploads import (
    BESIDE_BYTES,
    MOST_FIELD_BYTES,
    MOST_LINES_BEFORE,
    MOST_PARTS,
    MOST_UPLOADS,
    TENANT_SHARE,
    Pace,
    check_field,
    check_purpose,
    shown_name,
)
from gateway.finetune.files import Files, Info
from gateway.store_thread import StoreThread

_PIECE_BYTES = 256 << 10
#: Bytes after which an upload looks again whether there is room.
_LOOK_BYTES = 16 << 20
#: Of transfer encodings those that change nothing.
_PLAIN = ("", "7bit", "8bit", "binary")
_Read = TypeVar("_Read")


class Uploads:
    """See the module."""

    def __init__(self, files: Files, turns: StoreThread, most_bytes: int) -> None:
        """turns: where files are looked through. most_bytes: of one file."""
        self._files, self._turns, self._most_bytes = files, turns, most_bytes
        self._shares = Shares(MOST_UPLOADS, TENANT_SHARE)

    async def receive(self, request: web.Request, tenant: str) -> Info:
        """The file of an upload, complete and on the disk. Raises RequestError; nothing of it is left then."""
        self._check(request)
        if not self._shares.take(tenant, 1):
            raise Unavailable("too many uploads of yours, or in all, at the moment; try again", code="overloaded")
        try:
            return await _Upload(self._files, self._turns, self._most_bytes, request, tenant).read()
        except OSError as e:
            if isinstance(e, ConnectionError):
                raise
            full = e.errno in (errno.ENOSPC, errno.EDQUOT)
            raise Unavailable("this server's disk " + ("is full" if full else "fails") + "; try again later") from e
        finally:
            self._shares.give(tenant, 1)

    def _check(self, request: web.Request) -> None:
        if request.content_type != "multipart/form-data":
            raise WrongMediaType("send the file as multipart/form-data", param=hdrs.CONTENT_TYPE)
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower() not in ("", "identity"):
            raise InvalidRequest(
                "compressed bodies are not supported; send the body as it is", param=hdrs.CONTENT_ENCODING
            )
        if (request.content_length or 0) > self._most_bytes + BESIDE_BYTES:
            raise self._too_large()

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the file is larger than this server's limit of {self._most_bytes} bytes", param="file")

    async def expect(self, request: web.Request) -> None:
        """Answer `Expect: 100-continue`, unless the upload is too large: then the client gets its 413 at once."""
        if (request.content_length or 0) <= self._most_bytes + BESIDE_BYTES:
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


@dataclass(slots=True)
class _Upload:
    """One upload."""

    files: Files
    turns: StoreThread
    most_bytes: int
    request: web.Request
    tenant: str
    purpose: str = ""
    filename: str = ""
    file_id: str = ""
    content: BinaryIO | None = None
    pace: Pace | None = None

    async def read(self) -> Info:
        self.pace = Pace(asyncio.get_running_loop().time())
        try:
            await self._parts()
            if self.content is None:
                raise InvalidRequest("file is required", param="file", code="missing_required_parameter")
            if not self.purpose:
                raise InvalidRequest("purpose is required", param="purpose", code="missing_required_parameter")
            content, self.content = self.content, None
            return await asyncio.to_thread(
                self.files.commit, self.tenant, self.file_id, content, self.filename, self.purpose
            )
        finally:
            if self.content is not None:
                self.files.give_up(self.tenant, self.file_id, self.content)

    async def _parts(self) -> None:
        form = _Form(self.request.content)
        try:
            reader = MultipartReader(self.request.headers, cast(StreamReader, form))
        except _MALFORMED as e:
            raise _unreadable(e) from None
        seen: set[str] = set()
        for _ in range(MOST_PARTS + 1):
            part = await self._in_time(reader.next())
            form.begun = True
            if part is None:
                return
            if isinstance(part, MultipartReader):
                raise InvalidRequest("a field must not be a form itself", code="invalid_body")
            if part.headers.get(hdrs.CONTENT_TRANSFER_ENCODING, "").lower() not in _PLAIN or (
                hdrs.CONTENT_ENCODING in part.headers
            ):
                raise InvalidRequest("a field must not be encoded; send it as it is", code="invalid_body")
            name = check_field(part.name, seen)
            if name == "file":
                await self._file(part)
            else:
                self.purpose = check_purpose(await self._small(part, name))
        raise InvalidRequest(f"the form has more than {MOST_PARTS} fields", code="invalid_body")

    async def _small(self, part: BodyPartReader, name: str) -> bytes:
        data = b""
        while piece := await self._in_time(part.read_chunk(_PIECE_BYTES)):
            data += piece
            if len(data) > MOST_FIELD_BYTES:
                raise InvalidRequest(f"{name} has more than {MOST_FIELD_BYTES} bytes", param=name)
        return data

    async def _file(self, part: BodyPartReader) -> None:
        self.filename = shown_name(part.filename)
        await self._check_room(self.request.content_length or 0)
        self.file_id, content = await self.turns.run(self.tenant, partial(self.files.begin, self.tenant))
        self.content = content
        size = looked = 0
        while piece := await self._in_time(part.read_chunk(_PIECE_BYTES)):
            size += len(piece)
            if size > self.most_bytes:
                raise BodyTooLarge(f"the file is larger than this server's limit of {self.most_bytes} bytes")
            await asyncio.to_thread(content.write, piece)
            if size - looked >= _LOOK_BYTES:
                looked = size
                await self._check_room(0)
        if not size:
            raise InvalidRequest("the file is empty", param="file")
        await self._check_room(0)

    async def _check_room(self, wanted: int) -> None:
        await self.turns.run(self.tenant, partial(self.files.check_room, self.tenant, wanted))

    async def _in_time(self, reading: Awaitable[_Read]) -> _Read:
        """What comes next of the form. Raises BodyTooSlow, BodyTooLarge, InvalidRequest."""
        loop, pace = asyncio.get_running_loop(), self.pace
        assert pace is not None
        pace.bytes_ = self.request.content.total_bytes
        if pace.bytes_ > self.most_bytes + BESIDE_BYTES:
            raise BodyTooLarge(f"the form is larger than this server's limit of {self.most_bytes} bytes")
        try:
            async with asyncio.timeout_at(pace.due_s(loop.time())):
                return await reading
        except TimeoutError:
            raise BodyTooSlow("the upload did not arrive in time; send it at once") from None
        except _MALFORMED as e:
            raise _unreadable(e) from None


class _Form:
    """The body of a form. The reader skips what stands before its first field, a line at a time and without a pause;
    here that is few lines (`MOST_LINES_BEFORE`)."""

    def __init__(self, content: StreamReader) -> None:
        self.begun = False
        self._content, self._before = content, 0

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """As `StreamReader.readline`. Raises InvalidRequest."""
        self._before += not self.begun
        if self._before > MOST_LINES_BEFORE:
            raise InvalidRequest("the form does not begin with its boundary", code="invalid_body")
        return await self._content.readline(max_line_length=max_line_length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)


#: What aiohttp raises for a form that is none.
_MALFORMED = (
    ValueError,
    AssertionError,
    RuntimeError,
    HttpProcessingError,
    web.RequestPayloadError,
    web.HTTPException,
)


def _unreadable(error: Exception) -> InvalidRequest:
    said = " ".join(str(error).split())[:200].encode("ascii", "backslashreplace").decode()
    return InvalidRequest(f"the form could not be read: {said}", code="invalid_body")
