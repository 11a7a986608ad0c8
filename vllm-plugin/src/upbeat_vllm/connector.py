"""`UpbeatConnector`, as vLLM 0.32 and 0.33 load it: it dispatches by role, and translates vLLM's objects.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "UpbeatConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "upbeat_vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "127.0.0.1:8100", "secret": "data/secret"}}'

A request says by `kv_transfer_params` whose it is: `{"upbeat": {"session": ..., "tenant": ..., "priority": ...,
"sources": [...]}}`. Without it, the session is named by the prompt's first chunk.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models.utils import extract_layer_index

from contracts.cluster import secret_id
from contracts.ids import SESSION_ID_PATTERN, SessionKey
from contracts.kv import chunk_key, tenant_salt
from storelink import fleet
from storelink.log import PythonLog
from upbeat_vllm import keys
from upbeat_vllm.core import Core
from upbeat_vllm.digests import directory_digest
from upbeat_vllm.geometry import Geometry, geometry, why_uncached
from upbeat_vllm.orders import StepOrders
from upbeat_vllm.rank_side import RankSide
from upbeat_vllm.scheduler_side import SchedulerSide
from upbeat_vllm.settings import Refused, Settings, check_version
from upbeat_vllm.state import Turn
from upbeat_vllm.torch_blocks import TorchBlocks

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = PythonLog(logging.getLogger("vllm.upbeat"))
_SESSION = re.compile(SESSION_ID_PATTERN)
_NAME_CHARS = 256


class UpbeatMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The orders of a step."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class UpbeatConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises Refused for another vLLM, a wrong configuration, or a failure policy that fails requests."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise Refused(
                'set "kv_load_failure_policy": "recompute" in --kv-transfer-config: a piece that does not come must '
                "fail no request"
            )
        served = vllm_config.model_config.served_model_name
        name = served[0] if isinstance(served, list) else served or vllm_config.model_config.model
        self._settings = Settings.read(transfer.kv_connector_extra_config, name)
        self._engine_id: str = transfer.engine_id
        self._why = why_uncached(vllm_config, kv_cache_config)
        self._geometry: Geometry | None = None
        self._scheduler: SchedulerSide | None = None
        self._rank: RankSide | None = None
        self._requests: dict[str, Request] = {}
        self._load_errors: set[int] = set()
        if self._why:
            log.warning("this model is served without Upbeat's cache", reason=self._why)
            return
        self._geometry = geometry(vllm_config, kv_cache_config, self._settings, vllm.__version__)
        if role == KVConnectorRole.SCHEDULER:
            self._secret = self._settings.read_secret()
            #: By the number of the loading, and path. Empty: not known.
            self._adapters: dict[tuple[int, str], bytes] = {}
            self._turns: dict[str, Turn] = {}
            self._pool: BlockPool | None = None
            self._began: tuple[float, int] | None = None
            warms = self._settings.warm_up and self._settings.wake is not None
            core = Core(self._geometry.shape, self._settings.model, self._geometry.ranks, warms=warms)
            settings, name = self._settings, f"vllm-{self._engine_id[:8]}"
            settings.use_certificate()
            own_id = secret_id(self._secret)
            fleet.use(lambda: own_id)
            self._scheduler = SchedulerSide(
                core, settings.store, self._engine_id, name, settings.device, log, settings.wake, settings.node
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are waited for one by one."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A block of a layer is one run of bytes, heads outermost: a rank's share is one range of a piece."""
        return "LBHNC"

    # ---- scheduler side ----------------------------------------------------------------------------------------
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """What erasures evict from."""
        self._pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerSide.match`."""
        side = self._scheduler
        if side is None:
            return 0, False
        with side.lock:
            self._evict(side)
            return side.match(self._turn(request), request.all_token_ids, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See `Core.allocated`."""
        if (side := self._scheduler) is not None:
            with side.lock:
                side.core.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)
                side.flush()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Offers what the step completes, and takes the orders of the ranks."""
        side = self._scheduler
        if side is None:
            return UpbeatMetadata(StepOrders())
        with side.lock:
            self._evict(side)
            prefill = self._scheduled(side.core, scheduler_output)
            if not scheduler_output.total_num_scheduled_tokens:
                side.rest()
            self._began = (time.monotonic(), prefill) if scheduler_output.total_num_scheduled_tokens else None
            return UpbeatMetadata(side.take_orders())

    def _scheduled(self, core: Core, output: SchedulerOutput) -> int:
        """Returns how many tokens of prompts the step computes."""
        prefill = 0
        state = output.kv_connector_block_state
        cached = output.scheduled_cached_reqs
        for request_id in output.preempted_req_ids or ():
            core.preempted(request_id)
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in output.num_scheduled_tokens.items():
            if count > 1:
                prefill += count
            request = self._requests.get(request_id)
            if request is None or request_id not in computed:
                continue
            blocks = state.resolve_block_ids(request_id)[0]
            first = computed[request_id]
            core.scheduled(request_id, request.all_token_ids, blocks, first + count, first)
        return prefill

    def on_new_request(self, request: Request) -> None:
        """Kept until it has finished: a step's output names requests by id only."""
        if self._scheduler is not None:
            self._requests[request.request_id] = request

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Called once a step has run: how long it took."""
        side = self._scheduler
        if side is not None and self._began is not None:
            began, prefill = self._began
            self._began = None
            with side.lock:
                side.core.choice.stepped(time.monotonic() - began, prefill)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `Core.finished`."""
        side = self._scheduler
        if side is None:
            return False, None
        self._requests.pop(request.request_id, None)
        self._turns.pop(request.request_id, None)
        with side.lock:
            waits = side.core.is_loading(request.request_id)
            keep = side.core.finished(request.request_id, waits, time.time(), request.all_token_ids)
            side.flush()
        return keep, None

    def has_pending_push_work(self) -> bool:
        """Erasures that vLLM's cache has not heard of."""
        side = self._scheduler
        return side is not None and bool(side.core.blocks.to_evict)

    def reset_cache(self) -> bool | None:
        """vLLM's own cache was emptied; the store's is not vLLM's to empty."""
        return None

    def _evict(self, side: SchedulerSide) -> None:
        if side.core.blocks.to_evict and self._pool is not None:
            self._pool.evict_blocks(set(side.core.blocks.to_evict))
            side.core.blocks.to_evict.clear()
        side.evicted()

    def _turn(self, request: Request) -> Turn:
        turn = self._turns.get(request.request_id)
        if turn is None:
            assert self._geometry is not None
            said = request.kv_transfer_params or {}
            ours = said.get("upbeat") if isinstance(said, Mapping) else None
            turn = self._turns[request.request_id] = self._read(request, ours if isinstance(ours, Mapping) else {})
        return turn

    def _read(self, request: Request, said: Mapping[str, Any]) -> Turn:
        assert self._geometry is not None
        shape = self._geometry.shape
        tenant = said.get("tenant")
        tenant = tenant if isinstance(tenant, str) and 0 < len(tenant) <= _NAME_CHARS else self._settings.tenant
        # vLLM keeps prompts of different salts apart; so do chunk keys.
        salted = f"{tenant}\0{request.cache_salt}" if request.cache_salt else tenant
        salt = tenant_salt(self._secret, salted)
        session = said.get("session")
        if not isinstance(session, str) or not _SESSION.fullmatch(session):
            first = list(request.all_token_ids[: shape.chunk_tokens])
            session = "prompt-" + chunk_key(salt, shape.fingerprint, b"", first).hex()[:32]
        priority = said.get("priority", request.priority)
        sources = said.get("sources")
        cacheable = request.prompt_embeds is None and request.prompt_token_ids is not None
        items = [keys.Item(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features or ()]
        adapter, known = self._adapter(request)
        return Turn(
            request.request_id,
            SessionKey(tenant, session),
            salt,
            priority if isinstance(priority, int) else 0,
            tuple(s for s in sources if isinstance(s, str))[:16] if isinstance(sources, list) else (),
            keys.extras(items, adapter, shape.chunk_tokens),
            cacheable and known,
            request.cache_salt or "",
            said.get("warms") is True,
        )

    def _adapter(self, request: Request) -> tuple[bytes, bool]:
        """The digest of the request's LoRA adapter, and whether it is known: an adapter without files, or whose files
        are not those any more that vLLM has loaded, is not cached. vLLM numbers each loading anew."""
        lora = request.lora_request
        if lora is None:
            return b"", True
        try:
            found = directory_digest(Path(lora.lora_path), self._settings.cache)
        except OSError:
            found = b""
        loaded = self._adapters.setdefault((lora.lora_int_id, lora.lora_path), found)
        if lora.load_inplace or found != loaded:
            self._adapters[lora.lora_int_id, lora.lora_path] = found = b""
        return found, bool(found)

    # ---- rank side ---------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's KV of this rank."""
        if self._geometry is None:
            return
        blocks = TorchBlocks(kv_caches, self._geometry, get_tp_group().rank_in_group)
        # With asynchronous scheduling one step more than there are stages.
        in_flight = self._vllm_config.parallel_config.pipeline_parallel_size + 1
        self._rank = RankSide(blocks, self._geometry.shape.layers, self._engine_id, log, in_flight)

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, UpbeatMetadata)
        return metadata.orders

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before blocks are overwritten."""
        if self._rank is not None and isinstance(kv_connector_metadata, UpbeatMetadata):
            self._rank.overwrite(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """See `RankSide.begin`."""
        if self._rank is not None:
            self._rank.begin(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `RankSide.wait_for_layer`."""
        if self._rank is not None:
            self._rank.wait_for_layer(extract_layer_index(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Saves begin when the step has ended: grants come meanwhile."""

    def wait_for_save(self) -> None:
        """See `RankSide.computed`; copies go on beside the next steps."""
        if self._rank is not None:
            self._rank.computed(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose saves, and whose loads, have ended."""
        if self._rank is None:
            return None, None
        sent, received, failed = self._rank.results()
        self._load_errors = failed
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not come: vLLM computes them."""
        failed, self._load_errors = self._load_errors, set()
        return failed

    def shutdown(self) -> None:
        """End the threads: vLLM kills an engine that does not end soon."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._rank is not None:
            self._rank.close()
