// The processor's vector registers, and vectors of 16 lanes made of them: one register of AVX-512, two of AVX2, four of NEON (and of x86-64
// without AVX). Uses GCC's vector extensions; the compiler chooses the instructions.
//
// The compiler would keep a vector type wider than a register in memory, so 16 lanes are a struct of registers, which it takes apart.
// Operations are lane by lane, and lanes are summed in one order for all registers.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define UPBEAT_INLINE __attribute__((always_inline)) inline

namespace upbeat {

#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16, REGISTERS = 32;
constexpr const char* REGISTERS_NAME = "avx512";
#elif defined(__AVX2__)
constexpr int REGISTER_LANES = 8, REGISTERS = 16;
constexpr const char* REGISTERS_NAME = "avx2";
#elif defined(__aarch64__)
constexpr int REGISTER_LANES = 4, REGISTERS = 32;
constexpr const char* REGISTERS_NAME = "neon";
#else
constexpr int REGISTER_LANES = 4, REGISTERS = 16;
constexpr const char* REGISTERS_NAME = "baseline";
#endif
constexpr int LANES = 16;
constexpr int SPAN = LANES / REGISTER_LANES;  // registers of 16 lanes

#if defined(__aarch64__)
typedef __fp16 half;  // _Float16 needs GCC 13
#else
typedef _Float16 half;
#endif

// One register of lanes, and the types its lanes are converted from and to. Memory needs no alignment.
#define UPBEAT_REGISTER(type, bytes) type __attribute__((vector_size(bytes), aligned(sizeof(type) < 4 ? 2 : 4), may_alias))
typedef UPBEAT_REGISTER(float, 4 * REGISTER_LANES) f32r;
typedef UPBEAT_REGISTER(int32_t, 4 * REGISTER_LANES) i32r;
typedef UPBEAT_REGISTER(uint32_t, 4 * REGISTER_LANES) u32r;
typedef UPBEAT_REGISTER(uint16_t, 2 * REGISTER_LANES) u16r;
typedef UPBEAT_REGISTER(half, 2 * REGISTER_LANES) f16r;

UPBEAT_INLINE f32r larger(f32r a, f32r b) {
#if defined(__AVX512F__)  // the compiler does not use these by itself
    return (f32r)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (f32r)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
UPBEAT_INLINE f32r choose(i32r where, f32r yes, f32r no) { return where ? yes : no; }
UPBEAT_INLINE i32r integers(f32r x) { return __builtin_convertvector(x, i32r); }
UPBEAT_INLINE u32r widened(u16r x) { return __builtin_convertvector(x, u32r); }
UPBEAT_INLINE u16r lower_halves(u32r x) { return __builtin_convertvector(x, u16r); }
// The compiler would convert lane by lane.
#if defined(__AVX512F__)
UPBEAT_INLINE f32r widened(f16r x) { return (f32r)_mm512_cvtph_ps((__m256i)x); }
UPBEAT_INLINE f16r halves(f32r x) { return (f16r)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#elif defined(__AVX2__) && defined(__F16C__)
UPBEAT_INLINE f32r widened(f16r x) { return (f32r)_mm256_cvtph_ps((__m128i)x); }
UPBEAT_INLINE f16r halves(f32r x) { return (f16r)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
UPBEAT_INLINE f32r widened(f16r x) { return __builtin_convertvector(x, f32r); }
UPBEAT_INLINE f16r halves(f32r x) { return __builtin_convertvector(x, f16r); }
#endif

#if defined(__AVX512F__)

typedef f32r f32x16;
typedef i32r i32x16;
typedef u32r u32x16;

// 16 lanes: `of(0)`, `of(REGISTER_LANES)`, ... are their registers.
template <typename Lanes, typename Of>
UPBEAT_INLINE Lanes lanes_of(const Of& of) {
    return of(0);
}
UPBEAT_INLINE f32r register_of(f32x16 x, int) { return x; }
UPBEAT_INLINE u32r register_of(u32x16 x, int) { return x; }

#else

// Several registers as 16 lanes. `Other`: the type of comparisons.
struct f32x16;
struct i32x16;
struct u32x16;

#define UPBEAT_EACH(Lanes, call) lanes_of<Lanes>([&](int at) __attribute__((always_inline)) { const int i = at / REGISTER_LANES; return call; })
#define UPBEAT_LANES(Lanes, Register, Scalar)                                                  \
    struct Lanes {                                                                             \
        Register in[SPAN];                                                                     \
        template <typename Other>                                                              \
        UPBEAT_INLINE explicit operator Other() const;                                         \
        UPBEAT_INLINE Scalar operator[](int lane) const { return in[lane / REGISTER_LANES][lane % REGISTER_LANES]; } \
    };
UPBEAT_LANES(f32x16, f32r, float)
UPBEAT_LANES(i32x16, i32r, int32_t)
UPBEAT_LANES(u32x16, u32r, uint32_t)
#undef UPBEAT_LANES

// 16 lanes: `of(0)`, `of(REGISTER_LANES)`, ... are their registers.
template <typename Lanes, typename Of, size_t... I>
UPBEAT_INLINE Lanes lanes_of(const Of& of, std::index_sequence<I...>) {
    return {{of(int(I) * REGISTER_LANES)...}};
}
template <typename Lanes, typename Of>
UPBEAT_INLINE Lanes lanes_of(const Of& of) {
    return lanes_of<Lanes>(of, std::make_index_sequence<SPAN>());
}
UPBEAT_INLINE f32r register_of(const f32x16& x, int at) { return x.in[at / REGISTER_LANES]; }
UPBEAT_INLINE u32r register_of(const u32x16& x, int at) { return x.in[at / REGISTER_LANES]; }

#define UPBEAT_CAST(From, To, Register) \
    template <>                         \
    UPBEAT_INLINE From::operator To() const { return UPBEAT_EACH(To, (Register)in[i]); }
UPBEAT_CAST(f32x16, u32x16, u32r)
UPBEAT_CAST(f32x16, i32x16, i32r)
UPBEAT_CAST(u32x16, f32x16, f32r)
UPBEAT_CAST(i32x16, f32x16, f32r)
#undef UPBEAT_CAST

#define UPBEAT_OPERATOR(Lanes, Scalar, Result, op)                                                                  \
    UPBEAT_INLINE Result operator op(Lanes a, Lanes b) { return UPBEAT_EACH(Result, a.in[i] op b.in[i]); }          \
    UPBEAT_INLINE Result operator op(Lanes a, Scalar b) { return UPBEAT_EACH(Result, a.in[i] op b); }               \
    UPBEAT_INLINE Result operator op(Scalar a, Lanes b) { return UPBEAT_EACH(Result, a op b.in[i]); }
UPBEAT_OPERATOR(f32x16, float, f32x16, +)
UPBEAT_OPERATOR(f32x16, float, f32x16, -)
UPBEAT_OPERATOR(f32x16, float, f32x16, *)
UPBEAT_OPERATOR(f32x16, float, f32x16, /)
UPBEAT_OPERATOR(f32x16, float, i32x16, <)
UPBEAT_OPERATOR(f32x16, float, i32x16, >)
UPBEAT_OPERATOR(i32x16, int32_t, i32x16, +)
UPBEAT_OPERATOR(i32x16, int32_t, i32x16, &)
UPBEAT_OPERATOR(i32x16, int32_t, i32x16, <=)
UPBEAT_OPERATOR(i32x16, int32_t, i32x16, >=)
UPBEAT_OPERATOR(i32x16, int32_t, i32x16, <<)
UPBEAT_OPERATOR(u32x16, uint32_t, u32x16, +)
UPBEAT_OPERATOR(u32x16, uint32_t, u32x16, &)
UPBEAT_OPERATOR(u32x16, uint32_t, u32x16, |)
UPBEAT_OPERATOR(u32x16, uint32_t, u32x16, <<)
UPBEAT_OPERATOR(u32x16, uint32_t, u32x16, >>)
#undef UPBEAT_OPERATOR
UPBEAT_INLINE f32x16 operator-(f32x16 x) { return UPBEAT_EACH(f32x16, -x.in[i]); }
UPBEAT_INLINE f32x16& operator+=(f32x16& a, f32x16 b) { return a = a + b; }
UPBEAT_INLINE f32x16& operator*=(f32x16& a, f32x16 b) { return a = a * b; }

UPBEAT_INLINE f32x16 larger(f32x16 a, f32x16 b) { return UPBEAT_EACH(f32x16, larger(a.in[i], b.in[i])); }
UPBEAT_INLINE f32x16 choose(i32x16 where, f32x16 yes, f32x16 no) { return UPBEAT_EACH(f32x16, choose(where.in[i], yes.in[i], no.in[i])); }
UPBEAT_INLINE i32x16 integers(f32x16 x) { return UPBEAT_EACH(i32x16, integers(x.in[i])); }
#undef UPBEAT_EACH

#endif

// Load and store 16 values.
UPBEAT_INLINE f32x16 splat(float x) {
    return lanes_of<f32x16>([=](int) { return f32r{} + x; });
}
UPBEAT_INLINE f32x16 load(const float* p) {
    return lanes_of<f32x16>([=](int at) { return *reinterpret_cast<const f32r*>(p + at); });
}
UPBEAT_INLINE i32x16 load(const int32_t* p) {
    return lanes_of<i32x16>([=](int at) { return *reinterpret_cast<const i32r*>(p + at); });
}
UPBEAT_INLINE u32x16 load_wide(const uint16_t* p) {
    return lanes_of<u32x16>([=](int at) { return widened(*reinterpret_cast<const u16r*>(p + at)); });
}
UPBEAT_INLINE void store(float* p, f32x16 x) {
#pragma GCC unroll 4
    for (int at = 0; at < LANES; at += REGISTER_LANES) *reinterpret_cast<f32r*>(p + at) = register_of(x, at);
}
UPBEAT_INLINE void store(uint32_t* p, u32x16 x) {
#pragma GCC unroll 4
    for (int at = 0; at < LANES; at += REGISTER_LANES) *reinterpret_cast<u32r*>(p + at) = register_of(x, at);
}
// The lower half of each lane.
UPBEAT_INLINE void store_halves(uint16_t* p, u32x16 x) {
#pragma GCC unroll 4
    for (int at = 0; at < LANES; at += REGISTER_LANES) *reinterpret_cast<u16r*>(p + at) = lower_halves(register_of(x, at));
}
// 0, 1, 2, ...
UPBEAT_INLINE i32x16 counting() {
    static constexpr int32_t COUNT[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(COUNT);
}

// Reduction over all lanes, always in the same order: lanes 8 apart, then 4, 2 and 1.
template <typename Join>
UPBEAT_INLINE float joined(f32x16 x, const Join& join) {
#if defined(__AVX512F__)
    const i32r by8 = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}, by4 = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
    const i32r by2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}, by1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    x = join(x, __builtin_shuffle(x, by8));
    x = join(x, __builtin_shuffle(x, by4));
    x = join(x, __builtin_shuffle(x, by2));
    return join(x, __builtin_shuffle(x, by1))[0];
#elif defined(__AVX2__)
    const i32r by4 = {4, 5, 6, 7, 0, 1, 2, 3}, by2 = {2, 3, 0, 1, 6, 7, 4, 5}, by1 = {1, 0, 3, 2, 5, 4, 7, 6};
    f32r y = join(x.in[0], x.in[1]);
    y = join(y, __builtin_shuffle(y, by4));
    y = join(y, __builtin_shuffle(y, by2));
    return join(y, __builtin_shuffle(y, by1))[0];
#else
    const i32r by2 = {2, 3, 0, 1}, by1 = {1, 0, 3, 2};
    f32r y = join(join(x.in[0], x.in[2]), join(x.in[1], x.in[3]));
    y = join(y, __builtin_shuffle(y, by2));
    return join(y, __builtin_shuffle(y, by1))[0];
#endif
}
inline float sum(f32x16 x) {
    return joined(x, [](f32r a, f32r b) { return a + b; });
}
inline float largest(f32x16 x) {
    return joined(x, [](f32r a, f32r b) { return larger(a, b); });
}

// Writes transposed rows to `[16][16]`; `of(row, at)` is the register of a row from column `at` on.
template <typename Of>
UPBEAT_INLINE void transposed(const Of& of, float* to) {
    constexpr int R = REGISTER_LANES;
#if defined(__AVX512F__)
    const i32r low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}, high = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
    const i32r low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, high2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
#elif defined(__AVX2__)
    const i32r low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15}, low2 = {0, 1, 8, 9, 4, 5, 12, 13}, high2 = {2, 3, 10, 11, 6, 7, 14, 15};
#else
    const i32r low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, low2 = {0, 1, 4, 5}, high2 = {2, 3, 6, 7};
#endif
#pragma GCC unroll 4
    for (int row = 0; row < LANES; row += R)
#pragma GCC unroll 4
        for (int column = 0; column < LANES; column += R) {
            f32r a[R], b[R];
#pragma GCC unroll 16
            for (int i = 0; i < R; i++) a[i] = of(row + i, column);
#pragma GCC unroll 8
            for (int i = 0; i < R; i += 2) {
                b[i] = __builtin_shuffle(a[i], a[i + 1], low);
                b[i + 1] = __builtin_shuffle(a[i], a[i + 1], high);
            }
#pragma GCC unroll 4
            for (int i = 0; i < R; i += 4) {
                a[i] = __builtin_shuffle(b[i], b[i + 2], low2);
                a[i + 1] = __builtin_shuffle(b[i], b[i + 2], high2);
                a[i + 2] = __builtin_shuffle(b[i + 1], b[i + 3], low2);
                a[i + 3] = __builtin_shuffle(b[i + 1], b[i + 3], high2);
            }
            // Now a[4g + j] holds, in its quarters of four lanes, columns j, 4 + j, ... of rows 4g..4g+3.
            const auto put = [&](int j, f32r x) { *reinterpret_cast<f32r*>(to + (column + j) * LANES + row) = x; };
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
#if defined(__AVX512F__)
                const i32r quarters02 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}, quarters13 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
                const i32r lower = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, upper = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
                const f32r even01 = __builtin_shuffle(a[j], a[4 + j], quarters02), odd01 = __builtin_shuffle(a[j], a[4 + j], quarters13);
                const f32r even23 = __builtin_shuffle(a[8 + j], a[12 + j], quarters02), odd23 = __builtin_shuffle(a[8 + j], a[12 + j], quarters13);
                put(j, __builtin_shuffle(even01, even23, lower));
                put(8 + j, __builtin_shuffle(even01, even23, upper));
                put(4 + j, __builtin_shuffle(odd01, odd23, lower));
                put(12 + j, __builtin_shuffle(odd01, odd23, upper));
#elif defined(__AVX2__)
                const i32r lower = {0, 1, 2, 3, 8, 9, 10, 11}, upper = {4, 5, 6, 7, 12, 13, 14, 15};
                put(j, __builtin_shuffle(a[j], a[4 + j], lower));
                put(4 + j, __builtin_shuffle(a[j], a[4 + j], upper));
#else
                put(j, a[j]);
#endif
            }
        }
}

}  // namespace upbeat
