// Matrix products of a few rows with packed weights.
//
// Weights `[out, in]` are packed in tiles of 16 outputs: `[out / 16][in][16]`. Every output is one sum over `in` in ascending
// order, in float32, whatever the number of rows and wherever a row stands among them: results of a row never depend on
// which other rows a step computes.
#pragma once
#include "lanes.h"
#include "team.h"

namespace upbeat {

#if defined(__AVX512F__)
constexpr int ROWS = 12;  // rows of one block: with two tiles, 24 of 32 registers are sums
#else
constexpr int ROWS = 4;
#endif

// sums[m][t] += rows m of `a` (stride `lda`) times tile t of `b`, over `k` steps.
template <typename W, int M, int T>
inline void block(const float* a, long lda, const typename W::Stored* const* b, int k, f32x16 (*sums)[T]) {
    f32x16 s[M][T];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) s[m][t] = sums[m][t];
    for (int i = 0; i < k; i++) {
        f32x16 w[T];
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) w[t] = W::load(b[t] + long(i) * LANES);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) s[m][t] += a[m * lda + i] * w[t];
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) sums[m][t] = s[m][t];
}

// As `block`, for `m` rows, 1 to ROWS.
template <typename W, int T>
inline void rows(int m, const float* a, long lda, const typename W::Stored* const* b, int k, f32x16 (*sums)[T]) {
    switch (m) {
        case 1: return block<W, 1, T>(a, lda, b, k, sums);
        case 2: return block<W, 2, T>(a, lda, b, k, sums);
        case 3: return block<W, 3, T>(a, lda, b, k, sums);
        case 4: return block<W, 4, T>(a, lda, b, k, sums);
#if defined(__AVX512F__)
        case 5: return block<W, 5, T>(a, lda, b, k, sums);
        case 6: return block<W, 6, T>(a, lda, b, k, sums);
        case 7: return block<W, 7, T>(a, lda, b, k, sums);
        case 8: return block<W, 8, T>(a, lda, b, k, sums);
        case 9: return block<W, 9, T>(a, lda, b, k, sums);
        case 10: return block<W, 10, T>(a, lda, b, k, sums);
        case 11: return block<W, 11, T>(a, lda, b, k, sums);
        case 12: return block<W, 12, T>(a, lda, b, k, sums);
#endif
    }
}

// T neighbouring tiles of `weights` times all rows of `a [m, k]`, to done(row, tile, sum) in order of tiles for each row.
template <typename W, int T, typename Done>
inline void some_tiles(int first, const typename W::Stored* weights, const float* a, long lda, int m, int k, const Done& done) {
    const typename W::Stored* b[T];
    for (int t = 0; t < T; t++) b[t] = weights + long(first + t) * k * LANES;
    for (int row = 0; row < m; row += ROWS) {
        int n = m - row < ROWS ? m - row : ROWS;
        f32x16 sums[ROWS][T] = {};
        rows<W, T>(n, a + row * lda, lda, b, k, sums);
        for (int r = 0; r < n; r++) done(row + r, first, sums[r], T);
    }
}

// The product of `a [m, k]` (row stride `lda`) with `tiles` packed tiles: done(row, first tile, sums, how many), an even number of tiles
// at a time, the last perhaps alone. A row or two are computed eight tiles at a time: one sum would wait for itself.
template <typename W, typename Done>
void product(Team& team, const typename W::Stored* weights, int tiles, const float* a, long lda, int m, int k, const Done& done) {
    const int wide = m <= 3 ? 8 : 2;
    team.split((tiles + wide - 1) / wide, [&](int i) {
        int first = i * wide;
        if (wide == 8 && first + 8 <= tiles) return some_tiles<W, 8>(first, weights, a, lda, m, k, done);
        const int end = first + wide < tiles ? first + wide : tiles;
        for (; first + 2 <= end; first += 2) some_tiles<W, 2>(first, weights, a, lda, m, k, done);
        if (first < end) some_tiles<W, 1>(first, weights, a, lda, m, k, done);
    });
}

// out[row * out_stride + o] = dot of row `row` of `a` with row `o` of plain `weights [outputs, k]`; `k` a multiple of 16.
template <typename W>
void plain_product(Team& team, const typename W::Stored* weights, long outputs, const float* a, long lda, int m, int k, float* out, long out_stride) {
    constexpr int GROUP = 64;
    team.split(int((outputs + GROUP - 1) / GROUP), [&](int i) {
        long end = (i + 1L) * GROUP < outputs ? (i + 1L) * GROUP : outputs;
        for (long o = long(i) * GROUP; o < end; o++) {
            const typename W::Stored* w = weights + o * k;
            for (int row = 0; row < m; row += 4) {
                int n = m - row < 4 ? m - row : 4;
                f32x16 s[4] = {};
                for (int j = 0; j < k; j += LANES) {
                    f32x16 x = W::load(w + j);
                    for (int r = 0; r < n; r++) s[r] += load(a + (row + r) * lda + j) * x;
                }
                for (int r = 0; r < n; r++) out[(row + r) * out_stride + o] = sum(s[r]);
            }
        }
    });
}

}  // namespace upbeat
