"""Named kinds of nodes, and the sources of their figures.

Devices: NVIDIA's data sheet of the A100 80GB SXM (312 TFLOPS dense bfloat16, 2,039 GB/s). The efficiencies are
fitted to published measurements of Llama-2-7B and 13B in half precision on one A100-80G (InternLM/lmdeploy,
docs/en/benchmark/a100_fp16.md, version 0.1.0a1):

| measured there | published | fitted here |
| --- | --- | --- |
| 13B, prompt of 2,048 tokens, first token | 0.243 s | 0.254 s |
| 7B, prompt of 2,048 tokens, first token | 0.139 s | 0.134 s |
| 13B, decode, batch 1, short context | 17 ms | 16.8 ms |
| 7B, decode, batch 1, short context | 9 to 10 ms | 9.7 ms |
| 13B, decode, batch 16, about 2,100 tokens each | 33 ms | 32 ms |
| 7B, decode, batch 32, about 2,100 tokens each | 31 ms | 30 ms |

H100 80GB SXM and H200 SXM: NVIDIA's data sheets (989 TFLOPS dense bfloat16, twice that in FP8; 3,350 and 4,800 GB/s).
Fitted to throughputs that TensorRT-LLM 0.5.0 publishes in FP8 (docs/source/performance.md and
docs/source/blogs/H200launch.md there), weights and KV of one byte:

| measured there | published | fitted here |
| --- | --- | --- |
| 7B, H100, batch 64, 128 tokens in, 2,048 out | 5,367 tokens/s | 5,780 |
| 7B, H100, batch 32, 2,048 in, 2,048 out | 2,230 tokens/s | 2,347 |
| 7B, H100, batch 64, 2,048 in, 128 out | 2,058 tokens/s | 2,009 |
| 13B, H200, batch 64, 2,048 in, 128 out | 1,349 tokens/s | 1,360 |
| 70B, four H100, batch 64, 2,048 in, 128 out | 843 tokens/s | 819 |

70B runs on several devices as one node, with 0.6 of their rates for tensor parallelism, from the last row. Newer
releases lose less.

The tests hold the fit within 10 %. The host is SYMPHONY's (section 4, "Testbed Setup"): each of four devices has a
quarter of 256 GB DRAM, 4 TB SSD and a 100 Gbit/s link. Rates of PCIe 4.0 x16 (25
GB/s reached), of an SSD (6 GB/s a host) and of the blob tier (the scheduler's default) are assumptions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from contracts.kv import KvShape
from contracts.latency_profile import Profile
from loadtest.simulate.costs import Device, Measured, ModelShape, NodeKind, Roofline
from runtime import profile_files

A100 = Device(
    "A100-80GB", flops=312e12, memory_bytes_per_s=2039e9, memory_bytes=80e9, mfu=0.70, mbu=0.87, overhead_s=0.002
)
H100 = Device(
    "H100-80GB", flops=989e12, memory_bytes_per_s=3350e9, memory_bytes=80e9, mfu=0.50, mbu=0.87, overhead_s=0.002
)
A100_40 = replace(A100, name="A100-40GB", memory_bytes_per_s=1555e9, memory_bytes=40e9)
H200 = Device(
    "H200-141GB", flops=989e12, memory_bytes_per_s=4800e9, memory_bytes=141e9, mfu=0.50, mbu=0.87, overhead_s=0.002
)
#: GH200 with 96 GB of HBM3: an H100's compute (NVIDIA's data sheet; MIRAGE, section 7.1).
GH200 = replace(H100, name="GH200-96GB", memory_bytes_per_s=4000e9, memory_bytes=96e9)
#: RTX 6000 Ada (NVIDIA's data sheet: 364 TFLOPS dense bfloat16, 960 GB/s). Its efficiencies are assumptions.
ADA_6000 = Device(
    "Ada6000-48GB", flops=364e12, memory_bytes_per_s=960e9, memory_bytes=48e9, mfu=0.50, mbu=0.87, overhead_s=0.002
)
LLAMA_2_7B = ModelShape("Llama-2-7B", 6.74e9, layers=32, heads=32, kv_heads=32, head_dim=128)
LLAMA_31_8B = ModelShape("Llama-3.1-8B", 8.03e9, layers=32, heads=32, kv_heads=8, head_dim=128)
LLAMA_2_13B = ModelShape("Llama-2-13B", 13.02e9, layers=40, heads=40, kv_heads=40, head_dim=128)
LLAMA_31_70B = ModelShape("Llama-3.1-70B", 70.55e9, layers=80, heads=64, kv_heads=8, head_dim=128)
LLAMA_32_1B = ModelShape("Llama-3.2-1B", 1.24e9, layers=16, heads=32, kv_heads=8, head_dim=64)
LLAMA_32_3B = ModelShape("Llama-3.2-3B", 3.21e9, layers=28, heads=24, kv_heads=8, head_dim=128)
LLAMA_3_8B = replace(LLAMA_31_8B, name="Llama-3-8B")
OPT_67B = ModelShape("OPT-6.7B", 6.66e9, layers=32, heads=32, kv_heads=32, head_dim=128)
OPT_13B = ModelShape("OPT-13B", 12.85e9, layers=40, heads=40, kv_heads=40, head_dim=128)
OPT_30B = ModelShape("OPT-30B", 29.97e9, layers=48, heads=56, kv_heads=56, head_dim=128)
QWEN_25_7B = ModelShape("Qwen2.5-7B", 7.62e9, layers=28, heads=28, kv_heads=4, head_dim=128)
QWEN_25_14B = ModelShape("Qwen2.5-14B", 14.77e9, layers=48, heads=40, kv_heads=8, head_dim=128)
QWEN_25_32B = ModelShape("Qwen2.5-32B", 32.76e9, layers=64, heads=40, kv_heads=8, head_dim=128)
#: Share of several devices' rates that tensor parallelism reaches.
_TENSOR_PARALLEL = 0.6
#: Share of a device's memory that serving systems use; part of that for activations and buffers.
USABLE, ACTIVATION_BYTES = 0.9, 4e9
_GIB = float(1 << 30)


def tensor_parallel(device: Device, count: int) -> Device:
    """`count` devices as one, each with a part of every layer."""
    if count == 1:
        return device
    rate = count * _TENSOR_PARALLEL
    return Device(
        f"{count}x{device.name}",
        device.flops * rate,
        device.memory_bytes_per_s * rate,
        device.memory_bytes * count,
        device.mfu,
        device.mbu,
        device.overhead_s,
    )


def node_of(device: Device, model: ModelShape, max_tokens: int, count: int = 1) -> NodeKind:
    """`count` devices of the paper's testbed as one node, each with a quarter of a host. PCIe 5.0 has twice
    4.0's rate."""
    whole = tensor_parallel(device, count)
    name = device.name.split("-")[0].lower() + (f"x{count}" if count > 1 else "")
    return NodeKind(
        name=f"{name}-{model.name.lower()}",
        model=model.name,
        shape=model.kv_shape(),
        costs=Roofline(whole, model),
        hbm_bytes=whole.memory_bytes * USABLE - model.weight_bytes - count * ACTIVATION_BYTES,
        dram_bytes=count * 60e9,
        ssd_bytes=count * 1e12,
        dram_bytes_per_s=count * (25e9 if device is A100 else 50e9),
        ssd_bytes_per_s=count * 1.5e9,
        link_bytes_per_s=count * 100e9 / 8 / 4,
        blob_bytes_per_s=count * 3e8,
        max_batch=256,
        max_tokens=max_tokens,
    )


def a100(model: ModelShape, max_tokens: int) -> NodeKind:
    """One A100 of the paper's testbed."""
    return node_of(A100, model, max_tokens)


def measured(profile: Profile, hbm_gib: float, dram_gib: float) -> NodeKind:
    """A node of the measured machine."""
    rates = {name: rate.bytes_per_s for name, rate in profile.loads.items()}
    chunk_tokens = 64
    # A profile has only a token's bytes: model them as one wide head.
    width = profile.token_bytes // (profile.layers * 2 * 2)
    shape = KvShape.of_heads(
        bytes.fromhex(profile.subject.fingerprint), profile.layers, 1, width, chunk_tokens, "bfloat16"
    )
    return NodeKind(
        name=f"measured-{profile.model}",
        model=profile.model,
        shape=shape,
        costs=Measured(profile),
        hbm_bytes=hbm_gib * _GIB,
        dram_bytes=dram_gib * _GIB,
        ssd_bytes=64 * _GIB,
        dram_bytes_per_s=rates.get("dram", 4e9),
        ssd_bytes_per_s=rates.get("ssd_cold", rates.get("ssd", 1e9)),
        link_bytes_per_s=rates.get("peer", 1e9),
        blob_bytes_per_s=3e8,
        max_tokens=1 << 20,
    )


PRESETS: dict[str, NodeKind] = {
    kind.name: kind
    for kind in (
        *(
            node_of(device, model, most)
            for device in (A100, H100, H200)
            for model, most in ((LLAMA_31_8B, 131_072), (LLAMA_2_13B, 32_768))
        ),
        *(node_of(device, LLAMA_31_70B, 131_072, count) for device, count in ((A100, 4), (H100, 4), (H200, 2))),
    )
}


def node_kind(name: str, hbm_gib: float = 1.0, dram_gib: float = 4.0) -> NodeKind:
    """The preset of this name, or of a profile's file. Raises ValueError naming the presets, ConfigError for a bad
    profile."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix == ".json":
        return measured(profile_files.read(path), hbm_gib, dram_gib)
    raise ValueError(
        f"unknown preset {name!r}; there are {', '.join(PRESETS)}, or the file of a profile (`upbeat profile --out "
        "FILE`)"
    )
