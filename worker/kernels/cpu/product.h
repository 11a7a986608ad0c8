// Matrix products of a few rows with packed weights.
//
// Weights `[out, in]` are packed in tiles of 16 outputs, `[out / 16][in][16]`; in bfloat16 with two neighbouring inputs of an output side by
// side, `[out / 16][in / 2][16][2]`. Every output is one float32 sum over `in` in a fixed order, for any number of rows. So a row's result
// never depends on the other rows of a step.
#pragma once
#include <type_traits>
#include <vector>

#include "team.h"
#include "tiles.h"

namespace upbeat {

// Whether the sums of a block fit into registers beside its operands (which need more registers when loads are widened in parts). The largest
// block has 12 rows x 2 tiles of 16 outputs on AVX-512; on AVX2 and NEON 6 rows x 1 tile, or 4 rows with parts.
template <typename W>
constexpr bool fits(int rows, int tiles) {
    constexpr int MOST = REGISTERS == 32 ? 24 : 12;
    return rows * tiles * SPAN <= (SPAN > 1 && W::PARTS > 1 ? MOST * 2 / 3 : MOST);
}
// Tiles (4, 2 or 1) that a block of `rows` rows computes at once; several, as consecutive additions to one sum have latency.
template <typename W>
constexpr int tiles_at_once(int rows) { return fits<W>(rows, 4) ? 4 : fits<W>(rows, 2) ? 2 : 1; }
// Maximum number of rows of a block.
template <typename W>
constexpr int most_rows() {
    int rows = 1;
    while (fits<W>(rows + 1, SPAN > 1 ? 1 : 2)) rows++;
    return rows;
}
constexpr int ROWS = most_rows<F32>();
constexpr int MANY = 64, MANY_AT_ONCE = 96, DEPTH = 128;  // `many_rows`: minimum number of rows, rows at once, inputs at once
constexpr long CACHED_BYTES = 1 << 19;  // activations per task, to stay in cache

// Prefetch of the next tiles, `by` values behind the current ones (0: off), at every `every`-th load from `first` on. Blocks of rows share the
// prefetch, so that memory is busy while all of them compute. A pair of tiles can exceed the first cache, so it is prefetched to the second,
// and to the first NEAR loads before it is used.
struct Ahead {
    long by = 0;
    int first = 0, every = 1;
};
constexpr int NEAR = 24;

// to[m][t * 16] = (with ADD: +=) rows m of `a` (stride `lda`) times `b[t]`, over `k` inputs. stride: from one load of W::STEP inputs to the
// next. Prefetches as `ahead` says.
template <typename W, int M, int T, bool ADD>
inline void block(const typename W::Active* a, long lda, const typename W::Stored* const* b, long stride, int k, float* to, long ld, Ahead ahead) {
    constexpr int N = T * SPAN;  // registers of a row's sums
    f32r s[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) s[m][n] = ADD ? F32::load_register(to + m * ld + n * REGISTER_LANES) : f32r{};
    int next = ahead.by ? ahead.first * W::STEP : k;
    for (int i = 0; i < k; i += W::STEP) {
        typename W::Loaded w[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) w[n] = *reinterpret_cast<const typename W::Loaded*>(b[n / SPAN] + i / W::STEP * stride + n % SPAN * REGISTER_LANES * W::STEP);
        if (ahead.by)
            for (int t = 0; t < T; t++) __builtin_prefetch(b[t] + (i / W::STEP + NEAR) * stride);
        if (i == next) {
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) __builtin_prefetch(b[t] + i / W::STEP * stride + ahead.by, 0, 2);
            next += ahead.every * W::STEP;
        }
#pragma GCC unroll 2
        for (int part = 0; part < W::PARTS; part++) {
            decltype(W::part(w[0], 0)) x[N];
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) x[n] = W::part(w[n], part);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++)
#pragma GCC unroll 16
                for (int n = 0; n < N; n++) s[m][n] = W::add(s[m][n], a + m * lda + i + part, x[n]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) *reinterpret_cast<f32r*>(to + m * ld + n * REGISTER_LANES) = s[m][n];
}

// Widens `inputs` inputs of a tile to float32, `[inputs][16]`.
template <typename W>
inline void widen(const typename W::Stored* tile, int inputs, float* to) {
    for (int i = 0; i < inputs; i += W::STEP)
#pragma GCC unroll 4
        for (int at = 0; at < LANES; at += REGISTER_LANES) {
            const auto w = *reinterpret_cast<const typename W::Loaded*>(tile + i * LANES + at * W::STEP);
#pragma GCC unroll 2
            for (int part = 0; part < W::PARTS; part++) *reinterpret_cast<f32r*>(to + (i + part) * LANES + at) = W::part(w, part);
        }
}

// Like `block`, for `m` rows from 1 to MOST, the maximum with T tiles.
template <typename W, int T, bool ADD = false, int MOST = most_rows<W>()>
inline void rows(int m, const typename W::Active* a, long lda, const typename W::Stored* const* b, long stride, int k, float* to, long ld,
                 Ahead ahead = {}) {
    if constexpr (MOST > 1 && !fits<W>(MOST, T)) {
        rows<W, T, ADD, MOST - 1>(m, a, lda, b, stride, k, to, ld, ahead);
    } else {
        if constexpr (MOST > 1)
            if (m < MOST) return rows<W, T, ADD, MOST - 1>(m, a, lda, b, stride, k, to, ld, ahead);
        block<W, MOST, T, ADD>(a, lda, b, stride, k, to, ld, ahead);
    }
}

// Like `rows`, with as many of the T tiles at once as fit.
template <typename W, int T>
inline void rows_of_tiles(int m, const typename W::Active* a, long lda, const typename W::Stored* const* b, long stride, int k, float* to, long ld,
                          Ahead ahead = {}) {
    if constexpr (T == 1 || fits<W>(1, T))
        if (T == 1 || fits<W>(m, T)) return rows<W, T>(m, a, lda, b, stride, k, to, ld, ahead);
    if constexpr (T > 1) {
        rows_of_tiles<W, T / 2>(m, a, lda, b, stride, k, to, ld, ahead);
        rows_of_tiles<W, T / 2>(m, a, lda, b + T / 2, stride, k, to + T / 2 * LANES, ld, ahead);
    }
}

// T neighbouring tiles of `weights` times many rows of `a`, for registers of fewer than 16 lanes. DEPTH inputs at a time are widened to float32
// once, stay in the first cache, and are multiplied with all rows. Sums are kept in memory between, as float32. Each block of rows prefetches
// its share of the next inputs.
template <typename W, int T, typename Done>
inline void many_rows(int first, const typename W::Stored* weights, const float* a, long lda, int from, int to, int k, const Done& done) {
    alignas(64) float panel[T][DEPTH * LANES];
    alignas(64) f32x16 sums[MANY_AT_ONCE][T];
    for (int start = from; start < to; start += MANY_AT_ONCE) {
        const int m = to - start < MANY_AT_ONCE ? to - start : MANY_AT_ONCE, blocks = (m + ROWS - 1) / ROWS;
        memset(static_cast<void*>(sums), 0, sizeof(sums[0]) * m);
        for (int i = 0; i < k; i += DEPTH) {
            const int depth = k - i < DEPTH ? k - i : DEPTH;
            const typename W::Stored *now = weights + (long(first) * k + i) * LANES, *next = now + (i + depth < k ? depth : T * long(k) - i) * LANES;
            for (int t = 0; t < T; t++) widen<W>(now + long(t) * k * LANES, depth, panel[t]);
            const long fetched = long(DEPTH * LANES * sizeof(*weights)) / blocks;
            for (int block = 0, row = 0; block < blocks; block++) {
                const int n = (m - row) / (blocks - block);
                for (int t = 0; t < T; t++) {
                    const float* b = panel[t];
                    fetch(reinterpret_cast<const char*>(next + long(t) * k * LANES) + block * fetched, fetched);
                    rows<F32, 1, true>(n, a + (start + row) * lda + i, lda, &b, LANES, depth, reinterpret_cast<float*>(&sums[row][t]), T * LANES);
                }
                row += n;
            }
        }
        for (int r = 0; r < m; r++) done(start + r, first, sums[r], T);
    }
}

// T neighbouring tiles of `weights` times rows [from, to) of `a`; calls done(row, tile, sums, T).
template <typename W, int T, typename Done>
inline void some_tiles(int first, const typename W::Stored* weights, const typename W::Active* a, long lda, int from, int to, int k, bool ahead,
                       const Done& done) {
    if constexpr (SPAN > 1 && T <= 2 && std::is_same_v<typename W::Active, float>)
        if (to - from >= MANY) return many_rows<W, T>(first, weights, a, lda, from, to, k, done);
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
        constexpr int MOST = most_rows<W>();
        const int blocks = (to - from + MOST - 1) / MOST, even = (to - from + blocks - 1) / blocks;
        for (int row = from; row < to; row += even) {
            const int n = to - row < even ? to - row : even;
            alignas(64) f32x16 sums[MOST][T];
            rows_of_tiles<W, T>(n, a + row * lda, lda, b, W::STEP * LANES, k, reinterpret_cast<float*>(sums), T * LANES,
                                {ahead ? long(T) * k * LANES : 0, (row - from) / even, blocks});
            for (int r = 0; r < n; r++) done(row + r, first, sums[r], T);
        }
    }
}

// How the product of `m` rows, of `k` inputs each, with `tiles` packed tiles is divided into tasks. Few rows compute several tiles at a time, to
// hide latency. Many rows are divided, so that a task's rows stay in its core's cache while it processes its tiles.
template <typename W>
struct Cut {
    static constexpr int FEW = W::TILES ? 16 : 3, AT_ONCE = W::TILES ? 4 : 8;
    int m, k, tiles, cuts, share, wide;
    bool few;

    Cut(int m, int k, int tiles) : m(m), k(k), tiles(tiles), few(m <= FEW) {
        const long cached = CACHED_BYTES / (long(sizeof(typename W::Active)) * k) / 96 * 96;
        const int longest = cached > 96 ? int(cached) : 96;
        cuts = (m + longest - 1) / longest;
        share = SPAN > 1 ? (m + cuts - 1) / cuts : longest;
        wide = few || cuts > 1 ? 8 : 2;
    }

    int tasks() const { return (tiles + wide - 1) / wide * cuts; }

    // Task `i`: calls done(row, first tile, sums, number of tiles) with an even number of tiles, except perhaps for the last.
    template <typename Done>
    void run(int i, const typename W::Stored* weights, const typename W::Active* a, long lda, const Done& done) const {
        int first = i / cuts * wide;
        const int end = first + wide < tiles ? first + wide : tiles, from = i % cuts * share, to = from + share < m ? from + share : m;
        const bool ahead = !few || SPAN > 1;  // with few rows and one register per tile, memory is the bottleneck anyway
        if (few)
            for (; first + AT_ONCE <= end; first += AT_ONCE) some_tiles<W, AT_ONCE>(first, weights, a, lda, from, to, k, ahead, done);
        for (; first + 2 <= end; first += 2) some_tiles<W, 2>(first, weights, a, lda, from, to, k, ahead, done);
        if (first < end) some_tiles<W, 1>(first, weights, a, lda, from, to, k, ahead, done);
        if constexpr (W::TILES) tiles_done();
    }
};

// The product of `a [m, k]` (row stride `lda`) with `tiles` packed tiles. done: see `Cut::run`.
template <typename W, typename Done>
void product(Team& team, const typename W::Stored* weights, int tiles, const typename W::Active* a, long lda, int m, int k, const Done& done) {
    if (m == 0) return;
    const Cut<W> cut(m, k, tiles);
    team.split(cut.tasks(), [&](int i) { cut.run(i, weights, a, lda, done); });
}

// Rows [first, first + rows) of a grouped product: those of one matrix.
struct Group {
    int first, rows;
};

// The product of each group's rows of `a` with its own matrix of `tiles` tiles: of `weights`, that of number `matrix[g]`. One loop for all groups.
template <typename W, typename Done>
void grouped_product(Team& team, const typename W::Stored* weights, const std::vector<Group>& groups, const std::vector<int>& matrix, int tiles,
                     const typename W::Active* a, long lda, int k, const Done& done) {
    struct Task {
        int group, number;
    };
    std::vector<Cut<W>> cuts;
    std::vector<Task> tasks;
    for (size_t g = 0; g < groups.size(); g++) {
        cuts.emplace_back(groups[g].rows, k, tiles);
        for (int i = 0; i < cuts[g].tasks(); i++) tasks.push_back({int(g), i});
    }
    team.split(int(tasks.size()), [&](int i) {
        const int g = tasks[i].group, first = groups[g].first;
        cuts[g].run(tasks[i].number, weights + long(matrix[g]) * tiles * LANES * k, a + first * lda, lda,
                    [&](int row, int tile, const f32x16* sums, int n) { done(first + row, tile, sums, n); });
    });
}

// out[row * out_stride + o] = dot of row `row` of `a` with row `o` of plain `weights [outputs, k]`; `k` a multiple of 16.
template <typename W>
void plain_product(Team& team, const typename W::Stored* weights, long outputs, const float* a, long lda, int m, int k, float* out, long out_stride) {
    constexpr int GROUP = 64, PAIR = 2, MOST = ROWS / (SPAN > 1 ? PAIR : 1), SOME = MOST > 4 ? 4 : 2;
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
            for (; row + MOST <= m; row += MOST) some(row, std::integral_constant<int, MOST>());
            for (; row + SOME <= m; row += SOME) some(row, std::integral_constant<int, SOME>());
            for (; row < m; row++) some(row, std::integral_constant<int, 1>());
        }
    });
}

}  // namespace upbeat
