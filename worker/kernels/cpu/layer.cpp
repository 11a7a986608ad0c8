// A decoder layer of the Llama family over packed tokens, in three calls: project, write, finish. The interface is plain C, so that it
// builds without headers of other libraries and is called without copies.
//
// Activations are float32 in memory, rounded to the model's type after every operation, like in the published implementations. The caller
// owns all buffers; only threads and their scratch memory are kept between calls.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <tuple>

#include "attention.h"
#include "coded.h"
#include "experts.h"
#include "low_rank.h"
#include "speed.h"
#include "tile_attention.h"

using namespace upbeat;

extern "C" {

struct Shape {
    int32_t hidden, heads, kv_heads, dim, intermediate, chunk;
    int32_t experts, per_token, expert_size, norm_weights;  // 0 without experts
    int32_t gemma;                                          // norms multiply by 1 + weight, and the gate is GELU
    int32_t rank;                                           // of LoRA adapters; 0 without
    float eps, attention_scale, embedding_scale;
};

// Weights of one layer. Matrices are packed in tiles, vectors are plain; null if the model has none. gate_up alternates gate tiles with the up
// tiles of the same outputs. router `[experts, hidden]` is plain, null if the layer has no experts; with experts, gate_up and down have those of
// all experts, one after the other. attended_norm and mlp_norm, null in most families, follow the products with out and down. Matrices of LoRA
// adapters: see low_rank.h. coded_*: of matrices of few bits, whose other pointer is not used.
struct Layer {
    const void *input_norm, *post_norm, *qkv, *out, *gate_up, *down, *qkv_bias, *out_bias, *gate_up_bias, *down_bias, *q_norm, *k_norm, *router, *attended_norm, *mlp_norm;
    const void *qkv_a, *qkv_b, *out_a, *out_b, *gate_up_a, *gate_up_b, *down_a, *down_b;
    int32_t window;
    Coded coded_qkv, coded_out, coded_gate_up, coded_down;
};

// One step's buffers: x `[tokens, hidden]`, a (normed or attended) and mid, q `[tokens, heads * dim]`, kv `[tokens, 2 * kv_heads * dim]`,
// cos and sin `[tokens, dim]`, the first half of sin negated. Rows of `a` and `mid` are padded by 16 values; those are of W::Active.
// With experts: routed `[tokens, experts]`, spare `[tokens * per_token, hidden]` (padded), and mid has rows for `tokens * per_token` pairs. With
// norms behind products: spare `[tokens, hidden]` (padded). adapters: each row's LoRA adapter, -1: none; null: no row has one. low `[tokens, 3 * rank]`.
struct Buffers {
    float* x;
    void *a, *mid;
    float *q, *kv, *routed;
    void* spare;
    const float *cos, *sin;
    const int32_t* adapters;
    float* low;
};

}  // extern "C"

namespace {

long padded(long n) { return n + LANES; }

constexpr int MOST_SEGMENTS = 3;  // projections of one product: q, k and v

template <typename W>
LowRank<W> low_rank(const Shape& s, const Buffers& b, const void* a, const void* matrix_b, int segments, long outputs) {
    return {a, matrix_b, b.adapters, b.low, s.rank, segments, MOST_SEGMENTS * s.rank, outputs};
}

// Calls to(i, values) with the values of x's norm at every 16th `i` below `n`.
template <typename W, typename To>
void norm_row(const Shape& s, const float* x, const void* weight, int n, const To& to) {
    const auto* w = static_cast<const typename W::Stored*>(weight);
    f32x16 squares = splat(0);
    for (int i = 0; i < n; i += LANES) squares += load(x + i) * load(x + i);
    const float scale = 1.0f / std::sqrt(sum(squares) / n + s.eps);
    for (int i = 0; i < n; i += LANES) {
        const f32x16 gain = W::load(w + i), y = load(x + i) * scale;
        to(i, W::rounded(s.gemma ? y * (gain + 1.0f) : gain * W::rounded(y)));
    }
}

template <typename W, typename Out>
void norm_rows(Team& team, const Shape& s, const float* x, long stride, const void* weight, int rows, Out* out, long out_stride) {
    team.split(rows, [&](int row) { norm_row<W>(s, x + row * stride, weight, s.hidden, [&](int i, f32x16 y) { put(out + row * out_stride + i, y); }); });
}

template <typename W>
typename W::Active* active(void* buffer) {
    return static_cast<typename W::Active*>(buffer);
}

template <typename W>
f32x16 bias_of(const void* bias, long at) {
    return bias ? W::load(static_cast<const typename W::Stored*>(bias) + at) : splat(0);
}

template <typename W>
void head_finish(const Shape& s, float* x, const void* norm, const float* cos, const float* sin) {
    if (norm) norm_row<W>(s, x, norm, s.dim, [&](int i, f32x16 y) { store(x + i, y); });
    const int half = s.dim / 2;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = W::one(W::of(a * cos[i] + b * sin[i]));
        x[half + i] = W::one(W::of(b * cos[half + i] + a * sin[half + i]));
    }
}

// The product of `a [m, k]`, padded, with a matrix of the layer, packed in W's tiles or coded. done: see `Cut::run`.
template <typename W, typename Done>
void times(Team& team, const void* weights, const Coded& coded, int tiles, const void* a, int m, int k, const Done& done) {
    if constexpr (std::is_same_v<typename W::Active, float>)
        if (coded.codes) return coded_product(team, coded, tiles, static_cast<const float*>(a), padded(k), m, k, done);
    product<W>(team, static_cast<const typename W::Stored*>(weights), tiles, static_cast<const typename W::Active*>(a), padded(k), m, k, done);
}

template <typename W>
void project(Team& team, const Shape& s, const Layer& l, const Buffers& b, int tokens) {
    const int n = (s.heads + 2 * s.kv_heads) * s.dim, nq = s.heads * s.dim, nkv = 2 * s.kv_heads * s.dim;
    norm_rows<W>(team, s, b.x, s.hidden, l.input_norm, tokens, active<W>(b.a), padded(s.hidden));
    const auto lora = low_rank<W>(s, b, l.qkv_a, l.qkv_b, 3, n);
    lora.lower(team, active<W>(b.a), padded(s.hidden), tokens, s.hidden);
    times<W>(team, l.qkv, l.coded_qkv, n / LANES, b.a, tokens, s.hidden, [&](int row, int tile, const f32x16* sums, int n) {
        for (int t = 0; t < n; t++) {
            const int at = (tile + t) * LANES;
            const int segment = at < nq ? 0 : at < nq + nkv / 2 ? 1 : 2;
            const f32x16 y = W::rounded(lora.raised(sums[t] + bias_of<W>(l.qkv_bias, at), row, at, segment));
            store(at < nq ? b.q + long(row) * nq + at : b.kv + long(row) * nkv + at - nq, y);
        }
    });
    team.split(tokens, [&](int row) {
        const float *cos = b.cos + long(row) * s.dim, *sin = b.sin + long(row) * s.dim;
        for (int h = 0; h < s.heads; h++) head_finish<W>(s, b.q + long(row) * nq + h * s.dim, l.q_norm, cos, sin);
        for (int h = 0; h < s.kv_heads; h++) head_finish<W>(s, b.kv + long(row) * nkv + h * s.dim, l.k_norm, cos, sin);
    });
}

template <typename W>
void write(Team& team, const Shape& s, const Buffers& b, int tokens, char* base, const int64_t* pages, const int32_t* slots) {
    const int nkv = 2 * s.kv_heads * s.dim;
    team.split(tokens, [&](int row) {
        auto* page = reinterpret_cast<typename W::Stored*>(base + pages[row]);
        for (int g = 0; g < s.kv_heads; g++)
            for (int which = 0; which < 2; which++) {
                const float* from = b.kv + long(row) * nkv + (which * s.kv_heads + g) * s.dim;
                auto* to = page + ((long(g) * 2 + which) * s.chunk + slots[row]) * s.dim;
                for (int d = 0; d < s.dim; d += LANES) W::store(to + d, load(from + d));
            }
    });
}

// Scratch memory per thread and sizes, as models that take turns have different sizes.
template <typename Scratch, typename... Sizes>
Scratch& scratch(Sizes... sizes) {
    static thread_local std::map<std::tuple<Sizes...>, std::unique_ptr<Scratch>> made;
    auto& one = made[std::make_tuple(sizes...)];
    if (!one) one.reset(new Scratch(sizes...));
    return *one;
}

template <typename W>
void attend_all(Team& team, const Shape& s, const Layer& l, const Buffers& b, const Query* queries, int count, int layer, const char* base) {
    struct Task {
        int query, first, tokens, head;
    };
    std::vector<Task> tasks;
    const bool by_tiles = W::TILES && s.dim % 32 == 0 && s.chunk % 32 == 0;
    const int group = s.heads / s.kv_heads, most = std::max((by_tiles ? TILE_TASK_ROWS : BLOCK_ROWS) / group, 1);
    for (int i = 0; i < count; i++)
        for (int first = (queries[i].count - 1) / most * most; first >= 0; first -= most)  // the longest first
            for (int g = 0; g < s.kv_heads; g++) tasks.push_back({i, first, std::min(most, queries[i].count - first), g});
    const AttentionShape shape = {s.heads, s.kv_heads, s.dim, s.chunk, l.window, s.attention_scale};
    team.split(int(tasks.size()), [&](int i) {
        const Task& t = tasks[i];
        const auto with = [&](auto attend, auto& scratch) {
            attend(shape, base, queries[t.query], layer, t.first, t.tokens, t.head, b.q, long(s.heads) * s.dim, active<W>(b.a), padded(s.heads * s.dim),
                   scratch);
        };
#if defined(UPBEAT_TILES)
        if constexpr (W::TILES)
            if (by_tiles) return with(attend_by_tiles, scratch<TileScratch>(s.dim));
#endif
        with(attend<W>, scratch<Unpacked>(s.chunk, s.dim));
    });
}

// What follows a product with gate_up: rows of `mid`, of `width` values each, are silu(gate) * up, or with `gelu` gelu(gate) * up. By tanh,
// gelu(x) = x / 2 * (1 + tanh(y)) = x / (1 + exp(-2 y)).
template <typename W>
auto gated(typename W::Active* mid, int width, const void* bias, bool gelu, LowRank<W> lora) {
    return [=](int row, int tile, const f32x16* sums, int n) {
        for (int t = 0; t < n; t += 2) {
            const long at = long((tile + t) / 2) * LANES;
            const f32x16 gate = W::rounded(lora.raised(sums[t] + bias_of<W>(bias, at), row, at, 0));
            const f32x16 up = W::rounded(lora.raised(sums[t + 1] + bias_of<W>(bias, width + at), row, width + at, 1));
            const f32x16 slope = gelu ? gate * (gate * gate * 0.044715f + 1.0f) * 1.5957691216f : gate;
            const f32x16 swish = W::rounded(gate / (exponential(-slope) + 1.0f));
            put(mid + row * padded(width) + at, W::rounded(swish * up));
        }
    };
}

// Adds to `rows` rows of x what their experts make of the normed rows in a; a row's outputs are summed in float32.
template <typename W>
void mix_experts(Team& team, const Shape& s, const Layer& l, const Buffers& b, int rows) {
    using Stored = typename W::Stored;
    using Active = typename W::Active;
    const long wide = padded(s.hidden);
    if constexpr (!std::is_same_v<Active, float>)  // the router multiplies float32
        norm_rows<W>(team, s, b.x, s.hidden, l.post_norm, rows, static_cast<float*>(b.a), wide);
    plain_product<W>(team, static_cast<const Stored*>(l.router), s.experts, static_cast<float*>(b.a), wide, rows, s.hidden, b.routed, s.experts);
    if constexpr (!std::is_same_v<Active, float>)
        norm_rows<W>(team, s, b.x, s.hidden, l.post_norm, rows, active<W>(b.a), wide);
    const Routes routes = routes_of<W>(team, b.routed, rows, s.experts, s.per_token, s.norm_weights);
    team.split(int(routes.pairs.size()), [&](int place) {
        memcpy(active<W>(b.spare) + place * wide, active<W>(b.a) + routes.pairs[place] / s.per_token * wide, sizeof(Active) * s.hidden);
    });
    grouped_product<W>(team, static_cast<const Stored*>(l.gate_up), routes.groups, routes.experts, 2 * s.expert_size / LANES, active<W>(b.spare), wide,
                       s.hidden, gated<W>(active<W>(b.mid), s.expert_size, nullptr, false, low_rank<W>(s, b, nullptr, nullptr, 2, 0)));
    float* outputs = static_cast<float*>(b.spare);  // the experts' inputs are no longer needed
    grouped_product<W>(team, static_cast<const Stored*>(l.down), routes.groups, routes.experts, s.hidden / LANES, active<W>(b.mid), padded(s.expert_size),
                       s.expert_size, [&](int place, int tile, const f32x16* sums, int n) {
                           for (int t = 0; t < n; t++) store(outputs + place * wide + (tile + t) * LANES, W::rounded(sums[t]));
                       });
    team.split(rows, [&](int row) {
        for (int i = 0; i < s.hidden; i += LANES) {
            f32x16 sum = splat(0);
            for (int pair = row * s.per_token; pair < (row + 1) * s.per_token; pair++)
                sum += W::rounded(load(outputs + routes.places[pair] * wide + i) * routes.weights[pair]);
            float* x = b.x + long(row) * s.hidden + i;
            store(x, W::rounded(load(x) + W::rounded(sum)));
        }
    });
}

template <typename W>
void finish(Team& team, const Shape& s, const Layer& l, const Buffers& b, const Query* queries, int count, int rows, int layer, const char* base) {
    attend_all<W>(team, s, l, b, queries, count, layer, base);
    // x += the product with these weights, or with a norm behind it, x += that norm of the product.
    const auto add_product = [&](const void* weights, const Coded& coded, const void* bias, const void* norm, const void* a, int in, const LowRank<W>& lora) {
        const long wide = padded(s.hidden);
        float* spare = static_cast<float*>(b.spare);
        lora.lower(team, static_cast<const typename W::Active*>(a), padded(in), rows, in);
        times<W>(team, weights, coded, s.hidden / LANES, a, rows, in, [&](int row, int tile, const f32x16* sums, int n) {
            for (int t = 0; t < n; t++) {
                const int at = (tile + t) * LANES;
                const f32x16 y = W::rounded(lora.raised(sums[t] + bias_of<W>(bias, at), row, at));
                float* x = b.x + long(row) * s.hidden + at;
                norm ? store(spare + row * wide + at, y) : store(x, W::rounded(load(x) + y));
            }
        });
        if (!norm) return;
        team.split(rows, [&](int row) {
            float* x = b.x + long(row) * s.hidden;
            norm_row<W>(s, spare + row * wide, norm, s.hidden, [&](int i, f32x16 y) { store(x + i, W::rounded(load(x + i) + y)); });
        });
    };
    add_product(l.out, l.coded_out, l.out_bias, l.attended_norm, b.a, s.heads * s.dim, low_rank<W>(s, b, l.out_a, l.out_b, 1, s.hidden));
    norm_rows<W>(team, s, b.x, s.hidden, l.post_norm, rows, active<W>(b.a), padded(s.hidden));
    if (l.router) return mix_experts<W>(team, s, l, b, rows);
    const auto of_gate_up = low_rank<W>(s, b, l.gate_up_a, l.gate_up_b, 2, 2L * s.intermediate);
    of_gate_up.lower(team, active<W>(b.a), padded(s.hidden), rows, s.hidden);
    times<W>(team, l.gate_up, l.coded_gate_up, 2 * s.intermediate / LANES, b.a, rows, s.hidden,
             gated<W>(active<W>(b.mid), s.intermediate, l.gate_up_bias, s.gemma, of_gate_up));
    add_product(l.down, l.coded_down, l.down_bias, l.mlp_norm, b.mid, s.intermediate, low_rank<W>(s, b, l.down_a, l.down_b, 1, s.hidden));
}

template <typename W>
void pack_tiles(const typename W::Stored* from, typename W::Stored* to, long outputs, long in, long stride_tiles) {
    for (long tile = 0; tile < outputs / LANES; tile++)
        for (long k = 0; k < in; k++)
            for (int lane = 0; lane < LANES; lane++) to[(tile * stride_tiles * in + k / W::STEP * W::STEP) * LANES + lane * W::STEP + k % W::STEP] = from[(tile * LANES + lane) * in + k];
}

template <typename W>
void embed_rows(const Shape& s, const typename W::Stored* table, const int64_t* tokens, int count, float* x) {
    for (int row = 0; row < count; row++)
        for (int i = 0; i < s.hidden; i += LANES)
            store(x + long(row) * s.hidden + i, W::rounded(W::load(table + tokens[row] * s.hidden + i) * s.embedding_scale));
}

// Whether products by W agree with the portable ones, and give a row the same bits in any batch.
template <typename W>
bool agrees() {
    constexpr int K = 96, TILES = 5, OUT = TILES * LANES, MOST = 40;
    Team alone(1);
    std::vector<uint16_t> weights(OUT * K), narrow(MOST * K);
    std::vector<float> wide(MOST * K), expected(MOST * OUT), whole(MOST * OUT), got(MOST * OUT);
    uint32_t state = 1;
    const auto draw = [&] { return Bf16::of(int32_t(state = state * 1664525u + 1013904223u) * 0x1p-31f); };
    for (auto& w : weights) w = draw();
    for (int i = 0; i < MOST * K; i++) wide[i] = Bf16::one(narrow[i] = draw());
    const auto into = [&](std::vector<float>& to) {
        return [&](int row, int tile, const f32x16* sums, int n) {
            for (int t = 0; t < n; t++) store(to.data() + row * OUT + (tile + t) * LANES, sums[t]);
        };
    };
    product<Bf16>(alone, weights.data(), TILES, wide.data(), K, MOST, K, into(expected));
    product<W>(alone, weights.data(), TILES, narrow.data(), K, MOST, K, into(whole));
    for (int i = 0; i < MOST * OUT; i++)
        if (!(std::fabs(whole[i] - expected[i]) < 1e-4f)) return false;
    for (int rows : {1, 2, 7, 16, 17, 33})
        for (int first = 0; first + rows <= MOST; first += 7) {
            product<W>(alone, weights.data(), TILES, narrow.data() + first * K, K, rows, K, into(got));
            if (memcmp(got.data(), whole.data() + first * OUT, sizeof(float) * rows * OUT)) return false;
        }
    return true;
}

}  // namespace

#if defined(UPBEAT_PAIRS)
#define FOR_PAIRS(call) case 3: { using W = Bf16Pairs; call; break; }
#else
#define FOR_PAIRS(call)
#endif
#if defined(UPBEAT_TILES)
#define FOR_TILES(call) case 4: { using W = Bf16Tiles; call; break; }
#else
#define FOR_TILES(call)
#endif
#define FOR_TYPE(type, call)          \
    switch (type) {                   \
        case 0: { using W = F32; call; break; }  \
        case 1: { using W = Bf16; call; break; } \
        case 2: { using W = F16; call; break; }  \
        FOR_PAIRS(call)                          \
        FOR_TILES(call)                          \
    }

extern "C" {

// Whether products of `type` (3: pairs of bfloat16, 4: tiles of bfloat16) are usable: compiled in, allowed by the system, and correct.
int upbeat_usable(int type) {
#if defined(UPBEAT_PAIRS)
    if (type == 3) return agrees<Bf16Pairs>();
#endif
#if defined(UPBEAT_TILES)
    if (type == 4) return tiles_allowed() && agrees<Bf16Tiles>();
#endif
    return 0;
}

// Name of the registers that this library was built for.
const char* upbeat_registers() { return REGISTERS_NAME; }

// Measures the speed of products of `type`; takes some ten milliseconds.
void upbeat_speed(int type, Speed* to) { FOR_TYPE(type, *to = speed_of<W>()) }

void* upbeat_team(int threads) { return new Team(threads); }
void upbeat_team_use(void* team, int width) { static_cast<Team*>(team)->use(width); }
void upbeat_team_end(void* team) { delete static_cast<Team*>(team); }

// Packs `from [outputs, in]` into every `spread`-th tile of `to`. Both have the model's type; `outputs` is a multiple of 16.
void upbeat_pack(int type, const void* from, void* to, int64_t outputs, int64_t in, int64_t spread) {
    FOR_TYPE(type, pack_tiles<W>(static_cast<const W::Stored*>(from), static_cast<W::Stored*>(to), outputs, in, spread))
}
void upbeat_embed(int type, const Shape* s, const void* table, const int64_t* tokens, int count, float* x) {
    FOR_TYPE(type, embed_rows<W>(*s, static_cast<const W::Stored*>(table), tokens, count, x))
}
void upbeat_project(void* team, int type, const Shape* s, const Layer* l, const Buffers* b, int tokens) {
    FOR_TYPE(type, project<W>(*static_cast<Team*>(team), *s, *l, *b, tokens))
}
void upbeat_write(void* team, int type, const Shape* s, const Buffers* b, int tokens, void* base, const int64_t* pages, const int32_t* slots) {
    FOR_TYPE(type, write<W>(*static_cast<Team*>(team), *s, *b, tokens, static_cast<char*>(base), pages, slots))
}
// Attention of `queries` and the rest of the layer for `rows` rows of b->x, in place.
void upbeat_finish(void* team, int type, const Shape* s, const Layer* l, const Buffers* b, const Query* queries, int count, int rows, int layer,
                   const void* base) {
    FOR_TYPE(type, finish<W>(*static_cast<Team*>(team), *s, *l, *b, queries, count, rows, layer, static_cast<const char*>(base)))
}
// float32 logits `[rows, vocabulary]`; `head` plain.
void upbeat_logits(void* team, int type, const Shape* s, const void* norm, const void* head, int64_t vocabulary, const Buffers* b, int rows, float* out) {
    Team& t = *static_cast<Team*>(team);
    FOR_TYPE(type, norm_rows<W>(t, *s, b->x, s->hidden, norm, rows, static_cast<float*>(b->a), padded(s->hidden));
             plain_product<W>(t, static_cast<const W::Stored*>(head), vocabulary, static_cast<float*>(b->a), padded(s->hidden), rows, s->hidden, out,
                              vocabulary))
}

}  // extern "C"
