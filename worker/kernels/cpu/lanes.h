// Conversion of the types of weights and KV to vectors, and functions of vectors.
#pragma once
#include "registers.h"

namespace upbeat {

// Prefetches `bytes` bytes.
inline void fetch(const void* from, long bytes) {
    for (long at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

// For each type: `Stored` is the element of weights and KV, `Active` that of activations between products. Packed weights are read one register
// `Loaded` at a time, which has STEP inputs for each lane's output, and multiplied in PARTS; part p belongs to input p.

// float32.
struct F32 {
    using Stored = float;
    using Active = float;
    using Loaded = f32r;
    static constexpr int STEP = 1, PARTS = 1;
    static constexpr bool TILES = false;
    static f32r part(Loaded w, int) { return w; }
    static f32r add(f32r sum, const Active* a, f32r w) { return sum + *a * w; }
    static f32r load_register(const Stored* p) { return *reinterpret_cast<const f32r*>(p); }
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
    using Loaded = u32r;
    static constexpr int STEP = 2, PARTS = 2;
    static constexpr bool TILES = false;
    static f32r part(Loaded both, int which) { return (f32r)(which ? both & 0xffff0000u : both << 16); }
    static f32r add(f32r sum, const Active* a, f32r w) { return sum + *a * w; }
    static f32r load_register(const Stored* p) { return (f32r)(widened(*reinterpret_cast<const u16r*>(p)) << 16); }
    static f32x16 load(const Stored* p) { return (f32x16)(load_wide(p) << 16); }
    static u32x16 upper(f32x16 x) {
        u32x16 bits = (u32x16)x;
        return bits + 0x7fff + ((bits >> 16) & 1);
    }
    static void store(Stored* p, f32x16 x) { store_halves(p, upper(x) >> 16); }
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
    using Stored = half;
    using Active = float;
    using Loaded = f16r;
    static constexpr int STEP = 1, PARTS = 1;
    static constexpr bool TILES = false;
    static f32r part(Loaded w, int) { return widened(w); }
    static f32r add(f32r sum, const Active* a, f32r w) { return sum + *a * w; }
    static f32r load_register(const Stored* p) { return widened(*reinterpret_cast<const f16r*>(p)); }
    static f32x16 load(const Stored* p) {
        return lanes_of<f32x16>([=](int at) { return load_register(p + at); });
    }
    static void store(Stored* p, f32x16 x) {
#pragma GCC unroll 4
        for (int at = 0; at < LANES; at += REGISTER_LANES) *reinterpret_cast<f16r*>(p + at) = halves(register_of(x, at));
    }
    static float one(Stored x) { return float(x); }
    static Stored of(float x) { return Stored(x); }
    static f32x16 rounded(f32x16 x) {
        return lanes_of<f32x16>([&](int at) { return widened(halves(register_of(x, at))); });
    }
};

// Stores activations and probabilities, as bfloat16 for products by pairs. Processors with these products also round (values below 1e-38 to 0).
inline void put(float* p, f32x16 x) { store(p, x); }
#if defined(__AVX512BF16__)
inline void put(uint16_t* p, f32x16 x) { *reinterpret_cast<u16r*>(p) = (u16r)_mm512_cvtneps_pbh((__m512)x); }
#else
inline void put(uint16_t* p, f32x16 x) { Bf16::store(p, x); }
#endif

// Weights or KV read in place: rows of 16 values, one input at a time.
template <typename W>
struct Plain : W {};
template <>
struct Plain<Bf16> : Bf16 {
    using Loaded = u16r;
    static constexpr int STEP = 1, PARTS = 1;
    static f32r part(Loaded x, int) { return (f32r)(widened(x) << 16); }
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
    i32x16 scale = (integers(whole) + 127) << 23;
    return choose(tiny, splat(0.0f), y * (f32x16)scale);
}

// e^x as `falling`, up to e^88.
inline f32x16 exponential(f32x16 x) { return falling(choose(x > 88.0f, splat(88.0f), x)); }

}  // namespace upbeat
