// FP8 with a float32 scale per group, per 1x128 (128x1 in the column plane) or per 128x128; the column plane is transposed.
#pragma once
#include "amax.h"

namespace fp8 {

constexpr int BLOCK = 128, BLOCKS = W / BLOCK;

template <class E> INLINE float scale_of(const Args& a, float amax) {
    float floor = amax < a.eps ? a.eps : amax;
    if (floor == 0 || floor > as_f(MAX_FINITE)) return a.power_of_two ? as_f(as_u(1.0f) & INF) : 1.0f;
    float scale = min_f(as_f(E::max_bits) / floor, as_f(MAX_FINITE));
    return a.power_of_two ? as_f(as_u(scale) & INF) : scale;
}

struct Scratch {
    float x[TILE * W], col_scale[W], row_scale[TILE * BLOCKS];
    u8 line[W];
    u8 col[W * TILE];
};

INLINE void put_kept(u8* array, i64 index, float scale) {
    float kept = 1.0f / scale;
    memcpy(array + index * 4, &kept, 4);
}

// The scales of a tile's strip, and those that are kept. Per group: one, kept by quantize below.
template <class E> INLINE void find_scales(const Args& a, const Group& g, const Tile& t, i64 c0, i64 w, Scratch& s) {
    i64 Kt = ceil_div(a.columns, BLOCK), blocks = ceil_div(w, BLOCK), tile = g.tile0 + t.local;
    float square[BLOCKS] = {};
    if (a.row.data || a.square)
        for (i64 j = 0; j < blocks; j++) {
            u32 most = 0;
            for (i64 r = 0; r < t.rows; r++) {
                vu m = {};
                for (i64 c = j * BLOCK; c < least((j + 1) * BLOCK, w); c += LANES) m = larger(m, magnitude(load<vf>(s.x + r * W + c), true));
                u32 amax = lanes_max(m);
                most = larger(most, amax);
                if (a.square) continue;
                s.row_scale[r * BLOCKS + j] = scale_of<E>(a, as_f(amax));
                put_kept(a.row.scale, (t.row + r) * Kt + c0 / BLOCK + j, s.row_scale[r * BLOCKS + j]);
            }
            square[j] = scale_of<E>(a, as_f(most));
        }
    if (a.square) {
        for (i64 j = 0; j < blocks; j++) {
            for (i64 r = 0; r < t.rows; r++) s.row_scale[r * BLOCKS + j] = square[j];
            for (i64 c = j * BLOCK; c < (j + 1) * BLOCK; c++) s.col_scale[c] = square[j];
            if (a.row.data) put_kept(a.row.scale, tile * Kt + c0 / BLOCK + j, square[j]);
            if (a.col.data) put_kept(a.col.scale, tile * Kt + c0 / BLOCK + j, square[j]);
        }
    } else if (a.col.data) {
        for (i64 c = 0; c < w; c += LANES) {
            vu m = {};
            for (i64 r = 0; r < t.rows; r++) m = larger(m, magnitude(load<vf>(s.x + r * W + c), true));
            u32 amax[LANES];
            store(amax, m);
            for (int l = 0; l < LANES; l++) s.col_scale[c + l] = scale_of<E>(a, as_f(amax[l]));
        }
        for (i64 c = 0; c < w; c++) put_kept(a.col.scale, tile * a.columns + c0 + c, s.col_scale[c]);
    }
}

template <class E> void unit_of(const Args& a, const Tiles& tiles, const Tile& t, i64 c0, Scratch& s) {
    const Group& g = tiles.groups[t.group];
    i64 w = least(W, a.columns - c0), padded = round_up(w, LANES), rows4 = round_up(t.rows, 4);
    load_rows(a, t.row, t.rows, rows4, c0, w, s.x);
    if (a.kind == 2) {
        float row = a.row.data ? scale_of<E>(a, a.row.amax[t.group]) : 0, col = a.col.data ? scale_of<E>(a, a.col.amax[t.group]) : 0;
        for (i64 i = 0; i < TILE * BLOCKS; i++) s.row_scale[i] = row;
        for (i64 c = 0; c < W; c++) s.col_scale[c] = col;
    } else {
        find_scales<E>(a, g, t, c0, w, s);
    }
    if (a.row.data)
        for (i64 r = 0; r < t.rows; r++) {
            u8* out = a.row.data + (t.row + r) * a.columns + c0;
            u8* line = w == padded ? out : s.line;
            for (i64 c = 0; c < padded; c += LANES)
                store_bytes(line + c, E::encode(load<vf>(s.x + r * W + c) * s.row_scale[r * BLOCKS + c / BLOCK]));
            if (line != out) memcpy(out, line, size_t(w));
        }
    if (!a.col.data) return;
    if (t.rows < TILE) memset(s.col, 0, sizeof s.col);
    for (i64 r = 0; r < rows4; r += 4)
        for (i64 c = 0; c < w; c += LANES) {
            vf scale = load<vf>(s.col_scale + c);
            vu word = {};
            for (int i = 0; i < 4; i++)
                if (r + i < t.rows) word |= E::encode(load<vf>(s.x + (r + i) * W + c) * scale) << (8 * i);
            for (int l = 0; l < LANES; l++) {
                u32 bytes = word[l];
                memcpy(s.col + (c + l) * TILE + r, &bytes, 4);
            }
        }
    i64 pitch = a.plain ? g.rows : TILE * g.tiles, bytes = a.plain ? t.rows : TILE;
    u8* data = a.col.data + TILE * a.columns * g.tile0;
    for (i64 c = 0; c < w; c++) memcpy(data + (c0 + c) * pitch + t.local * TILE, s.col + c * TILE, size_t(bytes));
}

template <class E> void quantize(const Args& a, const Tiles& tiles) {
    if (a.kind == 2) {
        fill_amax(a, tiles);
        for (i64 g = 0; g < a.groups; g++) {
            if (a.row.amax) put_kept(a.row.scale, g, scale_of<E>(a, a.row.amax[g]));
            if (a.col.amax) put_kept(a.col.scale, g, scale_of<E>(a, a.col.amax[g]));
        }
    }
    i64 strips = ceil_div(a.columns, W);
    parallel(tiles.tiles.size() * strips, a.threads, 4, sizeof(Scratch), [&](i64 unit, char* scratch) {
        unit_of<E>(a, tiles, tiles.tiles[unit / strips], unit % strips * W, *(Scratch*)scratch);
    });
}

}  // namespace fp8
