"""The whole configuration: its sections, and addresses, paths and names derived from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from contracts.errors import ConfigError
from runtime.autoscale_config import AutoscaleSection
from runtime.gateway_config import GatewaySection
from runtime.places import DevicePlaces, NodePlaces, places_of
from runtime.registered_model import ModelName, RegisteredModel, as_model
from runtime.sections import (
    FinetuneSection,
    KvSection,
    NodesSection,
    SchedulerSection,
    TelemetrySection,
    TlsSection,
    VllmSection,
    WorkerSection,
)


class Config(BaseSettings):
    """All settings."""

    model_config = SettingsConfigDict(
        env_prefix="UPBEAT__",
        env_nested_delimiter="__",
        extra="forbid",
        validate_default=True,
        nested_model_default_partial_update=True,
    )
    #: A Hugging Face directory; for the command line also a hub id (runtime/model_names.py).
    model: Path = Path("models/demo")
    #: Name in the API; empty: `upbeat-` and the model directory's name, or the hub id.
    model_name: str = ""
    #: The models of the fleet by their names in the API, if several; `model` and `model_name` are then the first one.
    models: dict[ModelName, RegisteredModel] = {}
    #: How models share a device's memory. prism: KV and weights come and go as requests need them. elastic: all weights
    #: stay, KV comes and goes. static: each has a fixed share. swap: one model at a time, by groups of requests.
    #: serverless: one model at a time, and only while it has requests.
    sharing: Literal["prism", "elastic", "static", "swap", "serverless"] = "prism"
    data: Path = Path("data")
    #: Logs, sockets, locks and pids; never KV.
    run_dir: Path = Path(".cache/run")
    #: tmpfs or hugetlbfs for the arenas.
    shm_dir: Path = Path("/dev/shm")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    #: Rotation of a service's log under `upbeat up`: MiB of a file, and number of files kept.
    log_mib: float = Field(default=64.0, ge=0.001, allow_inf_nan=False)
    log_files: int = Field(default=3, ge=2, le=1000)
    gateway: GatewaySection = GatewaySection()
    scheduler: SchedulerSection = SchedulerSection()
    autoscale: AutoscaleSection = AutoscaleSection()
    nodes: NodesSection = NodesSection()
    kv: KvSection = KvSection()
    worker: WorkerSection = WorkerSection()
    vllm: VllmSection = VllmSection()
    finetune: FinetuneSection = FinetuneSection()
    tls: TlsSection = TlsSection()
    telemetry: TelemetrySection = TelemetrySection()

    @field_validator("model", mode="before")
    @classmethod
    def _path_or_hub_id(cls, value: Any) -> Any:
        return as_model(value)

    @field_validator("data", "run_dir", "shm_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _first_model(self) -> Config:
        if self.models and not self.model_fields_set & {"model", "model_name"}:
            self.model_name, first = next(iter(self.models.items()))
            self.model = first.path
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings

    @property
    def served_model(self) -> str:
        """The model's name in the API; with several models, the first one's."""
        return self.model_name or f"upbeat-{self.model.name}"

    @property
    def own_certificates(self) -> Path:
        """Where `upbeat up` keeps the certificates that it makes."""
        return self.data / "tls"

    @property
    def scheduler_addresses(self) -> tuple[str, ...]:
        """host:port of every scheduler, by number."""
        section = self.scheduler
        return tuple(section.addresses) or tuple(f"{section.host}:{section.port + n}" for n in range(section.count))

    def scheduler_listen(self, number: int) -> str:
        """What scheduler `number` listens on. Raises ConfigError when there is no such scheduler."""
        if not 0 <= number < len(self.scheduler_addresses):
            raise ConfigError(
                f"--number {number}: the configuration has {len(self.scheduler_addresses)} schedulers; "
                "give a smaller number, or raise scheduler.count or extend scheduler.addresses"
            )
        host, _, port = self.scheduler_addresses[number].rpartition(":")
        return f"{self.scheduler.listen_host or host}:{port}"

    def node(self, number: int) -> NodePlaces:
        """Every address and path of node `number`, and of its devices."""
        return places_of(self.nodes, self.data, self.shm_dir, number)

    def device(self, number: int, device: int) -> DevicePlaces:
        """The addresses and paths of a device of node `number`. Raises ConfigError when it has no such device."""
        devices = self.node(number).devices
        if not 0 <= device < len(devices):
            raise ConfigError(
                f"--device {device}: a node has {len(devices)} device{'s' if len(devices) > 1 else ''}, numbered "
                "from 0; "
                "give a smaller number, or raise nodes.devices"
            )
        return devices[device]

    @property
    def devices(self) -> int:
        """Devices of all nodes; also the number of workers."""
        return len(self.nodes.numbers) * self.nodes.devices
