"""Which profile fits this worker, and the initial pace and load rates that it gives."""

from __future__ import annotations

import os

import torch

from contracts.kv import KvShape
from contracts.latency_profile import Profile, Subject
from runtime.config import Config
from runtime.profile_files import cores, processor
from storelink.core.load_plan import LoadRate, LoadRates, Source
from worker.core.pace import Pace
from worker.measure.steps import Computed

#: Points of the profile to use: tokens of a prefill step; context and batches of decode steps.
_PREFILL_TOKENS, _CONTEXT_TOKENS, _BATCHES = 512, 1024, (1, 8)
#: A typical request, until one has ended here: tokens to prefill and to generate.
_TYPICAL_PREFILL, _TYPICAL_OUTPUT = 256, 128

#: Names in a profile, by source. Whether the page cache holds a file is unknown, so the faster case is assumed until
#: observed.
_SOURCES = {Source.DRAM: ("dram",), Source.SSD: ("ssd", "ssd_cold"), Source.PEER: ("peer",)}


def compute_threads(config: Config) -> int:
    """Number of compute threads: as configured, else the machine's cores divided by its workers."""
    workers = config.nodes.on_each_host * config.nodes.devices
    return config.worker.threads or max(1, (os.cpu_count() or 1) // workers)


def subject(shape: KvShape, threads: int, computes: str) -> Subject:
    """The subject of measurements in this process. computes: `native`, `torch` or `cuda`."""
    device = torch.cuda.get_device_name() if computes == "cuda" else processor()
    return Subject(shape.fingerprint.hex(), shape.dtype, device, cores(), threads, computes)


def profile_of(what: Subject, model: str, shape: KvShape, computed: Computed) -> Profile:
    """A profile of compute only, without loads."""
    return Profile(
        what, model, shape.layers, shape.token_bytes,
        computed.decode_step_s, computed.decode_layer_s, computed.prefill_step_s, computed.prefill_layer_s, {}, {},
    )  # fmt: skip


def seed(pace: Pace, profile: Profile) -> None:
    """Seed `pace` from the profile; later steps update it as usual."""
    pace.prefill_token_s = profile.prefill_s(_PREFILL_TOKENS) / _PREFILL_TOKENS
    context = min(_CONTEXT_TOKENS, profile.decode_step_s.columns[-1])
    pace.expect_decodes({batch: profile.decode_s(batch, context) for batch in _BATCHES})
    pace.request_s = profile.prefill_s(_TYPICAL_PREFILL) + _TYPICAL_OUTPUT * pace.marginal_token_s
    pace.output_tokens = _TYPICAL_OUTPUT


def measured_rates(profile: Profile) -> dict[str, float]:
    """Measured rates of a peer and of the SSD, in bytes per second."""
    names = {"peer": "peer", "ssd_cold": "ssd"}
    return {names[name]: load.bytes_per_s for name, load in profile.loads.items() if name in names}


def seed_loads(rates: LoadRates, profile: Profile, piece_bytes: int) -> None:
    """Seed the load plan's rates, used until loads are observed."""
    for source, names in _SOURCES.items():
        measured = [profile.loads[name] for name in names if name in profile.loads]
        if measured:
            best = max(measured, key=lambda rate: rate.bytes_per_s)
            rates.seed(source, LoadRate(best.first_s, piece_bytes / best.bytes_per_s))
