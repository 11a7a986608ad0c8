"""Run a module where nothing can be imported but Python, what engines share, and the four packages that it needs.

`python -m tests.storelink.only_these MODULE ARG...`: as `python -m MODULE ARG...`. Whatever else is imported raises.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: `tests` is what the test itself runs.
ALLOWED = frozenset(
    {*sys.stdlib_module_names, "contracts", "storelink", "grpc", "google", "blake3", "msgpack", "tests"}
)


class OnlyThese(MetaPathFinder):
    """Refuses every other module by its first name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None, so that others find it. Raises ImportError for what is not allowed."""
        # grpc brings typing_extensions along, which annotates it and does nothing.
        if fullname.partition(".")[0] not in ALLOWED | {"typing_extensions"}:
            raise ImportError(f"{fullname} is not there in others' engines")
        return None


def main() -> None:
    """See the module."""
    foreign = {name.partition(".")[0] for name in sys.modules} - ALLOWED
    assert not foreign & {"numpy", "torch", "structlog", "pydantic"}, foreign
    sys.meta_path.insert(0, OnlyThese())
    module = sys.argv[1]
    sys.argv[:2] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
