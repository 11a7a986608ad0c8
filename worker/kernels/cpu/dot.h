// bfloat16 products by the processor's own instructions: pairs of inputs at once (AVX-512 BF16), or tiles of 16 x 32 (AMX). The packed
// weights are those of the portable kernel; activations are kept as bfloat16, which they are rounded to anyway.
//
// The order of an output's sum is the instruction's: as fixed as the portable one, and another, so machines that compute differently may
// answer differently in the last bit. With UPBEAT_EMULATE both are computed in plain C++, for tests on processors without them.
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

// Weights and activations in pairs, each added to a float32 sum by one instruction.
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

// As above, in tiles: `tile_rows` instead of vectors.
struct Bf16Tiles : Bf16Pairs {
    static constexpr bool TILES = true;
};

}  // namespace upbeat
