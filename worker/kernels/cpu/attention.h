// Attention over paged KV, read in place, with sums and softmax in float32. If weights are multiplied by pairs, K and V are too: queries are
// bfloat16 already, and probabilities are rounded to bfloat16 before the product with V, as in FlashAttention.
//
// A page is `[kv_heads][K, V][chunk][head_dim]`. Keys are processed in order, in stripes that end at multiples of `stripe`. A row's running
// maximum, which affects every bit, changes only there. Tokens of a stripe that the query does not see count as zero. So a query's result
// depends only on its position and the tokens before it: chunked prefill, decode and recomputation give the same bits.
#pragma once
#include <type_traits>
#include <vector>

#include "paged.h"
#include "product.h"

namespace upbeat {

constexpr int BLOCK_ROWS = 192;  // query rows (tokens times heads per KV head) per unpacked stripe

// Scratch of one task: an unpacked stripe, scores of one block of rows, results.
struct Unpacked {
    const int stripe;  // tokens: whole pages, about 128
    std::vector<float> k, v, scores, out, q;
    std::vector<uint16_t> narrow, chances;  // q and probabilities as bfloat16
    Unpacked(int chunk, int dim)
        : stripe(chunk < 128 ? 128 / chunk * chunk : chunk), k(stripe * dim), v(stripe * dim), scores(ROWS * (stripe + LANES)),
          out(BLOCK_ROWS * (dim + LANES)), q(BLOCK_ROWS * (dim + LANES)), narrow(BLOCK_ROWS * dim), chances(ROWS * stripe) {}
};

// Packs K of one head like weights, in tiles of 16 tokens: `[tokens / 16][dim][16]`, in bfloat16 in pairs of dimensions. Also prefetches
// memory `ahead` values behind it, unless `ahead` is 0.
template <typename W>
inline void unpack_keys(const typename W::Stored* k, int tokens, int dim, long ahead, float* to) {
    constexpr int PAIRED = W::STEP * LANES;
    for (int t = 0; t < tokens; t += LANES)
        for (int d = 0; d < dim; d += PAIRED) {
            if (ahead)
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) __builtin_prefetch(k + (t + i) * dim + d + ahead, 0, 2);
            const auto of = [&](int i, int at) __attribute__((always_inline)) {
                const auto* row = k + (t + i) * dim + d + at * W::STEP;
                if constexpr (W::STEP == 2) return *reinterpret_cast<const f32r*>(row);
                else return W::load_register(row);
            };
            transposed(of, to + long(t) * dim / W::STEP + d / W::STEP * LANES);
        }
}

// Packs V of one head in tiles of 16 dimensions: `[dim / 16][stripe][16]`.
template <typename W>
inline void unpack_values(const typename W::Stored* v, int tokens, int stripe, int dim, float* to) {
    for (int d = 0; d < dim; d += LANES)
        for (int t = 0; t < tokens; t++) store(to + long(d) * stripe + t * LANES, W::load(v + t * dim + d));
}

// Like unpack_values, for bfloat16 in pairs of tokens: `[dim / 16][stripe / 2][16][2]`, `dim` a multiple of 32. Tokens from `seen` to `padded`
// become zero.
inline void pair_values(const uint16_t* v, int seen, int padded, int stripe, int dim, long ahead, uint16_t* to) {
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
            uint16_t* at = to + long(d) * stripe + t * LANES;
            *reinterpret_cast<u16x32*>(at) = __builtin_shuffle(one, two, low);
            *reinterpret_cast<u16x32*>(at + stripe * LANES) = __builtin_shuffle(one, two, high);
        }
}

// to[m][count * 16] = (with ADD: +=) a[m][k] times `count` tiles. apart: distance of tiles; stride: from one input to the next. m is at most
// most_rows<W>(); few rows take several tiles at a time.
template <typename W, bool ADD>
inline void tiled(int m, const typename W::Active* a, long lda, const typename W::Stored* tiles, long apart, long stride, int k, int count, float* to, long ld) {
    int t = 0;
    const auto some = [&](auto wide) {
        constexpr int T = decltype(wide)::value;
        const typename W::Stored* b[T];
        for (int j = 0; j < T; j++) b[j] = tiles + (t + j) * apart;
        rows<W, T, ADD>(m, a, lda, b, stride, k, to + t * LANES, ld);
        t += T;
    };
    const int wide = tiles_at_once<W>(m);
    while (wide >= 4 && t + 4 <= count) some(std::integral_constant<int, 4>());
    while (wide >= 2 && t + 2 <= count) some(std::integral_constant<int, 2>());
    while (t < count) some(std::integral_constant<int, 1>());
}

inline int up(int tokens) { return (tokens + LANES - 1) / LANES * LANES; }

// Rounds `[m][n]` to bfloat16.
inline void narrow(int m, int n, const float* from, long ld, uint16_t* to) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j += LANES) Bf16::store(to + i * n + j, load(from + i * ld + j));
}

// Softmax of a row's scores of `padded` tokens, of which it sees [low, high], into `chances`. Rescales `most`, `total` (by lane) and the row of
// `out` to the new maximum. scale: includes log2 e. WHOLE: the row sees all tokens.
template <bool WHOLE, typename Chance>
inline void soften(const float* scores, int padded, int low, int high, float scale, int dim, float& most, f32x16& total, float* out, Chance* chances) {
    const i32x16 count = counting();
    const auto seen = [&](int t, f32x16 x, float otherwise) { return WHOLE ? x : choose((count <= high - t) & (count >= low - t), x, splat(otherwise)); };
    f32x16 top = splat(UNSEEN);
    for (int t = 0; t < padded; t += LANES) top = larger(seen(t, load(scores + t), UNSEEN), top);
    const float here = largest(top) * scale;
    if (here > most) {
        const f32x16 shrunk = halving(splat(most - here));
        total *= shrunk;
        for (int d = 0; d < dim; d += LANES) store(out + d, load(out + d) * shrunk);
        most = here;
    }
    for (int t = 0; t < padded; t += LANES) {
        const f32x16 e = seen(t, halving(load(scores + t) * scale - most), 0);
        total += e;
        put(chances + t, e);
    }
}

// Attention of `tokens` tokens of `query` from token `first` on, for the heads of KV head `g`, into out `[row][heads * dim]` with `out_stride`.
template <typename W>
void attend(const AttentionShape& s, const char* base, const Query& query, int layer, int first, int tokens, int g, const float* q, long q_stride,
            typename W::Active* out, long out_stride, Unpacked& u) {
    constexpr bool PAIRS = std::is_same_v<typename W::Active, uint16_t>;
    using Stored = typename W::Stored;
    using Kept = std::conditional_t<std::is_same_v<Stored, uint16_t>, Bf16, W>;  // the type of pages
    const int group = s.heads / s.kv_heads, dim = s.dim, chunk = s.chunk, stripe = u.stripe, m = tokens * group;
    const long lq = dim + LANES, lp = stripe + LANES, half = long(chunk) * dim, head = g * 2 * half;
    const float scale = s.scale * LOG2_E;
    float most[BLOCK_ROWS];
    f32x16 total[BLOCK_ROWS];
    for (int i = 0; i < m; i++) {
        const float* from = q + (query.row + first + i / group) * q_stride + (g * group + i % group) * dim;
        memcpy(u.q.data() + i * lq, from, dim * sizeof(float));
        memset(u.out.data() + i * lq, 0, dim * sizeof(float));
        most[i] = UNSEEN;
        total[i] = splat(0);
    }
    const bool paired = dim % (2 * LANES) == 0, by_pairs = PAIRS && paired, once = m <= most_rows<Kept>();
    const bool keys_by_pairs = Kept::STEP == 2 && paired && (by_pairs || once || SPAN == 1);  // else K is widened to float32, which is faster with many rows
    if (by_pairs) narrow(m, dim, u.q.data(), lq, u.narrow.data());
    const int begin = query.start + first, last = begin + tokens - 1;
    const int lowest = s.window && begin - s.window + 1 > 0 ? begin - s.window + 1 : 0;
    const int64_t* pages = query.pages + layer * query.pages_a_layer;
    const auto keys = [&](int token) { return reinterpret_cast<const Stored*>(base + pages[token / chunk]) + head; };
    auto* pairs = reinterpret_cast<uint16_t*>(u.v.data());
    for (int at = lowest / chunk * chunk, end; at <= last; at = end) {
        end = (at / stripe + 1) * stripe;
        const int known = end <= last ? end - at : last + 1 - at;
        for (int t = 0; t < known; t += chunk) {
            const int seen = known - t < chunk ? known - t : chunk, padded = up(seen);
            const Stored* k = keys(at + t);
            // With few rows memory is the bottleneck: prefetch the next page, or the next head's first page.
            long ahead = 0;
            if (once && at + t + chunk <= last)
                ahead = keys(at + t + chunk) - k;
            else if (once && g + 1 < s.kv_heads)
                ahead = keys(lowest) - k + 2 * half;
            if (keys_by_pairs)
                unpack_keys<Kept>(k, padded, dim, ahead, u.k.data() + long(t) * dim / 2);
            else
                unpack_keys<Plain<Kept>>(k, padded, dim, ahead, u.k.data() + long(t) * dim);
            if constexpr (PAIRS)
                if (by_pairs) {
                    pair_values(k + half, seen, padded, stripe, dim, ahead, pairs + t * LANES);
                    continue;
                }
            if (!once)
                unpack_values<W>(k + half, seen, stripe, dim, u.v.data() + t * LANES);
            else if (ahead)
                fetch(k + half + ahead, half * sizeof(Stored));
        }
        for (int i = 0; i < m; i += ROWS) {
            const int n = m - i < ROWS ? m - i : ROWS, low = begin + i / group - at, high = begin + (i + n - 1) / group - at;
            const int seen = high < known ? high + 1 : known, padded = up(seen), tiles = padded / LANES;
            if (seen <= 0) continue;
            const bool whole = !s.window && padded <= low + 1;
            float *scores = u.scores.data(), *to = u.out.data() + i * lq;
            const auto soften_to = [&](auto* chances, long ld) {
                using Chance = std::remove_pointer_t<decltype(chances)>;
                const auto soft = whole ? soften<true, Chance> : soften<false, Chance>;
                for (int r = 0; r < n; r++) {
                    const int own = begin + (i + r) / group - at, from = s.window ? own - s.window + 1 : 0;
                    soft(scores + r * lp, padded, from, own, scale, dim, most[i + r], total[i + r], to + r * lq, chances + r * ld);
                }
            };
            const auto* unpacked = reinterpret_cast<const Stored*>(u.k.data());
            if constexpr (PAIRS)
                if (by_pairs) {
                    tiled<W, false>(n, u.narrow.data() + i * dim, dim, unpacked, dim * LANES, W::STEP * LANES, dim, tiles, scores, lp);
                    soften_to(u.chances.data(), stripe);
                    tiled<W, true>(n, u.chances.data(), stripe, pairs, stripe * LANES, W::STEP * LANES, padded, dim / LANES, to, lq);
                    continue;
                }
            if (keys_by_pairs)
                tiled<Kept, false>(n, u.q.data() + i * lq, lq, unpacked, dim * LANES, Kept::STEP * LANES, dim, tiles, scores, lp);
            else
                tiled<F32, false>(n, u.q.data() + i * lq, lq, u.k.data(), dim * LANES, LANES, dim, tiles, scores, lp);
            soften_to(scores, lp);
            if (!once) tiled<F32, true>(n, scores, lp, u.v.data(), stripe * LANES, LANES, seen, dim / LANES, to, lq);
            for (int t = 0; once && t < seen; t += chunk)  // V is read once, so in place
                tiled<Plain<Kept>, true>(n, scores + t, lp, keys(at + t) + half, LANES, dim, seen - t < chunk ? seen - t : chunk, dim / LANES, to, lq);
        }
    }
    for (int i = 0; i < m; i++) {
        auto* to = out + (query.out_row + first + i / group) * out_stride + (g * group + i % group) * dim;
        const float all = sum(total[i]);
        for (int d = 0; d < dim; d += LANES) put(to + d, W::rounded(load(u.out.data() + i * lq + d) / all));
    }
}

}  // namespace upbeat
