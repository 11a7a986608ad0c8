"""The sections of the configuration, except the gateway's (runtime/gateway_config.py): keys, types, bounds,
defaults."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from contracts.devices import MOST_DEVICES
from runtime.gateway_config import STRICT, Tenant
from runtime.registered_model import Dtype
from storelink.arena_file import HugePages

GIB = 1 << 30
#: The directory of this source tree, or of the installed packages.
CHECKOUT = Path(__file__).absolute().parent.parent


class SchedulerSection(BaseModel):
    """Placement."""

    model_config = STRICT
    host: str = "127.0.0.1"
    port: int = Field(default=8081, ge=1, le=65535)
    #: Schedulers at `host`, at consecutive ports from `port`. Sessions are divided among them; each can take over for
    #: the others.
    count: int = Field(default=1, ge=1, le=64)
    #: host:port of each scheduler, if on several hosts; then host, port and count are ignored.
    addresses: list[str] = []
    #: The address the processes listen on; empty: `host`.
    listen_host: str = ""
    #: balanced, sticky, cache-aware, random, round-robin, or the name of an entry point of the group
    #: upbeat.placement_policies.
    policy: str = "balanced"
    #: Limits of hints that cause a prefetch, per tenant and per client address: long-term rate and burst. A cache of
    #: more than 16,384 tokens counts as several.
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
    #: The engine may overwrite prefetched pages at any time (SYMPHONY 3.4). Off: prefetch stops at DRAM.
    cooperative: bool = True
    #: For comparison: prefetched KV stays in HBM until it is used or its hint ends, and requests wait for memory.
    hold_hinted: bool = False
    #: Victims and prefetches are ranked by layer: it pays without hints, where HBM is short (docs/operating.md). Off:
    #: whole chunks, from the end of the least recently used session.
    layer_priority: bool = False
    #: A request that would run alone starts when its first layers are loaded. Off: when all are.
    layerwise: bool = True
    #: Cached tokens are recomputed if that is estimated to be faster than loading. Off: all cached tokens are loaded.
    load_plan: bool = True
    #: Memory of one device, for weights and KV.
    hbm_gib: float = Field(default=1.0, gt=0)
    #: Arena of one node, shared by its devices.
    dram_gib: float = Field(default=2.0, gt=0)
    #: Huge pages for the arena. auto: if `shm_dir` has them (a hugetlbfs, or a tmpfs mounted with huge=advise); on:
    #: required.
    hugepages: HugePages = "auto"
    #: Size of a node's SSD tier; 0: a share of the disk's free space at start.
    ssd_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    #: Size of the blob tier of all nodes; 0: for a directory a share of the disk's free space at start, for a bucket no
    #: limit.
    blob_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    #: Share of a disk's size to keep free: with less free space, nothing is written to a tier on it.
    disk_reserve: float = Field(default=0.05, ge=0, lt=1)
    #: Idle seconds after which a session's cache leaves every tier (by default 30 days); 0: never.
    blob_expiry_s: float = Field(default=30 * 86_400.0, ge=0)
    #: Quotas of the slow tiers by tenant, and for all other tenants; 0: no limit.
    tenant_quota_gib: dict[Tenant, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    default_tenant_quota_gib: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    #: Chunks without a session leave the slow tiers after this time; must exceed the longest turn, in seconds.
    orphan_grace_s: float = Field(default=3600.0, ge=1)
    #: Empty: DATA/blob. Else an obstore URL: s3://bucket/prefix, gs://..., az://..., file:///...
    blob_url: str = ""
    #: Options of the blob store (`endpoint`, `access_key_id`, ...), as obstore names them.
    blob_options: dict[str, str] = {}
    #: Limit of bytes waiting for SSD writes, and for blob writes; more are skipped and counted.
    write_back_limit_bytes: int = Field(default=4 << 30, ge=1 << 20)
    #: How peers read each other's arena: NIXL where it can be imported, else sockets.
    transport: Literal["auto", "nixl", "socket"] = "auto"
    #: How the arena and the SSD exchange bytes: NIXL's POSIX backend, its GDS backend, or plain calls. auto: NIXL's
    #: POSIX backend where it can be imported, else plain calls.
    file_io: Literal["auto", "nixl", "gds", "threads"] = "auto"
    #: Limit of prefetch into the arena, in 10^6 bytes per second, to protect decoding; 0: no limit. Loads that requests
    #: wait for are never limited.
    prefetch_mb_s: float = Field(default=0.0, ge=0)
    #: Whether SSD I/O bypasses the page cache (O_DIRECT). auto: if the file system supports it, but data in the page
    #: cache is read from there (Linux 6.5).
    direct_io: Literal["auto", "on", "off"] = "auto"
    #: Injected faults, for tests: actions by failpoint (kvstore/failpoints.py).
    failpoints: dict[str, str] = {}

    #: Codecs of the SSD and the blob tier; all but raw lose precision and need the extra [lmcache]: docs/design/0006.
    ssd_codec: Literal["raw", "fp8", "k16v8", "cachegen"] = "raw"
    blob_codec: Literal["raw", "fp8", "k16v8", "cachegen"] = "raw"
    #: Whether new chunks on the SSD and in blob are encrypted, each session's with a key of its own. Others stay
    #: readable: docs/design/0040.
    encrypt: bool = False


class WorkerSection(BaseModel):
    """The engine."""

    model_config = STRICT
    #: Threads that compute; 0: all cores, divided evenly between this machine's workers.
    threads: int = Field(default=0, ge=0)
    #: auto: CUDA where torch sees a device and the extra [cuda] is installed, else the CPU.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: A row's result does not depend on its batch or on the split of its prompt. Always true of the compiled CPU
    #: kernels; slower on CUDA.
    batch_invariant: bool = False
    #: auto: float32 for models of at most 64 MiB, else the checkpoint's type.
    dtype: Dtype = "auto"
    #: Limit of requests in the batch.
    max_batch: int = Field(default=64, ge=1)
    #: Limit of waiting requests at the same or a more urgent priority; further ones get 503 and may try another node.
    max_waiting: int = Field(default=1024, ge=1)
    #: Limit of tokens of one engine step, prefill and decode together.
    step_tokens: int = Field(default=1024, ge=16)
    #: Target length of a step with decodes, in seconds (at least twice the time of its decodes); prompts are split to
    #: fit. 0: no limit.
    mixed_step_s: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    #: Target length of a step while several tenants share the device (active within ten seconds), in seconds (at least
    #: three times a single decode), so that no tenant's next turn waits behind a long step.
    shared_step_s: float = Field(default=0.005, gt=0, allow_inf_nan=False)
    granule_bytes: int = Field(default=2 << 20, ge=4096)
    #: Host memory (`shm_dir`) for images of weights, from which models are activated; beyond it they are packed from
    #: the checkpoint each time. None: half of what is free there beside the arenas.
    images_gib: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    #: Links to host memory that an activation uses on CUDA: the device's own, and those of other devices of its node,
    #: over NVLink. Each takes about half a GiB of those devices' memory (docs/many-models.md).
    load_links: int = Field(default=1, ge=1, le=MOST_DEVICES)
    #: Whether models lend memory of their layers to KV when it is short, and copy these layers from their images in
    #: each step (MIRAGE): auto, if copies are no slower than computing; off. For sharing: prism, also with one model.
    remap: Literal["auto", "off"] = "off"
    #: Part of a model's layers that it lends at most.
    remap_cap: float = Field(default=0.5, gt=0, le=1)
    #: Whether fine-tuning jobs train beside serving, with processors and memory that it does not use (HARLI). Not with
    #: several models and sharing: static, where each has a fixed part of the memory.
    harvest: Literal["auto", "off"] = "auto"
    #: CPU kernels: native (compiled for this machine), torch, or auto: torch only if compiled kernels cannot be built
    #: or do not suit the model. portable: compiled without bfloat16 instructions, for equal bits on different
    #: processors.
    kernels: Literal["auto", "native", "portable", "torch"] = "auto"
    #: Limit of processor time to compile one grammar (response_format or tools), in seconds; beyond it, it is refused.
    grammar_s: float = Field(default=1.0, ge=0.05, le=2)
    #: Processes that compile grammars, started with the first grammar; a tenant uses at most all but one (if several).
    grammar_processes: int = Field(default=2, ge=1, le=16)
    #: Profile from `upbeat profile`. auto: the stored one for this model and machine, if any; off: none; else a file,
    #: which must match.
    profile: str = Field(default="auto", min_length=1)
    #: Whether metrics are also shown under vLLM's names, so that its dashboards work (docs/metrics.md).
    vllm_names: bool = True
    #: Injected faults, for tests: actions by failpoint (worker/engine/failpoints.py).
    failpoints: dict[str, str] = {}


class VllmSection(BaseModel):
    """The vLLM servers of models whose engine is vllm."""

    model_config = STRICT
    #: Interpreter of the environment that has vLLM and the package upbeat-vllm; `make vllm` makes the default one.
    python: Path = CHECKOUT / ".cache" / "vllm" / "bin" / "python"
    #: Further arguments of every server, before those of its model (`models.NAME.vllm_args`); the last one wins.
    args: list[str] = []
    #: Seconds until a server must serve: it downloads, loads and compiles. Then it is ended and started again.
    start_s: float = Field(default=1800.0, ge=1, allow_inf_nan=False)
    #: Whether a hint brings a session into vLLM's own cache, with a request for one token while the server is idle. The
    #: store then keeps token ids with sessions.
    warm_up: bool = True
    #: URL of each device's server where something else starts them, such as http://127.0.0.1:8000; `{n}` is the node's
    #: number, `{d}` the device's. Empty: they are started here.
    server: str = Field(default="", pattern=r"^(http://[^\s/?#@]+(:[0-9]{1,5})?)?$")
    #: The environment variable that holds the API key of `server`; empty: it has none.
    api_key_env: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    #: The key itself, from a file of secrets (`--secrets`) rather than from the environment.
    api_key: str = ""

    @field_validator("python")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()


class NodesSection(BaseModel):
    """The nodes of this deployment. By default all run on this machine, at consecutive ports."""

    model_config = STRICT
    count: int = Field(default=2, ge=1, le=256)
    #: Devices of a node, each with one worker. They share the node's store (arena, SSD, transport) and the models'
    #: files.
    devices: int = Field(default=1, ge=1, le=MOST_DEVICES)
    #: First port of node 0: its store; +1 its worker, +2 the socket transport, +3 worker metrics, +4 store metrics.
    base_port: int = Field(default=8100, ge=1, le=65000)
    #: First port of the devices from number 1 on, two each: worker, worker metrics. 0: behind the last node's ports.
    device_base_port: int = Field(default=0, ge=0, le=65535)
    #: Every node has the ports of node 0: for nodes with a host each (`{n}` in both host names), such as pods.
    same_ports: bool = False
    #: Host names of each node's processes; `{n}` is the node's number, and in worker_host `{d}` the device's.
    store_host: str = "127.0.0.1"
    worker_host: str = "127.0.0.1"
    #: The address the processes listen on; their own host name when empty.
    listen_host: str = ""
    #: Number of the one node that this configuration is for, which joins a running fleet; its ports begin at base_port.
    #: `upbeat join` sets it.
    joins: int | None = Field(default=None, ge=0, le=999)
    #: Network interface for UCX.
    ucx_interface: str = "lo"

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of the configured nodes."""
        return range(self.count) if self.joins is None else [self.joins]

    @property
    def on_each_host(self) -> int:
        """Nodes that share a host, and so its memory, cores and disks: one where `store_host` differs by node."""
        return 1 if "{n}" in self.store_host else self.count


class TlsSection(BaseModel):
    """TLS with certificates on both sides of every internal channel."""

    model_config = STRICT
    #: Directory with this process's certificate: tls.crt, tls.key and ca.crt, as in a Kubernetes TLS secret; or one as
    #: `upbeat certs init` makes it, with a directory for each identity. None: no internal address may be beyond
    #: loopback.
    directory: Path | None = None
    #: Without a directory, `upbeat up` makes certificates of its own in DATA/tls.
    automatic: bool = True

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()


class FinetuneSection(BaseModel):
    """Fine-tuning through the API: files (DATA/files) and jobs (DATA/adapters)."""

    model_config = STRICT
    #: Size of a tenant's files and jobs together; 0: nothing can be uploaded.
    files_gib: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    #: Size of one file.
    file_mib: float = Field(default=256.0, gt=0, le=1 << 20, allow_inf_nan=False)
    #: Whether models that are made through the API are served (MODEL:SUFFIX). Every tenant can then use them; auto: if
    #: there is one tenant.
    serve: Literal["auto", "on", "off"] = "auto"


class TelemetrySection(BaseModel):
    """Traces (docs/monitoring.md). The standard OTEL_ variables count where a key here is empty."""

    model_config = STRICT
    #: Whether requests are traced; needs the extra [otel]. OTEL_SDK_DISABLED=true turns it off.
    traces: bool = False
    #: The collector (OTLP, HTTP with protobuf), such as http://127.0.0.1:4318. Empty: OTEL_EXPORTER_OTLP_ENDPOINT, else
    #: that.
    endpoint: str = Field(default="", pattern=r"^(https?://[^\s?#@]+)?$")
    #: Share of requests, and of hints, that are traced. None: OTEL_TRACES_SAMPLER_ARG, else 0.05.
    ratio: float | None = Field(default=None, ge=0, le=1)
    #: Tenants whose `traceparent` decides by its sampled flag, instead of `ratio`; "*": all. Of others it only says
    #: which trace a request belongs to.
    follow_tenants: list[Tenant | Literal["*"]] = []
    #: Limit of traces that a gateway process begins, per second; 0: none.
    traces_per_s: float = Field(default=20.0, ge=0, allow_inf_nan=False)
    #: Limit of spans that wait in a process to be sent; more are dropped and counted.
    queue_spans: int = Field(default=4096, ge=1, le=1 << 20)
    #: Seconds for which a batch of spans is tried.
    timeout_s: float = Field(default=5.0, gt=0, le=60)
