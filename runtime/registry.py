"""The models of a configuration, and which nodes serve them. The scheduler places requests among these nodes."""

from __future__ import annotations

from runtime.config import Config
from runtime.registered_model import RegisteredModel


def registered(config: Config) -> dict[str, RegisteredModel]:
    """Every model by its name in the API, in the configuration's order: `models`, or one entry from `model` and
    `model_name`."""
    return config.models or {config.served_model: RegisteredModel(path=config.model)}


def models_of(config: Config, number: int) -> list[str]:
    """The models that node `number` serves, in the configuration's order."""
    return [name for name, model in registered(config).items() if model.nodes is None or number in model.nodes]


def adapters_of(config: Config) -> dict[str, str]:
    """The model of every adapter, both by their names in the API."""
    return {adapter: name for name, model in registered(config).items() for adapter in model.adapters}


def weights_stay(config: Config) -> bool:
    """Whether all weights stay on their devices, so that a device must hold those of all its models."""
    return config.sharing in ("static", "elastic")


def as_only(config: Config, number: int) -> dict[str, Config]:
    """For each model of node `number`, by name: `config` with `model`, `model_name` and `worker.dtype` set as if it
    were the only model."""
    found = {}
    for name in models_of(config, number):
        model = registered(config)[name]
        dtype = config.worker.dtype if model.dtype == "auto" else model.dtype
        worker = config.worker.model_copy(update={"dtype": dtype})
        found[name] = config.model_copy(update={"model": model.path, "model_name": name, "worker": worker})
    return found


def load_links(config: Config, models: int) -> int:
    """Links over which a worker of so many models loads them, its own included: several only where weights come and
    go."""
    return config.worker.load_links if models > 1 and config.sharing in ("prism", "swap") else 1
