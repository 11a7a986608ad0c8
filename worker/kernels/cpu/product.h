// Matrix products of a few rows with packed weights.
//
// Weights `[out, in]` are packed in tiles of 16 outputs: `[out / 16][in][16]`, of bfloat16 with two neighbouring inputs of an output
// side by side: `[out / 16][in / 2][16][2]`. Every output is one sum over `in` in a fixed order, in float32, whatever the number of
// rows and wherever a row stands among them: results of a row never depend on which other rows a step computes.
#pragma once
#include "team.h"
#include "tiles.h"

namespace upbeat {

#if defined(__AVX512F__)
constexpr int ROWS = 12;  // rows of one block: with two tiles, 24 of 32 registers are sums
#else
constexpr int ROWS = 4;
#endif
constexpr long CACHED_BYTES = 1 << 19;  // of activations that one task goes over, so that they stay near

// Of the tiles that come next, `by` values behind those at hand (0: none are known), every so many loads from `first` on: neighbouring
// blocks of rows share the fetching, so that memory is never idle while they compute. A pair of tiles can be more than the nearest cache
// holds, so they are fetched to the second one, and from there NEAR loads before they are multiplied.
struct Ahead {
    long by = 0;
    int first = 0, every = 1;
};
constexpr int NEAR = 24;

// to[m][t * 16] = (or, ADD, +=) rows m of `a` (stride `lda`) times `b[t]`, over `k` inputs; from one load of W::STEP inputs to the next it is
// `stride`. What of the next tiles `ahead` names is fetched meanwhile.
template <typename W, int M, int T, bool ADD>
inline void block(const typename W::Active* a, long lda, const typename W::Stored* const* b, long stride, int k, float* to, long ld, Ahead ahead) {
    f32x16 s[M][T];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) s[m][t] = ADD ? load(to + m * ld + t * LANES) : splat(0);
    int next = ahead.by ? ahead.first * W::STEP : k;
    for (int i = 0; i < k; i += W::STEP) {
        typename W::Loaded w[T];
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) w[t] = *reinterpret_cast<const typename W::Loaded*>(b[t] + i / W::STEP * stride);
        if (ahead.by)
            for (int t = 0; t < T; t++) __builtin_prefetch(b[t] + (i / W::STEP + NEAR) * stride);
        if (i == next) {
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) __builtin_prefetch(b[t] + i / W::STEP * stride + ahead.by, 0, 2);
            next += ahead.every * W::STEP;
        }
#pragma GCC unroll 2
        for (int part = 0; part < W::PARTS; part++) {
            decltype(W::part(w[0], 0)) x[T];
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) x[t] = W::part(w[t], part);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++)
#pragma GCC unroll 16
                for (int t = 0; t < T; t++) s[m][t] = W::add(s[m][t], a + m * lda + i + part, x[t]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) store(to + m * ld + t * LANES, s[m][t]);
}

// As `block`, for `m` rows, 1 to ROWS.
template <typename W, int T, bool ADD = false>
inline void rows(int m, const typename W::Active* a, long lda, const typename W::Stored* const* b, long stride, int k, float* to, long ld,
                 Ahead ahead = {}) {
    switch (m) {
        case 1: return block<W, 1, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
        case 2: return block<W, 2, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
        case 3: return block<W, 3, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
        case 4: return block<W, 4, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
#if defined(__AVX512F__)
        case 5: return block<W, 5, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
        case 6: return block<W, 6, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
        case 7: return block<W, 7, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
        case 8: return block<W, 8, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
        case 9: return block<W, 9, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
        case 10: return block<W, 10, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
        case 11: return block<W, 11, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
        case 12: return block<W, 12, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
#endif
    }
}

// T neighbouring tiles of `weights` times rows [from, to) of `a`, to done(row, tile, sums, T).
template <typename W, int T, typename Done>
inline void some_tiles(int first, const typename W::Stored* weights, const typename W::Active* a, long lda, int from, int to, int k, bool ahead,
                       const Done& done) {
    const typename W::Stored* b[T];
    for (int t = 0; t < T; t++) b[t] = weights + long(first + t) * k * LANES;
    if constexpr (W::TILES) {
        constexpr int MOST = T == 4 ? 16 : 32;
        f32x16 sums[MOST][T];
        for (int row = from; row < to; row += MOST) {
            const int n = to - row < MOST ? to - row : MOST;
            tile_rows<T>(n, a + row * lda, lda, b, k, sums);
            for (int r = 0; r < n; r++) done(row + r, first, sums[r], T);
        }
    } else {
        const int blocks = (to - from + ROWS - 1) / ROWS, even = (to - from + blocks - 1) / blocks;
        for (int row = from; row < to; row += even) {
            const int n = to - row < even ? to - row : even;
            f32x16 sums[ROWS][T];
            rows<W, T>(n, a + row * lda, lda, b, W::STEP * LANES, k, reinterpret_cast<float*>(sums), T * LANES, {ahead ? long(T) * k * LANES : 0, (row - from) / even, blocks});
            for (int r = 0; r < n; r++) done(row + r, first, sums[r], T);
        }
    }
}

// The product of `a [m, k]` (row stride `lda`) with `tiles` packed tiles: done(row, first tile, sums, how many), an even number of tiles
// at a time, the last perhaps alone. Few rows are computed several tiles at a time: one sum would wait for itself. Many rows are cut,
// so that a task's share of them stays in its core's cache while it goes over its tiles.
template <typename W, typename Done>
void product(Team& team, const typename W::Stored* weights, int tiles, const typename W::Active* a, long lda, int m, int k, const Done& done) {
    constexpr int FEW = W::TILES ? 16 : 3, AT_ONCE = W::TILES ? 4 : 8;
    const bool few = m <= FEW;
    const long cached = CACHED_BYTES / (long(sizeof(*a)) * k) / 96 * 96;
    const int share = cached > 96 ? int(cached) : 96, cuts = (m + share - 1) / share;
    const int wide = few || cuts > 1 ? 8 : 2, groups = (tiles + wide - 1) / wide;
    team.split(groups * cuts, [&](int i) {
        int first = i / cuts * wide;
        const int end = first + wide < tiles ? first + wide : tiles, from = i % cuts * share, to = from + share < m ? from + share : m;
        if (few)
            for (; first + AT_ONCE <= end; first += AT_ONCE) some_tiles<W, AT_ONCE>(first, weights, a, lda, from, to, k, false, done);
        for (; first + 2 <= end; first += 2) some_tiles<W, 2>(first, weights, a, lda, from, to, k, !few, done);
        if (first < end) some_tiles<W, 1>(first, weights, a, lda, from, to, k, false, done);
        if constexpr (W::TILES) tiles_done();
    });
}

// out[row * out_stride + o] = dot of row `row` of `a` with row `o` of plain `weights [outputs, k]`; `k` a multiple of 16.
template <typename W>
void plain_product(Team& team, const typename W::Stored* weights, long outputs, const float* a, long lda, int m, int k, float* out, long out_stride) {
    constexpr int GROUP = 64, PAIR = 2;
    team.split(int((outputs + GROUP - 1) / GROUP), [&](int i) {
        const long end = (i + 1L) * GROUP < outputs ? (i + 1L) * GROUP : outputs;
        for (long o = long(i) * GROUP; o < end; o += PAIR) {
            const int n = end - o < PAIR ? 1 : PAIR;
            const typename W::Stored *one = weights + o * k, *two = weights + (o + n - 1) * k;
            auto some = [&](int row, auto many) {
                constexpr int M = decltype(many)::value;
                f32x16 s[M][PAIR] = {};
                for (int j = 0; j < k; j += LANES) {
                    const f32x16 x = W::load(one + j), y = W::load(two + j);
#pragma GCC unroll 16
                    for (int r = 0; r < M; r++) {
                        const f32x16 z = load(a + (row + r) * lda + j);
                        s[r][0] += z * x;
                        s[r][1] += z * y;
                    }
                }
                for (int r = 0; r < M; r++)
                    for (int p = 0; p < n; p++) out[(row + r) * out_stride + o + p] = W::one(W::of(sum(s[r][p])));
            };
            int row = 0;
            for (; row + ROWS <= m; row += ROWS) some(row, std::integral_constant<int, ROWS>());
            for (; row + 4 <= m; row += 4) some(row, std::integral_constant<int, 4>());
            for (; row < m; row++) some(row, std::integral_constant<int, 1>());
        }
    });
}

}  // namespace upbeat
