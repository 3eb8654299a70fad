// What `watch` counts in a tensor, in one pass: NaNs, infinities, elements that a block's scale cannot hold, the spread of
// the scales. Magnitudes are compared as integers, in bfloat16's own width where x is bfloat16.
#include <cmath>
#include <mutex>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common.h"

enum ScaleKind { NONE = 0, E8M0 = 1, CODES_E4M3 = 2, GROUP_FLOAT = 3, BLOCK_FLOAT = 4 };

struct CountArgs {
    const char* x;
    i64 ldx;  // elements from row to row
    const i64* offsets;
    i64 groups, columns, block;  // block: elements that share a scale
    const u8* scale;             // rowwise, compact; float for the FP8 formats
    i64 pitch;                   // scales from row to row
    const float* total;          // what multiplies the block scales, one a group or (total_by_row) a row; or null
    double low, high;            // in units of the scale: what is lost, what overflows
    double* out;                 // (G, FIELDS), added to
    double call;                 // number of this observation
    i32 dtype, scale_kind, tile_scales, total_by_row, threads;
};

namespace {

// the order of blockscale.tensors.counters
enum Field { NANS, INFS, SATURATED, UNDERFLOW_, ELEMENTS, BLOCKS, NAN_BLOCKS, INF_BLOCKS, SATURATED_BLOCKS, UNDERFLOW_BLOCKS,
             CALLS, AMAX, SCALE_MAX, SCALE_MIN, FIRST_NAN, FIRST_INF, FIELDS };
constexpr u32 NEVER = 0x80000000u;

template <int D> struct Word {  // magnitudes as the comparisons take them
    typedef u32 U;
    static constexpr U inf = INF;
    static U low(u32 b) { return b; }
    static U high(u32 b) { return b; }
    static u32 wide(U m) { return m; }
};
template <> struct Word<BF16> {
    typedef u16 U;
    static constexpr U inf = INF >> 16;
    static U low(u32 b) { return U(b >> 16); }
    static U high(u32 b) { return U((u64(b) + 0xFFFF) >> 16); }
    static u32 wide(U m) { return u32(m) << 16; }
};

template <int D> struct Bounds {
    typename Word<D>::U low, high;  // magnitudes: non-zero ones up to low are lost, those from high on overflow
    float scale;
    Bounds() {}
    Bounds(u32 l, u32 h, float s) : low(Word<D>::low(l)), high(Word<D>::high(h)), scale(s) {}
    Bounds(float s, const CountArgs& a) : Bounds(0, NEVER, s) {
        if (s != s) return;
        u32 l = MAX_FINITE, h = NEVER;
        double lost = s * a.low, over = s * a.high;
        if (s != 0 && lost <= double(as_f(MAX_FINITE))) l = as_u(float(lost)) - (double(float(lost)) > lost);
        if (s != 0 && over <= double(as_f(MAX_FINITE))) h = as_u(float(over)) + (double(float(over)) < over);
        *this = Bounds(l, h, s);
    }
};

template <class U, int BYTES> struct Vector {
    typedef U V __attribute__((vector_size(BYTES)));
};

template <class V> INLINE bool any(V mask) {
    u64 lane[sizeof(V) / 8], all = 0;
    memcpy(lane, &mask, sizeof mask);
    for (size_t i = 0; i < sizeof(V) / 8; i++) all |= lane[i];
    return all != 0;
}
#ifdef __AVX512BW__
INLINE bool any(Vector<u16, 64>::V m) { return _mm512_test_epi16_mask((__m512i)m, (__m512i)m) != 0; }
INLINE bool any(Vector<u32, 64>::V m) { return _mm512_test_epi32_mask((__m512i)m, (__m512i)m) != 0; }
#endif
#ifdef __AVX2__
INLINE bool any(Vector<u16, 32>::V m) { return !_mm256_testz_si256((__m256i)m, (__m256i)m); }
#endif

template <int D, int C> const typename Word<D>::U* chunk_at(const char* row, i64 c, i64 n, typename Word<D>::U* part) {
    typedef typename Word<D>::U U;
    if (D != F16 && n == C) return (const U*)row + c;
    if (D == F16) {
        to_float(row + c * 2, F16, n, C, (float*)part);
    } else {
        memset(part, 0, sizeof(U) * C);
        memcpy(part, row + c * i64(sizeof(U)), sizeof(U) * size_t(n));
    }
    return part;
}

struct Totals {
    i64 count[CALLS] = {0};
    u32 amax = 0;
    float scale_max = -INFINITY, scale_min = INFINITY;
};

// A block that needs a second look: something in it is not finite, or overflows.
template <int D, int C> void look_again(const char* row, i64 c0, i64 c1, typename Word<D>::U high, Totals& t, u32& largest) {
    typedef typename Word<D>::U U;
    constexpr U mask = U(~U(0)) >> 1, inf = Word<D>::inf;
    alignas(64) U part[C];
    i64 nans = 0, infs = 0, over = 0;
    U m_max = 0;
    for (i64 c = c0; c < c1; c += C) {
        i64 n = least(C, c1 - c);
        const U* p = chunk_at<D, C>(row, c, n, part);
        for (i64 i = 0; i < n; i++) {
            U m = p[i] & mask;
            nans += m > inf;
            infs += m == inf;
            if (m >= inf) continue;
            over += m >= high;
            m_max = m > m_max ? m : m_max;
        }
    }
    largest = Word<D>::wide(m_max);
    t.count[NANS] += nans;
    t.count[INFS] += infs;
    t.count[SATURATED] += over;
    t.count[NAN_BLOCKS] += nans > 0;
    t.count[INF_BLOCKS] += infs > 0;
    t.count[SATURATED_BLOCKS] += over > 0;
}

// One row, block by block; scale_of(j) gives the bounds of block j.
template <int D, int C, class S> INLINE void count_row(const CountArgs& a, const char* row, Totals& t, S scale_of) {
    typedef typename Word<D>::U U;
    constexpr U mask = U(~U(0)) >> 1;
    alignas(64) U part[C], lost[C] = {0};
    for (i64 c0 = 0, j = 0; c0 < a.columns; c0 += a.block, j++) {
        i64 c1 = least(c0 + a.block, a.columns);
        const Bounds<D> b = scale_of(j);
        U m_max = 0;
        for (i64 c = c0; c < c1; c += C) {
            const U* p = chunk_at<D, C>(row, c, least(C, c1 - c), part);
            U most = 0;
            for (int i = 0; i < C; i++) {
                U m = p[i] & mask;
                most = m > most ? m : most;
                lost[i] += U(m - 1) < b.low;
            }
            m_max = most > m_max ? most : m_max;
        }
        if (m_max == 0) continue;
        u32 largest = Word<D>::wide(m_max);
        bool finite = m_max < Word<D>::inf;
        if (!finite || m_max >= b.high) look_again<D, C>(row, c0, c1, b.high, t, largest);
        t.amax = larger(t.amax, largest);
        if (a.scale_kind == NONE || !finite) continue;
        t.count[UNDERFLOW_BLOCKS] += m_max <= b.low;
        t.scale_max = b.scale > t.scale_max ? b.scale : t.scale_max;
        t.scale_min = b.scale < t.scale_min ? b.scale : t.scale_min;
    }
    for (int i = 0; i < C; i++) t.count[UNDERFLOW_] += lost[i];
}

// The same for a row of whole vectors in which every block keeps something and nothing overflows or is not finite: no block is
// reduced to a number of its own. False, and nothing counted, for any other row.
template <int D, int C, class S> INLINE bool count_good_row(const CountArgs& a, const char* row, Totals& t, S scale_of) {
    typedef typename Word<D>::U U;
    constexpr int lanes = C * sizeof(U) > 64 ? 64 / sizeof(U) : C;
    typedef typename Vector<U, lanes * sizeof(U)>::V V;
    constexpr U mask = U(~U(0)) >> 1;
    if (D == F16 || a.columns % lanes || a.block % lanes) return false;
    V most = {}, lost = {}, over = {};
    float scale_max = t.scale_max, scale_min = t.scale_min;
    const U* p = (const U*)row;
    for (i64 c = 0, j = 0; c < a.columns; j++) {
        const Bounds<D> b = scale_of(j);
        V kept = {};
        for (i64 end = least(c + a.block, a.columns); c < end; c += lanes) {
            V m = load<V>(p + c) & mask;
            most = m > most ? m : most;
            kept |= (V)(m > b.low);
            lost -= (V)((m - 1) < b.low);
            over |= (V)(m >= b.high);
        }
        if (!any(kept)) return false;
        scale_max = b.scale > scale_max ? b.scale : scale_max;
        scale_min = b.scale < scale_min ? b.scale : scale_min;
    }
    if (any(over) || any((V)(most >= Word<D>::inf))) return false;
    U largest[lanes], lost_lane[lanes];
    store(largest, most);
    store(lost_lane, lost);
    u32 m = 0, n = 0;
    for (int i = 0; i < lanes; i++) m = larger(m, Word<D>::wide(largest[i])), n += lost_lane[i];
    t.amax = larger(t.amax, m);
    t.count[UNDERFLOW_] += n;
    t.scale_max = scale_max, t.scale_min = scale_min;
    return true;
}

// n elements side by side, no scales: true, with the largest magnitude, when all are finite.
template <int D> bool largest_of(const char* x, i64 n, u32& largest) {
    typedef std::conditional_t<D == F32, u32, u16> U;  // of float16 the magnitudes themselves, which order as numbers do
    constexpr U mask = U(~U(0)) >> 1, inf = D == F16 ? 0x7C00 : Word<D>::inf;
    constexpr int lanes = 64 / sizeof(U);
    typedef typename Vector<U, 64>::V V;
    const U* p = (const U*)x;
    V most[4] = {};
    i64 i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes)
        for (int k = 0; k < 4; k++) {
            V m = load<V>(p + i + k * lanes) & mask;
            most[k] = m > most[k] ? m : most[k];
        }
    U lane[4 * lanes], m_max = 0;
    memcpy(lane, most, sizeof most);
    for (U m : lane) m_max = m > m_max ? m : m_max;
    for (; i < n; i++) m_max = (p[i] & mask) > m_max ? (p[i] & mask) : m_max;
    if (D == F16) {
        float wide[LANES];  // the conversion writes a whole vector
        to_float((const char*)&m_max, F16, 1, 1, wide);
        largest = as_u(wide[0]);
    } else {
        largest = Word<D>::wide(m_max);
    }
    return m_max < inf;
}

template <int D> struct Tables {  // bounds by scale code: one table, or one a group
    std::vector<Bounds<D>> bounds;
    i64 step = 0;

    static float value(const CountArgs& a, int code) {
        if (a.scale_kind == CODES_E4M3) return e4m3_value(u32(code) & 0x7F);
        return code == 0xFF ? as_f(QNAN) : as_f(code ? u32(code) << 23 : 0x00400000u);
    }
    Tables(const CountArgs& a, const Tiles& tiles) {
        if ((a.scale_kind != E8M0 && a.scale_kind != CODES_E4M3) || a.total_by_row) return;
        step = a.total ? 256 : 0;
        bounds.resize(size_t(a.total ? 256 * a.groups : 256));
        for (i64 g = 0; g < (a.total ? a.groups : 1); g++)
            if (!a.total || tiles.groups[size_t(g)].rows)
                for (int code = 0; code < (a.scale_kind == E8M0 ? 256 : 128); code++)
                    bounds[size_t(g * 256 + code)] = Bounds<D>(a.total ? value(a, code) * a.total[g] : value(a, code), a);
    }
};

template <int D, int C> void count_tile(const CountArgs& a, const Tables<D>& tables, const Group& g, const Tile& tile, Totals& t) {
    const char* x = a.x + tile.row * a.ldx * size_of(a.dtype);
    u32 largest;
    if (a.scale_kind == NONE && a.ldx == a.columns && largest_of<D>(x, tile.rows * a.columns, largest)) {
        t.amax = largest;
        t.count[ELEMENTS] = tile.rows * a.columns;
        return;
    }
    auto count = [&](auto scale_of) {
        if (a.scale_kind == NONE || !count_good_row<D, C>(a, x, t, scale_of)) count_row<D, C>(a, x, t, scale_of);
    };
    const Bounds<D>* table = tables.bounds.empty() ? nullptr : &tables.bounds[size_t(tile.group * tables.step)];
    Bounds<D> whole = a.scale_kind == GROUP_FLOAT ? Bounds<D>(((const float*)a.scale)[tile.group], a) : Bounds<D>(0, NEVER, 0);
    for (i64 r = 0; r < tile.rows; r++, x += a.ldx * size_of(a.dtype)) {
        i64 row = tile.row + r;
        const u8* code = a.scale + (g.tile0 * TILE + tile.local * TILE + r) * a.pitch;
        if (table) {
            count([&](i64 j) { return table[code[j]]; });
        } else if (a.total_by_row) {
            count([&](i64 j) { return Bounds<D>(Tables<D>::value(a, code[j]) * a.total[row], a); });
        } else if (a.scale_kind == BLOCK_FLOAT) {
            const float* scale = (const float*)a.scale + (a.tile_scales ? g.tile0 + tile.local : row) * a.pitch;
            count([&](i64 j) { return Bounds<D>(scale[j], a); });
        } else {
            count([&](i64) { return whole; });
        }
    }
    t.count[ELEMENTS] = tile.rows * a.columns;
    t.count[BLOCKS] = a.scale_kind == NONE ? 0 : tile.rows * ceil_div(a.columns, a.block);
    if (a.scale_kind == NONE) t.count[NAN_BLOCKS] = t.count[INF_BLOCKS] = 0;
}

void add(const CountArgs& a, const Totals& t, double* out) {
    auto raise = [&](Field f, double value) { out[f] = value > out[f] ? value : out[f]; };
    for (int f = 0; f < CALLS; f++) out[f] += double(t.count[f]);
    raise(AMAX, double(as_f(t.amax)));
    raise(SCALE_MAX, t.scale_max);
    raise(SCALE_MIN, -double(t.scale_min));
    if (t.count[NANS]) raise(FIRST_NAN, -a.call);
    if (t.count[INFS]) raise(FIRST_INF, -a.call);
}

template <int D> void count(const CountArgs& a, const Tiles& tiles) {
    std::mutex lock;
    Tables<D> tables(a, tiles);
    parallel((i64)tiles.tiles.size(), a.threads, 1, 0, [&](i64 unit, char*) {
        const Tile& tile = tiles.tiles[size_t(unit)];
        const Group& g = tiles.groups[size_t(tile.group)];
        Totals t;
        if (a.block <= 16)
            count_tile<D, 16>(a, tables, g, tile, t);
        else if (a.block <= 32)
            count_tile<D, 32>(a, tables, g, tile, t);
        else
            count_tile<D, 64>(a, tables, g, tile, t);
        std::lock_guard<std::mutex> hold(lock);
        add(a, t, a.out + tile.group * FIELDS);
    });
}

}  // namespace

extern "C" void blockscale_count(const CountArgs* args) {
    DefaultFloats floats;
    const CountArgs& a = *args;
    Tiles tiles(a.offsets, a.groups);
    for (i64 g = 0; g < a.groups; g++) a.out[g * FIELDS + CALLS] += 1;
    if (a.dtype == F32) return count<F32>(a, tiles);
    if (a.dtype == BF16) return count<BF16>(a, tiles);
    count<F16>(a, tiles);
}

// Without scales: what is looked at in every step, so with little to hand over.
extern "C" void blockscale_look(const char* x, i64 ldx, const i64* offsets, i64 groups, i64 columns, double* out, double call,
                                i32 dtype, i32 threads) {
    CountArgs args = {};
    args.x = x, args.ldx = ldx, args.offsets = offsets, args.groups = groups, args.columns = columns;
    args.block = columns > 0 ? columns : 1, args.out = out, args.call = call, args.dtype = dtype, args.threads = threads;
    blockscale_count(&args);
}

// What is nearly always so: every element of the live rows is finite. 1: elements and magnitudes are counted; 0: something is not
// finite, and nothing was counted. Rows lie side by side; offsets null: `rows` of them in one group.
extern "C" i32 blockscale_count_finite(const char* x, const i64* offsets, i64 groups, i64 rows, i64 columns, double* out,
                                       i32 dtype, i32 threads) {
    constexpr i64 chunk = 1 << 18;
    struct Part {
        i64 group, first, elements;
        u32 largest;
        bool finite;
    };
    auto begin = [&](i64 g) { return (offsets ? offsets[g] : g * rows) * columns; };
    std::vector<Part> parts;
    for (i64 g = 0; g < groups; g++)
        for (i64 i = begin(g), end = begin(g + 1); i < end; i += chunk) parts.push_back({g, i, least(chunk, end - i), 0, false});
    parallel((i64)parts.size(), threads, 1, 0, [&](i64 unit, char*) {
        Part& p = parts[size_t(unit)];
        const char* first = x + p.first * size_of(dtype);
        p.finite = dtype == F32    ? largest_of<F32>(first, p.elements, p.largest)
                   : dtype == BF16 ? largest_of<BF16>(first, p.elements, p.largest)
                                   : largest_of<F16>(first, p.elements, p.largest);
    });
    for (const Part& p : parts)
        if (!p.finite) return 0;
    for (i64 g = 0; g < groups; g++) out[g * FIELDS + CALLS] += 1;
    for (const Part& p : parts) {
        double *row = out + p.group * FIELDS, amax = double(as_f(p.largest));
        row[ELEMENTS] += double(p.elements);
        row[AMAX] = amax > row[AMAX] ? amax : row[AMAX];
    }
    return 1;
}
