// Speed of products on this processor, and its peak, each measured for some milliseconds on one thread.
#pragma once
#include <algorithm>
#include <chrono>
#include <vector>

#include "product.h"

namespace upbeat {

// 1e9 operations/s of one thread. peak: multiply-adds between registers; product: a product whose operands are cached.
struct Speed {
    double peak = 0, product = 0;
};

inline double elapsed_s(std::chrono::steady_clock::time_point since) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

inline double peak_of_registers() {
    constexpr int SUMS = REGISTERS == 32 ? 24 : 12, TIMES = 10000;
    volatile float factor = 0.999f, summand = 0.001f, result;
    const f32r a = f32r{} + factor, b = f32r{} + summand;
    f32r s[SUMS];
    for (int j = 0; j < SUMS; j++) s[j] = a * float(j);
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < TIMES; i++)
#pragma GCC unroll 24
        for (int j = 0; j < SUMS; j++) s[j] = s[j] * a + b;
    const double took = elapsed_s(began);
    for (int j = 1; j < SUMS; j++) s[0] += s[j];
    result = s[0][0];
    (void)result;
    return 2.0 * TIMES * SUMS * REGISTER_LANES / took / 1e9;
}

// The best of several short rounds, as other processes may run meanwhile.
template <typename W>
Speed speed_of() {
    constexpr int ROUNDS = 8, TIMES = 8, M = 96, K = 512, TILES = 8;
    Team alone(1);
    const std::vector<typename W::Stored> weights(long(TILES) * LANES * K, W::of(0.01f));
    const std::vector<typename W::Active> a(long(M) * (K + LANES));
    std::vector<float> out(long(M) * TILES * LANES);
    Speed best;
    for (int round = 0; round < ROUNDS; round++) {
        best.peak = std::max(best.peak, peak_of_registers());
        const auto began = std::chrono::steady_clock::now();
        for (int i = 0; i < TIMES; i++)
            product<W>(alone, weights.data(), TILES, a.data(), K + LANES, M, K, [&](int row, int tile, const f32x16* sums, int n) {
                for (int t = 0; t < n; t++) store(out.data() + (long(row) * TILES + tile + t) * LANES, sums[t]);
            });
        best.product = std::max(best.product, 2.0 * TIMES * M * K * TILES * LANES / elapsed_s(began) / 1e9);
    }
    return best;
}

}  // namespace upbeat
