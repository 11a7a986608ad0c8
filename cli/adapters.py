"""`--adapter [MODEL:]NAME=DIR` over the configuration's adapters, their check before a start, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError
from contracts.kv import DTYPE_BYTES
from runtime.adapter_config import check_fits, elements, read_adapter_config
from runtime.config import Config
from runtime.config_file import changed
from runtime.model_config import load_config
from runtime.model_names import hub_id
from runtime.registered_model import RegisteredModel
from runtime.registry import registered

_EXAMPLE = "give [MODEL:]NAME=DIR, such as --adapter support=adapters/support"


def with_adapters(config: Config, texts: Sequence[str] | None) -> Config:
    """`config` with the adapters of `--adapter`, beside its own. Raises ConfigError."""
    if not texts:
        return config
    entries = {name: model.model_dump() for name, model in registered(config).items()}
    if not config.models:
        asked = hub_id(str(config.model))
        [entry] = entries.values()
        entries = {asked.repo if asked is not None and not config.model_name else config.served_model: entry}
    given = set[str]()
    for text in texts:
        left, equals, path = text.partition("=")
        model, name = _model_and_name(left, entries, text)
        if not equals or not name or not path:
            raise ConfigError(f"--adapter {text} names no adapter; {_EXAMPLE}")
        if name in given:
            raise ConfigError(f"--adapter {text}: {name} is named twice; give each adapter its own name")
        given.add(name)
        entries[model]["adapters"] = entries[model]["adapters"] | {name: path}
    return changed(config, {"models": entries})


def _model_and_name(left: str, models: dict[str, Any], text: str) -> tuple[str, str]:
    """The longest model's name that `left` begins with, and the rest; the only model, if it begins with none."""
    for model in sorted(models, key=len, reverse=True):
        if left.startswith(f"{model}:"):
            return model, left.removeprefix(f"{model}:")
    if len(models) > 1:
        raise ConfigError(f"--adapter {text}: say which model it is of: {', '.join(models)}; {_EXAMPLE}")
    return next(iter(models)), left


def check_adapters(name: str, model: RegisteredModel, directory: Path) -> None:
    """Raises ConfigError when an adapter of the model in `directory` cannot be served, as far as its configuration
    says."""
    for adapter, path in model.adapters.items():
        key = f"models.{name}.adapters.{adapter} ="
        check_fits(read_adapter_config(path, key), load_config(directory), f"{key} {path}")


def adapters_bytes(config: Config, name: str, directory: Path) -> int:
    """Bytes on the device of the adapters of the model in `directory`. Raises ConfigError."""
    model = registered(config)[name]
    if not model.adapters:
        return 0
    each = [read_adapter_config(path, f"models.{name}.adapters.{n} =") for n, path in model.adapters.items()]
    served = config.worker.dtype if model.dtype == "auto" else model.dtype
    # `auto` may be float32, whatever the files have.
    return elements(load_config(directory), each) * DTYPE_BYTES["float32" if served == "auto" else served]
