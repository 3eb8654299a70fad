// NVFP4: E2M1 elements, one E4M3 scale per 16 along the contraction or per 16x16, one float32 scale a group or a row.
//
// In the column plane a vector holds 16 columns of one row, so the 16 codes of a column's block gather in two 32-bit words.
#pragma once
#include "amax.h"
#include "columns.h"

namespace nvfp4 {

constexpr int BLOCK = 16, BLOCKS = W / BLOCK, HALF = TILE / 2;
constexpr float SIGNS[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};

// What the global amax of each of 16 rows, blocks or columns makes of its block maxima.
struct Globals {
    vf amax, enc, dec;  // S_enc and S_dec
    Globals(vf amax, float range) : amax(amax) {
        vf s = range / amax;
        s = choose((vi)(s > all(as_f(MAX_FINITE))), all(as_f(MAX_FINITE)), s);
        enc = choose((vi)(amax == vf{}) | (vi)(s == vf{}), all(1.0f), s);
        dec = 1.0f / enc;
    }
};

INLINE vf e4m3_values(vu c) {
    vf v = choose(below(c, 8), __builtin_convertvector((vi)c, vf) * 0x1p-9f, as_f((c << 20) + (120u << 23)));
    return choose(above(c, 0x7E), all(as_f(QNAN)), v);
}

// What elements are multiplied by, from the value of their block's scale
INLINE vf multiplier(vf scale, vf dec) {
    vf enc = 1.0f / (scale * dec);
    return choose((vi)(enc > all(as_f(MAX_FINITE))), all(as_f(MAX_FINITE)), enc);
}

// E4M3 codes of block maxima given as bits, and the multipliers of the blocks' elements (as bits) in the maxima's place.
// four: lanes whose maximum is mapped to 4, with four over six; else not looked at.
INLINE void scales(const Args& a, u32* amax, u8* code, vf enc, vf dec, vi four) {
    vf m = as_f(load<vu>(amax)), base = (m / 6.0f) * enc;
    // encode saturates where a product is beyond any float
    vu c = E4M3::encode(!a.four_over_six ? m * (enc * (1.0f / 6.0f)) : choose(four, base * 1.5f, base));
    store_bytes(code, c);
    store(amax, multiplier(e4m3_values(c), dec));
}

struct Words {
    vu word[4];
    // 16 random bits of element t of each lane's block
    vu bits(int t) const {
        vu w = word[t >> 2];
        int turn = 8 * (t & 3);
        return (turn ? (w >> turn) | (w << (32 - turn)) : w) & 0xFFFFu;
    }
};

typedef u64 vq __attribute__((vector_size(128)));

// Philox4x32-10
INLINE Words philox(i64 seed, vu c0, vu c1, vu c2, vu c3) {
    u32 k0 = u32(seed), k1 = u32(u64(seed) >> 32);
    for (int round = 0; round < 10; round++) {
        vq a = __builtin_convertvector(c0, vq) * 0xD2511F53u, b = __builtin_convertvector(c2, vq) * 0xCD9E8D57u;
        vu hi0 = __builtin_convertvector(a >> 32, vu), lo0 = __builtin_convertvector(a, vu);
        vu hi1 = __builtin_convertvector(b >> 32, vu), lo1 = __builtin_convertvector(b, vu);
        c0 = hi1 ^ c1 ^ k0, c1 = lo1, c2 = hi0 ^ c3 ^ k1, c3 = lo0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Codes of y, rounded up with a probability close to the fraction of the step; bits: 16 random ones a lane.
INLINE vu stochastic(vf y, vu bits) {
    vu u = as_u(y) & MAGNITUDE, sign = (as_u(y) >> 28) & 8u;
    vf a = as_f(smaller(u, all(E2M1::max_bits)));
    vi is2 = above(u, 0x3FFFFFFF), is4 = above(u, 0x407FFFFF);
    vf inverse = choose(is4, all(0.5f), choose(is2, all(1.0f), all(2.0f)));
    vf step = choose(is4, all(2.0f), choose(is2, all(1.0f), all(0.5f)));
    vf part = a * inverse;
    vf n = __builtin_convertvector(__builtin_convertvector(part, vi), vf);
    vi up = (part - n) * 65536.0f > __builtin_convertvector((vi)bits, vf) + 0.5f;
    n = choose(up, n + 1.0f, n);
    return choose(above(u, INF), all(u32(7)), E2M1::encode(n * step) | sign);
}

// The transform of 16 rows (pitch W), rounded to bfloat16.
INLINE void hadamard(float* x, i64 rows, i64 width) {
    for (i64 r0 = 0; r0 < rows; r0 += BLOCK)
        for (i64 c = 0; c < width; c += LANES) {
            vf v[16];
            for (int i = 0; i < 16; i++) v[i] = load<vf>(x + (r0 + i) * W + c) * SIGNS[i];
            for (int h = 1; h < 16; h *= 2)
                for (int i = 0; i < 16; i++)
                    if (!(i & h)) {
                        vf low = v[i], high = v[i + h];
                        v[i] = low + high, v[i + h] = low - high;
                    }
            for (int i = 0; i < 16; i++) store(x + (r0 + i) * W + c, as_f(float_to_bf16(v[i] * 0.25f) << 16));
        }
}

struct Scratch {
    float x[BLOCK * W], turned[BLOCK * BLOCK];
    u32 amax[BLOCK * BLOCKS], square[BLOCKS];
    i32 four[BLOCK * BLOCKS];  // -1: mapped to 4; the first row is that of 16x16 blocks
    float row_enc[BLOCK], row_dec[BLOCK];
    u8 code[BLOCK * BLOCKS];
    u8 col[W * HALF], col_code[W * 8];
};

}  // namespace nvfp4

#include "four_over_six.h"

namespace nvfp4 {

INLINE void row_maxima(const Args& a, const float* x, i64 n, i64 blocks, u32* amax) {
    memset(amax, 0, BLOCK * BLOCKS * 4);
    for (i64 r = 0; r < n; r++)
        for (i64 j = 0; j < blocks; j++) amax[r * BLOCKS + j] = lanes_max(magnitude(load<vf>(x + r * W + j * BLOCK), a.ignore));
}

// The row plane of 16 rows, n of them live; x their floats, s.amax their block maxima, s.row_enc and s.row_dec their globals.
INLINE void rows_of(const Args& a, const Group& g, const Tile& t, i64 r0, i64 n, i64 c0, i64 w, const float* x, Scratch& s) {
    i64 blocks = ceil_div(w, BLOCK), width = 8 * ceil_div(a.columns, BLOCK), last = w % BLOCK;
    for (i64 r = 0; r < n; r++)
        scales(a, s.amax + r * BLOCKS, s.code + r * BLOCKS, all(s.row_enc[r]), all(s.row_dec[r]), load<vi>(s.four + (a.square ? 0 : r * BLOCKS)));
    for (i64 r = 0; r < n; r++) {
        i64 local = t.local * TILE + r0 + r;
        u8* out = a.row.data + (t.row + r0 + r) * width + c0 / 2;
        Words words = {};
        for (i64 j = 0; j < blocks; j++) {
            vf y = load<vf>(x + r * W + j * BLOCK) * as_f(s.amax[r * BLOCKS + j]);
            vu code;
            if (a.stochastic) {
                if (j % LANES == 0)
                    words = philox(a.seed, lane_index() + u32(c0 / BLOCK + j), all(u32(local)), all(u32(t.group)), all(u32(2 * a.rng_offset)));
                u32 bits[BLOCK];
                for (int e = 0; e < BLOCK; e++) {
                    u32 word = words.word[e >> 2][j % LANES];
                    bits[e] = ((e & 3 ? (word >> 8 * (e & 3)) | (word << (32 - 8 * (e & 3))) : word) & 0xFFFFu);
                }
                code = stochastic(y, load<vu>(bits));
            } else {
                code = E2M1::encode(y);
            }
            if (last && j == blocks - 1) code = choose((vi)lane_index() < i32(last), code, vu{});
            store_nibbles(out + j * 8, code);
        }
        ScaleRow at = row_scales(a, g.tile0 * TILE + local, BLOCK);
        for (i64 j = 0; j < blocks; j++) a.row.scale[at.at(c0 / BLOCK + j)] = s.code[r * BLOCKS + j];
    }
}

// Block b (16 rows, n of them live) of the column plane, gathered in s.col and s.col_code.
INLINE void columns_of(const Args& a, const Tile& t, i64 b, i64 n, i64 c0, i64 w, const float* x, Scratch& s) {
    const float* amax = a.col.amax + (a.row_scaled ? t.group * a.columns + c0 : t.group);
    for (i64 c = 0; c < w; c += LANES) {
        u32 enc[LANES];
        u8 code[LANES];
        vu m = {};
        if (a.square)
            m = all(s.square[c / BLOCK]);
        else
            for (int r = 0; r < BLOCK; r++) m = larger(m, magnitude(load<vf>(x + r * W + c), a.ignore));
        store(enc, m);
        Globals global(a.row_scaled ? load_some(amax + c, w - c) : all(*amax), a.range);
        vi four = a.square ? (vi){} + s.four[c / BLOCK] : (vi){};
        if (a.four_over_six && !a.square) four = loses_less_with_four(a, x + c, W, as_f(m), global);
        scales(a, enc, code, global.enc, global.dec, four);
        vf factor = as_f(load<vu>(enc));
        Words words = {};
        if (a.stochastic)
            words = philox(a.seed, all(u32(t.local * 8 + b)), lane_index() + u32(c0 + c), all(u32(t.group)), all(u32(2 * a.rng_offset + 1)));
        vu word[2] = {};
        int kept = a.hadamard ? BLOCK : int(n);  // all outputs of a transform are kept
        for (int r = 0; r < kept; r++) {
            vf y = load<vf>(x + r * W + c) * factor;
            vu q = a.stochastic ? stochastic(y, words.bits(r)) : E2M1::encode(y);
            word[r >> 3] |= q << (4 * (r & 7));
        }
        for (int l = 0; l < LANES; l++) {
            u32 both[2] = {word[0][l], word[1][l]};  // little-endian, as every target of torch is
            memcpy(s.col + (c + l) * HALF + b * 8, both, 8);
            s.col_code[(c + l) * 8 + b] = code[l];
        }
    }
}

INLINE void unit_of(const Args& a, const Tiles& tiles, const Tile& t, i64 c0, Scratch& s) {
    const Group& g = tiles.groups[t.group];
    i64 w = least(W, a.columns - c0), blocks = ceil_div(w, BLOCK);
    if (a.col.data && t.rows < TILE) memset(s.col, 0, sizeof s.col);
    for (i64 b = 0; b * BLOCK < t.rows; b++) {
        i64 r0 = b * BLOCK, n = least(BLOCK, t.rows - r0);
        load_rows(a, t.row + r0, n, BLOCK, c0, w, s.x);
        if (a.row.data || a.square) row_maxima(a, s.x, n, blocks, s.amax);
        if (a.square) {
            for (i64 r = 1; r < n; r++)
                for (i64 j = 0; j < blocks; j++) s.amax[j] = larger(s.amax[j], s.amax[r * BLOCKS + j]);
            for (i64 r = 1; r < BLOCK; r++) memcpy(s.amax + r * BLOCKS, s.amax, BLOCKS * 4);
            memcpy(s.square, s.amax, BLOCKS * 4);
        }
        if (a.four_over_six && (a.row.data || a.square)) decide_rows(a, t, r0, n, blocks, s);
        if (a.row.data) {
            Globals global = row_globals(a, a.row.amax, t, r0, n);
            store(s.row_enc, global.enc), store(s.row_dec, global.dec);
            rows_of(a, g, t, r0, n, c0, w, s.x, s);
        }
        if (a.col.data) {
            if (a.hadamard) hadamard(s.x, BLOCK, round_up(w, LANES));
            columns_of(a, t, b, n, c0, w, s.x, s);
        }
    }
    if (a.col.data) put_columns<BLOCK>(a, g, t, c0, w, s.col, s.col_code);
}

INLINE void quantize(const Args& a, const Tiles& tiles) {
    auto turn = [&](float* x, i64 rows, i64 width) {
        if (a.hadamard) hadamard(x, rows, width);
    };
    if (a.row_scaled) {
        fill_row_amax(a, tiles, turn);
    } else {
        fill_amax(a, tiles);
        if (a.hadamard && a.col.amax && !a.amax) group_amax(a, tiles, a.col.amax, turn);
    }
    i64 strips = ceil_div(a.columns, W);
    parallel(tiles.tiles.size() * strips, a.threads, 4, sizeof(Scratch), [&](i64 unit, char* scratch) {
        unit_of(a, tiles, tiles.tiles[unit / strips], unit % strips * W, *(Scratch*)scratch);
    });
}

}  // namespace nvfp4
