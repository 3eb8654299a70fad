"""The activations and their gradients in registers, bit for bit those of ``reference.activations``.

The GPU's ``ex2.approx`` (``tl.exp``), ``tanh.approx`` and ``div.full`` (``/``) give other bits than a CPU, so that none of them is
used: exp and tanh are written out as in the reference, one rounding an operation, kernels are compiled without contraction to
multiply-adds, quotients are IEEE's. What is multiply-added here has an exact product. So results differ by no bit (but for what
a NaN carries).

Legend: a gate half, b linear half, s probability of the row, p upstream gradient, S sigmoid. KIND: the activation's ``kind``; its
options are ``first``, ``second``, ``third`` (limit, alpha, offset; beta1, beta2). Coefficients: Cephes (expf, tanhf).
"""

import triton
import triton.language as tl

from blockscale.kernels.casts import INTERPRETED, round_bf16

_LOG2E = tl.constexpr(1.44269504)
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)
#: 1.5 * 2^23: added to it, a small number is rounded to an integer, which then is the sum's lowest bits
_INTEGERS = tl.constexpr(12582912.0)
#: exp is made as 2^-4 of itself, which stays normal up to where it is said to be infinite
_DOWN = tl.constexpr(4)
#: 1 + exp(x) is 1 from here down
_NEGLIGIBLE = tl.constexpr(-40.0)

# 1 / (16 d) for d = 1/16 .. 2^124: the seed and one step, as rcp.rn does it for normal results, but with the step's product in the
# place of the result, so that it is rounded once where that is subnormal. Right for every d that sigmoid makes: where rcp.rn takes
# this way too, and by trial of the seed and both its neighbours for all d that exp can give above 2^122.
_RECIPROCAL = tl.constexpr("""{
.reg .f32 seed, whole, minus, rest;
rcp.approx.ftz.f32 seed, $1;
mul.rn.f32 seed, seed, 0f3D800000;
mul.rn.f32 whole, $1, 0f41800000;
neg.f32 minus, whole;
fma.rn.f32 rest, minus, seed, 0f3F800000;
fma.rn.f32 $0, seed, rest, seed;
}""")


@triton.jit
def _exp(x, DOWN: tl.constexpr):
    """exp(x) * 2^-DOWN where that is normal; anything else elsewhere (NaN included)."""
    integers: tl.constexpr = _INTEGERS - DOWN
    shifted = x * _LOG2E + integers
    k = shifted - integers
    r = tl.fma(k, -_LN2_HIGH, x) - k * _LN2_LOW
    poly = r * 1.9875691500e-4 + 1.3981999507e-3
    poly = poly * r + 8.3334519073e-3
    poly = poly * r + 4.1665795894e-2
    poly = poly * r + 1.6666665459e-1
    poly = poly * r + 5.0000001201e-1
    result = (poly * (r * r) + r) + 1.0
    bits = result.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal_of_16(d):
    """1 / (16 d), rounded once."""
    if INTERPRETED:
        return tl.math.div_rn(1.0, d * 16.0)
    else:
        return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), each operation rounded. A NaN gives anything: it is multiplied by what the NaN comes from."""
    n = tl.maximum(-x, _NEGLIGIBLE, propagate_nan=tl.PropagateNan.ALL)
    sixteenth = _exp(n, _DOWN) + 0.0625
    return tl.where(x < -88.72, 0.0, _reciprocal_of_16(sixteenth))


@triton.jit
def tanh(x):
    """A polynomial below 0.625 in magnitude, else 1 - 2 / (exp(2|x|) + 1) with the sign of x."""
    z = x * x
    poly = z * -5.70498872745e-3 + 2.06390887954e-2
    poly = poly * z + -5.37397155531e-2
    poly = poly * z + 1.33314422036e-1
    poly = poly * z + -3.33332819422e-1
    small = (poly * z) * x + x
    magnitude = tl.abs(x)
    # from 40 on the quotient is lost beside 1
    sixteenth = _exp(tl.minimum(magnitude * 2.0, 40.0), _DOWN) + 0.0625
    large = (1.0 - _reciprocal_of_16(sixteenth) * 2.0).to(tl.int32, bitcast=True)
    large = large | (x.to(tl.int32, bitcast=True) & -2147483648)
    return tl.where(magnitude >= 0.625, large.to(tl.float32, bitcast=True), small)


@triton.jit
def _least(x, limit):
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clamped(a, b, limit, alpha, offset):
    """a' = min(a, L), b' = clamp(b, -L, L) + offset, alpha a'."""
    gate = _least(a, limit)
    linear = tl.maximum(_least(b, limit), -limit, propagate_nan=tl.PropagateNan.ALL) + offset
    return gate, linear, gate * alpha


@triton.jit
def forward(a, b, s, first, second, third, KIND: tl.constexpr, PROBS: tl.constexpr):
    """y in float32; b is not read without a GLU, s not without PROBS."""
    if KIND == "swiglu":
        y = (a * sigmoid(a)) * b
    elif KIND == "clamped_swiglu":
        gate, linear, z = _clamped(a, b, first, second, third)
        y = (gate * sigmoid(z)) * linear
    elif KIND == "squared_relu":
        r = tl.where(a < 0.0, 0.0, a)
        y = r * r
    else:
        t = tanh(tl.math.div_rn(a, first))
        v = tanh(tl.math.div_rn(b, second))
        y = (((t * first) * sigmoid(a)) * second) * v
    if PROBS:
        y = y * s
    return y


@triton.jit
def backward(p, a, b, s, first, second, third, KIND: tl.constexpr, PROBS: tl.constexpr):
    """(da, db, the element's summand of ds) in float32; db is da without a GLU, the summand is for PROBS."""
    ps = p
    if PROBS:
        ps = p * s
    if KIND == "swiglu":
        sig = sigmoid(a)
        da = (((a * sig) * (1.0 - sig) + sig) * ps) * b
        db = (ps * a) * sig
        term = ((p * a) * sig) * b
    elif KIND == "clamped_swiglu":
        gate, linear, z = _clamped(a, b, first, second, third)
        sig = sigmoid(z)
        da = (((z * sig) * (1.0 - sig) + sig) * tl.where(a > first, 0.0, ps)) * linear
        inside = tl.where((b > first) | (b < -first), 0.0, ps)
        db = (inside * gate) * sig
        term = ((p * gate) * sig) * linear
    elif KIND == "squared_relu":
        r = tl.where(a < 0.0, 0.0, a)
        da = p * 2.0
        if PROBS:
            da = da * s
        da = da * r
        db = da
        term = p * (r * r)
    else:
        t = tanh(tl.math.div_rn(a, first))
        sig = sigmoid(a)
        v = tanh(tl.math.div_rn(b, second))
        g = (t * first) * sig
        u = v * second
        da = (((1.0 - t * t) * sig + g * (1.0 - sig)) * ps) * u
        db = (ps * g) * (1.0 - v * v)
        term = (p * g) * u
    return da, db, term


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x as float32, rounded to DTYPE."""
    if DTYPE.is_bf16():
        return round_bf16(x)
    elif DTYPE.is_fp16():
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """x in DTYPE. (The interpreter does not round to bfloat16 as the GPU does, so that there the bits are moved.)"""
    if INTERPRETED and DTYPE.is_bf16():
        bits = round_bf16(x).to(tl.int32, bitcast=True) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
