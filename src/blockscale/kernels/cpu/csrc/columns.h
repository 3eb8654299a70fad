// The columns of a tile of a packed format, gathered, on their way to the transposed column plane.
#pragma once
#include "common.h"

// col: TILE / 2 bytes a column, col_code: TILE / BLOCK scale codes a column.
template <int BLOCK> INLINE void put_columns(const Args& a, const Group& g, const Tile& t, i64 c0, i64 w, const u8* col, const u8* col_code) {
    constexpr i64 HALF = TILE / 2, PER_TILE = TILE / BLOCK;
    i64 K = a.columns, Kt = ceil_div(K, TILE), blocks = ceil_div(t.rows, BLOCK), group_blocks = ceil_div(g.rows, BLOCK);
    i64 pitch = a.plain ? BLOCK / 2 * group_blocks : HALF * g.tiles, bytes = a.plain ? BLOCK / 2 * blocks : HALF;
    u8* data = a.col.data + HALF * K * g.tile0;
    i64 nT = a.plain ? ceil_div(group_blocks, 4) : PER_TILE / 4 * g.tiles;
    i64 scale_pitch = a.layout == LINEAR ? group_blocks : 4 * nT;
    u8* scale = a.col.scale + PER_TILE * TILE * Kt * g.tile0;
    for (i64 c = 0; c < w; c++) {
        memcpy(data + (c0 + c) * pitch + t.local * HALF, col + c * HALF, size_t(bytes));
        ScaleRow at = scale_row(a.layout, c0 + c, scale_pitch, nT);
        for (i64 b = 0; b < blocks; b++) scale[at.at(t.local * PER_TILE + b)] = col_code[c * PER_TILE + b];
    }
}
