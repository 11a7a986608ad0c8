"""An engine on a tiny random model, with a store that is a dictionary: real threads, real pages, real copies."""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from contracts.convert import layers_from_bitmap, manifest_from_wire, session_to_wire
from contracts.frames import StepFrame
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest, leading, tenant_salt
from contracts.request import Failed, GenerateRequest, Output, Sampling, ToolUse
from contracts.v1 import kvstore_pb2
from runtime.clock import RealClock
from runtime.model_config import load_config
from runtime.sections import KvSection, WorkerSection
from storelink.core.load_plan import Source
from storelink.ends import ArenaGone, ArenaHere
from tests.worker.owners import KV
from worker.core.events import StoreDown, StoreUp
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.core.windowed import Windowed
from worker.devices.cpu.native_runner import NativeRunner
from worker.devices.runner import Runner, Slice, Steps
from worker.engine.device_loop import DeviceLoop
from worker.engine.engine import Cancel, NativeEngine, Submit
from worker.engine.executor import Executor
from worker.kernels.choice import choose_kernels
from worker.link.kv_loader import KvLoader
from worker.link.loads import FromStore, LoadTable
from worker.memory.copier import Copier, HostCopier
from worker.memory.device_memory import DeviceMemory, host_memory
from worker.memory.paged_kv import PagedKv
from worker.models.load import Model, load_model
from worker.sampling.grammars import GrammarCompiler
from worker.sampling.output import Guide
from worker.text.codec import TextCodec

DEMO = Path(__file__).parents[2] / "models" / "demo"
#: Tokens of the demo's tokenizer.
VOCAB = TextCodec.load(DEMO).vocab_size
CHUNK = 16
GRANULE = 1 << 16


def tiny_model(directory: Path) -> Path:
    """A random Llama of 4 layers with the demo tokenizer."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048, eos_token_id=2, pad_token_id=0, bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory, safe_serialization=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text((DEMO / name).read_text())
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 4
    return directory


class FakeStore:
    """Speaks the worker's side of Attach from a dictionary. One arena slot a piece, never reused.

    fault(key, layer) is asked before each piece is delivered: False withholds it (a bad piece). Delivery happens on a
    thread of its own, in layer order, `delay_s` apart.
    """

    def __init__(self, shape: KvShape, slots: int = 4096) -> None:
        self.shape = shape
        self.arena: np.ndarray | None = np.zeros(slots * shape.piece_bytes, np.uint8)
        self.chunks: dict[bytes, list[int]] = {}
        self.manifests: list[Manifest] = []
        self.fault: Callable[[bytes, int], bool] = lambda key, layer: True
        self.refuse: Callable[[bytes], bool] = lambda key: False
        self.delay_s = 0.0
        #: Where it says that chunks come from.
        self.source = Source.DRAM
        self.delivered = 0
        #: Every load that was asked for, in order, and how many chunks' copies were granted.
        self.asked: list[kvstore_pb2.LoadRequest] = []
        self.offered: list[kvstore_pb2.SaveRequest] = []
        self.granted = 0
        self._next = 0
        self.sent = self.handled = 0
        self._grants: dict[int, tuple[list[bytes], dict[int, list[int]]]] = {}
        self._cancelled: set[int] = set()
        self._work: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.to_engine: Callable[[object], None] = lambda event: None
        self.to_loader: Callable[[object], None] = lambda message: None
        self._wake = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, message: kvstore_pb2.WorkerToStore) -> None:
        self.sent += 1
        if message.WhichOneof("kind") == "cancel":
            self._cancelled.add(message.cancel.load_id)
            self._wake.set()
        self._work.put(message)

    def attached(self, to_engine: Callable[[object], None], to_loader: Callable[[object], None]) -> None:
        """Another engine from now on, whose loads are numbered from the beginning."""
        self.to_engine, self.to_loader = to_engine, to_loader
        self._cancelled = set()

    def hurry(self) -> None:
        """Deliver without a delay from now on, what is being delivered included."""
        self.delay_s = 0.0
        self._wake.set()

    def cancelled(self) -> int:
        """How many loads were given up."""
        return len(self._cancelled)

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while isinstance(message := self._work.get(), kvstore_pb2.WorkerToStore):
            match message.WhichOneof("kind"):
                case "load":
                    self._load(message.load)
                case "save":
                    self._save(message.save)
                case "saved":
                    keys, slots = self._grants.pop(message.saved.save_id)
                    for index in message.saved.ok:
                        self.chunks[keys[index]] = slots[index]
                case "turn":
                    self.manifests.append(manifest_from_wire(message.turn.manifest))
            self.handled += 1

    def hint(
        self, session: str, keys: list[bytes], *, priority: int = 0, arrival_s: float = 0.0, expires_s: float = 60.0
    ) -> None:
        """This session is about to speak, in `arrival_s`: its chunks are offered to the worker."""
        wire = session_to_wire(SessionKey("t", session))
        offer = kvstore_pb2.PrefetchOffer(
            session=wire,
            fingerprint=self.shape.fingerprint,
            keys=keys,
            priority=priority,
            arrival_s=arrival_s,
            expires_s=expires_s,
        )
        self.to_engine(FromStore(kvstore_pb2.StoreToWorker(offer=offer)))

    def erase(self, session: str, keys: list[bytes]) -> None:
        """The session was erased: none of its chunks is here any more."""
        for key in keys:
            self.chunks.pop(key, None)
        erase = kvstore_pb2.Erase(keys=keys, sessions=[session_to_wire(SessionKey("t", session))])
        self.to_engine(FromStore(kvstore_pb2.StoreToWorker(erase=erase)))

    def invalidate(self, session: str) -> None:
        """The session is not coming after all."""
        self.to_engine(FromStore(kvstore_pb2.StoreToWorker(invalidate=session_to_wire(SessionKey("t", session)))))

    def _load(self, load: kvstore_pb2.LoadRequest) -> None:
        self.asked.append(load)
        found = leading(c.key in self.chunks for c in load.chunks)
        told = kvstore_pb2.LoadFound(load_id=load.load_id, chunks=found, sources=[self.source] * found)
        self.to_engine(FromStore(kvstore_pb2.StoreToWorker(found=told)))
        whole = set(range(found))
        for layer in range(self.shape.layers):
            if load.load_id in self._cancelled:
                return
            if self.delay_s and found:
                self._wake.wait(self.delay_s)
                self._wake.clear()
                if load.load_id in self._cancelled:
                    return
            pieces = kvstore_pb2.LoadPieces(load_id=load.load_id)
            for i in range(found):
                if layer in layers_from_bitmap(load.chunks[i].layers, self.shape.layers):
                    if not self.fault(load.chunks[i].key, layer):
                        whole.discard(i)
                        continue
                    pieces.chunks.append(i)
                    pieces.layers.append(layer)
                    pieces.offsets.append(self.chunks[load.chunks[i].key][layer] * self.shape.piece_bytes)
                    self.delivered += 1
            if pieces.chunks:
                self.to_loader(pieces)
        for i in set(range(found)) - whole:
            self.chunks.pop(load.chunks[i].key, None)  # a bad chunk is deleted, as the store does
        self.to_loader(kvstore_pb2.LoadEnd(load_id=load.load_id, usable=leading(i in whole for i in range(found))))

    def _save(self, save: kvstore_pb2.SaveRequest) -> None:
        self.offered.append(save)
        grant = kvstore_pb2.SaveGrant(save_id=save.save_id)
        slots: dict[int, list[int]] = {}
        for index, key in enumerate(save.keys):
            if key in self.chunks:
                grant.held.append(index)
            elif self.refuse(key) or self._next + self.shape.layers > len(self.arena) // self.shape.piece_bytes:  # type: ignore[arg-type]
                grant.refused.append(index)
            else:
                slots[index] = list(range(self._next, self._next + self.shape.layers))
                self._next += self.shape.layers
                grant.indices.append(index)
                self.granted += 1
                grant.offsets.extend(slot * self.shape.piece_bytes for slot in slots[index])
        self._grants[save.save_id] = (list(save.keys), slots)
        self.to_loader(grant)


@dataclass
class Result:
    """What one request gave."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    finish: str | None = None
    logprobs: list[float] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)


@dataclass
class Counting:
    """A runner that counts its steps and the tokens which it computes."""

    runner: Steps
    tokens: int = 0
    steps: int = 0

    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        self.tokens += sum(len(s.tokens) for s in slices)
        self.steps += 1
        return self.runner.step(slices, before_layer, after_layer)


@dataclass
class Slow:
    """A runner each of whose steps takes this much longer, so that something can happen meanwhile."""

    runner: Steps
    seconds: float

    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.runner.step(slices, before_layer, after_layer)


class Harness:
    """One engine. `step_ms`: how much longer a step takes than it would. `pages` bounds HBM; `store` None: no store
    attached."""

    def __init__(
        self,
        model: Path,
        *,
        pages: int = 400,
        store: bool = True,
        cache: bool = True,
        cooperative: bool = True,
        dtype: str = "float32",
        kernels: str = "auto",
        step_ms: int = 0,
        niceness: int = 0,
        adapters: dict[str, Path] | None = None,
        **worker: int,
    ) -> None:
        torch.set_num_threads(1)
        self.adapters = adapters
        settings = KvSection(cache=cache, cooperative=cooperative, chunk_tokens=CHUNK, layer_priority=True)
        runner, copier = self.assemble(model, pages, dtype, kernels)
        self.pool = PagePool(self.kv.slab_count, self.kv.pages_per_slab, self.model.shape.layers)
        table = LoadTable()
        self.loader = KvLoader(self.kv, table, lambda event: self.engine.inbox.put(event), copier)
        self.cache = HbmCache(self.pool, windowed=Windowed.of(self.model.shape))
        salt = tenant_salt(b"s" * 32, "t")
        self.executor = Executor(
            self.model.shape, self.kv, self.cache, table, self.loader, RealClock(), settings, lambda tenant: salt
        )
        self.codec = TextCodec.load(model)
        if step_ms:
            runner = Slow(runner, step_ms / 1000)
        self.computed = runner = Counting(runner)
        self.grammars = GrammarCompiler(self.codec, self.model.config.vocab_size, self.model.eos_ids)
        self.engine = NativeEngine(
            self.executor, runner, self.codec, self.model.eos_ids, "tiny", WorkerSection(**worker),
            adapters=self.model.adapters.by_name,
        )  # fmt: skip
        self.loop = DeviceLoop([self.engine], niceness)
        self.crashes: list[BaseException] = []
        self.loop.on_crash = self.crashes.append
        self.loader.start()
        self.loop.start()
        self.store: FakeStore | None = None
        if store:
            self.attach(FakeStore(self.model.shape))
        self._frames: queue.Queue[StepFrame] = queue.Queue()
        self._results: dict[str, Result] = {}
        self._count = 0

    def assemble(self, model: Path, pages: int, dtype: str, kernels: str) -> tuple[Steps, Copier]:
        """Sets memory, model and kv; returns what computes and what copies."""
        self.memory: DeviceMemory = host_memory(64 << 20, GRANULE)
        computing = choose_kernels(kernels, load_config(model), CHUNK, 1)
        pack = computing and computing.pack
        self.model: Model = load_model(model, self.memory, dtype, "cpu", CHUNK, None, pack, "", self.adapters)
        self.kv = PagedKv.reserve(self.memory, self.model.shape, pages, KV)
        runner = NativeRunner(self.model, self.kv, computing) if computing else Runner(self.model, self.kv)
        return runner, HostCopier(self.kv)

    def attach(self, store: FakeStore) -> None:
        """Attach this store (which another engine may have filled)."""
        self.store = store
        store.attached(self.engine.inbox.put, self.loader.from_store)
        self.executor.link = self.loader.link = store  # type: ignore[assignment]
        assert store.arena is not None
        self.loader.from_store(ArenaHere(store.arena.data))
        self.engine.inbox.put(StoreUp())

    def detach(self) -> None:
        """The store dies."""
        assert self.store is not None
        self.store.close()
        self.store.arena = None
        self.loader.from_store(ArenaGone(lambda: None))
        self.engine.inbox.put(StoreDown())

    def put(self, frame: StepFrame) -> None:
        """A gateway stream's end."""
        self._frames.put(frame)

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        session: str = "s",
        resume: list[int] | None = None,
        group: str = "",
        choice: int = 0,
        json_schema: str | None = None,
        tool_use: ToolUse | None = None,
        tenant: str = "t",
        weight: float = 1.0,
        regex: str | None = None,
        cache_salt: str = "",
        trace: str = "",
        adapter: str = "",
        **sampling: object,
    ) -> str:
        """Start a request; greedy and without an end of text unless said otherwise."""
        self._count += 1
        chosen = Sampling(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **sampling})  # type: ignore[arg-type]
        request = GenerateRequest(
            f"r{self._count}", tenant, session, "tiny", chosen, prompt_tokens=prompt, resume_tokens=resume or [],
            group=group, choice=choice, json_schema=json_schema, tool_use=tool_use, weight=weight, regex=regex,
            cache_salt=cache_salt, trace=trace, adapter=adapter,
        )  # fmt: skip
        self._results[request.request_id] = Result()
        self.engine.inbox.put(Submit(request, prompt, max_tokens, self, self.guide(request)))
        return request.request_id

    def guide(self, request: GenerateRequest) -> Guide | None:
        """The request's grammar, compiled here and now."""
        spec = self.grammars.spec(request)
        return None if spec is None else self.grammars.guide(request, self.grammars.matcher(spec.grammar(), spec.param))

    def cancel(self, request_id: str) -> None:
        """The client goes away."""
        self.engine.inbox.put(Cancel(request_id))

    def wait(self, *request_ids: str, timeout_s: float = 60) -> list[Result]:
        """The results of these requests, once they have ended."""
        while any(self._results[r].finish is None for r in request_ids):
            assert not self.crashes, self.crashes
            frame = self._frames.get(timeout=timeout_s)
            for output in frame.outputs:
                self._take(output)
            for failed in frame.failed:
                self._fail(failed)
        return [self._results[r] for r in request_ids]

    def _take(self, output: Output) -> None:
        result = self._results[output.request_id]
        result.text += output.text
        result.tokens += output.tokens
        result.cached = output.cached_tokens
        result.logprobs += [p.logprob for p in output.logprobs or []]
        for delta in output.tool_calls or []:
            if delta.index == len(result.calls):
                result.calls.append([delta.id, delta.name, ""])
            result.calls[delta.index][2] += delta.arguments
        result.finish = output.finish_reason or result.finish

    def _fail(self, failed: Failed) -> None:
        raise AssertionError(f"a request failed: {failed.error}")

    def run(self, prompt: list[int], max_tokens: int, **more: object) -> Result:
        """Submit and wait."""
        return self.wait(self.submit(prompt, max_tokens, **more))[0]  # type: ignore[arg-type]

    def settle(self) -> None:
        """Wait until everything finished is below, then check every invariant."""
        waited = threading.Event()
        for _ in range(500):
            quiet = self.store is None or self.store.arena is None or self.store.sent == self.store.handled
            if quiet and self.engine.idle and not self.executor.table.open:
                break
            waited.wait(0.01)
        assert not self.crashes, self.crashes
        self.cache.validate()

    def purge(self) -> None:
        """Forget all of HBM (the engine must be idle)."""
        self.settle()
        assert self.cache.make_room(self.pool.total, 1e9)

    def contents(self) -> dict[tuple[bytes, int], bytes]:
        """The bytes of every piece in HBM, by chunk key and layer."""
        return {
            (key, layer): bytes(self.kv.page_bytes_view(int(page)))
            for key, block in self.cache.index.items()
            for layer, page in enumerate(block.pages)
            if block.ready[layer]
        }

    def close(self) -> None:
        """Stop the engine."""
        self.loop.stop()
        self.loader.stop()
        if self.store:
            self.store.close()
        assert not self.crashes, self.crashes


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids that are no special ones."""
    return [rng.randrange(3, VOCAB) for _ in range(length)]
