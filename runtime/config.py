"""The typed configuration: YAML plus `UPBEAT__SECTION__KEY`, parsed once, and every wrong value named with its remedy.

Precedence: environment over file over default. A node's processes read the same file as everyone and are told their
node's number on the command line, and workers their device's; every address and path follows from these (runtime/places.py).
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from contracts.api_keys import hashed, is_hashed
from contracts.devices import MOST_DEVICES
from contracts.errors import ConfigError
from runtime.config_checks import check
from runtime.gateway_config import STRICT, GatewaySection, Tenant
from runtime.kept import kept
from runtime.places import DevicePlaces, NodePlaces, places_of
from runtime.registry import Dtype, ModelName, RegisteredModel, as_model
from storelink.arena_file import HugePages

GIB = 1 << 30


class SchedulerSection(BaseModel):
    """Placement."""

    model_config = STRICT
    host: str = "127.0.0.1"
    port: int = Field(default=8081, ge=1, le=65535)
    #: Schedulers at `host`, at consecutive ports from `port`; sessions are shared among them, and each stands in for the others.
    count: int = Field(default=1, ge=1, le=64)
    #: host:port of each scheduler, where they are not at one host; then host, port and count say nothing.
    addresses: list[str] = []
    #: The address the processes listen on; their own host name when empty.
    listen_host: str = ""
    #: balanced, sticky, cache-aware, random, round-robin, or the name of an entry point of the group upbeat.placement_policies.
    policy: str = "balanced"
    #: Hints of a tenant, and of each of its addresses, that are followed by a prefetch: in the long run, and at once.
    hints_per_s: float = Field(default=200.0, gt=0)
    hint_burst: float = Field(default=1000.0, ge=1)

    @field_validator("addresses")
    @classmethod
    def _host_and_port(cls, value: list[str]) -> list[str]:
        for address in value:
            if not re.fullmatch(r"([^\s:/\[\]]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}", address):
                raise ValueError(f"{address!r} is no address; give host:port, such as 10.0.0.7:8081")
        return value


class KvSection(BaseModel):
    """The KV cache and its tiers."""

    model_config = STRICT
    cache: bool = True
    chunk_tokens: int = Field(default=64, ge=1, le=1024)
    #: The worker's engine may overwrite prefetched pages at any time (SYMPHONY 3.4). Off: prefetch stops at DRAM.
    cooperative: bool = True
    #: For comparison: what hints brought into HBM stays there until it is used or its hint has ended, and requests wait for room.
    hold_hinted: bool = False
    #: Victims and prefetches are ranked by layer. Off: whole chunks, the least recently used session's last ones first.
    layer_priority: bool = True
    #: A request starts when its first layers are there. Off: when all are.
    layerwise: bool = True
    #: Cached tokens are computed again where that is estimated sooner than loading them; false: whatever is cached is loaded.
    load_plan: bool = True
    #: Of one device: weights and KV.
    hbm_gib: float = Field(default=1.0, gt=0)
    #: Of one node: its devices share it.
    dram_gib: float = Field(default=2.0, gt=0)
    #: Huge pages for the arena. auto: where `shm_dir` offers them (a hugetlbfs, or a tmpfs mounted with huge=advise); on: or not start.
    hugepages: HugePages = "auto"
    #: Size of a node's SSD tier; 0: a share of the disk's free space at the start.
    ssd_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    #: Size of the blob tier, of all nodes together; 0: a share of the disk's free space at the start where it is a directory, no limit
    #: where it is a bucket.
    blob_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    #: The share of a disk's size that SSD and blob tier leave free: while less is, nothing is written to a tier on it.
    disk_reserve: float = Field(default=0.05, ge=0, lt=1)
    #: Idle time after which the blob tier forgets a session, in seconds; 0: never.
    blob_expiry_s: float = Field(default=0.0, ge=0)
    #: What a tenant's sessions may hold in the slow tiers, by tenant, and for the tenants not named; 0: no limit.
    tenant_quota_gib: dict[Tenant, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    default_tenant_quota_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    #: Chunks that no session has named for this time leave the slow tiers; longer than any turn takes, in seconds.
    orphan_grace_s: float = Field(default=3600.0, ge=1)
    #: Empty: DATA/blob. Else an obstore URL: s3://bucket/prefix, gs://..., az://..., file:///...
    blob_url: str = ""
    #: Options of the blob store (`endpoint`, `access_key_id`, ...), as obstore names them.
    blob_options: dict[str, str] = {}
    #: Bytes that wait for SSD and blob writes at most, each; more are skipped and counted.
    write_back_limit_bytes: int = Field(default=4 << 30, ge=1 << 20)
    #: How peers read each other's arena: NIXL where it can be imported, else sockets.
    transport: Literal["auto", "nixl", "socket"] = "auto"
    #: How the arena and the SSD exchange bytes: NIXL's POSIX backend where it can be imported, its GDS backend, or plain calls.
    file_io: Literal["auto", "nixl", "gds", "threads"] = "auto"
    #: Bytes that prefetch brings into the arena, in 10^6 a second at most, so that decoding beside it keeps its pace; 0: no limit.
    #: What requests wait for is never paced.
    prefetch_mb_s: float = Field(default=0.0, ge=0)
    #: Whether the SSD is read and written past the page cache (O_DIRECT). auto: where the file system allows it, but what the page cache
    #: holds already is read from there (Linux 6.5).
    direct_io: Literal["auto", "on", "off"] = "auto"
    #: Faults to order, for tests: an action by the name of its point (kvstore/failpoints.py).
    failpoints: dict[str, str] = {}

    #: How the SSD and the blob tier store pieces; anything but raw loses precision and needs the extra [lmcache]: docs/design/0006.
    ssd_codec: Literal["raw", "fp8", "k16v8", "cachegen"] = "raw"
    blob_codec: Literal["raw", "fp8", "k16v8", "cachegen"] = "raw"


class WorkerSection(BaseModel):
    """The engine."""

    model_config = STRICT
    #: 0: all cores, shared evenly between this machine's workers.
    threads: int = Field(default=0, ge=0)
    #: auto: CUDA where torch sees a device and the extra [cuda] is installed, else the CPU.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: No row's result depends on its batch or on how its prompt was cut. The compiled CPU kernels always compute so; on CUDA it costs time.
    batch_invariant: bool = False
    #: auto: float32 on the CPU for models of at most 64 MiB, the checkpoint's own type otherwise.
    dtype: Dtype = "auto"
    #: Requests on the device at a time.
    max_batch: int = Field(default=64, ge=1)
    #: Requests of one priority, or more urgent, that wait for the device at most; one more is told to try elsewhere (503).
    max_waiting: int = Field(default=1024, ge=1)
    #: Tokens of one engine step, prefill and decode together.
    step_tokens: int = Field(default=1024, ge=16)
    #: How long a step may take while somebody decodes, in seconds, or twice what its decodes take where that is longer: prompts are
    #: computed in pieces that fit. 0: no such bound.
    mixed_step_s: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    #: How long a step may take while several tenants share the device (one that was here within ten seconds counts), so that the next turn
    #: of any of them finds no long step under way; or three times what a lone decode takes.
    shared_step_s: float = Field(default=0.005, gt=0, allow_inf_nan=False)
    granule_bytes: int = Field(default=2 << 20, ge=4096)
    #: What computes on the CPU: kernels compiled for this machine, or torch; auto: torch where they cannot be built or do not suit.
    #: portable: compiled, without bfloat16 instructions, so that unlike processors answer with the same bits.
    kernels: Literal["auto", "native", "portable", "torch"] = "auto"
    #: Processor time that one grammar (of response_format, or tools) may take to compile, in seconds; one that takes longer is refused.
    grammar_s: float = Field(default=1.0, ge=0.05, le=2)
    #: Processes that compile them; of more than one, a tenant may use all but one at a time. They start with the first grammar.
    grammar_processes: int = Field(default=2, ge=1, le=16)
    #: What `upbeat profile` measured. auto: what it kept for this model and machine, if that; off: nothing; else a file that must fit.
    profile: str = Field(default="auto", min_length=1)
    #: Requests that kill or hang the engine, for tests: kill:WORD or hang:WORD by the name of a point (worker/engine/failpoints.py).
    failpoints: dict[str, str] = {}


class NodesSection(BaseModel):
    """The nodes of this deployment. By default all run on this machine, at consecutive ports."""

    model_config = STRICT
    count: int = Field(default=2, ge=1, le=256)
    #: Devices of a node, each with a worker of its own: they share the node's store (arena, SSD, transport), and the models' files.
    devices: int = Field(default=1, ge=1, le=MOST_DEVICES)
    #: First port of node 0: its store; +1 its worker, +2 the socket transport, +3 worker metrics, +4 store metrics.
    base_port: int = Field(default=8100, ge=1, le=65000)
    #: First port of the devices from number 1 on, two each: worker, worker metrics. 0: behind the ports of the last node.
    device_base_port: int = Field(default=0, ge=0, le=65535)
    #: Host name of each node's processes, `{n}` standing for its number, and in worker_host `{d}` for the device's.
    store_host: str = "127.0.0.1"
    worker_host: str = "127.0.0.1"
    #: The address the processes listen on; their own host name when empty.
    listen_host: str = ""
    #: Network interface for UCX.
    ucx_interface: str = "lo"


class Config(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(
        env_prefix="UPBEAT__", env_nested_delimiter="__", extra="forbid", validate_default=True, nested_model_default_partial_update=True
    )
    #: A Hugging Face directory; for the command line also a hub id (runtime/model_names.py), which stays as it is.
    model: Path = Path("models/demo")
    #: Name in the API; empty: `upbeat-` and the model directory's name, or the hub id.
    model_name: str = ""
    #: The models of the fleet by their names in the API, where there are several; `model` and `model_name` are then the first of them.
    models: dict[ModelName, RegisteredModel] = {}
    #: How the models of a device share its memory. static: each has a fixed share.
    sharing: Literal["static"] = "static"
    data: Path = Path("data")
    #: Logs, sockets, locks and pids; never KV.
    run_dir: Path = Path(".cache/run")
    #: tmpfs or hugetlbfs where the arenas lie.
    shm_dir: Path = Path("/dev/shm")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    #: A service's log under `upbeat up`: a new file is begun before it has more than this, in MiB, and so many are kept.
    log_mib: float = Field(default=64.0, ge=0.001, allow_inf_nan=False)
    log_files: int = Field(default=3, ge=2, le=1000)
    gateway: GatewaySection = GatewaySection()
    scheduler: SchedulerSection = SchedulerSection()
    nodes: NodesSection = NodesSection()
    kv: KvSection = KvSection()
    worker: WorkerSection = WorkerSection()

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
        """The model's name in the API; of several the first one's."""
        return self.model_name or f"upbeat-{self.model.name}"

    @property
    def scheduler_addresses(self) -> tuple[str, ...]:
        """host:port of every scheduler, by number."""
        section = self.scheduler
        return tuple(section.addresses) or tuple(f"{section.host}:{section.port + n}" for n in range(section.count))

    @property
    def scheduler_address(self) -> str:
        """host:port of scheduler 0."""
        return self.scheduler_addresses[0]

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
        return places_of(self, number)

    def device(self, number: int, device: int) -> DevicePlaces:
        """Those of one device of node `number`. Raises ConfigError when it has no such device."""
        devices = self.node(number).devices
        if not 0 <= device < len(devices):
            raise ConfigError(
                f"--device {device}: a node has {len(devices)} device{'s' if len(devices) > 1 else ''}, numbered from 0; "
                "give a smaller number, or raise nodes.devices"
            )
        return devices[device]

    @property
    def devices(self) -> int:
        """Of all nodes: so many workers are there."""
        return self.nodes.count * self.nodes.devices


def load_config(file: Path | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """The configuration from `file` (YAML), `UPBEAT__*` and `overrides` (highest, nested like the file).

    Raises ConfigError naming key, value and remedy; the service then does not start.
    """
    return changed(said_config(file), overrides or {})


def said_config(file: Path | None = None) -> Config:
    """What `file` and `UPBEAT__*` say, each value checked and nothing as a whole. Raises ConfigError."""
    try:
        return Config(**_content(file))
    except ValidationError as e:
        raise ConfigError(_explain(e)) from e


def says(file: Path | None, section: str, key: str) -> bool:
    """Whether `file` or the environment gives this key of a section a value, be it the default. Raises ConfigError as `said_config` does.

    (`model_fields_set` of a section names all of its fields once one differs from its default, and none as long as none does.)
    """
    return any(key in (values.get(section) or {}) for values in (_content(file), EnvSettingsSource(Config)()))


def _content(file: Path | None) -> dict[str, Any]:
    """What the file holds. Raises ConfigError."""
    if file is None:
        return {}
    try:
        data = yaml.safe_load(file.read_text()) or {}
    except OSError as e:
        raise ConfigError(f"--config {file}: {e.strerror}; give a readable YAML file") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"--config {file} is not YAML: {e}") from e
    if not isinstance(data, dict):
        raise ConfigError(f"--config {file} must hold a mapping of sections, such as `kv: {{hbm_gib: 1}}`")
    return data


def changed(config: Config, overrides: dict[str, Any]) -> Config:
    """`config` with some keys replaced, nested like the file. Raises ConfigError as `load_config` does."""
    base = config.model_dump()
    if "models" in overrides:  # who names them says no more what `model` said
        base = {key: value for key, value in base.items() if key not in ("model", "model_name")}
    try:
        config = Config.model_validate(_merge(base, overrides)) if overrides else config
    except ValidationError as e:
        raise ConfigError(_explain(e)) from e
    check(config)
    return config


def with_hashed_keys(config: Config) -> Config:
    """`config` as it is written to disk: API keys that were given in full are hashed, unless they are too short to be."""
    keys = [key.model_dump() | {"key": _hashed(key.key)} for key in config.gateway.api_keys]
    return changed(config, {"gateway": {"api_keys": keys}})


def _hashed(configured: str) -> str:
    with contextlib.suppress(ValueError):
        return configured if is_hashed(configured) else hashed(configured)
    return configured


def dump_config(config: Config) -> str:
    """YAML that `load_config` reads back to an equal configuration."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text


def cluster_secret(data: Path) -> bytes:
    """The cluster secret, 32 bytes, from DATA/secret; made on first use, readable by its owner only."""
    path = data / "secret"
    try:
        secret = bytes.fromhex(kept(path, lambda: os.urandom(32).hex()))
    except ValueError:
        secret = b""
    if len(secret) != 32:
        raise ConfigError(f"{path} must hold 64 hexadecimal digits; restore it, or delete DATA to start over")
    return secret


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`models` is replaced whole: who says one says all."""
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict) and key != "models"
        merged[key] = _merge(merged[key], value) if nested else value
    return merged


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        remedy = "remove it or correct its spelling" if item["type"] == "extra_forbidden" else item["msg"]
        value = "(a key)" if key.endswith(".key") else repr(item["input"])
        lines.append(f"{key} = {value}: {remedy} (in YAML, or UPBEAT__{key.upper().replace('.', '__')})")
    return "wrong configuration:\n  " + "\n  ".join(lines)
