// Attention over paged KV, pages read in place, in float32.
//
// A page is `[kv_heads][K, V][chunk][head_dim]`. A query sees its sequence's tokens page by page in order, with a running maximum
// and sum; a page's tokens beyond what the query sees count as nothing. What a query computes depends on its own position and
// on nothing else, so prefill in pieces, decode and recomputation give the same bits.
#pragma once
#include <type_traits>
#include <vector>

#include "product.h"

namespace upbeat {

constexpr int BLOCK_ROWS = 96;  // query rows (tokens times the heads that share a KV head) that one unpacking of a page serves

struct Query {
    int32_t row;      // of the first token in q and, with `out_row`, in the output
    int32_t count;    // tokens
    int32_t start;    // position of the first
    int32_t out_row;
    const int64_t* pages;  // byte offsets of the sequence's pages, `[layers][pages_a_layer]`
    int64_t pages_a_layer;
};

// Scratch of one task: a page unpacked, scores, results.
struct Unpacked {
    std::vector<float> k, v, scores, out, q;
    std::vector<uint16_t> narrow, rest;  // what tiles multiply: q or the scores, and what rounding the scores left
    Unpacked(int chunk, int dim)
        : k(chunk * dim), v(chunk * dim), scores(BLOCK_ROWS * (chunk + LANES)), out(BLOCK_ROWS * (dim + LANES)), q(BLOCK_ROWS * (dim + LANES)),
          narrow(BLOCK_ROWS * ((chunk > dim ? chunk : dim) + LANES)), rest(BLOCK_ROWS * (chunk + LANES)) {}
};

// `[16][16]` of rows with stride `from_stride`, transposed.
inline void transposed(const f32x16* from, float* to) {
    f32x16 a[16], b[16];
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

// K of one head as tiles of 16 tokens, packed as weights are: `[tokens / 16][dim][16]`, of bfloat16 in pairs of dimensions.
template <typename W>
inline void unpack_keys(const typename W::Stored* k, int tokens, int dim, float* to) {
    constexpr int PAIRED = W::STEP * LANES;
    for (int t = 0; t < tokens; t += LANES)
        for (int d = 0; d < dim; d += PAIRED) {
            f32x16 rows[16];
            for (int i = 0; i < 16; i++) rows[i] = W::STEP == 2 ? load(reinterpret_cast<const float*>(k + (t + i) * dim + d)) : W::load(k + (t + i) * dim + d);
            transposed(rows, to + long(t) * dim / W::STEP + d / W::STEP * LANES);
        }
}

// V of one head as tiles of 16 dimensions `[dim / 16][chunk][16]`.
template <typename W>
inline void unpack_values(const typename W::Stored* v, int tokens, int chunk, int dim, float* to) {
    for (int d = 0; d < dim; d += LANES)
        for (int t = 0; t < tokens; t++) store(to + long(d) * chunk + t * LANES, W::load(v + t * dim + d));
}

// to[m][count * 16] = (or +=) a[m][k] times `count` tiles, `apart` values from each other, `stride` from an input to the next. Few rows
// take four tiles at a time.
template <typename W>
inline void tiled(int m, const typename W::Active* a, long lda, const typename W::Stored* tiles, long apart, long stride, int k, int count, float* to, long ld,
                  bool add) {
    for (int i = 0; i < m; i += ROWS) {
        const int n = m - i < ROWS ? m - i : ROWS;
        int t = 0;
        auto some = [&](auto wide) {
            constexpr int T = decltype(wide)::value;
            f32x16 sums[ROWS][T] = {};
            const typename W::Stored* b[T];
            for (int j = 0; j < T; j++) b[j] = tiles + (t + j) * apart;
            float* at = to + i * ld + t * LANES;
            if (add)
                for (int r = 0; r < n; r++)
                    for (int j = 0; j < T; j++) sums[r][j] = load(at + r * ld + j * LANES);
            rows<W, T>(n, a + i * lda, lda, b, stride, k, sums);
            for (int r = 0; r < n; r++)
                for (int j = 0; j < T; j++) store(at + r * ld + j * LANES, sums[r][j]);
            t += T;
        };
        while (n <= 6 && t + 4 <= count) some(std::integral_constant<int, 4>());
        while (t + 2 <= count) some(std::integral_constant<int, 2>());
        while (t < count) some(std::integral_constant<int, 1>());
    }
}

// V of one head for tiles: as packed weights of `[dim]` outputs, tokens being the inputs, zero from `tokens` to `padded`, an even number.
inline void pair_values(const uint16_t* v, int tokens, int padded, int dim, uint16_t* to) {
    for (int d = 0; d < dim; d += LANES)
        for (int t = 0; t < padded; t += 2) {
            const auto row = [&](int token) {
                return token < tokens ? __builtin_convertvector(*reinterpret_cast<const u16x16*>(v + long(token) * dim + d), u32x16) : u32x16{};
            };
            *reinterpret_cast<u32x16*>(to + long(d) * padded + t * LANES) = row(t) | row(t + 1) << 16;
        }
}

// to[m][count * 16] = (or +=) a[m][k] times `count` tiles by the processor's tiles; `k` a multiple of 32.
inline void tile_product(int m, const uint16_t* a, long lda, const uint16_t* tiles, int k, int count, float* to, long ld, bool add) {
    for (int i = 0; i < m; i += 32) {
        const int n = m - i < 32 ? m - i : 32;
        for (int t = 0; t < count; t += 2) {
            f32x16 sums[32][2];
            const int last = t + 1 < count ? t + 1 : t;
            const uint16_t* b[2] = {tiles + long(t) * k * LANES, tiles + long(last) * k * LANES};
            tile_rows<2>(n, a + i * lda, lda, b, k, sums);
            for (int r = 0; r < n; r++)
                for (int j = t; j <= last; j++) {
                    float* at = to + (i + r) * ld + j * LANES;
                    store(at, add ? load(at) + sums[r][j - t] : sums[r][j - t]);
                }
        }
    }
}

// Queries, which are rounded to bfloat16 already, as such: `[m][dim]`.
inline void narrow_queries(int m, int dim, long lq, Unpacked& u) {
    for (int i = 0; i < m; i++)
        for (int d = 0; d < dim; d += LANES) Bf16::store(u.narrow.data() + i * dim + d, load(u.q.data() + i * lq + d));
}

// Scores of a page's first `padded` tokens, from K in `u.k` packed in pairs.
inline void tile_scores(int m, int padded, int dim, long lq, long lp, Unpacked& u) {
    narrow_queries(m, dim, lq, u);
    tile_product(m, u.narrow.data(), dim, reinterpret_cast<const uint16_t*>(u.k.data()), dim, padded / LANES, u.scores.data(), lp, false);
}

// u.out += the scores times V's first `seen` tokens. A score is the sum of two bfloat16, so that it loses nothing that counts.
inline void tile_values(const uint16_t* v, int m, int seen, int dim, long lp, long lq, Unpacked& u) {
    const int written = (seen + LANES - 1) / LANES * LANES, padded = (seen + 31) / 32 * 32;
    auto* pairs = reinterpret_cast<uint16_t*>(u.v.data());
    pair_values(v, seen, padded, dim, pairs);
    for (int i = 0; i < m; i++)
        for (int t = 0; t < padded; t += LANES) {
            const f32x16 x = t < written ? load(u.scores.data() + i * lp + t) : splat(0), upper = Bf16::rounded(x);
            Bf16::store(u.narrow.data() + i * padded + t, upper);
            Bf16::store(u.rest.data() + i * padded + t, x - upper);
        }
    tile_product(m, u.narrow.data(), padded, pairs, padded, dim / LANES, u.out.data(), lq, true);
    tile_product(m, u.rest.data(), padded, pairs, padded, dim / LANES, u.out.data(), lq, true);
}

// Have so many bytes brought near.
inline void fetch(const void* from, long bytes) {
    for (long at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at);
}

struct AttentionShape {
    int heads, kv_heads, dim, chunk, window;  // window 0: none
    float scale;
};

// `tokens` of `query` from token `first` on, heads of KV head `g`: into out `[row][heads * dim]`, stride `out_stride`.
template <typename W>
void attend(const AttentionShape& s, const char* base, const Query& query, int layer, int first, int tokens, int g, const float* q, long q_stride,
            typename W::Active* out, long out_stride, Unpacked& u) {
    using Kept = std::conditional_t<std::is_same_v<typename W::Stored, uint16_t>, Bf16, W>;  // as pages are read, whatever multiplies weights
    const int group = s.heads / s.kv_heads, dim = s.dim, chunk = s.chunk, m = tokens * group;
    const long lq = dim + LANES, lp = chunk + LANES;
    const bool by_tiles = W::TILES && dim % 32 == 0 && chunk % 32 == 0;
    float most[BLOCK_ROWS];
    f32x16 total[BLOCK_ROWS];  // by lane
    for (int i = 0; i < m; i++) {
        const float* from = q + (query.row + first + i / group) * q_stride + (g * group + i % group) * dim;
        memcpy(u.q.data() + i * lq, from, dim * sizeof(float));
        memset(u.out.data() + i * lq, 0, dim * sizeof(float));
        most[i] = -1e30f;
        total[i] = splat(0);
    }
    const bool by_pairs = !W::TILES && std::is_same_v<typename W::Active, uint16_t> && dim % (2 * LANES) == 0;
    if (by_pairs) narrow_queries(m, dim, lq, u);
    const int begin = query.start + first, last = begin + tokens - 1;
    const int from_token = s.window && begin - s.window + 1 > 0 ? begin - s.window + 1 : 0;
    for (int page = from_token / chunk; page <= last / chunk; page++) {
        const int at = page * chunk, seen = last + 1 - at < chunk ? last + 1 - at : chunk, padded = (seen + LANES - 1) / LANES * LANES;
        const int64_t* where = query.pages + layer * query.pages_a_layer + page;
        const long head = long(g) * 2 * chunk * dim, half = long(chunk) * dim;
        const auto* k = reinterpret_cast<const typename W::Stored*>(base + where[0]) + head;
        const auto* v = k + half;
        // Few rows are done before memory has the next page: it is asked for meanwhile, K first.
        const auto* next = m <= ROWS && page < last / chunk ? reinterpret_cast<const typename W::Stored*>(base + where[1]) + head : nullptr;
        if (by_tiles) {
            unpack_keys<Kept>(k, padded, dim, u.k.data());
            if constexpr (W::TILES) tile_scores(m, padded, dim, lq, lp, u);
        } else if (by_pairs) {
            unpack_keys<Kept>(k, padded, dim, u.k.data());
            if constexpr (!W::TILES && std::is_same_v<typename W::Active, uint16_t>)
                tiled<W>(m, u.narrow.data(), dim, reinterpret_cast<const uint16_t*>(u.k.data()), dim * LANES, W::STEP * LANES, dim, padded / LANES,
                         u.scores.data(), lp, false);
        } else if (Kept::STEP == 2 && dim % (2 * LANES) == 0) {
            unpack_keys<Kept>(k, padded, dim, u.k.data());
            tiled<Kept>(m, u.q.data(), lq, reinterpret_cast<const typename W::Stored*>(u.k.data()), dim * LANES, Kept::STEP * LANES, dim, padded / LANES,
                        u.scores.data(), lp, false);
        } else {
            unpack_keys<Plain<Kept>>(k, padded, dim, u.k.data());
            tiled<F32>(m, u.q.data(), lq, u.k.data(), dim * LANES, LANES, dim, padded / LANES, u.scores.data(), lp, false);
        }
        if (next) fetch(next, half * sizeof(*next));
        const i32x16 count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const bool whole = !s.window && at + padded - 1 <= begin;  // everybody sees all of the page
        for (int i = 0; i < m; i++) {
            const int position = begin + i / group, high = position - at, low = s.window ? position - s.window + 1 - at : 0;
            float* p = u.scores.data() + i * lp;
            f32x16 top = splat(-1e30f);
            for (int t = 0; t < padded; t += LANES) {
                const i32x16 token = count + t;
                f32x16 x = load(p + t) * s.scale;
                if (!whole) x = choose((token <= high) & (token >= low), x, splat(-1e30f));
                store(p + t, x);
                top = larger(x, top);
            }
            const float before = most[i], here = largest(top), now = here > before ? here : before;
            if (before != now) {
                const f32x16 shrunk = falling(splat(before - now));
                total[i] *= shrunk;
                for (int d = 0; d < dim; d += LANES) store(u.out.data() + i * lq + d, load(u.out.data() + i * lq + d) * shrunk);
                most[i] = now;
            }
            for (int t = 0; t < padded; t += LANES) {
                const f32x16 x = load(p + t);
                f32x16 e = falling(x - now);
                if (!whole) e = choose(x > -1e29f, e, splat(0));
                store(p + t, e);
                total[i] += e;
            }
        }
        if (next) fetch(next + half, half * sizeof(*next));
        if (by_tiles) {
            if constexpr (W::TILES) tile_values(v, m, seen, dim, lp, lq, u);
        } else if (m <= ROWS) {  // V is gone over once: in place
            tiled<Plain<Kept>>(m, u.scores.data(), lp, v, LANES, dim, seen, dim / LANES, u.out.data(), lq, true);
        } else {
            unpack_values<W>(v, seen, chunk, dim, u.v.data());
            tiled<F32>(m, u.scores.data(), lp, u.v.data(), chunk * LANES, LANES, seen, dim / LANES, u.out.data(), lq, true);
        }
    }
    if constexpr (W::TILES) tiles_done();
    for (int i = 0; i < m; i++) {
        auto* to = out + (query.out_row + first + i / group) * out_stride + (g * group + i % group) * dim;
        const float all = sum(total[i]);
        for (int d = 0; d < dim; d += LANES) put(to + d, W::rounded(load(u.out.data() + i * lq + d) / all));
    }
}

}  // namespace upbeat
