// The activations and their gradients: the operations of spec/numerics.md in the order of blockscale.reference.activations,
// a row at a time, each operation one float32 rounding.
#include "common.h"

struct ActivationArgs {
    const char* h;
    const char* dy;      // null: forward
    const float* probs;  // (rows) or null
    char* out;           // y (rows, width), or dh (rows, columns of h)
    float* ds;           // (rows) or null
    i64 ldh, lddy, rows, width;  // width: of y
    i64 run;                     // columns of a GLU's half that lie together
    float first, second, third;  // limit, alpha, offset; beta1, beta2
    i32 kind, dtype, threads;    // kind: 0 swiglu, 1 clamped swiglu, 2 squared relu, 3 situ
};

namespace {

// exp(x), x above 88.72 infinite, below -103.97 zero
INLINE vf exp_of(vf x) {
    x = choose((vi)(x > all(88.72f)), all(100.0f), x);
    x = choose((vi)(x < all(-103.97f)), all(-110.0f), x);
    vf k = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer, ties to even
    vf r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    vf result = (p * (r * r) + r) + 1.0f;
    vi n = __builtin_convertvector(choose((vi)(k == k), k, vf{}), vi), half = n >> 1;
    return result * as_f((vu)(half + 127) << 23) * as_f((vu)(n - half + 127) << 23);
}

INLINE vf sigmoid(vf x) { return 1.0f / (exp_of(-x) + 1.0f); }

INLINE vf tanh_of(vf x) {
    vf z = x * x;
    vf p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z + -5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z + -3.33332819422e-1f;
    vf small = (p * z) * x + x;
    vu sign = as_u(x) & ~MAGNITUDE;
    vf a = as_f(as_u(x) & MAGNITUDE);
    vf large = 1.0f - 2.0f / (exp_of(a * 2.0f) + 1.0f);
    large = as_f((as_u(large) & MAGNITUDE) | sign);
    return choose((vi)(a < all(0.625f)), small, large);
}

// value where not (x > limit), else +0
INLINE vf zero_above(vf value, vf x, float limit) { return choose((vi)(x > all(limit)), vf{}, value); }

struct Inputs {
    vf a, b, s, p;
    bool scaled;
    METHOD vf times_s(vf x) const { return scaled ? x * s : x; }
};

struct Gradients {
    vf da, db, ds;
};

template <int KIND> INLINE vf forward(const ActivationArgs& c, const Inputs& i) {
    vf a = i.a, b = i.b;
    if (KIND == 0) return i.times_s((a * sigmoid(a)) * b);
    if (KIND == 1) {
        vf gate = choose((vi)(a > all(c.first)), all(c.first), a);
        vf linear = choose((vi)(b > all(c.first)), all(c.first), choose((vi)(b < all(-c.first)), all(-c.first), b)) + c.third;
        return i.times_s((gate * sigmoid(gate * c.second)) * linear);
    }
    if (KIND == 2) {
        vf r = choose((vi)(a < vf{}), vf{}, a);
        return i.times_s(r * r);
    }
    vf t = tanh_of(a / c.first), v = tanh_of(b / c.second);
    return i.times_s((((t * c.first) * sigmoid(a)) * c.second) * v);
}

template <int KIND> INLINE Gradients backward(const ActivationArgs& c, const Inputs& i) {
    vf a = i.a, b = i.b, ps = i.times_s(i.p);
    if (KIND == 0) {
        vf S = sigmoid(a);
        return {(ps * ((a * S) * (1.0f - S) + S)) * b, (ps * a) * S, ((i.p * a) * S) * b};
    }
    if (KIND == 1) {
        vf gate = choose((vi)(a > all(c.first)), all(c.first), a);
        vf linear = choose((vi)(b > all(c.first)), all(c.first), choose((vi)(b < all(-c.first)), all(-c.first), b)) + c.third;
        vf z = gate * c.second, S = sigmoid(z);
        vf da = (((z * S) * (1.0f - S) + S) * zero_above(ps, a, c.first)) * linear;
        vf inside = zero_above(zero_above(ps, b, c.first), -b, c.first);
        return {da, (inside * gate) * S, ((i.p * gate) * S) * linear};
    }
    if (KIND == 2) {
        vf r = choose((vi)(a < vf{}), vf{}, a);
        return {i.times_s(i.p * 2.0f) * r, vf{}, i.p * (r * r)};
    }
    vf t = tanh_of(a / c.first), S = sigmoid(a), v = tanh_of(b / c.second);
    vf g = (t * c.first) * S, u = v * c.second;
    return {(((1.0f - t * t) * S + g * (1.0f - S)) * ps) * u, (ps * g) * (1.0f - v * v), (i.p * g) * u};
}

// Sum of n terms, the upper half added to the lower until one is left.
INLINE float halving_sum(float* x, i64 n) {
    while (n > 1) {
        i64 kept = (n + 1) / 2;
        for (i64 i = 0; i < n - kept; i++) x[i] += x[kept + i];
        n = kept;
    }
    return n ? x[0] : 0.0f;
}

// The halves of a GLU's row, which lie in runs, as dense lines of floats, and back. Whole vectors are written: a run's surplus
// lies where the next one comes, the last one's in the room behind the line. Short runs pass through `both`.
INLINE void split(const char* row, int dtype, i64 width, i64 run, float* both, float* a, float* b) {
    i64 size = size_of(dtype);
    if (run < LANES) {
        to_float(row, dtype, 2 * width, 2 * width, both);
        for (i64 c = 0; c < width; c += run)
            for (i64 i = c; i < c + run; i++) a[i] = both[c + i], b[i] = both[c + run + i];
        return;
    }
    for (i64 c = 0; c < width; c += run) {
        to_float(row + 2 * c * size, dtype, run, run, a + c);
        to_float(row + (2 * c + run) * size, dtype, run, run, b + c);
    }
}

INLINE void join(const float* a, const float* b, int dtype, i64 width, i64 run, float* both, char* row) {
    i64 size = size_of(dtype);
    if (run < LANES) {
        for (i64 c = 0; c < width; c += run)
            for (i64 i = c; i < c + run; i++) both[c + i] = a[i], both[c + run + i] = b[i];
        return from_float(both, dtype, 2 * width, row);
    }
    for (i64 c = 0; c < width; c += run) {
        from_float(a + c, dtype, run, row + 2 * c * size);
        from_float(b + c, dtype, run, row + (2 * c + run) * size);
    }
}

template <int KIND> INLINE void row_of(const ActivationArgs& c, i64 r, float* memory, i64 padded) {
    constexpr bool GLU = KIND != 2;
    i64 size = size_of(c.dtype);
    float *a = memory, *b = a + padded, *p = b + padded, *terms = p + padded, *both = terms + padded;
    const char* h = c.h + r * c.ldh * size;
    if (GLU) split(h, c.dtype, c.width, c.run, both, a, b);
    else to_float(h, c.dtype, c.width, c.width, a);
    if (c.dy) to_float(c.dy + r * c.lddy * size, c.dtype, c.width, c.width, p);
    vf s = all(c.probs ? c.probs[r] : 1.0f);
    bool scaled = c.probs != nullptr;
    char* out = c.out + r * c.width * size * (c.dy && GLU ? 2 : 1);
    if (!c.dy) {
        for (i64 k = 0; k < c.width; k += LANES)
            store(a + k, forward<KIND>(c, {load<vf>(a + k), GLU ? load<vf>(b + k) : vf{}, s, vf{}, scaled}));
        return from_float(a, c.dtype, c.width, out);
    }
    for (i64 k = 0; k < c.width; k += LANES) {
        Gradients g = backward<KIND>(c, {load<vf>(a + k), GLU ? load<vf>(b + k) : vf{}, s, load<vf>(p + k), scaled});
        store(a + k, g.da), store(b + k, g.db), store(terms + k, g.ds);
    }
    if (GLU) join(a, b, c.dtype, c.width, c.run, both, out);
    else from_float(a, c.dtype, c.width, out);
    if (c.ds) c.ds[r] = halving_sum(terms, c.width);
}

template <int KIND> void run(const ActivationArgs& c) {
    i64 padded = round_up(c.width, LANES) + LANES, step = 1 + 4096 / (c.width + 1);
    parallel(ceil_div(c.rows, step), c.threads, 8, size_t(padded) * 6 * 4, [&](i64 unit, char* memory) {
        for (i64 r = unit * step; r < least((unit + 1) * step, c.rows); r++) row_of<KIND>(c, r, (float*)memory, padded);
    });
}

}  // namespace

extern "C" void blockscale_activation(const ActivationArgs* args) {
    DefaultFloats floats;
    if (args->kind == 0) return run<0>(*args);
    if (args->kind == 1) return run<1>(*args);
    if (args->kind == 2) return run<2>(*args);
    run<3>(*args);
}
