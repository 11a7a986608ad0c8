// Attention over paged KV, pages read in place; sums and softmax in float32. Where weights are multiplied by pairs, so are K and V: queries are
// bfloat16 already, and probabilities are rounded to it before they meet V, as FlashAttention's are.
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
    std::vector<uint16_t> narrow, chances;  // q and probabilities as bfloat16
    Unpacked(int chunk, int dim)
        : k(chunk * dim), v(chunk * dim), scores(BLOCK_ROWS * (chunk + LANES)), out(BLOCK_ROWS * (dim + LANES)), q(BLOCK_ROWS * (dim + LANES)),
          narrow(BLOCK_ROWS * dim), chances(BLOCK_ROWS * chunk) {}
};

// K of one head as tiles of 16 tokens, packed as weights are: `[tokens / 16][dim][16]`, of bfloat16 in pairs of dimensions. What lies
// `ahead` values behind it is fetched meanwhile, unless that is 0.
template <typename W>
inline void unpack_keys(const typename W::Stored* k, int tokens, int dim, long ahead, float* to) {
    constexpr int PAIRED = W::STEP * LANES;
    for (int t = 0; t < tokens; t += LANES)
        for (int d = 0; d < dim; d += PAIRED) {
            f32x16 rows[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const auto* row = k + (t + i) * dim + d;
                rows[i] = W::STEP == 2 ? load(reinterpret_cast<const float*>(row)) : W::load(row);
                if (ahead) __builtin_prefetch(row + ahead, 0, 2);
            }
            transposed(rows, to + long(t) * dim / W::STEP + d / W::STEP * LANES);
        }
}

// V of one head as tiles of 16 dimensions `[dim / 16][chunk][16]`.
template <typename W>
inline void unpack_values(const typename W::Stored* v, int tokens, int chunk, int dim, float* to) {
    for (int d = 0; d < dim; d += LANES)
        for (int t = 0; t < tokens; t++) store(to + long(d) * chunk + t * LANES, W::load(v + t * dim + d));
}

// The same of bfloat16 in pairs of tokens, `[dim / 16][chunk / 2][16][2]`, `dim` a multiple of 32; tokens from `seen` to `padded` are zero.
inline void pair_values(const uint16_t* v, int seen, int padded, int chunk, int dim, long ahead, uint16_t* to) {
    typedef uint16_t u16x32 __attribute__((vector_size(64), aligned(2), may_alias));
    u16x32 low, high;
    for (int i = 0; i < LANES; i++) {
        low[2 * i] = uint16_t(i), low[2 * i + 1] = uint16_t(32 + i);
        high[2 * i] = uint16_t(16 + i), high[2 * i + 1] = uint16_t(48 + i);
    }
    for (int d = 0; d < dim; d += 2 * LANES)
        for (int t = 0; t < padded; t += 2) {
            const u16x32 one = t < seen ? *reinterpret_cast<const u16x32*>(v + t * dim + d) : u16x32{};
            const u16x32 two = t + 1 < seen ? *reinterpret_cast<const u16x32*>(v + (t + 1) * dim + d) : u16x32{};
            if (ahead) __builtin_prefetch(v + t * dim + d + ahead, 0, 2), __builtin_prefetch(v + (t + 1) * dim + d + ahead, 0, 2);
            uint16_t* at = to + long(d) * chunk + t * LANES;
            *reinterpret_cast<u16x32*>(at) = __builtin_shuffle(one, two, low);
            *reinterpret_cast<u16x32*>(at + chunk * LANES) = __builtin_shuffle(one, two, high);
        }
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
            f32x16 sums[ROWS][T];
            const typename W::Stored* b[T];
            for (int j = 0; j < T; j++) b[j] = tiles + (t + j) * apart;
            float* at = to + i * ld + t * LANES;
            for (int r = 0; r < n; r++)
                for (int j = 0; j < T; j++) sums[r][j] = add ? load(at + r * ld + j * LANES) : splat(0);
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

// `[m][n]`, rounded to bfloat16.
inline void narrow(int m, int n, const float* from, long ld, uint16_t* to) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j += LANES) Bf16::store(to + i * n + j, load(from + i * ld + j));
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
    if (by_pairs) narrow(m, dim, u.q.data(), lq, u.narrow.data());
    const int begin = query.start + first, last = begin + tokens - 1;
    const int from_token = s.window && begin - s.window + 1 > 0 ? begin - s.window + 1 : 0;
    const int64_t* pages = query.pages + layer * query.pages_a_layer;
    for (int page = from_token / chunk; page <= last / chunk; page++) {
        const int at = page * chunk, seen = last + 1 - at < chunk ? last + 1 - at : chunk, padded = (seen + LANES - 1) / LANES * LANES;
        const int64_t* where = pages + page;
        const long head = long(g) * 2 * chunk * dim, half = long(chunk) * dim;
        const auto* k = reinterpret_cast<const typename W::Stored*>(base + where[0]) + head;
        const auto* v = k + half;
        // Few rows are done before memory has what comes next, a page or a head: it is asked for meanwhile.
        long ahead = 0;
        if (m <= ROWS && page < last / chunk)
            ahead = (where[1] - where[0]) / long(sizeof(*k));
        else if (m <= ROWS && g + 1 < s.kv_heads)
            ahead = (pages[from_token / chunk] - where[0]) / long(sizeof(*k)) + 2 * half;
        if (by_pairs) {
            unpack_keys<Kept>(k, padded, dim, ahead, u.k.data());
            if constexpr (std::is_same_v<typename W::Active, uint16_t>)
                tiled<W>(m, u.narrow.data(), dim, reinterpret_cast<const uint16_t*>(u.k.data()), dim * LANES, W::STEP * LANES, dim, padded / LANES,
                         u.scores.data(), lp, false);
        } else if (Kept::STEP == 2 && dim % (2 * LANES) == 0) {
            unpack_keys<Kept>(k, padded, dim, ahead, u.k.data());
            tiled<Kept>(m, u.q.data(), lq, reinterpret_cast<const typename W::Stored*>(u.k.data()), dim * LANES, Kept::STEP * LANES, dim, padded / LANES,
                        u.scores.data(), lp, false);
        } else {
            unpack_keys<Plain<Kept>>(k, padded, dim, ahead, u.k.data());
            tiled<F32>(m, u.q.data(), lq, u.k.data(), dim * LANES, LANES, dim, padded / LANES, u.scores.data(), lp, false);
        }
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
        if (by_pairs) {
            if constexpr (std::is_same_v<typename W::Active, uint16_t>) {
                auto* pairs = reinterpret_cast<uint16_t*>(u.v.data());
                pair_values(v, seen, padded, chunk, dim, ahead, pairs);
                narrow(m, padded, u.scores.data(), lp, u.chances.data());
                tiled<W>(m, u.chances.data(), padded, pairs, chunk * LANES, W::STEP * LANES, padded, dim / LANES, u.out.data(), lq, true);
            }
        } else if (m <= ROWS) {  // V is gone over once: in place
            if (ahead) fetch(v + ahead, half * sizeof(*v));
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
