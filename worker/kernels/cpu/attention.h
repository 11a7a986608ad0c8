// Attention over paged KV, pages read in place, in float32.
//
// A page is `[kv_heads][K, V][chunk][head_dim]`. A query sees its sequence's tokens page by page in order, with a running maximum
// and sum; a page's tokens beyond what the query sees count as nothing. What a query computes depends on its own position and
// on nothing else, so prefill in pieces, decode and recomputation give the same bits.
#pragma once
#include <type_traits>
#include <vector>

#include "paged.h"
#include "product.h"

namespace upbeat {

constexpr int BLOCK_ROWS = 96;  // query rows (tokens times the heads that share a KV head) that one unpacking of a page serves

// Scratch of one task: a page unpacked, scores, results.
struct Unpacked {
    std::vector<float> k, v, scores, out, q;
    std::vector<uint16_t> narrow;  // q as bfloat16
    Unpacked(int chunk, int dim)
        : k(chunk * dim), v(chunk * dim), scores(BLOCK_ROWS * (chunk + LANES)), out(BLOCK_ROWS * (dim + LANES)), q(BLOCK_ROWS * (dim + LANES)),
          narrow(BLOCK_ROWS * dim) {}
};

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

// Queries, which are rounded to bfloat16 already, as such: `[m][dim]`.
inline void narrow_queries(int m, int dim, long lq, Unpacked& u) {
    for (int i = 0; i < m; i++)
        for (int d = 0; d < dim; d += LANES) Bf16::store(u.narrow.data() + i * dim + d, load(u.q.data() + i * lq + d));
}

// `tokens` of `query` from token `first` on, heads of KV head `g`: into out `[row][heads * dim]`, stride `out_stride`.
template <typename W>
void attend(const AttentionShape& s, const char* base, const Query& query, int layer, int first, int tokens, int g, const float* q, long q_stride,
            typename W::Active* out, long out_stride, Unpacked& u) {
    using Kept = std::conditional_t<std::is_same_v<typename W::Stored, uint16_t>, Bf16, W>;  // as pages are read, whatever multiplies weights
    const int group = s.heads / s.kv_heads, dim = s.dim, chunk = s.chunk, m = tokens * group;
    const long lq = dim + LANES, lp = chunk + LANES;
    float most[BLOCK_ROWS];
    f32x16 total[BLOCK_ROWS];  // by lane
    for (int i = 0; i < m; i++) {
        const float* from = q + (query.row + first + i / group) * q_stride + (g * group + i % group) * dim;
        memcpy(u.q.data() + i * lq, from, dim * sizeof(float));
        memset(u.out.data() + i * lq, 0, dim * sizeof(float));
        most[i] = -1e30f;
        total[i] = splat(0);
    }
    const bool by_pairs = std::is_same_v<typename W::Active, uint16_t> && dim % (2 * LANES) == 0;
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
        if (by_pairs) {
            unpack_keys<Kept>(k, padded, dim, u.k.data());
            if constexpr (std::is_same_v<typename W::Active, uint16_t>)
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
        if (m <= ROWS) {  // V is gone over once: in place
            tiled<Plain<Kept>>(m, u.scores.data(), lp, v, LANES, dim, seen, dim / LANES, u.out.data(), lq, true);
        } else {
            unpack_values<W>(v, seen, chunk, dim, u.v.data());
            tiled<F32>(m, u.scores.data(), lp, u.v.data(), chunk * LANES, LANES, seen, dim / LANES, u.out.data(), lq, true);
        }
    }
    for (int i = 0; i < m; i++) {
        auto* to = out + (query.out_row + first + i / group) * out_stride + (g * group + i % group) * dim;
        const float all = sum(total[i]);
        for (int d = 0; d < dim; d += LANES) put(to + d, W::rounded(load(u.out.data() + i * lq + d) / all));
    }
}

}  // namespace upbeat
