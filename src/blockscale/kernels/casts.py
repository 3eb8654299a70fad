"""Element and scale casts of the GPU kernels: the hardware's conversions, and the same in integers for the interpreter.

Triton's interpreter converts to float8 wrongly and has no inline assembly, so every cast has two forms, chosen when this
module is imported; a test on a GPU proves them equal. All take float32. Meaning: ``reference`` and ``formats``; satfinite,
nearest even, NaN codes canonical, the sign of zero kept.
"""

import triton
import triton.language as tl

#: whether kernels of this process run in the interpreter
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FLT_MAX = tl.constexpr(3.4028234663852886e38)

_CVT4 = """{{
.reg .b16 lo, hi;
cvt.rn.satfinite.{0}x2.f32 lo, $2, $1;
cvt.rn.satfinite.{0}x2.f32 hi, $4, $3;
mov.b32 $0, {{lo, hi}};
}}"""
_CVT4_E4M3 = tl.constexpr(_CVT4.format("e4m3"))
_CVT4_E5M2 = tl.constexpr(_CVT4.format("e5m2"))
_CVT1_E4M3 = tl.constexpr("""{
.reg .b16 h; .reg .f32 z;
mov.f32 z, 0f00000000;
cvt.rn.satfinite.e4m3x2.f32 h, z, $1;
cvt.u32.u16 $0, h;
}""")


_WORD = tl.constexpr("=r,r,r,r,r")


def _pack8_text() -> str:
    """Eight float32 to eight E2M1 codes, the first in the lowest four bits.

    The magnitude's code is 2 min(a, 2) + clamp(a - 2, 0, 2) + clamp(a - 4, 0, 2) / 2, each part rounded to an integer; a
    part is fractional only where the parts before it have reached their (even) ends, so that adding them one after the
    other to 2^23 rounds ties to the even code. Saturation of a - 2 and a - 4 to 0..1 is free in the multiply-add, which is
    exact there. NaN gives code 0 here; a block with a NaN is overwritten by the caller.
    """
    lines = ["{", ".reg .f32 a, s, t, u; .reg .b32 r, m, p, q, e, o;"]
    for i in reversed(range(8)):
        lines += [
            f"abs.f32 a, ${i + 1}; mul.sat.f32 s, a, 0f3F000000; fma.rn.sat.f32 t, a, 0f3F000000, 0fBF800000;",
            "fma.rn.sat.f32 u, a, 0f3F000000, 0fC0000000; fma.rn.f32 s, s, 0f40800000, 0f4B000000;",
            "fma.rn.f32 s, t, 0f40000000, s; add.rn.f32 s, s, u;",
            "mov.b32 m, s;" if i == 7 else "mov.b32 r, s; mad.lo.u32 m, m, 16, r;",
        ]
    # 0x4B000000 * (1 + 16), what the two lowest sums leave above their codes
    lines += ["sub.u32 m, m, 0xFB000000;"]
    for target, first in (("e", 1), ("o", 2)):  # the sign bytes of the even and of the odd elements
        a, b, c, d = (f"${first + 2 * n}" for n in range(4))
        lines += [f"prmt.b32 p, {a}, {b}, 0x7373; prmt.b32 q, {c}, {d}, 0x7373; prmt.b32 {target}, p, q, 0x5410;"]
    lines += ["shr.u32 e, e, 4; and.b32 e, e, 0x08080808; and.b32 o, o, 0x80808080; or.b32 m, m, e; or.b32 $0, m, o;", "}"]
    return "\n".join(lines)


_PACK8 = tl.constexpr(_pack8_text())
_PACK8_ARGS = tl.constexpr("=r" + ",r" * 8)


@triton.jit
def to_float32(x):
    """Exact. (The interpreter halves bfloat16's subnormals, so that there the bits are moved.)"""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def max_nan(a, b):
    """The larger, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(magnitude, axis: tl.constexpr, IGNORE_NAN: tl.constexpr):
    """Largest of ``magnitude`` (>= 0) along an axis; NaN if one is there, unless they are ignored (0 of NaNs only)."""
    if IGNORE_NAN:
        return tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), axis)
    elif INTERPRETED:  # where a reduction with a function of one's own is a loop in Python
        nan = tl.max((magnitude != magnitude).to(tl.int32), axis)
        return tl.where(nan > 0, float("nan"), tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), axis))
    else:
        return tl.reduce(magnitude, axis, max_nan)


@triton.jit
def largest(value, axis: tl.constexpr):
    """Largest magnitude along an axis, NaNs left out (0 of NaNs only): a maximum takes the operand that is a number."""
    found = tl.max(tl.abs(value), axis)
    return tl.where(found == found, found, 0.0)


@triton.jit
def _to_fp8_integers(x, MANTISSA: tl.constexpr, EMIN: tl.constexpr, LARGEST: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    a = tl.minimum(tl.where(nan, 0.0, tl.abs(x)), LARGEST)
    abits = a.to(tl.int32, bitcast=True)
    shift: tl.constexpr = 23 - MANTISSA
    normal = ((abits + ((1 << (shift - 1)) - 1) + ((abits >> shift) & 1)) >> shift) - ((EMIN + 126) << MANTISSA)
    # adding 2^(EMIN - MANTISSA + 23) rounds to multiples of the smallest subnormal
    magic: tl.constexpr = (EMIN - MANTISSA + 23 + 127) << 23
    base = tl.full(x.shape, magic, tl.int32).to(tl.float32, bitcast=True)
    small = (a + base).to(tl.int32, bitcast=True) - magic
    code = tl.where(abits < ((EMIN + 127) << 23), small, normal) | ((bits >> 24) & 0x80)
    return tl.where(nan, 0x7F, code).to(tl.uint8)


@triton.jit
def to_fp8(x, E5M2: tl.constexpr):
    """E4M3 or E5M2 codes (uint8)."""
    if E5M2:
        if INTERPRETED:
            return _to_fp8_integers(x, 2, -14, 57344.0)
        else:
            return tl.inline_asm_elementwise(_CVT4_E5M2, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        if INTERPRETED:
            return _to_fp8_integers(x, 3, -6, 448.0)
        else:
            return tl.inline_asm_elementwise(_CVT4_E4M3, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def pack_fp8(x0, x1, x2, x3, E5M2: tl.constexpr):
    """int32 of four E4M3 or E5M2 codes, x0's in the lowest byte."""
    if INTERPRETED:
        low = to_fp8(x0, E5M2).to(tl.int32) | (to_fp8(x1, E5M2).to(tl.int32) << 8)
        return low | (to_fp8(x2, E5M2).to(tl.int32) << 16) | (to_fp8(x3, E5M2).to(tl.int32) << 24)
    elif E5M2:
        return tl.inline_asm_elementwise(_CVT4_E5M2, _WORD, [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(_CVT4_E4M3, _WORD, [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def fp8_scale(amax, eps, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(what brings ``amax`` to the largest code, its inverse), float32; ``amax`` >= 0, not NaN.

    The largest codes are 1.75 * 2^n, so that the power of two below fl(max / amax) follows from the exponent of amax and a
    carry from a mantissa above .75: the quotient next to a power of two does not round to it.
    """
    floor = tl.maximum(amax, eps)
    bits = floor.to(tl.int32, bitcast=True)
    one = (bits == 0) | (bits == 0x7F800000)
    if POWER_OF_TWO:
        TOP: tl.constexpr = 269 if E5M2 else 262
        exponent = tl.where(one, 127, tl.minimum(TOP - ((bits + 0x1FFFFF) >> 23), 254))
        inverse = tl.where(exponent == 254, 0x400000, (254 - exponent) << 23)
        return (exponent << 23).to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)
    else:
        LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
        most = tl.full(floor.shape, LARGEST, tl.float32)
        scale = tl.where(one, 1.0, tl.minimum(tl.math.div_rn(most, floor), FLT_MAX))
        return scale, reciprocal(scale)


@triton.jit
def reciprocal(x):
    """fl(1 / x)."""
    return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def to_e4m3_scale(x):
    """E4M3 codes (int32) of non-negative scales."""
    if INTERPRETED:
        return _to_fp8_integers(x, 3, -6, 448.0).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(_CVT1_E4M3, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def from_e4m3_scale(code):
    """float32 values of E4M3 codes (int32, 0..0x7F); 0x7F is NaN."""
    normal = (code + (120 << 3)) << 20
    value = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))
    return tl.where(code == 0x7F, float("nan"), value)


@triton.jit
def _e2m1_integers(y):
    """E2M1 code (int32) of one value; NaN gives 0."""
    bits = y.to(tl.int32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    a = tl.minimum(tl.where(nan, 0.0, tl.abs(y)), 6.0)
    # 2^22, 2^23 and 2^24 round to multiples of 1/2, 1 and 2
    fine = (a + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    middle = (a + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000 + 2
    coarse = (a + 16777216.0).to(tl.int32, bitcast=True) - 0x4B800000 + 4
    code = tl.minimum(tl.minimum(fine, middle), coarse)
    return code | tl.where(nan, 0, (bits >> 28) & 8)


@triton.jit
def pack_e2m1(x0, x1, x2, x3, x4, x5, x6, x7):
    """int32 of eight E2M1 codes, x0's in the lowest four bits; a NaN gives code 0."""
    if INTERPRETED:
        word = _e2m1_integers(x0) | (_e2m1_integers(x1) << 4) | (_e2m1_integers(x2) << 8) | (_e2m1_integers(x3) << 12)
        high = _e2m1_integers(x4) | (_e2m1_integers(x5) << 4) | (_e2m1_integers(x6) << 8) | (_e2m1_integers(x7) << 12)
        return word | (high << 16)
    else:
        return tl.inline_asm_elementwise(
            _PACK8, _PACK8_ARGS, [x0, x1, x2, x3, x4, x5, x6, x7], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def split4(y):
    """The four parts of (..., 2, 2), the last axis counting fastest."""
    even, odd = tl.split(y)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def split8(y):
    """The eight parts of (..., 2, 2, 2), the last axis counting fastest."""
    even, odd = tl.split(y)
    x0x4, x2x6 = tl.split(even)
    x1x5, x3x7 = tl.split(odd)
    x0, x4 = tl.split(x0x4)
    x2, x6 = tl.split(x2x6)
    x1, x5 = tl.split(x1x5)
    x3, x7 = tl.split(x3x7)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def e8m0(amax, EXPONENT: tl.constexpr, CARRY: tl.constexpr, SMALLEST: tl.constexpr, FLOOR: tl.constexpr):
    """(E8M0 code int32, 2^(127 - code) float32) of a block from its amax (>= 0, infinite or NaN).

    "up": fl(amax * fl(1 / max)) is at most 2^k exactly when amax is at most max * 2^k, so the exponent of amax and a carry
    from its mantissa decide; only ``SMALLEST``, one float32 above max * 2^-127, still rounds to code 0.

    Args:
        EXPONENT: floor(log2(max)). CARRY: what makes a mantissa above max's overflow: 0x7FFFFF - mantissa of max.
        SMALLEST: bits of that float32. FLOOR: the exponent of amax decides alone ("floor").
    """
    bits = amax.to(tl.int32, bitcast=True)
    low: tl.constexpr = EXPONENT << 23
    if FLOOR:
        t = bits
    else:
        t = bits + (CARRY - (bits == SMALLEST).to(tl.int32))
    t = (tl.maximum(t, low) & 0x7F800000) - low
    code = t >> 23
    inverse = 0x7F000000 - t
    nan = bits > 0x7F800000
    if FLOOR:
        code = tl.where(nan, 255, code)
        inverse = tl.where(nan, 0x7FC00000, inverse)
    else:
        special = bits >= 0x7F800000
        code = tl.where(special, tl.where(nan, 255, 254), code)
        inverse = tl.where(special, tl.where(nan, 0x7FC00000, 0x00400000), inverse)
    return code, inverse.to(tl.float32, bitcast=True)


@triton.jit
def round_bf16(x):
    """The nearest bfloat16, as float32; a NaN stays one."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 in another type, to nearest even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        return (round_bf16(x).to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def from_fp8(code, E5M2: tl.constexpr):
    """float32 values of E4M3 or E5M2 codes (uint8)."""
    if INTERPRETED:
        wide = code.to(tl.int32)
        magnitude = wide & 0x7F
        # as the fields of a float32, subnormals too, whose exponent is off by the difference of the biases
        if E5M2:
            value = (magnitude << 21).to(tl.float32, bitcast=True) * 5.192296858534828e33
            value = tl.where(magnitude >= 0x7C, tl.where(magnitude == 0x7C, float("inf"), float("nan")), value)
        else:
            value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            value = tl.where(magnitude == 0x7F, float("nan"), value)
        return tl.where(wide >= 0x80, -value, value)
    elif E5M2:
        return code.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def from_e2m1(code):
    """float32 values of E2M1 codes (int32, 0..15): 2^126 makes up for the difference of the biases."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def from_e8m0(code):
    """float32 values of E8M0 codes (int32)."""
    bits = tl.where(code == 0, 0x400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def pack_codes(c0, c1, c2, c3, c4, c5, c6, c7):
    """int32 of eight 4-bit codes (int32), c0 in the lowest bits."""
    low = c0 | (c1 << 4) | (c2 << 8) | (c3 << 12)
    return low | (c4 << 16) | (c5 << 20) | (c6 << 24) | (c7 << 28)


@triton.jit
def present_nibbles(count):
    """int32 with the lowest ``count`` (clamped to 0..8) groups of four bits set."""
    n = tl.minimum(tl.maximum(count, 0), 8)
    return tl.where(n == 8, -1, (1 << (4 * n)) - 1)
