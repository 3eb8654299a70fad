// What a quantizer is handed, where everything lies, and how work is shared out.
//
// Legend: K columns, G groups; a tile is 128 rows of one group (the last one may hold fewer); W columns of a strip. One
// unit of work is a tile by a strip: it is read once, and all that is made of it is written while it is in the cache.
#pragma once
#include <atomic>
#include <cfenv>
#include <thread>
#include <vector>

#include "simd.h"

constexpr i64 TILE = 128, W = 256;
enum Layout { COMPACT = 0, SWIZZLED = 1, SWIZZLED_8X4 = 2, LINEAR = 3 };

struct Plane {
    u8* data;
    u8* scale;  // float for the FP8 formats
    float* amax;
    i64 data_bytes, scale_bytes;
};

struct Args {
    const char* x;
    i64 ldx;  // elements from row to row
    const i64* offsets;
    i64 groups, capacity, columns;
    Plane row, col;  // data null: not asked for
    const float* amax;  // (2, G), row-scaled in the shape of the one plane's own, or null
    i64 seed, rng_offset;
    float eps, range;  // range: what NVFP4's global amax is mapped to
    i32 dtype, plain, layout, threads;
    i32 kind;  // 0 MXFP8, 1 NVFP4, 2 FP8 per tensor, 3 FP8 per block, 4 MXFP4
    i32 e5m2, square, floor, ignore, power_of_two, hadamard, stochastic, row_scaled;
    i32 four_over_six;  // 0 no, 1 by absolute, 2 by squared errors
};

INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
INLINE i64 round_up(i64 a, i64 b) { return ceil_div(a, b) * b; }
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

struct Group {
    i64 start, rows, tile0, tiles;
};

struct Tile {
    i64 group, row, rows, local;  // row: its first row in the buffer
};

struct Tiles {
    std::vector<Group> groups;
    std::vector<Tile> tiles;
    i64 live = 0;

    Tiles(const i64* offsets, i64 count) {
        for (i64 g = 0, before = 0; g < count; g++) {
            i64 rows = offsets[g + 1] - offsets[g], n = ceil_div(rows, TILE);
            groups.push_back({offsets[g], rows, before, n});
            for (i64 t = 0; t < n; t++) tiles.push_back({g, offsets[g] + t * TILE, least(TILE, rows - t * TILE), t});
            before += n;
            live = offsets[g + 1];
        }
    }
};

// The rounding mode and the treatment of subnormals are the caller's to choose for itself, not for these results.
struct DefaultFloats {
    fenv_t kept;
    DefaultFloats() {
        fegetenv(&kept);
        fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { fesetenv(&kept); }
};

// f(unit, scratch) for every unit, each by one thread; scratch is the thread's own, aligned to 64 bytes.
template <class F> void parallel(i64 units, i64 threads, i64 least_units, size_t scratch_bytes, F f) {
    std::atomic<i64> next{0};
    threads = least(threads, units / (least_units > 0 ? least_units : 1));
    auto work = [&] {
        DefaultFloats floats;
        std::vector<char> memory(scratch_bytes + 64);
        char* scratch = memory.data() + (64 - (u64)memory.data() % 64);
        for (i64 unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) f(unit, scratch);
    };
    std::vector<std::thread> others;
    for (i64 n = 1; n < threads; n++) {
        try {
            others.emplace_back(work);
        } catch (...) {  // no more threads to be had: those that run do it all
            break;
        }
    }
    work();
    for (auto& t : others) t.join();
}

// Byte of scale (i, j), i the non-contracted index and j the block, as base + (j / 4) * step + j % 4.
struct ScaleRow {
    i64 base, step;
    i64 at(i64 j) const { return base + (j >> 2) * step + (j & 3); }
};

INLINE ScaleRow scale_row(int layout, i64 i, i64 pitch, i64 nT) {
    if (layout == SWIZZLED) return {(i / 128) * nT * 512 + (i % 32) * 16 + (i % 128) / 32 * 4, 512};
    if (layout == SWIZZLED_8X4) return {(i / 8) * nT * 32 + (i % 8) * 4, 32};
    return {i * pitch, 4};
}

// Rowwise scales of row `slot` (counted from the first tile), one byte per `block` columns.
INLINE ScaleRow row_scales(const Args& a, i64 slot, i64 block) {
    i64 blocks = ceil_div(a.columns, block), nT = ceil_div(blocks, 4);
    return scale_row(a.layout, slot, a.layout == LINEAR ? blocks : nT * 4, nT);
}

// n rows of w columns from (row, c0) as floats, pitch W: zeros behind them up to whole blocks of 32 and `padded_rows` rows.
INLINE void load_rows(const Args& a, i64 row, i64 n, i64 padded_rows, i64 c0, i64 w, float* out) {
    i64 size = size_of(a.dtype), padded = round_up(w, 32);
    for (i64 r = 0; r < n; r++) to_float(a.x + ((row + r) * a.ldx + c0) * size, a.dtype, w, padded, out + r * W);
    for (i64 r = n; r < padded_rows; r++) memset(out + r * W, 0, size_t(padded) * 4);
}

INLINE void clear(void* p, i64 from, i64 to) {
    if (p && to > from) memset((char*)p + from, 0, size_t(to - from));
}
