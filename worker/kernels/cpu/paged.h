// What attention is asked and reads: queries, shapes, pages; and what both ways of it use.
#pragma once
#include "lanes.h"

namespace upbeat {

struct Query {
    int32_t row;      // of the first token in q and, with `out_row`, in the output
    int32_t count;    // tokens
    int32_t start;    // position of the first
    int32_t out_row;
    const int64_t* pages;  // byte offsets of the sequence's pages, `[layers][pages_a_layer]`
    int64_t pages_a_layer;
};

// Have so many bytes brought near.
inline void fetch(const void* from, long bytes) {
    for (long at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

struct AttentionShape {
    int heads, kv_heads, dim, chunk, window;  // window 0: none
    float scale;
};

constexpr float UNSEEN = -1e30f;  // the score of a token that a query does not see
constexpr float LOG2_E = 1.44269504088896341f;

// 2^x for x <= 0, to 4e-7; exactly 1 for 0.
inline f32x16 halving(f32x16 x) {
    x = larger(x, splat(-125.0f));
    const f32x16 shifted = x + 12582912.0f, r = x - (shifted - 12582912.0f);  // from the nearest integer, which `shifted` has in its low bits
    f32x16 y = splat(1.3398874e-3f);
    y = y * r + 9.6184374e-3f;
    y = y * r + 5.5503324e-2f;
    y = y * r + 2.4022648e-1f;
    y = y * r + 6.9314720e-1f;
    y = y * r + 1.0f;
    return (f32x16)((i32x16)y + ((i32x16)shifted << 23));
}

// `[16][16]`, transposed.
__attribute__((always_inline)) inline void transposed(const f32x16* from, float* to) {
    f32x16 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = from[i];
    const i32x16 low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}, high = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
    const i32x16 low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, high2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = __builtin_shuffle(a[i], a[i + 1], low);
        b[i + 1] = __builtin_shuffle(a[i], a[i + 1], high);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = __builtin_shuffle(b[i], b[i + 2], low2);
        a[i + 1] = __builtin_shuffle(b[i], b[i + 2], high2);
        a[i + 2] = __builtin_shuffle(b[i + 1], b[i + 3], low2);
        a[i + 3] = __builtin_shuffle(b[i + 1], b[i + 3], high2);
    }
    // Now a[4g + j] holds, in its four quarters, columns j, 4 + j, 8 + j, 12 + j of rows 4g..4g+3.
    const i32x16 quarters02 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}, quarters13 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
    const i32x16 lower = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, upper = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        f32x16 even01 = __builtin_shuffle(a[j], a[4 + j], quarters02), odd01 = __builtin_shuffle(a[j], a[4 + j], quarters13);
        f32x16 even23 = __builtin_shuffle(a[8 + j], a[12 + j], quarters02), odd23 = __builtin_shuffle(a[8 + j], a[12 + j], quarters13);
        store(to + (j)*LANES, __builtin_shuffle(even01, even23, lower));
        store(to + (8 + j) * LANES, __builtin_shuffle(even01, even23, upper));
        store(to + (4 + j) * LANES, __builtin_shuffle(odd01, odd23, lower));
        store(to + (12 + j) * LANES, __builtin_shuffle(odd01, odd23, upper));
    }
}

}  // namespace upbeat
