// The largest magnitude of each group, NaNs left out, as the integer of its bits: any order gives the same.
#pragma once
#include "common.h"

struct GroupMax {
    std::vector<std::atomic<u32>> bits;
    explicit GroupMax(i64 groups) : bits(groups) {}

    void add(i64 group, u32 value) {
        u32 seen = bits[group].load(std::memory_order_relaxed);
        while (value > seen && !bits[group].compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
        }
    }
};

// prepare(x, tile): what is done to a strip (128 rows, pitch W) before its maximum is taken.
template <class F> void group_amax(const Args& a, const Tiles& tiles, float* out, F prepare) {
    i64 strips = ceil_div(a.columns, W);
    GroupMax found(a.groups);
    parallel(tiles.tiles.size() * strips, a.threads, 4, TILE * W * 4, [&](i64 unit, char* scratch) {
        const Tile& t = tiles.tiles[unit / strips];
        i64 c0 = unit % strips * W, w = least(W, a.columns - c0), rows = round_up(t.rows, 16);
        float* x = (float*)scratch;
        load_rows(a, t.row, t.rows, rows, c0, w, x);
        prepare(x, rows, round_up(w, LANES));
        vu m = {};
        for (i64 r = 0; r < rows; r++)
            for (i64 c = 0; c < w; c += LANES) m = larger(m, magnitude(load<vf>(x + r * W + c), true));
        found.add(t.group, lanes_max(m));
    });
    for (i64 g = 0; g < a.groups; g++) out[g] = as_f(found.bits[g].load());
}

// The global amax of both planes: given, or the tensor's own.
INLINE void fill_amax(const Args& a, const Tiles& tiles) {
    auto plain = [](float*, i64, i64) {};
    float *row = a.row.amax, *col = a.col.amax;
    if (a.amax) {
        if (row) memcpy(row, a.amax, size_t(a.groups) * 4);
        if (col) memcpy(col, a.amax + a.groups, size_t(a.groups) * 4);
        return;
    }
    if (row || col) group_amax(a, tiles, row ? row : col, plain);
    if (row && col) memcpy(col, row, size_t(a.groups) * 4);
}

// Row-scaled: the amax of each live row, and of each column of each group. prepare: what is done to 16 rows before the latter.
template <class F> void fill_row_amax(const Args& a, const Tiles& tiles, F prepare) {
    i64 strips = ceil_div(a.columns, W), steps = 16;
    if (a.row.amax) clear(a.row.amax, tiles.live * 4, a.capacity * 4);
    if (a.amax) {
        if (a.row.amax) memcpy(a.row.amax, a.amax, size_t(tiles.live) * 4);
        else memcpy(a.col.amax, a.amax, size_t(a.groups * a.columns) * 4);
        return;
    }
    if (a.row.amax)
        parallel(ceil_div(tiles.live, steps), a.threads, 8, W * 4, [&](i64 unit, char* scratch) {
            float* x = (float*)scratch;
            for (i64 r = unit * steps; r < least((unit + 1) * steps, tiles.live); r++) {
                vu m = {};
                for (i64 c0 = 0; c0 < a.columns; c0 += W) {
                    i64 w = least(W, a.columns - c0);
                    load_rows(a, r, 1, 1, c0, w, x);
                    for (i64 c = 0; c < w; c += LANES) m = larger(m, magnitude(load<vf>(x + c), true));
                }
                a.row.amax[r] = as_f(lanes_max(m));
            }
        });
    if (a.col.amax)
        parallel(a.groups * strips, a.threads, 1, 17 * W * 4, [&](i64 unit, char* scratch) {
            const Group& g = tiles.groups[unit / strips];
            i64 c0 = unit % strips * W, w = least(W, a.columns - c0);
            float *x = (float*)scratch, *most = x + 16 * W;
            memset(most, 0, W * 4);
            for (i64 r = 0; r < g.rows; r += 16) {
                load_rows(a, g.start + r, least(16, g.rows - r), 16, c0, w, x);
                prepare(x, 16, round_up(w, LANES));
                for (i64 i = 0; i < 16; i++)
                    for (i64 c = 0; c < w; c += LANES) store(most + c, larger(load<vu>(most + c), magnitude(load<vf>(x + i * W + c), true)));
            }
            memcpy(a.col.amax + unit / strips * a.columns + c0, most, size_t(w) * 4);
        });
}
