// Vectors of 16 floats, and how the types that weights and KV are kept in become such vectors. GCC's and clang's vector
// extensions: the compiler chooses the instructions of the machine it builds for (AVX-512, AVX2, NEON, ...).
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace upbeat {

constexpr int LANES = 16;
typedef float f32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2), may_alias));

inline f32x16 splat(float x) { return f32x16{} + x; }
inline f32x16 load(const float* p) { return *reinterpret_cast<const f32x16*>(p); }
inline void store(float* p, f32x16 x) { *reinterpret_cast<f32x16*>(p) = x; }
inline f32x16 choose(i32x16 where, f32x16 yes, f32x16 no) { return where ? yes : no; }
#if defined(__AVX512F__)  // which the compiler does not find by itself
inline f32x16 larger(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }
#else
inline f32x16 larger(f32x16 a, f32x16 b) { return a > b ? a : b; }
#endif

// Of each type: `Stored`, as weights and KV are kept; `Active`, as activations between products are. Packed weights are read `Loaded` at a
// time, STEP inputs of 16 outputs, and multiplied in PARTS: part p is that of input p.

// float32 as it is.
struct F32 {
    using Stored = float;
    using Active = float;
    using Loaded = f32x16;
    static constexpr int STEP = 1, PARTS = 1;
    static constexpr bool TILES = false;
    static f32x16 part(Loaded w, int) { return w; }
    static f32x16 add(f32x16 sum, const Active* a, f32x16 w) { return sum + *a * w; }
    static f32x16 load(const Stored* p) { return upbeat::load(p); }
    static void store(Stored* p, f32x16 x) { upbeat::store(p, x); }
    static float one(Stored x) { return x; }
    static Stored of(float x) { return x; }
    static f32x16 rounded(f32x16 x) { return x; }
};

// bfloat16: the upper half of a float32, rounded to nearest even.
struct Bf16 {
    using Stored = uint16_t;
    using Active = float;
    using Loaded = u32x16;
    static constexpr int STEP = 2, PARTS = 2;
    static constexpr bool TILES = false;
    static f32x16 part(Loaded both, int which) { return (f32x16)(which ? both & 0xffff0000u : both << 16); }
    static f32x16 add(f32x16 sum, const Active* a, f32x16 w) { return sum + *a * w; }
    static f32x16 load(const Stored* p) {
        u16x16 half = *reinterpret_cast<const u16x16*>(p);
        return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
    }
    static u32x16 upper(f32x16 x) {
        u32x16 bits = (u32x16)x;
        return bits + 0x7fff + ((bits >> 16) & 1);
    }
    static void store(Stored* p, f32x16 x) { *reinterpret_cast<u16x16*>(p) = __builtin_convertvector(upper(x) >> 16, u16x16); }
    static float one(Stored x) {
        uint32_t bits = uint32_t(x) << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }
    static Stored of(float x) {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        return Stored((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
    static f32x16 rounded(f32x16 x) { return (f32x16)(upper(x) & 0xffff0000u); }
};

// IEEE half precision.
struct F16 {
    using Stored = _Float16;
    typedef _Float16 f16x16 __attribute__((vector_size(32), aligned(2), may_alias));
    using Active = float;
    using Loaded = f16x16;
    static constexpr int STEP = 1, PARTS = 1;
    static constexpr bool TILES = false;
    static f32x16 part(Loaded w, int) { return __builtin_convertvector(w, f32x16); }
    static f32x16 add(f32x16 sum, const Active* a, f32x16 w) { return sum + *a * w; }
    static f32x16 load(const Stored* p) { return __builtin_convertvector(*reinterpret_cast<const f16x16*>(p), f32x16); }
    static void store(Stored* p, f32x16 x) { *reinterpret_cast<f16x16*>(p) = __builtin_convertvector(x, f16x16); }
    static float one(Stored x) { return float(x); }
    static Stored of(float x) { return Stored(x); }
    static f32x16 rounded(f32x16 x) { return __builtin_convertvector(__builtin_convertvector(x, f16x16), f32x16); }
};

// Activations and probabilities, as bfloat16 where they are multiplied by pairs: the processor that does so also rounds (what is below 1e-38 to 0).
inline void put(float* p, f32x16 x) { store(p, x); }
#if defined(__AVX512BF16__)
inline void put(uint16_t* p, f32x16 x) { *reinterpret_cast<u16x16*>(p) = (u16x16)_mm512_cvtneps_pbh((__m512)x); }
#else
inline void put(uint16_t* p, f32x16 x) { Bf16::store(p, x); }
#endif

// Rows of 16 values as they are kept, one input at a time: what is read in place.
template <typename W>
struct Plain : W {};
template <>
struct Plain<Bf16> : Bf16 {
    using Loaded = u16x16;
    static constexpr int STEP = 1, PARTS = 1;
    static f32x16 part(Loaded x, int) { return (f32x16)(__builtin_convertvector(x, u32x16) << 16); }
};

// e^x within 2 units in the last place for x in [-87, 0]; 0 below.
inline f32x16 falling(f32x16 x) {
    i32x16 tiny = x < -87.3f;
    x = larger(x, splat(-87.3f));
    f32x16 t = x * 1.44269504088896341f;
    f32x16 whole = (t + 12582912.0f) - 12582912.0f;  // to nearest integer
    f32x16 r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    f32x16 y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    i32x16 scale = (__builtin_convertvector(whole, i32x16) + 127) << 23;
    return choose(tiny, splat(0.0f), y * (f32x16)scale);
}

// e^x as `falling`, up to e^88.
inline f32x16 exponential(f32x16 x) { return falling(choose(x > 88.0f, splat(88.0f), x)); }

// The sum, or the largest, of all lanes, in every lane; always in the same order.
template <typename Join>
inline f32x16 joined(f32x16 x, const Join& join) {
    const i32x16 by8 = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}, by4 = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
    const i32x16 by2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}, by1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    x = join(x, __builtin_shuffle(x, by8));
    x = join(x, __builtin_shuffle(x, by4));
    x = join(x, __builtin_shuffle(x, by2));
    return join(x, __builtin_shuffle(x, by1));
}
inline float sum(f32x16 x) {
    return joined(x, [](f32x16 a, f32x16 b) { return a + b; })[0];
}
inline float largest(f32x16 x) {
    return joined(x, larger)[0];
}

}  // namespace upbeat
