"""When compiled kernels are said to be far from what their processor should reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from worker.core.kernel_speed import SHARE_AT_LEAST, KernelSpeed, complaint, widest_registers
from worker.kernels.cpu_kernels import PRODUCTS

ZEN3 = frozenset({"sse2", "avx", "avx2", "fma", "f16c"})
ZEN5 = ZEN3 | {"avx512f", "avx512_bf16"}
GRAVITON = frozenset({"fp", "asimd", "asimdhp"})
WELL = KernelSpeed("avx2", "portable", product_gflops=118, peak_gflops=138)


@pytest.mark.parametrize(
    ("abilities", "widest"),
    [
        (ZEN3, "avx2"),
        (ZEN5, "avx512"),
        (GRAVITON, "neon"),
        ({"sse2", "avx"}, "baseline"),
        ({"avx2"}, "baseline"),
        (set(), "baseline"),
    ],
)
def test_a_processors_widest_registers_are_those_that_all_it_needs_is_there_for(
    abilities: set[str], widest: str
) -> None:
    assert widest_registers(frozenset(abilities)) == widest


def test_kernels_near_the_peak_of_the_right_registers_are_not_complained_of() -> None:
    assert complaint(WELL, ZEN3) == ""
    assert (
        complaint(replace(WELL, registers="avx512", products="pairs", product_gflops=520, peak_gflops=274), ZEN5) == ""
    )
    assert complaint(replace(WELL, registers="neon"), GRAVITON) == ""


def test_kernels_for_narrower_registers_than_the_processor_has_are_named() -> None:
    assert "built for avx2 registers and this processor has avx512" in complaint(WELL, ZEN5)
    assert "built for baseline registers and this processor has avx2" in complaint(
        replace(WELL, registers="baseline"), ZEN3
    )


def test_kernels_wider_than_what_the_system_says_it_has_are_no_reason_to_complain() -> None:
    assert complaint(WELL, frozenset()) == "", "where /proc/cpuinfo says nothing"


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize(("beyond", "complains"), [(-0.3, True), (-0.01, True), (0.01, False)])
def test_products_far_below_what_they_should_reach_are_complained_of(
    products: str, beyond: float, complains: bool
) -> None:
    share = SHARE_AT_LEAST[products] + beyond
    found = complaint(replace(WELL, products=products, product_gflops=share * 138), ZEN3)
    assert ("138" in found and f"{share:.0%}" in found) == complains


def test_what_the_doctor_prints_has_registers_products_and_both_rates() -> None:
    said = "avx2 registers, portable products of bfloat16: 118 GFLOP/s a thread, 86% of what"
    assert str(WELL) == f"{said} float32 multiplications and additions alone reach (138)"
