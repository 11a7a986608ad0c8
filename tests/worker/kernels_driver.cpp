// A decoder layer of the CPU kernels, without Python: against a plain reference in double, and the same bits however a sequence is cut and
// whatever it is computed beside. For processors that this machine only emulates; the tests in Python see more.
//
// Prints a line for each type: its name, the error's share, and a digest of the result's bits. Exit status 1: something is wrong.
#include <cstdio>
#include <string>

#include "layer.cpp"

namespace {

constexpr int HIDDEN = 64, HEADS = 6, KV_HEADS = 2, DIM = 32, INNER = 96, CHUNK = 32, TOKENS = 301, WORDS = 50, PAGES = 64;
constexpr int NQ = HEADS * DIM, NKV = 2 * KV_HEADS * DIM;

struct Random {
    uint32_t state;
    float next() { return int32_t(state = state * 1664525u + 1013904223u) * 0x1p-31f; }
    int below(int n) { return int((next() + 1) / 2 * n) % n; }
};

template <typename Stored>
struct Matrix {
    std::vector<Stored> plain, packed;
    int in;
    double at(int output, int input, float (*one)(Stored)) const { return one(plain[long(output) * in + input]); }
};

// One layer and an embedding of type W, number `type` at the border.
template <typename W>
struct Model {
    using Stored = typename W::Stored;
    int type;
    Shape shape = {HIDDEN, HEADS, KV_HEADS, DIM, INNER, CHUNK, 0, 0, 0, 0, 0, 0, 1e-5f, 1 / std::sqrt(float(DIM)), 1};
    Layer layer = {};
    std::vector<Stored> table, input_norm, post_norm;
    Matrix<Stored> qkv, out, gate, up, down;
    std::vector<Stored> gate_up;

    explicit Model(int type, int window) : type(type) {
        Random random = {7};
        const auto fill = [&](std::vector<Stored>& to, long count, float scale, float around) {
            for (long i = 0; i < count; i++) to.push_back(W::of(around + scale * random.next()));
        };
        const auto matrix = [&](Matrix<Stored>& m, int outputs, int in) {
            m.in = in;
            fill(m.plain, long(outputs) * in, 0.3f, 0);
            m.packed.resize(m.plain.size());
            upbeat_pack(type, m.plain.data(), m.packed.data(), outputs, in, 1);
        };
        fill(table, WORDS * HIDDEN, 1, 0);
        fill(input_norm, HIDDEN, 0.2f, 1);
        fill(post_norm, HIDDEN, 0.2f, 1);
        matrix(qkv, NQ + NKV, HIDDEN);
        matrix(out, HIDDEN, NQ);
        matrix(gate, INNER, HIDDEN);
        matrix(up, INNER, HIDDEN);
        matrix(down, HIDDEN, INNER);
        gate_up.resize(2 * INNER * HIDDEN);
        upbeat_pack(type, gate.plain.data(), gate_up.data(), INNER, HIDDEN, 2);
        upbeat_pack(type, up.plain.data(), gate_up.data() + LANES * HIDDEN, INNER, HIDDEN, 2);
        layer.input_norm = input_norm.data(), layer.post_norm = post_norm.data();
        layer.qkv = qkv.packed.data(), layer.out = out.packed.data(), layer.gate_up = gate_up.data(), layer.down = down.packed.data();
        layer.window = window;
    }
};

// Cosines and sines of a position, `[DIM]` each, the first half of the sines negated.
void rope(int position, float* cosines, float* sines) {
    for (int i = 0; i < DIM / 2; i++) {
        const double angle = position * std::pow(10000.0, -2.0 * i / DIM);
        cosines[i] = cosines[DIM / 2 + i] = float(std::cos(angle));
        sines[DIM / 2 + i] = float(std::sin(angle));
        sines[i] = -sines[DIM / 2 + i];
    }
}

// Tokens [start, start + count) of a sequence whose pages begin at page `first`.
struct Piece {
    const std::vector<int64_t>* tokens;
    int first, start, count;
};

// One step of the layer over `pieces`; their rows of the result, in order.
template <typename W>
std::vector<float> step(Team& team, const Model<W>& model, std::vector<char>& memory, const std::vector<Piece>& pieces) {
    constexpr long PAGE = long(KV_HEADS) * 2 * CHUNK * DIM * sizeof(typename W::Stored);
    int rows = 0;
    for (const Piece& p : pieces) rows += p.count;
    std::vector<float> x(rows * HIDDEN), a(rows * (NQ + LANES)), mid(rows * (INNER + LANES)), q(rows * NQ), kv(rows * NKV), cosines(rows * DIM), sines(rows * DIM);
    std::vector<int64_t> tokens, places, offsets(PAGES);
    std::vector<int32_t> slots;
    std::vector<Query> queries;
    for (int i = 0; i < PAGES; i++) offsets[i] = (i * 29 % PAGES) * PAGE;  // neighbours in a sequence lie apart
    for (const Piece& p : pieces) {
        const int row = int(tokens.size());
        queries.push_back({row, p.count, p.start, row, offsets.data() + p.first, PAGES});
        for (int i = p.start; i < p.start + p.count; i++) {
            rope(i, cosines.data() + tokens.size() * DIM, sines.data() + tokens.size() * DIM);
            tokens.push_back((*p.tokens)[i]);
            places.push_back(offsets[p.first + i / CHUNK]);
            slots.push_back(i % CHUNK);
        }
    }
    const Buffers buffers = {x.data(), a.data(), mid.data(), q.data(), kv.data(), nullptr, nullptr, cosines.data(), sines.data(), nullptr, nullptr};
    upbeat_embed(model.type, &model.shape, model.table.data(), tokens.data(), rows, x.data());
    upbeat_project(&team, model.type, &model.shape, &model.layer, &buffers, rows);
    upbeat_write(&team, model.type, &model.shape, &buffers, rows, memory.data(), places.data(), slots.data());
    upbeat_finish(&team, model.type, &model.shape, &model.layer, &buffers, queries.data(), int(queries.size()), rows, 0, memory.data());
    return x;
}

using Rows = std::vector<std::vector<double>>;

template <typename Stored>
Rows times(const Rows& x, const Matrix<Stored>& m, float (*one)(Stored), int outputs) {
    Rows y(x.size(), std::vector<double>(outputs));
    for (size_t r = 0; r < x.size(); r++)
        for (int o = 0; o < outputs; o++)
            for (int i = 0; i < m.in; i++) y[r][o] += x[r][i] * m.at(o, i, one);
    return y;
}

// The same layer over one whole sequence, in double and with nothing rounded.
template <typename W>
Rows reference(const Model<W>& model, const std::vector<int64_t>& tokens) {
    const auto normed = [](Rows x, const std::vector<typename W::Stored>& weight) {
        for (auto& row : x) {
            double squares = 0;
            for (double v : row) squares += v * v;
            for (size_t i = 0; i < row.size(); i++) row[i] *= W::one(weight[i]) / std::sqrt(squares / row.size() + 1e-5);
        }
        return x;
    };
    const int n = int(tokens.size());
    Rows x(n, std::vector<double>(HIDDEN));
    for (int r = 0; r < n; r++)
        for (int i = 0; i < HIDDEN; i++) x[r][i] = W::one(model.table[tokens[r] * HIDDEN + i]);
    Rows h = times(normed(x, model.input_norm), model.qkv, W::one, NQ + NKV);
    for (int r = 0; r < n; r++) {
        float cosines[DIM], sines[DIM];
        rope(r, cosines, sines);
        for (int head = 0; head < HEADS + KV_HEADS; head++) {
            double* at = h[r].data() + head * DIM;
            for (int i = 0; i < DIM / 2; i++) {
                const double low = at[i], high = at[DIM / 2 + i];
                at[i] = low * cosines[i] + high * sines[i];
                at[DIM / 2 + i] = high * cosines[i] - low * sines[i];
            }
        }
    }
    Rows attended(n, std::vector<double>(NQ));
    for (int r = 0; r < n; r++)
        for (int head = 0; head < HEADS; head++) {
            const int g = head / (HEADS / KV_HEADS), low = model.layer.window ? std::max(0, r - model.layer.window + 1) : 0;
            std::vector<double> scores;
            double most = -1e300, total = 0;
            for (int t = low; t <= r; t++) {
                double score = 0;
                for (int d = 0; d < DIM; d++) score += h[r][head * DIM + d] * h[t][NQ + g * DIM + d];
                scores.push_back(score / std::sqrt(double(DIM)));
                most = std::max(most, scores.back());
            }
            for (double& s : scores) total += s = std::exp(s - most);
            for (int t = low; t <= r; t++)
                for (int d = 0; d < DIM; d++) attended[r][head * DIM + d] += scores[t - low] / total * h[t][NQ + NKV / 2 + g * DIM + d];
        }
    const auto add = [&](const Rows& y) {
        for (int r = 0; r < n; r++)
            for (int i = 0; i < HIDDEN; i++) x[r][i] += y[r][i];
    };
    add(times(attended, model.out, W::one, HIDDEN));
    const Rows seen = normed(x, model.post_norm), up = times(seen, model.up, W::one, INNER);
    Rows inner = times(seen, model.gate, W::one, INNER);
    for (int r = 0; r < n; r++)
        for (int i = 0; i < INNER; i++) inner[r][i] *= up[r][i] / (1 + std::exp(-inner[r][i]));
    add(times(inner, model.down, W::one, HIDDEN));
    return x;
}

template <typename W>
bool examine(const std::string& name, int type, int window, double tolerance) {
    Team team(2);
    const Model<W> model(type, window);
    Random random = {11};
    std::vector<int64_t> tokens(TOKENS);
    for (auto& t : tokens) t = random.below(WORDS);
    std::vector<char> memory(long(PAGES) * KV_HEADS * 2 * CHUNK * DIM * sizeof(typename W::Stored));
    const int own = (TOKENS + CHUNK - 1) / CHUNK;  // pages; those of the company lie behind them
    const std::vector<float> whole = step(team, model, memory, {{&tokens, 0, 0, TOKENS}});

    double error = 0, size = 0;
    const Rows expected = reference(model, tokens);
    for (int r = 0; r < TOKENS; r++)
        for (int i = 0; i < HIDDEN; i++) {
            error += (whole[r * HIDDEN + i] - expected[r][i]) * (whole[r * HIDDEN + i] - expected[r][i]);
            size += expected[r][i] * expected[r][i];
        }
    error = std::sqrt(error / size);
    bool same = true;
    for (int round = 0; round < 9 && same; round++) {
        std::fill(memory.begin(), memory.end(), 0);
        for (int start = 0; start < TOKENS;) {
            const int longest = std::min(TOKENS - start, round % 3 == 0 ? 8 : round % 3 == 1 ? 60 : TOKENS), count = 1 + random.below(longest);
            std::vector<Piece> pieces;
            for (int n = random.below(4), page = own; n > 0; n--, page += 4) pieces.push_back({&tokens, page, 0, 1 + random.below(4 * CHUNK)});
            const int place = pieces.empty() ? 0 : random.below(int(pieces.size()));
            pieces.insert(pieces.begin() + place, {&tokens, 0, start, count});
            const std::vector<float> got = step(team, model, memory, pieces);
            int row = 0;
            for (int i = 0; i < place; i++) row += pieces[i].count;
            same = same && !memcmp(got.data() + row * HIDDEN, whole.data() + start * HIDDEN, sizeof(float) * count * HIDDEN);
            start += count;
        }
    }
    uint64_t digest = 14695981039346656037u;  // FNV-1a
    for (const float value : whole) {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        digest = (digest ^ bits) * 1099511628211u;
    }
    const bool close = error < tolerance;
    printf("%s %.1e %016llx%s%s\n", name.c_str(), error, static_cast<unsigned long long>(digest), close ? "" : " FAR FROM THE REFERENCE", same ? "" : " OTHER BITS IN OTHER COMPANY");
    return close && same;
}

}  // namespace

int main() {
    bool good = examine<F32>("float32", 0, 0, 3e-6);
    good = examine<Bf16>("bfloat16", 1, 0, 2e-2) && good;
    good = examine<F16>("float16", 2, 0, 3e-3) && good;
    good = examine<Bf16>("bfloat16-window", 1, 50, 2e-2) && good;
    return !good;
}
