"""The meaning of the activations, forward and backward, in plain torch on any device, without a host sync.

Legend: h the pre-activation [rows, W], a its gate half, b its linear half, s the router's probability per row, p the
upstream gradient, S the sigmoid.

Every operation is one float32 rounding, in the order of the table in spec/numerics.md read left to right; where a
line here has its factors in another order, it only uses that a product of two does not depend on which is first.
torch's eager operators contract nothing, and their elementwise bits for + - * / do not depend on a tensor's length;
those of ``exp``, ``sigmoid`` and ``tanh`` do, so these are written out.

Selections (masks) use aten's threshold family: on a CPU ``torch.where`` and ``masked_fill_`` are not vectorised and
take as long as twenty multiplications. Source of the coefficients: Cephes (expf, tanhf).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from blockscale.activations import Activation, ClampedSwiglu, Situ, SquaredRelu, Swiglu

#: output elements per pass over the rows: the temporaries of a pass stay in the second-level cache
CHUNK_ELEMENTS = 1 << 17

_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
# float32 1.5 * 2^23 + 127: added to an integer k in -127..128, the sum's lowest 9 bits are k + 127
_EXPONENT_BIAS = 12582912.0 + 127.0


def _next_below(value: float) -> float:
    return float(torch.nextafter(torch.tensor(value, dtype=torch.float32), torch.tensor(-torch.inf)))


_BELOW_OVERFLOW = _next_below(-88.72)
_BELOW_UNDERFLOW = _next_below(-103.97)
_BELOW_ZERO = _next_below(0.0)
_BELOW_TANH_SPLIT = _next_below(0.625)


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    result = x * coefficients[0]
    for c in coefficients[1:-1]:
        result.add_(c).mul_(x)
    return result.add_(coefficients[-1])


def _power_of_two_(k: Tensor) -> Tensor:
    """2^k for integers k in -126..127, in place, by writing the exponent field."""
    k.add_(_EXPONENT_BIAS).view(torch.int32).bitwise_left_shift_(23)
    return k


def _exp_of_negative(n: Tensor) -> Tensor:
    """exp(-n) in a new tensor. Arguments that must give inf (0) are replaced by 100 (-110), which do."""
    x = F.threshold(n, _BELOW_OVERFLOW, -100.0).neg_()
    F.threshold(x, _BELOW_UNDERFLOW, -110.0, inplace=True)
    k = (x * 1.44269504).round_()
    r = x.sub_(k * 0.693359375).sub_(k * -2.12194440e-4)
    result = _horner(r, _EXP).mul_(r * r).add_(r).add_(1.0)
    half = (k * 0.5).floor_()
    k.sub_(half)
    return result.mul_(_power_of_two_(half)).mul_(_power_of_two_(k))


def exp_f32(x: Tensor) -> Tensor:
    """exp of a float32 tensor with the bits of spec/numerics.md; above 88.72 inf, below -103.97 zero, NaN stays."""
    return _exp_of_negative(x.neg())


def sigmoid_f32(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of a float32 tensor, each operation rounded."""
    return _exp_of_negative(x).add_(1.0).reciprocal_()


def tanh_f32(x: Tensor) -> Tensor:
    """tanh of a float32 tensor: a polynomial below 0.625 in magnitude, else from exp(2|x|)."""
    z = x * x
    small = _horner(z, _TANH).mul_(z).mul_(x).add_(x)
    # fl(2/t) = 2 fl(1/t) except where 1/t is subnormal, and there 1 - 2/t is 1 either way
    large = _exp_of_negative(x.abs().mul_(-2.0)).add_(1.0).reciprocal_().mul_(-2.0).add_(1.0).copysign_(x)
    # each side is +0 where the other one holds, and a NaN passes both; neither side is -0 where it holds
    small = torch.ops.aten.hardtanh_backward(small, x, -0.625, 0.625)
    return small.add_(torch.ops.aten.threshold_backward(large, x.abs(), _BELOW_TANH_SPLIT))


def row_sums(terms: Tensor) -> Tensor:
    """Sum over the last dimension of a 2-D float32 tensor, which is overwritten.

    The order is fixed by the width alone (the upper half is added to the lower until one column is left), so a row's
    bits depend neither on the other rows nor on the number of threads.
    """
    width = terms.shape[1]
    if width == 0:
        return terms.new_zeros(terms.shape[0])
    while width > 1:
        kept = (width + 1) // 2
        terms[:, : width - kept] += terms[:, kept:width]
        width = kept
    return terms[:, 0].clone()


def _zero_above(value: Tensor, x: Tensor, limit: float) -> Tensor:
    """``value`` where not (x > limit), else +0; a NaN in x keeps ``value``."""
    return torch.ops.aten.threshold_backward(value, x.neg(), _next_below(-limit))


def _scaled(x: Tensor, s: Tensor | None) -> Tensor:
    return x if s is None else x.mul_(s)


def _upstream(p: Tensor, s: Tensor | None) -> Tensor:
    return p if s is None else p * s


def _divided(x: Tensor, by: float) -> Tensor:
    # a tensor on the device: CUDA multiplies by the reciprocal when it divides by a host number
    return x / torch.full((), by, dtype=torch.float32, device=x.device)


# Forward: (act, a, b, s) -> y.  Backward: (act, p, a, b, s) -> da, db (None without GLU), summands of ds (None without
# s). All of them own their float32 arguments.


def _swiglu(act: Swiglu, a: Tensor, b: Tensor, s: Tensor | None) -> Tensor:
    # ((a*S)*b)*s
    return _scaled(sigmoid_f32(a).mul_(a).mul_(b), s)


def _swiglu_backward(act: Swiglu, p: Tensor, a: Tensor, b: Tensor, s: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    sig = sigmoid_f32(a)
    ps = _upstream(p, s)
    da = (a * sig).mul_(1.0 - sig).add_(sig).mul_(ps).mul_(b)  # ((p*s) * (S + (a*S)*(1-S))) * b
    db = (ps * a).mul_(sig)  # ((p*s)*a)*S
    return da, db, None if s is None else p.mul_(a).mul_(sig).mul_(b)  # ((p*a)*S)*b


def _clamped(act: ClampedSwiglu, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a' = min(a, L), b' = clamp(b, -L, L) + offset, z = alpha*a'; clamp keeps a NaN."""
    gate = a.clamp(max=act.limit)
    return gate, b.clamp(-act.limit, act.limit).add_(act.offset), gate * act.alpha


def _clamped_swiglu(act: ClampedSwiglu, a: Tensor, b: Tensor, s: Tensor | None) -> Tensor:
    gate, linear, z = _clamped(act, a, b)
    return _scaled(sigmoid_f32(z).mul_(gate).mul_(linear), s)  # ((a'*S)*b')*s


def _clamped_swiglu_backward(
    act: ClampedSwiglu, p: Tensor, a: Tensor, b: Tensor, s: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    gate, linear, z = _clamped(act, a, b)
    sig = sigmoid_f32(z)
    ps = _upstream(p, s)
    # the mask is a selection at its place in the product: what follows it still gives its sign, or its NaN
    da = z.mul_(sig).mul_(1.0 - sig).add_(sig).mul_(_zero_above(ps, a, act.limit)).mul_(linear)
    inside = _zero_above(_zero_above(ps, b, act.limit), b.neg_(), act.limit)
    db = inside.mul_(gate).mul_(sig)  # (m(p*s)*a')*S
    return da, db, None if s is None else p.mul_(gate).mul_(sig).mul_(linear)  # ((p*a')*S)*b'


def _relu(x: Tensor) -> Tensor:
    return F.threshold(x, _BELOW_ZERO, 0.0)  # x < 0 gives +0; -0 and NaN stay


def _squared_relu(act: SquaredRelu, x: Tensor, b: None, s: Tensor | None) -> Tensor:
    return _scaled(_relu(x).square_(), s)  # (r*r)*s


def _squared_relu_backward(act: SquaredRelu, p: Tensor, x: Tensor, b: None, s: Tensor | None) -> tuple[Tensor, None, Tensor | None]:
    r = _relu(x)
    dx = _scaled(p * 2.0, s).mul_(r)  # ((2*p)*s)*r
    return dx, None, None if s is None else p.mul_(r.square_())  # p*(r*r)


def _situ_parts(act: Situ, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tanh_f32(_divided(a, act.beta1)), sigmoid_f32(a), tanh_f32(_divided(b, act.beta2))


def _situ(act: Situ, a: Tensor, b: Tensor, s: Tensor | None) -> Tensor:
    t, sig, v = _situ_parts(act, a, b)
    return _scaled(t.mul_(act.beta1).mul_(sig).mul_(act.beta2).mul_(v), s)  # ((((beta1*t)*S)*beta2)*v)*s


def _situ_backward(act: Situ, p: Tensor, a: Tensor, b: Tensor, s: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    t, sig, v = _situ_parts(act, a, b)
    g = (t * act.beta1).mul_(sig)
    u = v * act.beta2
    ps = _upstream(p, s)
    # ((p*s) * ((1-t*t)*S + ((beta1*t)*S)*(1-S))) * u
    da = (1.0 - t.square_()).mul_(sig).add_(g * (1.0 - sig)).mul_(ps).mul_(u)
    db = (ps * g).mul_(1.0 - v.square_())  # ((p*s)*g)*(1 - v*v)
    return da, db, None if s is None else p.mul_(g).mul_(u)  # (p*g)*u


_FORWARD: dict[type[Activation], Callable[..., Tensor]] = {
    Swiglu: _swiglu,
    ClampedSwiglu: _clamped_swiglu,
    SquaredRelu: _squared_relu,
    Situ: _situ,
}
_BACKWARD: dict[type[Activation], Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]] = {
    Swiglu: _swiglu_backward,
    ClampedSwiglu: _clamped_swiglu_backward,
    SquaredRelu: _squared_relu_backward,
    Situ: _situ_backward,
}


def _halves(h: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    """Views of the gate and the linear columns, [rows, runs, run length] each."""
    runs = h.unflatten(1, (-1, 2, interleave or h.shape[1] // 2))
    return runs[:, :, 0], runs[:, :, 1]


def _float_copy(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x).flatten(1)


def _inputs(h: Tensor, act: Activation, interleave: int | None) -> tuple[Tensor, Tensor | None]:
    if not act.is_glu:
        return _float_copy(h), None
    a, b = _halves(h, interleave)
    return _float_copy(a), _float_copy(b)


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(width, 1))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def _kill(x: Tensor, live: Tensor | None, rows: slice) -> None:
    if live is not None:
        dead = ~live[rows]
        x[rows].masked_fill_(dead if x.dim() == 1 else dead.unsqueeze(1), 0)


def activation_forward(h: Tensor, act: Activation, probs: Tensor | None, interleave: int | None, live: Tensor | None) -> Tensor:
    """act(h) * probs.

    Args:
        h: [rows, W] float32, bfloat16 or float16.
        act: which activation.
        probs: float32 [rows] factor of each row, or None (the same bits as ones).
        interleave: run length of the interleaved halves of a GLU; None: the first half is the gate.
        live: bool [rows]; other rows give zeros, whatever they hold. None: all live.

    Returns:
        [rows, W/2] (W without GLU) in h's dtype, rounded once from float32.
    """
    width = act.out_width(h.shape[1], interleave)
    y = h.new_empty(h.shape[0], width)
    forward = _FORWARD[type(act)]
    for rows in _chunks(*y.shape):
        a, b = _inputs(h[rows], act, interleave)
        y[rows] = forward(act, a, b, None if probs is None else probs[rows].unsqueeze(1))
        _kill(y, live, rows)
    return y


def activation_backward(
    dy: Tensor, h: Tensor, act: Activation, probs: Tensor | None, interleave: int | None, live: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`activation_forward`, recomputed from h.

    Args:
        dy: [rows, W/2] (W without GLU), the upstream gradient, in h's dtype.
        h, act, probs, interleave, live: as in the forward.

    Returns:
        dh [rows, W] in h's dtype, rounded once, and ds float32 [rows] (None without probs).
    """
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    ds = None if probs is None else torch.empty(h.shape[0], dtype=torch.float32, device=h.device)
    backward = _BACKWARD[type(act)]
    for rows in _chunks(*dy.shape):
        a, b = _inputs(h[rows], act, interleave)
        s = None if probs is None else probs[rows].unsqueeze(1)
        da, db, terms = backward(act, _float_copy(dy[rows]), a, b, s)
        if db is None:
            dh[rows] = da
        else:
            for half, gradient in zip(_halves(dh[rows], interleave), (da, db), strict=True):
                half.copy_(gradient.view(half.shape))
        _kill(dh, live, rows)
        if ds is not None and terms is not None:
            ds[rows] = row_sums(terms)
            _kill(ds, live, rows)
    return dh, ds
