"""Values of `--model` and `model:`: a directory, or a hub id, `owner/name` or `owner/name@revision`.

An existing path wins. A name whose first part is an existing directory is a path too, unless it has a revision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: The hub's rules: letters, digits, and ._- between them; no -- or .. anywhere.
_REPO = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_](?:[\w.-]*\w)?", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)[\w][\w./+-]*", re.ASCII)
_LONGEST = 96


@dataclass(frozen=True, slots=True)
class HubId:
    """A model on a hub. revision: a branch, a tag or a commit; None: the hub's main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_id(text: str) -> HubId | None:
    """`text` as a hub id; None: it is a path, existing or not."""
    repo, at, revision = text.partition("@")
    if len(repo) > _LONGEST or not _REPO.fullmatch(repo) or (at and not _REVISION.fullmatch(revision)):
        return None
    if Path(text).exists() or (not at and Path(repo).parent.is_dir()):
        return None
    return HubId(repo, revision or None)
