"""Decides how long an upload may take, what its fields may be, and under which name its file is shown.

Reads nothing itself.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from contracts.errors import InvalidRequest

#: Seconds between two pieces at most; seconds after which an upload must have delivered so many bytes a second.
REST_S, BEGIN_S, LEAST_BYTES_PER_S = 10.0, 20.0, 64 << 10
#: Uploads of this process at a time, and the part of one tenant.
MOST_UPLOADS, TENANT_SHARE = 16, 0.25
#: Parts of a form, bytes of a field that is no file, bytes of a form beside its file, and characters of a file's name.
MOST_PARTS, MOST_FIELD_BYTES, BESIDE_BYTES, MOST_NAME = 8, 1024, 16 << 10, 255
#: Lines before the boundary that begins a form's first field, and of that field's headers.
MOST_LINES_BEFORE = 64
PURPOSE = "fine-tune"
_SHOWN = 80


@dataclass(slots=True)
class Pace:
    """An upload that arrives. Times are seconds on the caller's clock."""

    began_s: float
    bytes_: int = 0

    def due_s(self, now_s: float) -> float:
        """When its next piece must have come."""
        return min(now_s + REST_S, self.began_s + BEGIN_S + self.bytes_ / LEAST_BYTES_PER_S)


def check_field(name: str | None, seen: set[str]) -> str:
    """The name of a form's field. Raises InvalidRequest for one that is unknown, not supported, or there twice."""
    if name not in ("file", "purpose"):
        shown = (name or "")[:_SHOWN]
        if shown.startswith("expires_after"):
            raise InvalidRequest(
                "expires_after is not supported: files stay until they are deleted; leave it out",
                param="expires_after",
                code="unsupported_parameter",
            )
        raise InvalidRequest(
            f"unrecognized request argument supplied: {shown!r}", param=shown or None, code="unknown_parameter"
        )
    if name in seen:
        raise InvalidRequest(f"{name} is given twice; give it once", param=name)
    seen.add(name)
    return name


def check_purpose(given: bytes) -> str:
    """The purpose. Raises InvalidRequest."""
    text = given.decode("utf-8", "replace")
    if text != PURPOSE:
        raise InvalidRequest(f"purpose = {text[:_SHOWN]!r}: only {PURPOSE!r} is supported", param="purpose")
    return text


def shown_name(given: str | None) -> str:
    """A file's name for users: no directories, no characters that terminals or pages act on. It names nothing here."""
    last = (given or "").replace("\\", "/").rpartition("/")[2]
    clean = "".join(
        c for c in last if unicodedata.category(c)[0] != "C" and unicodedata.category(c) not in ("Zl", "Zp")
    )
    return clean.strip()[:MOST_NAME] or "upload.jsonl"
