"""The activations between the two linears: forward values and gradients, float32, every operation rounded.

Arrays of float32 stay float32 in numpy as long as no float64 array meets them; constants are made float32 by `c`.
"""

import numpy as np

from .codes import round_to

c = np.float32
GLU = {"swiglu": True, "clamped_swiglu": True, "squared_relu": False, "situ": True}
DEFAULTS = {
    "swiglu": {},
    "clamped_swiglu": {"limit": 7.0, "alpha": 1.702, "offset": 1.0},
    "squared_relu": {},
    "situ": {"beta1": 4.0, "beta2": 25.0},
}
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


def horner(x: np.ndarray, coefficients: tuple) -> np.ndarray:
    """The polynomial, highest power first."""
    result = np.full_like(x, c(coefficients[0]))
    for coefficient in coefficients[1:]:
        result = result * x + c(coefficient)
    return result


def exp(x: np.ndarray) -> np.ndarray:
    """exp as the specification writes it out."""
    with np.errstate(all="ignore"):
        k = np.rint(x * c(1.44269504))
        r = (x - k * c(0.693359375)) - k * c(-2.12194440e-4)
        y = (horner(r, EXP) * (r * r) + r) + c(1)
        power = np.where(np.isfinite(k), np.clip(k, -200, 200), 0).astype(np.int32)
        half = power // 2
        y = np.ldexp(np.ldexp(y, half), power - half)
    return np.where(x > c(88.72), c(np.inf), np.where(x < c(-103.97), c(0), y)).astype(c)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    with np.errstate(all="ignore"):
        return c(1) / (c(1) + exp(-x))


def tanh(x: np.ndarray) -> np.ndarray:
    """tanh as the specification writes it out."""
    with np.errstate(all="ignore"):
        z = x * x
        small = (horner(z, TANH) * z) * x + x
        large = np.copysign(c(1) - c(2) / (exp(c(2) * np.abs(x)) + c(1)), x)
    return np.where(np.abs(x) < c(0.625), small, large)


def split(h: np.ndarray, interleave: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(activated half a, linear half b) of a GLU input: halves, or runs of `interleave` columns in turn."""
    if interleave is None:
        half = h.shape[1] // 2
        return h[:, :half], h[:, half:]
    runs = h.reshape(h.shape[0], -1, 2, interleave)
    return runs[:, :, 0].reshape(h.shape[0], -1), runs[:, :, 1].reshape(h.shape[0], -1)


def join(a: np.ndarray, b: np.ndarray, interleave: int | None) -> np.ndarray:
    """The inverse of split."""
    if interleave is None:
        return np.concatenate([a, b], axis=1)
    runs = [part.reshape(a.shape[0], -1, interleave) for part in (a, b)]
    return np.stack(runs, axis=2).reshape(a.shape[0], -1)


def forward(h, name: str, probs=None, interleave: int | None = None, dtype: str = "float32", **options) -> np.ndarray:
    """y (rows, width) float32, rounded to dtype. h float32 holding values of dtype; probs float32 [rows] or None."""
    options = DEFAULTS[name] | options
    with np.errstate(all="ignore"):
        s = c(1) if probs is None else probs[:, None]
        if not GLU[name]:
            relu = _relu(h)
            return round_to(relu * relu * s, dtype)
        a, b = split(h, interleave)
        return round_to({"swiglu": _swiglu, "clamped_swiglu": _clamped, "situ": _situ}[name](a, b, s, **options), dtype)


def backward(
    h, upstream, name: str, probs=None, interleave: int | None = None, dtype: str = "float32", **options
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dh rounded to dtype, ds float64 [rows], sum of |terms of ds| float64 [rows])."""
    options = DEFAULTS[name] | options
    with np.errstate(all="ignore"):
        p, s = upstream, c(1) if probs is None else probs[:, None]
        if not GLU[name]:
            relu = _relu(h)
            dh, terms = c(2) * p * s * relu, p * (relu * relu)
        else:
            a, b = split(h, interleave)
            function = {"swiglu": _swiglu_grad, "clamped_swiglu": _clamped_grad, "situ": _situ_grad}[name]
            da, db, terms = function(a, b, p, s, **options)
            dh = join(da, db, interleave)
        terms = terms.astype(np.float64)
        return round_to(dh, dtype), terms.sum(1), np.abs(terms).sum(1)


def _relu(x):
    return np.where(x < 0, c(0), x)


def _swiglu(a, b, s):
    return a * sigmoid(a) * b * s


def _swiglu_grad(a, b, p, s):
    S = sigmoid(a)
    da = p * s * (S + a * S * (c(1) - S)) * b
    return da, p * s * a * S, p * a * S * b


def _clamped(a, b, s, limit, alpha, offset):
    a1, b1 = _clamp(a, b, limit, offset)
    return a1 * sigmoid(c(alpha) * a1) * b1 * s


def _clamp(a, b, limit, offset):
    L = c(limit)
    return np.where(a > L, L, a), np.where(b > L, L, np.where(b < -L, -L, b)) + c(offset)


def _clamped_grad(a, b, p, s, limit, alpha, offset):
    a1, b1 = _clamp(a, b, limit, offset)
    S, L = sigmoid(c(alpha) * a1), c(limit)
    da = np.where(a > L, c(0), p * s) * (S + c(alpha) * a1 * S * (c(1) - S)) * b1
    db = np.where((b > L) | (b < -L), c(0), p * s) * a1 * S
    return da, db, p * a1 * S * b1


def _situ_parts(a, b, beta1, beta2):
    t, S, tb = tanh(a / c(beta1)), sigmoid(a), tanh(b / c(beta2))
    return t, S, tb, c(beta2) * tb, c(beta1) * t * S


def _situ(a, b, s, beta1, beta2):
    _, _, tb, _, g = _situ_parts(a, b, beta1, beta2)
    return g * c(beta2) * tb * s


def _situ_grad(a, b, p, s, beta1, beta2):
    t, S, tb, u, g = _situ_parts(a, b, beta1, beta2)
    da = p * s * ((c(1) - t * t) * S + c(beta1) * t * S * (c(1) - S)) * u
    return da, p * s * g * (c(1) - tb * tb), p * g * u
