"""Judges whether compiled kernels are as fast as the processor allows, from the registers they were built for and the
measured rate of one thread. Does not measure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

#: Vector registers by name, narrowest first, with the /proc/cpuinfo flags they require.
REGISTERS: dict[str, frozenset[str]] = {
    "baseline": frozenset(),
    "neon": frozenset({"asimd"}),
    "avx2": frozenset({"avx2", "fma"}),
    "avx512": frozenset({"avx512f", "fma"}),
}
#: Minimum plausible ratio to the float32 peak, by kind of product. `portable` products reach 0.8 to 0.95. An
#: instruction on pairs does once (Intel) or twice the work of a float32 one; tiles do up to 32 times as much.
SHARE_AT_LEAST = {"portable": 0.4, "pairs": 0.6, "tiles": 2.0}


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """Kernels and their speed. Rates are of one thread, in 1e9 floating-point operations per second."""

    registers: str
    products: str
    product_gflops: float
    peak_gflops: float

    @property
    def share(self) -> float:
        """Product rate divided by the float32 peak; above 1 is possible with bfloat16 instructions."""
        return self.product_gflops / self.peak_gflops

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.products} products of bfloat16: {self.product_gflops:.0f} GFLOP/s "
            "a thread, "
            f"{self.share:.0%} of what float32 multiplications and additions alone reach ({self.peak_gflops:.0f})"
        )


def widest_registers(abilities: Set[str]) -> str:
    """The widest registers of a processor with these /proc/cpuinfo flags."""
    return [name for name, needs in REGISTERS.items() if needs <= abilities][-1]


def complaint(speed: KernelSpeed, abilities: Set[str]) -> str:
    """Why these kernels are slower than a processor with these /proc/cpuinfo flags allows; empty if not."""
    widest = widest_registers(abilities)
    built = list(REGISTERS).index(speed.registers)
    if built < list(REGISTERS).index(widest):
        return (
            f"they were built for {speed.registers} registers and this processor has {widest}: "
            "the compiler is too old to know it, or was told otherwise"
        )
    if speed.share < SHARE_AT_LEAST[speed.products]:
        return (
            f"{speed.products} products reach {speed.product_gflops:.1f} GFLOP/s a thread, {speed.share:.0%} of "
            "what this processor's "
            f"float32 instructions reach ({speed.peak_gflops:.0f}), and should reach "
            f"{SHARE_AT_LEAST[speed.products]:.0%} at least: "
            "the compiler made slow code of them, or others use the processor"
        )
    return ""
