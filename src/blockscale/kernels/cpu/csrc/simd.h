// Vectors of 16 lanes as GCC and Clang have them on every target, element codes, and conversions.
// Every float operation here is one IEEE rounding: the file is compiled without contraction and without fast-math.
#pragma once
#include <cstdint>
#include <cstring>

typedef int32_t i32;
typedef int64_t i64;
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef u32 vu __attribute__((vector_size(64)));
typedef i32 vi __attribute__((vector_size(64)));
typedef u16 vh __attribute__((vector_size(32)));
typedef u8 vb __attribute__((vector_size(16)));
typedef u16 vb2 __attribute__((vector_size(16)));
typedef u8 vn __attribute__((vector_size(8)));

#define METHOD inline __attribute__((always_inline))
#define INLINE static METHOD

enum DType { F32 = 0, BF16 = 1, F16 = 2 };

INLINE int size_of(int dtype) { return dtype == F32 ? 4 : 2; }

template <class To, class From> INLINE To bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

INLINE float as_f(u32 x) { return bits_of<float>(x); }
INLINE u32 as_u(float x) { return bits_of<u32>(x); }
INLINE vf as_f(vu x) { return (vf)x; }
INLINE vu as_u(vf x) { return (vu)x; }

template <class V> INLINE V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V> INLINE void store(void* p, V v) { memcpy(p, &v, sizeof v); }

INLINE vu lane_index() { return (vu){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
INLINE vu all(u32 x) { return (vu){} + x; }
INLINE vf all(float x) { return as_f(all(as_u(x))); }
INLINE vu choose(vi mask, vu a, vu b) { return mask ? a : b; }
INLINE vf choose(vi mask, vf a, vf b) { return mask ? a : b; }
INLINE u32 choose(bool mask, u32 a, u32 b) { return mask ? a : b; }
INLINE float choose(bool mask, float a, float b) { return mask ? a : b; }
// unsigned 31-bit values: compared as signed, which every target has
INLINE vu larger(vu a, vu b) { return (vu)((vi)a > (vi)b ? (vi)a : (vi)b); }
INLINE vu smaller(vu a, vu b) { return (vu)((vi)a < (vi)b ? (vi)a : (vi)b); }
INLINE u32 larger(u32 a, u32 b) { return a > b ? a : b; }
INLINE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
INLINE vi above(vu a, u32 b) { return (vi)a > (vi)all(b); }
INLINE vi below(vu a, u32 b) { return (vi)a < (vi)all(b); }
INLINE bool above(u32 a, u32 b) { return a > b; }
INLINE bool below(u32 a, u32 b) { return a < b; }

constexpr u32 MAGNITUDE = 0x7FFFFFFF, INF = 0x7F800000, QNAN = 0x7FC00000, MAX_FINITE = 0x7F7FFFFF;

// |x| as an integer: ordered like the floats, any NaN above infinity. With ignore, a NaN counts as 0.
INLINE vu magnitude(vf x, bool ignore) {
    vu u = as_u(x) & MAGNITUDE;
    return ignore ? choose(above(u, INF), vu{}, u) : u;
}

INLINE u32 lanes_max(vu v) {
    u32 lane[LANES], m = 0;
    store(lane, v);
    for (int i = 0; i < LANES; i++) m = larger(m, lane[i]);
    return m;
}

INLINE float min_f(float x, float bound) { return x > bound ? bound : x; }  // a NaN stays

// An element type of M mantissa bits, exponent bias B and the largest finite value MAX; NAN_CODE whatever a NaN's sign.
template <int M, int B, u32 MAX_BITS, int BITS> struct Element {
    static constexpr u32 max_bits = MAX_BITS, mantissa = M;
    static constexpr u32 smallest_normal = u32(128 - B) << 23, magic = u32(127 + 1 - B - M + 23) << 23;
    static constexpr u32 half = (1u << (22 - M)) - 1;

    // codes of float values: to nearest, ties to even; saturating. Below the smallest normal a float addition rounds.
    template <class U, class F> INLINE U encode_as(F x) {
        U bits = as_u(x), u = bits & MAGNITUDE;
        U sign = (bits >> (32 - BITS)) & (1u << (BITS - 1));
        auto nan = above(u, INF);
        u = smaller(u, U{} + MAX_BITS);
        U normal = ((u + half + ((u >> (23 - M)) & 1u)) >> (23 - M)) - (u32(127 - B) << M);
        U small = as_u(as_f(u) + as_f(U{} + magic)) - magic;
        U code = choose(below(u, smallest_normal), small, normal) | sign;
        return choose(nan, U{} + ((1u << (BITS - 1)) - 1), code);
    }
    INLINE vu encode(vf x) { return encode_as<vu>(x); }
    INLINE u32 encode(float x) { return encode_as<u32>(x); }
};

typedef Element<3, 7, 0x43E00000, 8> E4M3;
typedef Element<2, 15, 0x47600000, 8> E5M2;
typedef Element<1, 1, 0x40C00000, 4> E2M1;

INLINE float e4m3_value(u32 code) {  // of a non-negative code
    if (code == 0x7F) return as_f(QNAN);
    return code < 8 ? float(code) * 0x1p-9f : as_f((code << 20) + (120u << 23));
}

INLINE vf half_to_float(vu h) {
    vu m = h & 0x7FFFu;
    vf f = as_f(m << 13) * 0x1p112f;  // exact, subnormals too
    vu u = choose(above(m, 0x7BFF), (m << 13) | INF, as_u(f));
    return as_f(u | ((h & 0x8000u) << 16));
}

INLINE vu float_to_half(vf x) {
    vu u = as_u(x) & MAGNITUDE, sign = (as_u(x) >> 16) & 0x8000u;
    vu normal = (u + 0xFFFu + ((u >> 13) & 1u) - (112u << 23)) >> 13;
    vu small = as_u(as_f(u) + all(0.5f)) - 0x3F000000u;
    vu code = choose(below(u, 0x38800000), small, choose(above(u, 0x477FFFFF), all(u32(0x7C00)), normal));
    return choose(above(u, INF), all(u32(0x7E00)), code) | sign;
}

INLINE vu float_to_bf16(vf x) {
    vu u = as_u(x);
    vu code = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return choose(above(u & MAGNITUDE, INF), all(u32(0x7FC0)), code);
}

template <int D> INLINE vf load_as_float(const char* p) {
    if (D == F32) return load<vf>(p);
    vu h = __builtin_convertvector(load<vh>(p), vu);
    return D == BF16 ? as_f(h << 16) : half_to_float(h);
}

template <int D> INLINE void store_as(char* p, vf x) {
    if (D == F32) return store(p, x);
    store(p, __builtin_convertvector(D == BF16 ? float_to_bf16(x) : float_to_half(x), vh));
}

// n values of a dtype to float; zeros behind them up to the padded count, a multiple of 16
template <int D> INLINE void convert(const char* p, i64 n, i64 padded, float* out) {
    constexpr int size = D == F32 ? 4 : 2;
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, load_as_float<D>(p + i * size));
    if (i < n) {
        char part[64] = {0};
        memcpy(part, p + i * size, size_t(n - i) * size);
        store(out + i, load_as_float<D>(part));
        i += LANES;
    }
    if (i < padded) memset(out + i, 0, size_t(padded - i) * 4);
}

INLINE void to_float(const char* p, int dtype, i64 n, i64 padded, float* out) {
    if (dtype == F32) return convert<F32>(p, n, padded, out);
    if (dtype == BF16) return convert<BF16>(p, n, padded, out);
    convert<F16>(p, n, padded, out);
}

// n floats (the buffer holds whole vectors) to a dtype
template <int D> INLINE void convert_back(const float* x, i64 n, char* out) {
    constexpr int size = D == F32 ? 4 : 2;
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) store_as<D>(out + i * size, load<vf>(x + i));
    if (i < n) {
        char part[64];
        store_as<D>(part, load<vf>(x + i));
        memcpy(out + i * size, part, size_t(n - i) * size);
    }
}

INLINE void from_float(const float* x, int dtype, i64 n, char* out) {
    if (dtype == F32) return convert_back<F32>(x, n, out);
    if (dtype == BF16) return convert_back<BF16>(x, n, out);
    convert_back<F16>(x, n, out);
}

INLINE void store_bytes(u8* out, vu codes) { store(out, __builtin_convertvector(codes, vb)); }

// 16 E2M1 codes as 8 bytes, the even element in the low nibble
INLINE void store_nibbles(u8* out, vu codes) {
    vb2 w = (vb2)__builtin_convertvector(codes, vb);
    store(out, __builtin_convertvector((w & 0xF) | (w >> 4), vn));
}
