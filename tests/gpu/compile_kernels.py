"""Compiles the kernels for sm_90 in bfloat16 and prints, a line each: what they use, and which instructions they
became.

    python tests/gpu/compile_kernels.py

A process of its own: where tests interpret kernels, nothing can be compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.kernels.cuda import attention, experts, low_rank, products, quantised, rows

E = "*bf16"
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(name: str, kernel: Any, types: dict[str, str], fixed: dict[str, Any], warps: int, stages: int) -> None:
    """Pointers and the sizes that `types` marks with `!` are multiples of 16, as they are with an 8B model."""
    signature = {n: "constexpr" if n in fixed else types[n].rstrip("!") for n in kernel.arg_names}
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(kernel.arg_names)
        if n not in fixed and (types[n][0] == "*" or types[n][-1] == "!")
    }
    source = ASTSource(kernel, signature, fixed, even)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([_CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    narrow = len(re.findall(r"LDG\.E\.U16|LDGSTS\.E(?!\.(BYPASS|LTC|64|128))", code))
    counts = {"wgmma": code.count("HGMMA"), "mma": len(re.findall(r"\bHMMA", code)), "narrow": narrow}
    numbers = {"shared": made.metadata.shared, "registers": registers, "stack": stack} | counts
    print(name, *(f"{key} {value}" for key, value in numbers.items()))


def main() -> None:
    """An 8B model of the Llama family: 32 heads, 8 KV heads, head_dim 128, hidden 4096, pages of 64 tokens; and what
    other families have instead."""
    compile_attention("", attention.AttentionShape(32, 8, 128, 64, torch.bfloat16), window=0)
    compile_rows("", 32, 8, 128, 4096, 14336, gemma=False)
    types = {"x": E, "weight": E, "bias": E, "out": E, "rows": "i32"} | dict.fromkeys(
        ("outputs", "inputs", "x_stride", "out_stride"), "i32!"
    )
    fixed = {"BIAS": False, "WIDEN": False, "ROWS": 64, "OUTPUTS": 64, "INPUTS": 64}
    compiled("product", products._product, types, fixed, 4, 3)
    compile_quantised()
    compile_experts()
    compile_low_rank()
    # Gemma 3 4B.
    compile_attention("gemma_", attention.AttentionShape(8, 4, 256, 64, torch.bfloat16), window=1024)
    compile_rows("gemma_", 8, 4, 256, 2560, 10240, gemma=True)


def compile_attention(prefix: str, shape: attention.AttentionShape, window: int) -> None:
    """The kernels of attention, named with `prefix`."""
    common = {
        "q": E,
        "out": E,
        "table": "*i64",
        "width": "i32",
        "slices": "*i32",
        "blocks": "*i32",
        "scale": "fp32",
        "splits": "i32",
    }
    sizes = {"HEADS": shape.heads, "DIM": shape.head_dim, "DIM_UP": shape.head_dim, "WINDOW": window}
    for prefill in (True, False):
        tiles, parts = shape.tiles(prefill), E if prefill else "*fp32"
        fixed = sizes | {
            "SHARED": shape.heads // shape.kv_heads,
            "GROUP": shape.group,
            "CHUNK": shape.chunk_tokens,
            "BYTES": 2,
            "WIDEN": False,
        }
        fixed |= {"ROWS": tiles.rows, "TILE": tiles.keys, "SPLIT": 0 if prefill else attention.SPLIT_TOKENS}
        types = common | {"parts": parts, "stats": parts}
        name = prefix + ("prefill" if prefill else "decode")
        compiled(name, attention._attend, types, fixed, tiles.warps, tiles.stages)
    types = common | {"parts": "*fp32", "stats": "*fp32"}
    compiled(f"{prefix}merge", attention._merge, types, sizes | {"SPLIT": attention.SPLIT_TOKENS}, 1, 3)


def compile_rows(
    prefix: str, heads: int, kv_heads: int, head_dim: int, hidden: int, intermediate: int, *, gemma: bool
) -> None:
    """The kernels between products and attention, named with `prefix`. gemma: as Gemma has them, heads' norms too."""
    norm = {"x": E, "delta": E, "weight": E, "out": E, "eps": "fp32"}
    up = triton.next_power_of_2(hidden)
    fixed = {"HIDDEN": hidden, "HIDDEN_UP": up, "ADD": True, "GEMMA": gemma}
    compiled(f"{prefix}add_norm", rows._add_norm, norm, fixed, 8 if hidden >= 4096 else 4, 3)
    rotation = dict.fromkeys(("packed", "q", "cos", "sin", "q_norm", "k_norm"), E)
    rotation |= {"table": "*i64", "width": "i32", "places": "*i32", "eps": "fp32"}
    fixed = {"HEADS": heads, "KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "HALF": head_dim // 2}
    fixed |= {"HALF_UP": head_dim // 2, "CHUNK": 64, "BYTES": 2, "NORM": gemma, "GEMMA": gemma}
    compiled(f"{prefix}rotate_write", rows._rotate_write, rotation, fixed, 1, 3)
    gate = {"WIDTH": intermediate, "BLOCK": 1024, "GELU": gemma}
    compiled(f"{prefix}gate_mul", rows._gate_mul, {"gate_up": E, "out": E}, gate, 4, 3)


def compile_quantised() -> None:
    """Groups of 128 inputs, and of float8 blocks of 128."""
    types = {"x": E, "codes": "*u8", "scales": "*fp16", "zeros": "*u8", "group_of": "*i32", "bias": E, "out": E}
    types |= {"rows": "i32"} | dict.fromkeys(("outputs", "inputs", "groups", "group", "x_stride", "out_stride"), "i32!")
    fixed = {"SCATTERED": False, "ALIGNED": True, "BIAS": False, "WIDEN": False, "OUTPUTS": 64, "INPUTS": 64}
    for code, name in enumerate(("int4", "int8", "fp8")):
        for rows_, suffix in ((64, ""), (16, "_few")):
            sizes = fixed | {"CODE": code, "ROWS": rows_}
            compiled(f"{name}{suffix}", quantised._product, types, sizes, 4, 3)


def compile_experts() -> None:
    """A Qwen3-MoE model: 128 experts, 8 for each token."""
    types = {"logits": E, "places": "*i32", "chosen": "*i32", "weights": E}
    fixed = {"EXPERTS": 128, "EXPERTS_UP": 128, "PER_TOKEN": 8, "PER_TOKEN_UP": 8, "NORM": True, "PADDED": True}
    compiled("route", experts._route, types, fixed, 1, 3)
    types = {"chosen": "*i32", "count": "i32", "pairs": "*i32", "bounds": "*i32"}
    compiled("sort", experts._sort, types, {"BLOCK": 1024}, 4, 3)
    types = {"x": E, "weight": E, "out": E, "pairs": "*i32", "bounds": "*i32", "outputs": "i32!", "inputs": "i32!"}
    for name, rows_ in (("grouped", 64), ("grouped_few", 16)):
        fixed = {"SHARE": 8, "WIDEN": False, "ROWS": rows_, "OUTPUTS": 64, "INPUTS": 64}
        compiled(name, experts._grouped_product, types, fixed, 4, 3)
    types = {"outputs": E, "weights": E, "out": E}
    compiled("mix", experts._mix, types, {"HIDDEN": 2048, "PER_TOKEN": 8, "BLOCK": 1024}, 4, 3)


def compile_low_rank() -> None:
    """Adapters of rank 16 of q, k and v."""
    common = {"numbers": "*i32", "low": "*fp32", "inputs": "i32!", "outputs": "i32!", "second": "i32!", "third": "i32!"}
    types = common | {"x": E, "a": E, "b": E, "out": E}
    compiled("lower", low_rank._lower, types, {"MANY": 48, "LOWS": 16, "INPUTS": 256}, 4, 3)
    fixed = {"SEGMENTS": 3, "RANK": 16, "RANK_UP": 16, "OUTPUTS": 64}
    compiled("raise", low_rank._raise, types, fixed, 4, 3)


if __name__ == "__main__":
    main()
