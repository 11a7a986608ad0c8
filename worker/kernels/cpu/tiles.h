// The processor's tile registers (AMX): eight, with 16 rows of 64 bytes each. One instruction adds the product of two to a third.
#pragma once
#include "dot.h"

namespace upbeat {

#if defined(UPBEAT_TILES)

struct TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // All eight tiles at full size.
    static const TileShapes& full() {
        static const TileShapes shapes = [] {
            TileShapes made;
            for (int i = 0; i < 8; i++) made.row_bytes[i] = 64, made.rows[i] = 16;
            return made;
        }();
        return shapes;
    }
};

#if defined(UPBEAT_EMULATE)
struct EmulatedTiles {
    TileShapes shapes;
    unsigned char bytes[8][16][64];
};
inline EmulatedTiles& emulated() {
    static thread_local EmulatedTiles tiles;
    return tiles;
}
inline void emulated_copy(int tile, char* memory, long stride, bool store) {
    EmulatedTiles& e = emulated();
    for (int r = 0; r < e.shapes.rows[tile]; r++)
        store ? memcpy(memory + r * stride, e.bytes[tile][r], e.shapes.row_bytes[tile]) : memcpy(e.bytes[tile][r], memory + r * stride, e.shapes.row_bytes[tile]);
}
inline void emulated_dot(int to, int a, int b) {
    EmulatedTiles& e = emulated();
    for (int m = 0; m < e.shapes.rows[to]; m++)
        for (int n = 0; n < e.shapes.row_bytes[to] / 4; n++) {
            float even = 0, odd = 0, sum;
            for (int k = 0; k < e.shapes.row_bytes[a] / 4; k++) {
                uint16_t x[2], y[2];
                memcpy(x, e.bytes[a][m] + 4 * k, 4);
                memcpy(y, e.bytes[b][k] + 4 * n, 4);
                even += Bf16::one(x[0]) * Bf16::one(y[0]);
                odd += Bf16::one(x[1]) * Bf16::one(y[1]);
            }
            memcpy(&sum, e.bytes[to][m] + 4 * n, 4);
            sum += even + odd;
            memcpy(e.bytes[to][m] + 4 * n, &sum, 4);
        }
}
#define TILE_SHAPES(shapes_) (emulated().shapes = (shapes_))
#define TILE_ZERO(tile) memset(emulated().bytes[tile], 0, sizeof(emulated().bytes[tile]))
#define TILE_LOAD(tile, from, stride) emulated_copy(tile, const_cast<char*>(reinterpret_cast<const char*>(from)), stride, false)
#define TILE_STORE(tile, to, stride) emulated_copy(tile, reinterpret_cast<char*>(to), stride, true)
#define TILE_DOT(to, a, b) emulated_dot(to, a, b)
inline void tiles_done() {}
inline bool tiles_allowed() { return true; }
#else
#define TILE_SHAPES(shapes_) _tile_loadconfig(&(shapes_))
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT(to, a, b) _tile_dpbf16ps(to, a, b)
// Releases the tiles, so that the system need not save them for a sleeping thread.
inline void tiles_done() { _tile_release(); }
// A process must ask the system for permission to use tiles.
inline bool tiles_allowed() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

// sums[m][t] = `n` rows of `a` times tiles `b[t]`, over `k` inputs, a multiple of 32. Up to 16 rows and four tiles, or 32 rows and two.
template <int T>
inline void tile_rows(int n, const uint16_t* a, long lda, const uint16_t* const* b, int k, f32x16 (*sums)[T]) {
    static_assert(T == 1 || T == 2 || T == 4, "four sums at most");
    constexpr int DEPTH = 32, WIDE = 64;
    const int upper = n < 16 ? n : 16, lower = n - upper;
    TileShapes shapes = TileShapes::full();
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = uint8_t(upper);
    shapes.rows[2] = shapes.rows[3] = uint8_t(T == 4 ? upper : lower ? lower : 1);
    shapes.rows[5] = uint8_t(lower ? lower : 1);
    TILE_SHAPES(shapes);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    const long stride = lda * 2;
    for (int i = 0; i < k; i += DEPTH) {
        TILE_LOAD(4, a + i, stride);
        TILE_LOAD(6, b[0] + long(i) * LANES, WIDE);
        TILE_DOT(0, 4, 6);
        if constexpr (T > 1) {
            TILE_LOAD(7, b[1] + long(i) * LANES, WIDE);
            TILE_DOT(1, 4, 7);
        }
        if constexpr (T == 4) {
            TILE_LOAD(6, b[2] + long(i) * LANES, WIDE);
            TILE_DOT(2, 4, 6);
            TILE_LOAD(7, b[3] + long(i) * LANES, WIDE);
            TILE_DOT(3, 4, 7);
        } else if (lower) {
            TILE_LOAD(5, a + 16 * lda + i, stride);
            TILE_DOT(2, 5, 6);
            if constexpr (T == 2) TILE_DOT(3, 5, 7);
        }
    }
    constexpr long row = T * sizeof(f32x16);
    TILE_STORE(0, &sums[0][0], row);
    if constexpr (T > 1) TILE_STORE(1, &sums[0][1], row);
    if constexpr (T == 4) {
        TILE_STORE(2, &sums[0][2], row);
        TILE_STORE(3, &sums[0][3], row);
    } else if (lower) {
        TILE_STORE(2, &sums[16][0], row);
        if constexpr (T == 2) TILE_STORE(3, &sums[16][1], row);
    }
}

#else
template <int T>
inline void tile_rows(int, const uint16_t*, long, const uint16_t* const*, int, f32x16 (*)[T]) {}
inline void tiles_done() {}
inline bool tiles_allowed() { return false; }
#endif

}  // namespace upbeat
