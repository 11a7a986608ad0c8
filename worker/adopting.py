"""With which adopted models a worker starts: with all of them, if that fails without the newest, and else with none.

So a model that was trained here never keeps a device from serving what its configuration says. Loading has failed when
it raises an error, or when the process has died meanwhile `MOST_DEATHS` times. Once all are loaded, that is forgotten,
and the next start tries all again.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runtime import telemetry
from runtime.adopted_models import with_adopted
from runtime.config import Config
from runtime.registry import models_of, registered

log = telemetry.logger("worker.adopting")
MOST_DEATHS = 2


class StartWithFewer(Exception):
    """The models cannot be loaded; the next start of the process leaves some out."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """Loading that has not ended well. stage: 0: with all; 1: without the newest; 2: with none. deaths: at this stage.
    why: of the last stage's end."""

    stage: int = 0
    deaths: int = 0
    why: str = ""


class Adopting:
    """See the module. `with` it, the models are loaded; an error is raised as StartWithFewer if fewer may do. config:
    with the models that are served now; left_out: the others that this node should serve, and why it does not."""

    def __init__(self, config: Config, number: int, path: Path) -> None:
        """Node `number` starts. path: a file of this device, which outlives the process."""
        self._path = path
        whole = with_adopted(config)
        names = [name for name in models_of(whole, number) if name not in registered(config)]
        tried = self._read() if names else _Tried()
        if tried.deaths >= MOST_DEATHS:
            tried = _Tried(tried.stage + 1, 0, f"the worker died {MOST_DEATHS} times while it loaded its models")
        dropped = [] if not tried.stage else names[-1:] if tried.stage == 1 else names
        self._tried, self._adopts = tried, len(dropped) < len(names)
        self.left_out = dict.fromkeys(dropped, tried.why)
        models = {name: model for name, model in registered(whole).items() if name not in dropped}
        self.config = whole.model_copy(update={"models": models}) if names else config
        for name in dropped:
            log.error("an adopted model is not served", model=name, reason=tried.why)

    def __enter__(self) -> Self:
        if self._adopts:
            self._write(_Tried(self._tried.stage, self._tried.deaths + 1, self._tried.why))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._adopts and isinstance(error, Exception):
            log.error("cannot load the adopted models; starting with fewer", error=str(error), exc_info=error)
            why = f"the worker cannot load it: {error}"[:500].encode(errors="replace").decode()
            if self._write(_Tried(self._tried.stage + 1, 0, why)):
                raise StartWithFewer from error
        elif not isinstance(error, Exception):  # also of a process that is stopped meanwhile
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _read(self) -> _Tried:
        try:
            data: Any = json.loads(self._path.read_text())
            return _Tried(int(data["stage"]), int(data["deaths"]), str(data["why"]))
        except (OSError, ValueError, KeyError, TypeError):
            return _Tried()

    def _write(self, tried: _Tried) -> bool:
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(asdict(tried)))
            part.replace(self._path)
        except OSError as e:
            log.warning("what is loaded cannot be noted", path=str(self._path), error=str(e))
            return False
        return True
