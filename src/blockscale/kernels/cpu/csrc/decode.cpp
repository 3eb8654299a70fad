// One group of a quantized plane as a dense matrix for a matrix product or as values: codes times block scales.
//
// out is row-major: (rows, K) for a row plane and for MXFP8's column plane, (K, pitch) for the transposed column planes,
// whose rows are filled with zeros up to `pitch`. Absent elements are zero whatever the buffers hold there.
#include "common.h"

struct DecodeArgs {
    const u8* data;
    const u8* scale;
    char* out;
    i64 start, rows, columns;   // first row of the group in the buffer, rows, K
    i64 tile0, tiles, tile_count;  // tiles of 128 rows before it, its own
    i64 pitch;                  // of out, in elements
    float times;                // multiplies the block scale first (the global scale), 1 for operands
    i32 kind, e5m2, square, hadamard, column, layout, dtype, threads;  // dtype of out: F32 or BF16
};

// Of the bits of all magnitudes: the smallest but zero, the largest, and those that any of them has.
struct Range {
    u32 smallest = MAGNITUDE, largest = 0, any = 0;
};

namespace {

INLINE vu bytes16(const u8* p) { return __builtin_convertvector(load<vb>(p), vu); }

// 16 FP8 codes as floats: below the smallest normal an integer times the step, else the bits move to their places.
template <bool FIVE> INLINE vf fp8_values(vu c) {
    constexpr u32 mantissa = FIVE ? 2 : 3, bias = FIVE ? 15 : 7;
    vu sign = (c & 0x80u) << 24, u = c & 0x7Fu;
    vf small = __builtin_convertvector((vi)u, vf) * as_f((128 - bias - mantissa) << 23);
    vf v = choose(below(u, 1 << mantissa), small, as_f((u << (23 - mantissa)) + ((127 - bias) << 23)));
    v = choose(above(u, FIVE ? 0x7C : 0x7E), all(as_f(QNAN)), v);
    if (FIVE) v = choose((vi)(u == 0x7Cu), all(as_f(INF)), v);
    return as_f(as_u(v) | sign);
}

INLINE vf e2m1_values(vu c) {
    vu u = c & 7u;
    vu bits = choose(above(u, 1), (u << 22) + (126u << 23), choose(above(u, 0), all(0x3F000000u), vu{}));
    return as_f(bits | ((c & 8u) << 28));
}

// 16 E2M1 codes of 8 bytes
INLINE vu nibbles(const u8* p) {
    u8 code[16];
    for (int i = 0; i < 8; i++) code[2 * i] = p[i] & 15, code[2 * i + 1] = p[i] >> 4;
    return bytes16(code);
}

INLINE float e8m0(u32 code) { return as_f(code == 255 ? QNAN : code == 0 ? 0x400000u : code << 23); }

// The range of what all threads wrote
struct Found {
    std::atomic<u32> smallest{MAGNITUDE}, largest{0}, any{0};

    void add(vu low, vu high, vu bits) {
        u32 l[LANES], b[LANES], least_seen = MAGNITUDE, seen_bits = 0, most = lanes_max(high);
        store(l, low), store(b, bits);
        for (int i = 0; i < LANES; i++) least_seen = smaller(least_seen, l[i]), seen_bits |= b[i];
        any.fetch_or(seen_bits);
        for (u32 seen = largest.load(); most > seen && !largest.compare_exchange_weak(seen, most);) {
        }
        for (u32 seen = smallest.load(); least_seen < seen && !smallest.compare_exchange_weak(seen, least_seen);) {
        }
    }
    Range range() const { return {smallest.load(), largest.load(), any.load()}; }
};

INLINE vf first_lanes(vf v, i64 n) {
    return choose((vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} < i32(n), v, vf{});
}

struct Writer {
    char* out;
    int dtype;
    Found& found;
    vu low = all(MAGNITUDE), high = vu{}, bits = vu{};

    METHOD void see(vf v) {
        vu u = as_u(v) & MAGNITUDE;
        high = larger(high, u), bits |= u;
        low = smaller(low, choose((vi)(u == 0u), low, u));
    }

    METHOD void put_all(i64 at, vf v) {
        see(v);
        // cut off, not rounded: where a value is no bfloat16 number, the range says so and nobody reads these
        if (dtype == BF16) store(out + at * 2, __builtin_convertvector(as_u(v) >> 16, vh));
        else store(out + at * 4, v);
    }

    // n (at most 16) values at element `at`
    METHOD void put(i64 at, vf v, i64 n) {
        if (n == LANES) return put_all(at, v);
        char whole[64];
        Writer part{whole, dtype, found, low, high, bits};
        part.put_all(0, first_lanes(v, n));
        low = part.low, high = part.high, bits = part.bits;
        memcpy(out + at * size_of(dtype), whole, size_t(n) * size_of(dtype));
    }
};

template <int KIND, bool FIVE> struct Decoder {
    static constexpr int BLOCK = KIND == 0 || KIND == 4 ? 32 : KIND == 1 ? 16 : 128;
    static constexpr bool PACKED = KIND == 1 || KIND == 4, CODES = PACKED || KIND == 0;
    const DecodeArgs& a;
    Writer& w;

    METHOD float scale_value(const u8* scale, i64 at) const {
        if (KIND == 2) return a.times;
        float s = KIND == 0 || KIND == 4 ? e8m0(scale[at]) : KIND == 1 ? e4m3_value(scale[at] & 0x7F) : 0;
        if (KIND == 1 && scale[at] & 0x80) s = -s;
        if (KIND == 3) memcpy(&s, scale + at * 4, 4);
        return KIND == 1 ? s * a.times : s;
    }

    METHOD vf whole_elements(const u8* p, i64 i) const {
        return PACKED ? e2m1_values(nibbles(p + i / 2)) : fp8_values<FIVE>(bytes16(p + i));
    }

    METHOD vf elements(const u8* p, i64 i, i64 n) const {  // from element i, n of them there
        if (PACKED || n >= LANES) return whole_elements(p, i);
        u8 part[16] = {};
        memcpy(part, p + i, size_t(n));
        return fp8_values<FIVE>(bytes16(part));
    }

    // blocks along the row: `length` elements from p, scale of block j by at(j)
    template <class At> METHOD void line(const u8* p, i64 length, i64 kept, i64 to, At at) {
        for (i64 j = 0; j * BLOCK < length; j++) {
            vf s = all(scale_value(a.scale, at(j)));
            if ((j + 1) * BLOCK <= least(length, kept)) {  // most of them
                for (i64 i = j * BLOCK; i < (j + 1) * BLOCK; i += LANES) w.put_all(to + i, whole_elements(p, i) * s);
                continue;
            }
            for (i64 i = j * BLOCK; i < least(j * BLOCK + BLOCK, length); i += LANES) {
                vf v = elements(p, i, length - i) * s;
                i64 n = least(LANES, length - i);
                if (i + n > kept) n = kept > i ? kept - i : 0;
                if (n) w.put(to + i, v, n);
            }
        }
    }

    METHOD void row(i64 r) {
        i64 K = a.columns, Kt = ceil_div(K, 128), slot = a.tile0 * 128 + r;
        i64 width = PACKED ? BLOCK / 2 * ceil_div(K, BLOCK) : K, blocks = ceil_div(K, BLOCK), nT = ceil_div(blocks, 4);
        const u8* p = a.data + (a.start + r) * width;
        if (CODES) {
            ScaleRow at = scale_row(a.layout, slot, nT * 4, nT);
            line(p, K, K, r * a.pitch, [&](i64 j) { return at.at(j); });
        } else {
            i64 base = (KIND == 3 && a.square ? a.tile0 + r / 128 : a.start + r) * Kt;
            line(p, K, K, r * a.pitch, [&](i64 j) { return base + j; });
        }
    }

    // MXFP8's column plane: rows as they lie, a scale a column
    METHOD void mx_column_rows(i64 b, float* s) {
        i64 K = a.columns, Kp = round_up(K, 128);
        for (i64 k = 0; k < K; k++) {
            i64 at = a.layout == SWIZZLED ? 4 * Kp * a.tile0 + scale_row(a.layout, k, 0, a.tiles).at(b) : (4 * a.tile0 + b) * Kp + k;
            s[k] = e8m0(a.scale[at]);
        }
        for (i64 r = b * 32; r < least(b * 32 + 32, a.rows); r++)
            for (i64 k = 0; k < K; k += LANES) {
                i64 n = least(LANES, K - k);
                w.put(r * a.pitch + k, elements(a.data + (a.start + r) * K, k, n) * load<vf>(s + k), n);
            }
    }

    // Row k of a transposed column plane
    METHOD void column(i64 k) {
        i64 K = a.columns, Kt = ceil_div(K, 128), unit = PACKED ? 64 : 128;
        const u8* p = a.data + unit * K * a.tile0 + unit * a.tiles * k;
        i64 kept = KIND == 1 && a.hadamard ? round_up(a.rows, 16) : a.rows, to = k * a.pitch;
        if (PACKED) {
            constexpr i64 per_tile = 128 / BLOCK;
            ScaleRow at = scale_row(a.layout, k, per_tile * a.tiles, per_tile / 4 * a.tiles);
            line(p, round_up(a.rows, BLOCK), kept, to, [&](i64 j) { return per_tile * 128 * Kt * a.tile0 + at.at(j); });
        } else {
            i64 step = a.square ? Kt : K, base = a.tile0 * step + (a.square ? k / 128 : k);
            line(p, a.rows, kept, to, [&](i64 j) { return base + j * step; });
        }
        i64 size = size_of(a.dtype);
        memset(a.out + (to + kept) * size, 0, size_t(a.pitch - kept) * size);
    }
};

template <int KIND, bool FIVE> void run(const DecodeArgs& a, Range* range) {
    bool transposed = a.column && KIND != 0;
    i64 per_unit = a.column && KIND == 0 ? 32 : 16, count = transposed ? a.columns : a.rows;
    i64 elements = per_unit * (transposed ? a.rows : a.columns);
    Found found;
    size_t scratch = KIND == 0 ? size_t(round_up(a.columns, 16)) * 4 : 0;
    parallel(ceil_div(count, per_unit), a.threads, 1 + (1 << 18) / (elements + 1), scratch, [&](i64 unit, char* memory) {
        Writer w{a.out, a.dtype, found};
        Decoder<KIND, FIVE> d{a, w};
        if (a.column && KIND == 0)
            d.mx_column_rows(unit, (float*)memory);
        else
            for (i64 i = unit * per_unit; i < least((unit + 1) * per_unit, count); i++) transposed ? d.column(i) : d.row(i);
        found.add(w.low, w.high, w.bits);
    });
    *range = found.range();
}

}  // namespace

extern "C" void blockscale_decode(const DecodeArgs* args, Range* range) {
    DefaultFloats floats;
    const DecodeArgs& a = *args;
    if (a.kind == 1) return run<1, false>(a, range);
    if (a.kind == 4) return run<4, false>(a, range);
    if (a.kind == 0) return a.e5m2 ? run<0, true>(a, range) : run<0, false>(a, range);
    if (a.kind == 2) return a.e5m2 ? run<2, true>(a, range) : run<2, false>(a, range);
    return a.e5m2 ? run<3, true>(a, range) : run<3, false>(a, range);
}

// n values rounded to bfloat16 (kept in `out` as bfloat16 or as float; null: not kept), with the range of the rounded ones.
extern "C" void blockscale_round(const char* x, i32 dtype, i64 n, char* out, i32 out_dtype, i32 threads, Range* range) {
    DefaultFloats floats;
    constexpr i64 UNIT = 1 << 15;
    Found found;
    parallel(ceil_div(n, UNIT), threads, 8, 0, [&](i64 unit, char*) {
        Writer w{out, out_dtype, found};
        float part[LANES];
        for (i64 i = unit * UNIT; i < least(n, (unit + 1) * UNIT); i += LANES) {
            i64 count = least(LANES, n - i);
            to_float(x + i * size_of(dtype), dtype, count, LANES, part);
            vf v = as_f(float_to_bf16(load<vf>(part)) << 16);
            out ? w.put(i, v, count) : w.see(count < LANES ? first_lanes(v, count) : v);
        }
        found.add(w.low, w.high, w.bits);
    });
    *range = found.range();
}

struct EpilogueArgs {
    const float* acc;
    char* out;
    i64 rows, columns;
    float row_scale, column_scale;
    const float *row_scales, *column_scales;  // (rows), (columns), each in the place of the number when it is not null
    const float* bias;                        // (columns) or null
    const float* bias_scale;                  // (rows) or null
    i32 has_alpha, dtype, threads;
};

// out = round(acc * alpha + bias_scale * bias), alpha = row scale * column scale; each operation rounded in float32 and the
// result once. out may be acc.
extern "C" void blockscale_epilogue(const EpilogueArgs* args) {
    DefaultFloats floats;
    const EpilogueArgs& a = *args;
    i64 size = size_of(a.dtype), n = a.columns, padded = round_up(n, LANES);
    parallel(a.rows, a.threads, 1 + (1 << 16) / (n + 1), size_t(padded) * 3 * 4, [&](i64 r, char* memory) {
        float *line = (float*)memory, *bias = line + padded, *scales = bias + padded;
        const float* acc = a.acc + r * n;
        if (n % LANES) memcpy(line, acc, size_t(n) * 4), acc = line;
        if (a.bias) memcpy(bias, a.bias, size_t(n) * 4);
        if (a.column_scales) memcpy(scales, a.column_scales, size_t(n) * 4);
        vf s = all(a.bias_scale ? a.bias_scale[r] : 1.0f), row = all(a.row_scales ? a.row_scales[r] : a.row_scale);
        vf alpha = row * a.column_scale;
        for (i64 c = 0; (a.has_alpha || a.bias) && c < n; c += LANES) {
            vf v = load<vf>(acc + c);
            if (a.has_alpha) v = v * (a.column_scales ? row * load<vf>(scales + c) : alpha);
            if (a.bias) v = v + s * load<vf>(bias + c);
            store(line + c, v);
        }
        from_float(a.has_alpha || a.bias ? line : acc, a.dtype, n, a.out + r * n * size);
    });
}
