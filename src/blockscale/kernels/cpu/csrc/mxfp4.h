// MXFP4: MXFP8's scales with E2M1 elements, two a byte; the column plane is transposed.
#pragma once
#include "columns.h"
#include "mxfp8.h"

namespace mxfp4 {

constexpr int BLOCK = 32, BLOCKS = W / BLOCK, HALF = TILE / 2;

struct Scratch {
    float x[BLOCK * W];
    u32 row[BLOCK * BLOCKS], col[W];
    u8 row_code[BLOCK * BLOCKS], code[W];
    u8 packed[W * HALF], col_code[W * (TILE / BLOCK)];
};

INLINE void put_rows(const Args& a, const Group& g, const Tile& t, i64 r0, i64 n, i64 c0, i64 w, Scratch& s) {
    i64 blocks = ceil_div(w, BLOCK), width = 16 * ceil_div(a.columns, BLOCK);
    mxfp8::scales<E2M1>(s.row, s.row_code, BLOCK * BLOCKS, a.floor);
    for (i64 r = 0; r < n; r++) {
        u8* out = a.row.data + (t.row + r0 + r) * width + c0 / 2;
        for (i64 c = 0; c < blocks * BLOCK; c += LANES) {
            vu code = E2M1::encode(load<vf>(s.x + r * W + c) * as_f(s.row[r * BLOCKS + c / BLOCK]));
            if (c + LANES > w) code = choose((vi)lane_index() < i32(w - c), code, vu{});  // absent, not NaN, in a NaN block too
            store_nibbles(out + c / 2, code);
        }
        ScaleRow at = row_scales(a, g.tile0 * TILE + t.local * TILE + r0 + r, BLOCK);
        for (i64 j = 0; j < blocks; j++) a.row.scale[at.at(c0 / BLOCK + j)] = s.row_code[r * BLOCKS + j];
    }
}

// Block b of the columns, n rows of it live, gathered
INLINE void gather_columns(const Args& a, i64 b, i64 n, i64 w, Scratch& s) {
    mxfp8::scales<E2M1>(s.col, s.code, W, a.floor);
    for (i64 c = 0; c < w; c += LANES) {
        vf factor = as_f(load<vu>(s.col + c));
        vu word[4] = {};
        for (i64 r = 0; r < n; r++) word[r >> 3] |= E2M1::encode(load<vf>(s.x + r * W + c) * factor) << (4 * (r & 7));
        for (int l = 0; l < LANES; l++) {
            u32 four[4] = {word[0][l], word[1][l], word[2][l], word[3][l]};  // little-endian, as every target of torch is
            memcpy(s.packed + (c + l) * HALF + b * 16, four, 16);
            s.col_code[(c + l) * 4 + b] = s.code[c + l];
        }
    }
}

INLINE void unit_of(const Args& a, const Group& g, const Tile& t, i64 c0, Scratch& s) {
    i64 w = least(W, a.columns - c0);
    if (a.col.data && t.rows < TILE) memset(s.packed, 0, sizeof s.packed);
    for (i64 b = 0; b * BLOCK < t.rows; b++) {
        i64 r0 = b * BLOCK, n = least(BLOCK, t.rows - r0);
        load_rows(a, t.row + r0, n, BLOCK, c0, w, s.x);
        mxfp8::maxima(a, s.x, n, w, s.row, s.col);
        if (a.row.data) put_rows(a, g, t, r0, n, c0, w, s);
        if (a.col.data) gather_columns(a, b, n, w, s);
    }
    if (a.col.data) put_columns<BLOCK>(a, g, t, c0, w, s.packed, s.col_code);
}

INLINE void quantize(const Args& a, const Tiles& tiles) {
    i64 strips = ceil_div(a.columns, W);
    parallel(tiles.tiles.size() * strips, a.threads, 4, sizeof(Scratch), [&](i64 unit, char* scratch) {
        const Tile& t = tiles.tiles[unit / strips];
        unit_of(a, tiles.groups[t.group], t, unit % strips * W, *(Scratch*)scratch);
    });
}

}  // namespace mxfp4
