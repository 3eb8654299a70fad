// NVFP4 four over six: whether a block loses less with its maximum mapped to 4 than to 6. 16 blocks at a time, one a lane.
#pragma once

namespace nvfp4 {

INLINE vf e2m1_values(vu c) {
    vu u = c & 7u;
    vu bits = choose(above(u, 1), (u << 22) + (126u << 23), choose(above(u, 0), all(0x3F000000u), vu{}));
    return as_f(bits | ((c & 8u) << 28));
}

// Sum in element order of |d| or d * d, d the decoded block less x; element t of the lanes' blocks at x + t * pitch.
INLINE vf lost(const Args& a, const float* x, i64 pitch, vu code, const Globals& global) {
    vf scale = e4m3_values(code), enc = multiplier(scale, global.dec), total;
    for (int t = 0; t < BLOCK; t++) {
        vf v = load<vf>(x + t * pitch), q = e2m1_values(E2M1::encode(v * enc));
        vf d = ((q * scale) * global.amax) / a.range - v;
        vf each = a.four_over_six == 1 ? as_f(as_u(d) & MAGNITUDE) : d * d;
        total = t ? total + each : each;
    }
    return total;
}

struct Lost {
    vf six, four;
};

INLINE Lost both(const Args& a, const float* x, i64 pitch, vf amax, const Globals& global) {
    vf base = (amax / 6.0f) * global.enc;
    return {lost(a, x, pitch, E4M3::encode(base), global), lost(a, x, pitch, E4M3::encode(base * 1.5f), global)};
}

INLINE vi loses_less_with_four(const Args& a, const float* x, i64 pitch, vf amax, const Globals& global) {
    Lost l = both(a, x, pitch, amax, global);
    return (vi)(l.four < l.six);
}

// n floats, zeros behind them
INLINE vf load_some(const float* p, i64 n) {
    if (n >= LANES) return load<vf>(p);
    float part[LANES] = {};
    memcpy(part, p, size_t(n) * 4);
    return load<vf>(part);
}

// The globals of the 16 rows from r0 of a tile, n of them live; amax: of the groups or, row-scaled, of the buffer's rows.
INLINE Globals row_globals(const Args& a, const float* amax, const Tile& t, i64 r0, i64 n) {
    return Globals(a.row_scaled ? load_some(amax + t.row + r0, n) : all(amax[t.group]), a.range);
}

// Errors of the rows of a tile as a tree: r with r + 8, then + 4, + 2, + 1.
INLINE float tree_sum(vf v) {
    float e[LANES];
    store(e, v);
    for (int h = 8; h; h /= 2)
        for (int i = 0; i < h; i++) e[i] += e[i + h];
    return e[0];
}

// s.four of 16 rows from their block maxima s.amax; of 16x16 blocks from the row plane's amax, for both planes.
INLINE void decide_rows(const Args& a, const Tile& t, i64 r0, i64 n, i64 blocks, Scratch& s) {
    const float* amax = a.square && a.amax ? a.amax : a.row.amax ? a.row.amax : a.col.amax;
    Globals global = row_globals(a, amax, t, r0, n);
    for (i64 j = 0; j < blocks; j++) {
        u32 m[LANES];
        for (int r = 0; r < BLOCK; r++) {
            m[r] = s.amax[r * BLOCKS + j];
            for (int e = 0; e < BLOCK; e++) s.turned[e * BLOCK + r] = s.x[r * W + j * BLOCK + e];
        }
        Lost l = both(a, s.turned, BLOCK, as_f(load<vu>(m)), global);
        i32 four[LANES];
        store(four, (vi)(l.four < l.six));
        if (a.square) s.four[j] = tree_sum(l.four) < tree_sum(l.six) ? -1 : 0;
        else
            for (int r = 0; r < BLOCK; r++) s.four[r * BLOCKS + j] = four[r];
    }
}

}  // namespace nvfp4
