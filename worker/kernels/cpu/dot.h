// bfloat16 products by processor instructions: pairs of inputs (AVX-512 BF16), or tiles of 16 x 32 (AMX). Weights are packed as for the
// portable kernel; activations are stored as bfloat16, to which they are rounded anyway.
//
// The instruction fixes the order of an output's sum, which differs from the portable order. So machines with different instructions may
// differ in the last bit. UPBEAT_EMULATE computes both in plain C++, for tests on processors without them.
#pragma once
#include "lanes.h"

#if defined(UPBEAT_EMULATE) || defined(__AVX512BF16__)
#define UPBEAT_PAIRS 1
#endif
#if defined(UPBEAT_EMULATE) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__))
#define UPBEAT_TILES 1
#endif
#if (defined(UPBEAT_PAIRS) || defined(UPBEAT_TILES)) && !defined(UPBEAT_EMULATE)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace upbeat {

// Multiplies pairs of weights and activations and adds them to a float32 sum, with one instruction.
struct Bf16Pairs : Bf16 {
    using Active = uint16_t;
    using Loaded = u32r;
    static constexpr int PARTS = 1;
    static constexpr bool TILES = false;
    static Loaded part(Loaded both, int) { return both; }
    static f32r add(f32r sum, const Active* a, Loaded w) {
        uint32_t pair;
        memcpy(&pair, a, sizeof(pair));
#if defined(UPBEAT_PAIRS) && !defined(UPBEAT_EMULATE)
        return (f32r)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(pair)), (__m512bh)w);
#else
        const u32r x = u32r{} + pair;
        sum += (f32r)(x & 0xffff0000u) * (f32r)(w & 0xffff0000u);
        return sum + (f32r)(x << 16) * (f32r)(w << 16);
#endif
    }
};

// The same with tiles: `tile_rows` instead of vectors.
struct Bf16Tiles : Bf16Pairs {
    static constexpr bool TILES = true;
};

}  // namespace upbeat
