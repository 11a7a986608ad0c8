// Matrix products with weights of few bits, which become float32 when they are used.
//
// A weight is (code - zero) * scale, for float8 codes code * scale; the inputs of an output are in groups that share zero and scale. Codes, zeros
// and scales are packed in tiles of 16 outputs: `[out / 16][in][16]`, two inputs of an output in a byte of 4-bit codes; `[out / 16][groups][16]`.
// As in product.h, an output is one float32 sum over `in` in a fixed order, for any number of rows.
#pragma once
#include "product.h"

namespace upbeat {

// One matrix; codes null: it has none. Zeros null: float8. group_of `[in]`: the group of each input, null: in order, `group` inputs in each.
struct Coded {
    const uint8_t* codes;
    const void* scales;
    const uint8_t* zeros;
    const int32_t* group_of;
    int32_t group, groups;
    int32_t code;   // 0: 4 bits, 1: 8 bits, 2: float8 e4m3
    int32_t scale;  // 0: float32, 1: bfloat16, 2: float16
};

// The bytes of one register's lanes.
typedef uint8_t bytes_r __attribute__((vector_size(REGISTER_LANES), aligned(1), may_alias));
UPBEAT_INLINE u32r widened_bytes(const uint8_t* p) {
#if defined(__AVX512F__)  // the compiler would convert lane by lane
    return (u32r)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (u32r)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    return __builtin_convertvector(*reinterpret_cast<const bytes_r*>(p), u32r);
#endif
}

// For each kind of codes: `load` gets the bytes of a register's lanes, `number` makes float32 of the code of input `which` of INPUTS in a byte.
// An integer c below 2^23 is the float with its bits in 2^23's mantissa, less 2^23; `zero` has that 2^23 in it.
constexpr uint32_t WHOLE_BITS = 0x4b000000u;
constexpr float WHOLE = 8388608.0f;

struct Int4 {
    using Loaded = u32r;
    static constexpr int INPUTS = 2;
    static constexpr bool ZEROS = true;
    static constexpr float FACTOR = 1.0f;
    static UPBEAT_INLINE Loaded load(const uint8_t* p) { return widened_bytes(p); }
    static UPBEAT_INLINE f32r number(Loaded x, int which, f32r zero) { return (f32r)((which ? x >> 4 : x & 15) | WHOLE_BITS) - zero; }
};

struct Int8 {
    using Loaded = u32r;
    static constexpr int INPUTS = 1;
    static constexpr bool ZEROS = true;
    static constexpr float FACTOR = 1.0f;
    static UPBEAT_INLINE Loaded load(const uint8_t* p) { return widened_bytes(p); }
    static UPBEAT_INLINE f32r number(Loaded x, int, f32r zero) { return (f32r)(x | WHOLE_BITS) - zero; }
};

// A float8 with its bits in a float16 is the same number divided by 2^8, small ones included; `scale` has that factor in it.
struct Float8 {
    using Loaded = f16r;
    static constexpr int INPUTS = 1;
    static constexpr bool ZEROS = false;
    static constexpr float FACTOR = 256.0f;
    static UPBEAT_INLINE Loaded load(const uint8_t* p) {
#if defined(__AVX512F__)  // extended by its sign, which is then in bits 14 and 15
        const u16r x = (u16r)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return (f16r)(x << 7 & 0xbf80);
#elif defined(__AVX2__)
        const u16r x = (u16r)_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        return (f16r)(x << 7 & 0xbf80);
#else
        const u32r x = widened_bytes(p);
        return (f16r)lower_halves((x & 0x80u) << 8 | (x & 0x7fu) << 7);
#endif
    }
    static UPBEAT_INLINE f32r number(Loaded x, int, f32r) { return widened(x); }
};

// Zeros and scales of group `g` of the outputs of the tiles from `first` on, in N registers.
template <typename Code, int N>
UPBEAT_INLINE void read_group(const Coded& c, int first, long g, f32r* zero, f32r* scale) {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
        const long at = ((first + n / SPAN) * long(c.groups) + g) * LANES + n % SPAN * REGISTER_LANES;
        scale[n] = c.scale == 0   ? F32::load_register(static_cast<const float*>(c.scales) + at)
                   : c.scale == 1 ? Bf16::load_register(static_cast<const uint16_t*>(c.scales) + at)
                                  : F16::load_register(static_cast<const half*>(c.scales) + at);
        scale[n] *= Code::FACTOR;
        if (Code::ZEROS) zero[n] = (f32r)(widened_bytes(c.zeros + at) | WHOLE_BITS);
    }
}

// Calls use(i, weights) for inputs [from, to) with the weights of T tiles from `first` on, in T * SPAN registers. `from` is even.
template <typename Code, bool SCATTERED, int T, typename Use>
UPBEAT_INLINE void each_input(const Coded& c, int first, int from, int to, int k, const Use& use) {
    constexpr int N = T * SPAN;
    f32r zero[N] = {}, scale[N] = {};
    const uint8_t* tiles[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) tiles[t] = c.codes + (first + t) * (long(k) / Code::INPUTS) * LANES;
    for (int i = from; i < to;) {
        int end = to;
        if (!SCATTERED) {
            const int g = i / c.group;
            if ((g + 1L) * c.group < to) end = (g + 1) * c.group;
            read_group<Code, N>(c, first, g, zero, scale);
        }
        for (; i < end; i += Code::INPUTS) {
            typename Code::Loaded x[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) x[n] = Code::load(tiles[n / SPAN] + long(i / Code::INPUTS) * LANES + n % SPAN * REGISTER_LANES);
#pragma GCC unroll 2
            for (int which = 0; which < Code::INPUTS; which++) {
                if (SCATTERED) read_group<Code, N>(c, first, c.group_of[i + which], zero, scale);
                f32r w[N];
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) w[n] = Code::number(x[n], which, zero[n]) * scale[n];
                use(i + which, w);
            }
        }
    }
}

constexpr int FEW_CODED = 3;  // rows that are multiplied while weights are made; more share a panel of weights

template <typename Code, bool SCATTERED, int M, int T>
void few_coded(const Coded& c, int first, const float* a, long lda, int k, float* to) {
    constexpr int N = T * SPAN;
    f32r s[M][N] = {};
    each_input<Code, SCATTERED, T>(c, first, 0, k, k, [&](int i, const f32r* w) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) s[m][n] = s[m][n] + a[m * lda + i] * w[n];
    });
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) *reinterpret_cast<f32r*>(to + m * T * LANES + n * REGISTER_LANES) = s[m][n];
}

// to[m][t * 16]: `m` rows of `a`, MANY_AT_ONCE at most, times T tiles from `first` on.
template <typename Code, bool SCATTERED, int T>
void coded_sums(const Coded& c, int first, const float* a, long lda, int m, int k, float* to) {
    static_assert(FEW_CODED == 3, "each has its case");
    if (m == 1) return few_coded<Code, SCATTERED, 1, T>(c, first, a, lda, k, to);
    if (m == 2) return few_coded<Code, SCATTERED, 2, T>(c, first, a, lda, k, to);
    if (m == 3) return few_coded<Code, SCATTERED, 3, T>(c, first, a, lda, k, to);
    alignas(64) float panel[T][DEPTH * LANES];
    memset(to, 0, sizeof(float) * m * T * LANES);
    for (int i = 0; i < k; i += DEPTH) {
        const int depth = k - i < DEPTH ? k - i : DEPTH;
        each_input<Code, SCATTERED, T>(c, first, i, i + depth, k, [&](int at, const f32r* w) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int n = 0; n < T * SPAN; n++)
                *reinterpret_cast<f32r*>(panel[n / SPAN] + (at - i) * LANES + n % SPAN * REGISTER_LANES) = w[n];
        });
        const int blocks = (m + ROWS - 1) / ROWS;
        for (int block = 0, row = 0; block < blocks; block++) {
            const int n = (m - row) / (blocks - block);
            for (int t = 0; t < T; t++) {
                const float* b = panel[t];
                rows<F32, 1, true>(n, a + row * lda + i, lda, &b, LANES, depth, to + (row * T + t) * LANES, T * LANES);
            }
            row += n;
        }
    }
}

using CodedSums = void (*)(const Coded&, int, const float*, long, int, int, float*);

template <int T>
CodedSums coded_sums_of(const Coded& c) {
    const bool scattered = c.group_of != nullptr;
    if (c.code == 0) return scattered ? coded_sums<Int4, true, T> : coded_sums<Int4, false, T>;
    if (c.code == 1) return scattered ? coded_sums<Int8, true, T> : coded_sums<Int8, false, T>;
    return scattered ? coded_sums<Float8, true, T> : coded_sums<Float8, false, T>;
}

// Like `product`, with a coded matrix.
template <typename Done>
void coded_product(Team& team, const Coded& c, int tiles, const float* a, long lda, int m, int k, const Done& done) {
    if (m == 0) return;
    const Cut<F32> cut(m, k, tiles);
    const CodedSums one = coded_sums_of<1>(c), two = coded_sums_of<2>(c);
    team.split(cut.tasks(), [&](int i) {
        int first = i / cut.cuts * cut.wide;
        const int end = first + cut.wide < tiles ? first + cut.wide : tiles;
        const int from = i % cut.cuts * cut.share, to = from + cut.share < m ? from + cut.share : m;
        f32x16 sums[MANY_AT_ONCE * 2];
        for (int n; first < end; first += n) {
            n = first + 2 <= end ? 2 : 1;
            for (int row = from; row < to; row += MANY_AT_ONCE) {
                const int some = to - row < MANY_AT_ONCE ? to - row : MANY_AT_ONCE;
                (n == 2 ? two : one)(c, first, a + row * lda, lda, some, k, reinterpret_cast<float*>(sums));
                for (int r = 0; r < some; r++) done(row + r, first, sums + r * n, n);
            }
        }
    });
}

}  // namespace upbeat
