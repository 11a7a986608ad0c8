// Low-rank products of LoRA adapters beside a product of a whole batch. A row's sums have a fixed order, and depend on its own adapter only.
#pragma once
#include "lanes.h"
#include "team.h"

namespace upbeat {

inline f32x16 active_lanes(const float* p) { return load(p); }
inline f32x16 active_lanes(const uint16_t* p) { return Bf16::load(p); }

// The adapters' part of one product. a: `[adapters, segments * rank, k]`. b: `[adapters, outputs / 16][rank][16]`. numbers: each row's adapter; -1:
// none. low: `[rows]`, of `stride` floats each. Null where no row of the step has an adapter, or none changes this product.
template <typename W>
struct LowRank {
    using Stored = typename W::Stored;
    const Stored *a, *b;
    const int32_t* numbers;
    float* low;
    int rank, segments;
    long stride, outputs;

    LowRank(const void* a, const void* b, const int32_t* numbers, float* low, int rank, int segments, long stride, long outputs)
        : a(numbers ? static_cast<const Stored*>(a) : nullptr), b(static_cast<const Stored*>(b)), numbers(numbers), low(low), rank(rank), segments(segments),
          stride(stride), outputs(outputs) {}

    // low = rows of `x` times their adapters' A, over `k` inputs, a multiple of 16.
    void lower(Team& team, const typename W::Active* x, long ldx, int rows, int k) const {
        if (!a) return;
        team.split(rows, [&](int row) {
            if (numbers[row] < 0) return;
            constexpr int TOGETHER = 4;
            const int many = segments * rank;
            const Stored* matrix = a + long(numbers[row]) * many * k;
            for (int j = 0; j < many; j += TOGETHER) {
                const int n = many - j < TOGETHER ? many - j : TOGETHER;
                f32x16 sums[TOGETHER] = {};
                for (int i = 0; i < k; i += LANES) {
                    const f32x16 mine = active_lanes(x + row * ldx + i);
                    for (int t = 0; t < n; t++) sums[t] += mine * W::load(matrix + long(j + t) * k + i);
                }
                for (int t = 0; t < n; t++) low[row * stride + j + t] = sum(sums[t]);
            }
        });
    }

    // `y`, of 16 outputs from `at` on, which belong to `segment`, plus the row's low-rank product.
    f32x16 raised(f32x16 y, int row, long at, int segment = 0) const {
        if (!a || numbers[row] < 0) return y;
        const Stored* tile = b + (long(numbers[row]) * outputs + at) * rank;
        const float* mine = low + row * stride + segment * rank;
        f32x16 delta = splat(0);
        for (int r = 0; r < rank; r++) delta += mine[r] * W::load(tile + r * LANES);
        return y + delta;
    }
};

}  // namespace upbeat
