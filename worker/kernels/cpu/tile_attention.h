// Attention over paged KV by tiles (AMX), like `attend` by vectors, for head sizes and chunks that are multiples of 32.
//
// Scores are computed transposed: a tile of K, as it lies in its page, times queries. So lanes are query rows, softmax needs no sum across
// lanes, and its result is the right operand of the next product, with V transposed. Tokens are processed in stripes that begin at multiples
// of STRIPE. A row's maximum, which affects every bit, changes only there, so bits depend on positions only (FlashAttention-2, except for the
// order of loops). Probabilities are rounded to bfloat16 before the product with V, as there.
#pragma once
#include <algorithm>

#include "paged.h"
#include "tiles.h"

namespace upbeat {

constexpr int UNIT = 32;             // tokens of a tile of probabilities
constexpr int STRIPE = 4 * UNIT;     // tokens per update of the maximum
constexpr int TILE_TASK_ROWS = 128;  // query rows (tokens times heads per KV head) per transposed V

#if defined(UPBEAT_TILES)

// Scratch of one task. A group is 16 query rows, a tile 16 rows of 64 bytes.
struct TileScratch {
    static constexpr int GROUPS = TILE_TASK_ROWS / LANES;
    alignas(64) float scores[STRIPE][LANES];
    alignas(64) uint16_t chances[STRIPE / UNIT][UNIT * LANES];  // the probabilities, tokens in pairs
    f32x16 most[GROUPS], total[GROUPS];
    uint16_t *queries, *values;  // `[groups][dim / 32][16 pairs][16 rows][2]`, `[units][dim][32 tokens]`
    float* out;                  // `[groups][dim][16 rows]`
    explicit TileScratch(int dim)
        : queries(lines<uint16_t>(GROUPS * LANES * dim)), values(lines<uint16_t>(STRIPE * dim)), out(lines<float>(GROUPS * LANES * dim)) {}
    ~TileScratch() { free(queries), free(values), free(out); }
    TileScratch(const TileScratch&) = delete;

  private:
    template <typename T>
    static T* lines(int count) { return static_cast<T*>(aligned_alloc(64, sizeof(T) * count)); }
};

// Packs 16 rows of query heads as the right operand of a product: `[dim / 2][16][2]`. Rows from `count` on become zero.
inline void pack_queries(const float* const* rows, int count, int dim, uint16_t* to) {
    for (int d = 0; d < dim; d += UNIT) {
        alignas(64) uint16_t narrow[LANES][UNIT] = {};
        for (int i = 0; i < count; i++) {
            Bf16::store(narrow[i], load(rows[i] + d));
            Bf16::store(narrow[i] + LANES, load(rows[i] + d + LANES));
        }
        transposed([&](int i, int at) { return *reinterpret_cast<const f32r*>(narrow[i] + 2 * at); }, reinterpret_cast<float*>(to + d * LANES));
    }
}

// Packs a unit of V as the left operand of a product: `[dim][32 tokens]`. Tokens from `seen` on become zero, as their memory is undefined.
inline void transpose_values(const uint16_t* v, int seen, int dim, uint16_t* to) {
    alignas(64) uint16_t rest[UNIT][LANES];
    for (int d = 0; d < dim; d += LANES) {
        const uint16_t* from = v + d;
        long stride = dim;
        if (seen < UNIT) {
            memset(rest, 0, sizeof(rest));
            for (int i = 0; i < seen; i++) memcpy(rest[i], from + i * stride, sizeof(rest[i]));
            from = rest[0], stride = LANES;
        }
        const auto of = [&](int i, int at) {
            const auto row = [&](int token) { return widened(*reinterpret_cast<const u16r*>(from + token * stride + at)); };
            return (f32r)(row(2 * i) | row(2 * i + 1) << 16);
        };
        transposed(of, reinterpret_cast<float*>(to + d * UNIT));
    }
}

// Scores `[32][16]` of 32 tokens of K `[32][dim]` with a group's packed queries.
inline void tile_scores(const uint16_t* k, int dim, const uint16_t* queries, float* to) {
    constexpr long LINE = LANES * sizeof(float);
    const long row = dim * 2L;
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int d = 0; d < dim; d += UNIT) {
        TILE_LOAD(6, queries + d * LANES, LINE);
        TILE_LOAD(4, k + d, row);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(5, k + LANES * dim + d, row);
        TILE_DOT(1, 5, 6);
    }
    TILE_STORE(0, to, LINE);
    TILE_STORE(1, to + LANES * LANES, LINE);
}

// out `[dim][16]` += transposed V times probabilities, over `units` units.
inline void tile_values(const uint16_t* values, const uint16_t* chances, int units, int dim, float* out) {
    constexpr long LINE = LANES * sizeof(float);
    constexpr int BLOCK = LANES * LANES;
    for (int d = 0; d < dim; d += UNIT) {
        float* at = out + d * LANES;
        TILE_LOAD(2, at, LINE);
        TILE_LOAD(3, at + BLOCK, LINE);
        for (int unit = 0; unit < units; unit++) {
            const uint16_t* left = values + (long(unit) * dim + d) * UNIT;
            TILE_LOAD(7, chances + unit * UNIT * LANES, LINE);
            TILE_LOAD(4, left, LINE);
            TILE_DOT(2, 4, 7);
            TILE_LOAD(5, left + LANES * UNIT, LINE);
            TILE_DOT(3, 5, 7);
        }
        TILE_STORE(2, at, LINE);
        TILE_STORE(3, at + BLOCK, LINE);
    }
}

// Softmax of a group's scores of `count` tokens (even) from position `at` on, into `chances`. Rescales `most`, `total` and `out` to the new
// maximum. Rows see tokens [low, high]; WHOLE: all of these.
template <bool WHOLE>
inline void soften(const float (*scores)[LANES], int count, int at, i32x16 low, i32x16 high, float scale, int dim, f32x16& most, f32x16& total,
                   float* out, uint16_t* chances) {
    const auto seen = [&](int t, f32x16 x, float otherwise) { return WHOLE ? x : choose((low <= at + t) & (high >= at + t), x, splat(otherwise)); };
    f32x16 top = splat(UNSEEN), other = top;
    for (int t = 0; t < count; t += 2) {
        top = larger(seen(t, load(scores[t]), UNSEEN), top);
        other = larger(seen(t + 1, load(scores[t + 1]), UNSEEN), other);
    }
    const f32x16 before = most, now = larger(larger(top, other) * scale, before);
    if (memcmp(&before, &now, sizeof(now))) {
        const f32x16 shrunk = halving(before - now);
        for (int d = 0; d < dim; d++) store(out + d * LANES, load(out + d * LANES) * shrunk);
        total *= shrunk;
        most = now;
    }
    f32x16 all = total;
    for (int t = 0; t < count; t += 2) {
        const f32x16 one = seen(t, halving(load(scores[t]) * scale - now), 0), two = seen(t + 1, halving(load(scores[t + 1]) * scale - now), 0);
        all += one + two;
        store(reinterpret_cast<uint32_t*>(chances + t * LANES), ((u32x16)one + 0x8000u) >> 16 | (((u32x16)two + 0x8000u) & 0xffff0000u));  // none is negative
    }
    total = all;
}

// Attention of `tokens` tokens of `query` from token `first` on, for the heads of KV head `g`, into out `[row][heads * dim]` with `out_stride`.
inline void attend_by_tiles(const AttentionShape& s, const char* base, const Query& query, int layer, int first, int tokens, int g, const float* q,
                            long q_stride, uint16_t* out, long out_stride, TileScratch& u) {
    const int share = s.heads / s.kv_heads, dim = s.dim, m = tokens * share, groups = (m + LANES - 1) / LANES;
    const int begin = query.start + first, last = begin + tokens - 1;
    const int lowest = s.window && begin - s.window + 1 > 0 ? begin - s.window + 1 : 0;
    const float scale = s.scale * LOG2_E;
    const long half = long(s.chunk) * dim;
    int32_t high[TileScratch::GROUPS][LANES], low[TileScratch::GROUPS][LANES];
    for (int i = 0; i < groups; i++) {
        const float* rows[LANES];
        const int count = std::min(m - i * LANES, LANES);
        for (int lane = 0; lane < LANES; lane++) {
            const int row = i * LANES + (lane < count ? lane : 0), token = row / share;
            rows[lane] = q + (query.row + first + token) * q_stride + (g * share + row % share) * dim;
            high[i][lane] = begin + token;
            low[i][lane] = s.window ? begin + token - s.window + 1 : 0;
        }
        pack_queries(rows, count, dim, u.queries + long(i) * LANES * dim);
        u.most[i] = splat(UNSEEN);
        u.total[i] = splat(0);
        memset(u.out + long(i) * dim * LANES, 0, sizeof(float) * dim * LANES);
    }
    TILE_SHAPES(TileShapes::full());
    const int64_t* pages = query.pages + layer * query.pages_a_layer;
    const auto keys = [&](int token) {
        return reinterpret_cast<const uint16_t*>(base + pages[token / s.chunk]) + g * 2 * half + long(token % s.chunk) * dim;
    };
    for (int at = lowest / UNIT * UNIT, end; at <= last; at = end) {
        end = std::min((at / STRIPE + 1) * STRIPE, last + 1);
        const int units = (end - at + UNIT - 1) / UNIT;
        for (int unit = 0; unit < units; unit++) {
            const int token = at + unit * UNIT;
            transpose_values(keys(token) + half, std::min(UNIT, end - token), dim, u.values + long(unit) * UNIT * dim);
            if (token + STRIPE <= last) {
                const auto* next = keys(token + STRIPE);
                fetch(next, UNIT * dim * 2);
                fetch(next + half, UNIT * dim * 2);
            }
        }
        for (int i = 0; i < groups; i++) {
            for (int unit = 0; unit < units; unit++)
                tile_scores(keys(at + unit * UNIT), dim, u.queries + long(i) * LANES * dim, u.scores[unit * UNIT]);
            const bool whole = !s.window && at + units * UNIT - 1 <= high[i][0];
            float* to = u.out + long(i) * dim * LANES;
            (whole ? soften<true> : soften<false>)(u.scores, units * UNIT, at, load(low[i]), load(high[i]), scale, dim, u.most[i], u.total[i], to, u.chances[0]);
            tile_values(u.values, u.chances[0], units, dim, to);
        }
    }
    tiles_done();
    for (int i = 0; i < groups; i++)
        for (int d = 0; d < dim; d += LANES) {
            f32x16 columns[LANES];
            alignas(64) float rows[LANES][LANES];
            for (int j = 0; j < LANES; j++) columns[j] = load(u.out + (long(i) * dim + d + j) * LANES) / u.total[i];
            transposed([&](int row, int at) { return register_of(columns[row], at); }, rows[0]);
            for (int lane = 0; lane < LANES && i * LANES + lane < m; lane++) {
                const int row = i * LANES + lane;
                put(out + (query.out_row + first + row / share) * out_stride + (g * share + row % share) * dim + d, load(rows[lane]));
            }
        }
}

#endif

}  // namespace upbeat
