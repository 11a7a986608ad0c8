"""`models.NAME`: the configuration of one model of the fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from runtime.gateway_config import STRICT
from runtime.model_names import hub_id

Engine = Literal["native", "vllm"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
#: A model's name in the API (the field `model`).
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$")]
#: Adapters of one model.
MOST_ADAPTERS = 64
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def as_model(value: Any) -> Any:
    """A directory becomes absolute; a hub id stays unchanged (runtime/model_names.py). pydantic checks other values."""
    if not isinstance(value, str | Path) or hub_id(str(value)) is not None:
        return value
    return Path(value).expanduser().absolute()


class RegisteredModel(BaseModel):
    """One model of the fleet."""

    model_config = STRICT
    #: A Hugging Face directory, or for the command line a hub id.
    path: Path
    #: Service targets (SLO) in seconds: time to the first token, by which a device's prompts are ordered over all its
    #: models; and per token after it, which bounds the steps that compute prompts. 0: none.
    ttft_s: _Seconds = 0.0
    tpot_s: _Seconds = 0.0
    #: When models compete for a device, the one with the greatest number gives up memory first.
    priority: int = Field(default=0, ge=-1000, le=1000)
    #: Stays on the device even when idle.
    pinned: bool = False
    #: Minimum number of nodes where it is active; 0: as many as needed.
    min_nodes: int = Field(default=0, ge=0)
    #: Numbers of the nodes that serve it; None: all.
    nodes: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)
    #: The engine that runs it: our own, or a vLLM server (section `vllm`), alone on its device.
    engine: Engine = "native"
    #: Further arguments of its `vllm serve`.
    vllm_args: list[str] = []
    #: auto: `worker.dtype`.
    dtype: Dtype = "auto"
    #: LoRA adapters by their names in the API: directories as PEFT writes them.
    adapters: dict[ModelName, Path] = Field(default={}, max_length=MOST_ADAPTERS)

    @field_validator("path", mode="before")
    @classmethod
    def _path_or_hub_id(cls, value: Any) -> Any:
        return as_model(value)

    @field_validator("adapters")
    @classmethod
    def _absolute(cls, value: dict[str, Path]) -> dict[str, Path]:
        return {name: path.expanduser().absolute() for name, path in value.items()}
