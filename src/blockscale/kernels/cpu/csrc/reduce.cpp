// Sums over rows and over columns, float32, each in an order that neither threads nor other rows or groups change.
#include <algorithm>

#include "common.h"

struct ReduceArgs {
    const char* x;  // (rows, columns)
    i64 ldx;
    const i64* offsets;
    i64 groups, columns;
    const float* factor;  // by row, or (groups, columns) for dots; null: 1
    float* out;
    i32 dtype, threads;
};

// out (groups, columns): rows times their factor, summed. 32 rows one after another, then those sums one after another.
extern "C" void blockscale_sum_rows(const ReduceArgs* args) {
    DefaultFloats floats;
    const ReduceArgs& a = *args;
    constexpr i64 RUN = 32;
    i64 strips = ceil_div(a.columns, W), size = size_of(a.dtype);
    parallel(a.groups * strips, a.threads, 1, W * 3 * 4, [&](i64 unit, char* memory) {
        float *total = (float*)memory, *part = total + W, *line = part + W;
        i64 g = unit / strips, c0 = unit % strips * W, w = least(W, a.columns - c0), padded = round_up(w, LANES);
        memset(total, 0, W * 4);
        for (i64 first = a.offsets[g]; first < a.offsets[g + 1]; first += RUN) {
            memset(part, 0, W * 4);
            for (i64 r = first; r < least(first + RUN, a.offsets[g + 1]); r++) {
                to_float(a.x + (r * a.ldx + c0) * size, a.dtype, w, padded, line);
                vf s = all(a.factor ? a.factor[r] : 1.0f);
                for (i64 c = 0; c < padded; c += LANES) store(part + c, load<vf>(part + c) + load<vf>(line + c) * s);
            }
            for (i64 c = 0; c < padded; c += LANES) store(total + c, load<vf>(total + c) + load<vf>(part + c));
        }
        memcpy(a.out + g * a.columns + c0, total, size_t(w) * 4);
    });
}

// out (live rows): each row times its group's factors, summed: 16 sums, each over every 16th column, then by halves.
extern "C" void blockscale_dot_rows(const ReduceArgs* args) {
    DefaultFloats floats;
    const ReduceArgs& a = *args;
    constexpr i64 STEP = 16;
    i64 live = a.offsets[a.groups], padded = round_up(a.columns, LANES), size = size_of(a.dtype);
    parallel(ceil_div(live, STEP), a.threads, 1 + 4096 / (a.columns + 1), size_t(padded) * 2 * 4, [&](i64 unit, char* memory) {
        float *line = (float*)memory, *factors = line + padded;
        i64 seen = -1;
        for (i64 r = unit * STEP; r < least((unit + 1) * STEP, live); r++) {
            i64 g = std::upper_bound(a.offsets, a.offsets + a.groups + 1, r) - a.offsets - 1;
            if (g != seen) memcpy(factors, a.factor + g * a.columns, size_t(a.columns) * 4), seen = g;
            to_float(a.x + r * a.ldx * size, a.dtype, a.columns, padded, line);
            vf sum = {};
            for (i64 c = 0; c < padded; c += LANES) sum += load<vf>(line + c) * load<vf>(factors + c);
            float lane[LANES];
            store(lane, sum);
            for (int h = LANES / 2; h; h /= 2)
                for (int i = 0; i < h; i++) lane[i] += lane[i + h];
            a.out[r] = lane[0];
        }
    });
}
