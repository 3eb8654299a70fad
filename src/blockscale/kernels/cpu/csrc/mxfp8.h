// MXFP8: one power of two per 32 elements along K (row plane) and along M (column plane), or per 32x32.
#pragma once
#include "common.h"

namespace mxfp8 {

constexpr int BLOCK = 32, BLOCKS = W / BLOCK;

// Codes of block maxima given as integers, and the exact multiplier that brings a block to its codes. In place: bits of amax
// become bits of the multiplier.
template <class E> INLINE void scales(u32* amax, u8* code, i64 n, bool floor) {
    constexpr u32 emax = E::mantissa == 3 ? 8 : E::mantissa == 2 ? 15 : 2;
    const float reciprocal = 1.0f / as_f(E::max_bits);
    for (i64 i = 0; i < n; i += LANES) {
        vu u = load<vu>(amax + i), c;
        vi nan = above(u, INF);
        if (floor) {
            c = u >> 23;
            c = choose(above(c, emax), c - emax, vu{});
        } else {
            vu v = as_u(as_f(u) * reciprocal);
            vu exponent = v >> 23, mantissa = v & 0x7FFFFFu;
            vi up = above(mantissa, 0) & ~((exponent == 0) & below(mantissa, 0x400001));
            c = smaller(exponent + (vu)(up & 1), all(u32(0xFE)));
        }
        vu inverse = choose(above(c, 253), all(u32(0x400000)), (254u - c) << 23);
        store(amax + i, choose(nan, all(QNAN), inverse));
        store_bytes(code + i, choose(nan, all(u32(0xFF)), c));
    }
}

// Maxima of the 32 rows of a strip (w columns of n rows live): by row and block, and by column; of squares alike in both.
INLINE void maxima(const Args& a, const float* strip, i64 n, i64 w, u32* row, u32* col) {
    i64 blocks = ceil_div(w, BLOCK);
    memset(row, 0, BLOCK * BLOCKS * 4);
    if (a.row.data || a.square)
        for (i64 r = 0; r < n; r++)
            for (i64 j = 0; j < blocks; j++) {
                const float* x = strip + r * W + j * BLOCK;
                row[r * BLOCKS + j] = lanes_max(larger(magnitude(load<vf>(x), a.ignore), magnitude(load<vf>(x + LANES), a.ignore)));
            }
    if (a.square) {
        for (i64 r = 1; r < n; r++)
            for (i64 j = 0; j < blocks; j++) row[j] = larger(row[j], row[r * BLOCKS + j]);
        for (i64 r = 1; r < BLOCK; r++) memcpy(row + r * BLOCKS, row, BLOCKS * 4);
        for (i64 c = 0; c < blocks * BLOCK; c++) col[c] = row[c / BLOCK];
    } else if (a.col.data) {
        for (i64 c = 0; c < blocks * BLOCK; c += LANES) {
            vu m = {};
            for (i64 r = 0; r < n; r++) m = larger(m, magnitude(load<vf>(strip + r * W + c), a.ignore));
            store(col + c, m);
        }
    }
}

struct Scratch {
    float x[BLOCK * W];
    u32 row[BLOCK * BLOCKS], col[W];
    u8 row_code[BLOCK * BLOCKS], col_code[W], line[W];
};

// One block of 32 rows of a strip; n of them live.
template <class E> void block_rows(const Args& a, const Group& g, const Tile& t, i64 b, i64 c0, Scratch& s) {
    i64 w = least(W, a.columns - c0), blocks = ceil_div(w, BLOCK), n = least(BLOCK, t.rows - b * BLOCK);
    i64 row = t.row + b * BLOCK, local = t.local * TILE + b * BLOCK;
    bool row_plane = a.row.data, col_plane = a.col.data;
    load_rows(a, row, n, BLOCK, c0, w, s.x);
    maxima(a, s.x, n, w, s.row, s.col);
    if (row_plane) {
        scales<E>(s.row, s.row_code, BLOCK * BLOCKS, a.floor);
        for (i64 r = 0; r < n; r++) {
            u8* out = a.row.data + (row + r) * a.columns + c0;
            u8* line = w == blocks * BLOCK ? out : s.line;
            for (i64 c = 0; c < blocks * BLOCK; c += LANES)
                store_bytes(line + c, E::encode(load<vf>(s.x + r * W + c) * as_f(s.row[r * BLOCKS + c / BLOCK])));
            if (line != out) memcpy(out, line, size_t(w));
            ScaleRow at = row_scales(a, g.tile0 * TILE + local + r, BLOCK);
            for (i64 j = 0; j < blocks; j++) a.row.scale[at.at(c0 / BLOCK + j)] = s.row_code[r * BLOCKS + j];
        }
    }
    if (!col_plane) return;
    scales<E>(s.col, s.col_code, W, a.floor);
    for (i64 r = 0; r < n; r++) {
        u8* out = a.col.data + (row + r) * a.columns + c0;
        u8* line = w == blocks * BLOCK ? out : s.line;
        for (i64 c = 0; c < blocks * BLOCK; c += LANES)
            store_bytes(line + c, E::encode(load<vf>(s.x + r * W + c) * load<vf>(s.col + c)));
        if (line != out) memcpy(out, line, size_t(w));
    }
    i64 at_block = t.local * 4 + b;
    if (a.layout == COMPACT || a.layout == LINEAR) {
        i64 pitch = a.layout == LINEAR ? a.columns : round_up(a.columns, TILE);
        memcpy(a.col.scale + (g.tile0 * 4 + at_block) * pitch + c0, s.col_code, size_t(w));
        return;
    }
    i64 nT = ceil_div(ceil_div(g.rows, BLOCK), 4);
    u8* scale = a.col.scale + 4 * TILE * ceil_div(a.columns, TILE) * g.tile0;
    for (i64 c = 0; c < w; c++) scale[scale_row(a.layout, c0 + c, 0, nT).at(at_block)] = s.col_code[c];
}

template <class E> void quantize(const Args& a, const Tiles& tiles) {
    i64 strips = ceil_div(a.columns, W);
    parallel(tiles.tiles.size() * strips, a.threads, 4, sizeof(Scratch), [&](i64 unit, char* scratch) {
        const Tile& t = tiles.tiles[unit / strips];
        for (i64 b = 0; b * BLOCK < t.rows; b++)
            block_rows<E>(a, tiles.groups[t.group], t, b, unit % strips * W, *(Scratch*)scratch);
    });
}

}  // namespace mxfp8
