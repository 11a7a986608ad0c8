"""The models of a configuration: what is said of each, and which nodes serve it.

Decides nothing about who is placed where: a request goes to the nodes of its model, and the scheduler chooses among them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from contracts.errors import ConfigError
from runtime.gateway_config import STRICT
from runtime.model_names import hub_id

if TYPE_CHECKING:
    from runtime.config import Config

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
#: A model's name in the API: what callers write into `model`.
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$")]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def as_model(value: Any) -> Any:
    """A directory, absolute; a hub id stays as it is (runtime/model_names.py). What is neither is left to pydantic."""
    if not isinstance(value, str | Path) or hub_id(str(value)) is not None:
        return value
    return Path(value).expanduser().absolute()


class RegisteredModel(BaseModel):
    """`models.NAME`: one model of the fleet."""

    model_config = STRICT
    #: A Hugging Face directory, or for the command line a hub id.
    path: Path
    #: What its callers are promised, in seconds: until the first token, and a token after it; 0: nothing.
    ttft_s: _Seconds = 0.0
    tpot_s: _Seconds = 0.0
    #: Whose memory goes first when models compete for a device: the one with the greater number's.
    priority: int = Field(default=0, ge=-1000, le=1000)
    #: It stays on the device even when nobody asks it anything.
    pinned: bool = False
    #: So many nodes have it active at least; 0: as many as are needed.
    min_nodes: int = Field(default=0, ge=0)
    #: Numbers of the nodes that serve it; None: all.
    nodes: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)
    #: What computes it.
    engine: Literal["native"] = "native"
    #: auto: as `worker.dtype` says.
    dtype: Dtype = "auto"

    @field_validator("path", mode="before")
    @classmethod
    def _path_or_hub_id(cls, value: Any) -> Any:
        return as_model(value)


def registered(config: Config) -> dict[str, RegisteredModel]:
    """Every model by its name in the API, in the configuration's order: `models`, or `model` and `model_name` as its one entry."""
    return config.models or {config.served_model: RegisteredModel(path=config.model)}


def models_of(config: Config, number: int) -> list[str]:
    """The models that node `number` serves, in the configuration's order."""
    return [name for name, model in registered(config).items() if model.nodes is None or number in model.nodes]


def as_only(config: Config, number: int) -> dict[str, Config]:
    """By name, for each model of node `number`: `config` as if it were the only one, in `model`, `model_name` and `worker.dtype`."""
    found = {}
    for name in models_of(config, number):
        model = registered(config)[name]
        dtype = config.worker.dtype if model.dtype == "auto" else model.dtype
        worker = config.worker.model_copy(update={"dtype": dtype})
        found[name] = config.model_copy(update={"model": model.path, "model_name": name, "worker": worker})
    return found


def check_models(config: Config) -> None:
    """Raise ConfigError for the first thing about models that can only be judged as a whole."""
    count = config.nodes.count
    for name, model in config.models.items():
        numbers = model.nodes if model.nodes is not None else list(range(count))
        key = f"models.{name}.nodes"
        if beyond := [n for n in numbers if n >= count]:
            raise ConfigError(f"{key} = {numbers}: there is no node {beyond[0]}; give numbers from 0 to {count - 1}, or raise nodes.count")
        if twice := [n for n, times in Counter(numbers).items() if times > 1]:
            raise ConfigError(f"{key} = {numbers}: node {twice[0]} is there twice; name each node once")
        if model.min_nodes > len(numbers):
            raise ConfigError(
                f"models.{name}.min_nodes = {model.min_nodes}: {len(numbers)} of {count} nodes may serve it; "
                f"lower it, extend {key} or raise nodes.count"
            )
    _check_both_ways(config)
    for number in range(count):
        if not models_of(config, number):
            first = next(iter(registered(config)))
            raise ConfigError(
                f"node {number} serves no model; add it to one, such as models.{first}.nodes: [..., {number}], or lower nodes.count"
            )


def _check_both_ways(config: Config) -> None:
    """`models` and `model` with `model_name` may both be written down, but must mean the same."""
    if not config.models:
        return
    said = config.models.get(config.model_name)
    if said is None or said.path != config.model:
        raise ConfigError(
            f"model = {str(config.model)!r}, model_name = {config.model_name!r}: models names {', '.join(config.models)} as well; "
            "remove model and model_name, or move them to models.NAME.path"
        )
