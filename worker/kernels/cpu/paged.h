// Inputs of attention (queries, shapes, pages), and functions shared by its two implementations.
#pragma once
#include "lanes.h"

namespace upbeat {

struct Query {
    int32_t row;      // row of the first token in q; `out_row`: in the output
    int32_t count;    // number of tokens
    int32_t start;    // position of the first token
    int32_t out_row;
    const int64_t* pages;  // byte offsets of the sequence's pages, `[layers][pages_a_layer]`
    int64_t pages_a_layer;
};

struct AttentionShape {
    int heads, kv_heads, dim, chunk, window;  // window 0: none
    float scale;
};

constexpr float UNSEEN = -1e30f;  // the score of a token that a query does not see
constexpr float LOG2_E = 1.44269504088896341f;

// 2^x for x <= 0, to 4e-7; exactly 1 for 0.
inline f32x16 halving(f32x16 x) {
    x = larger(x, splat(-125.0f));
    const f32x16 shifted = x + 12582912.0f, r = x - (shifted - 12582912.0f);  // r: x minus the nearest integer, which is in the low bits of `shifted`
    f32x16 y = splat(1.3398874e-3f);
    y = y * r + 9.6184374e-3f;
    y = y * r + 5.5503324e-2f;
    y = y * r + 2.4022648e-1f;
    y = y * r + 6.9314720e-1f;
    y = y * r + 1.0f;
    return (f32x16)((i32x16)y + ((i32x16)shifted << 23));
}

}  // namespace upbeat
