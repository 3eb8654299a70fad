"""Options of formats and recipes that do not go together: the message names the option, its value and what is legal."""

import pytest
import torch

import blockscale as bs

X = torch.ones(40, 32)
ROWS = bs.NVFP4(row_scaled=True)

WRONG = [
    (lambda: bs.MXFP4(block=(1, 16)), r"block=\(1, 16\) is not legal; it must be one of \(1, 32\), \(32, 32\)"),
    (lambda: bs.MXFP4(scale_rounding="near"), r"scale_rounding='near' is not legal"),
    (lambda: bs.formats.parse("mxfp4:element=e2m1"), r"option 'element' is not one of"),
    (lambda: bs.NVFP4((16, 16), row_scaled=True), r"row_scaled=True is not legal with block=\(16, 16\)"),
    (lambda: bs.NVFP4(four_over_six="max"), r"four_over_six='max' is not legal; it must be one of None, 'mae', 'mse'"),
    (lambda: bs.NVFP4(scale_max=256), r"scale_max=256 is not legal; it must be one of 448"),
    (lambda: bs.NVFP4(four_over_six="mae", hadamard=True), r"four_over_six='mae' is not legal with hadamard or stochastic"),
    (lambda: bs.NVFP4(four_over_six="mse", stochastic=True), r"four_over_six='mse' is not legal with hadamard or stochastic"),
    (lambda: bs.formats.parse("nvfp4:scale_max=many"), r"'many' is not a legal value"),
    (lambda: bs.quantize(X, bs.MXFP4(), amax=torch.ones(1)), r"amax is given but mxfp4 has no global scale"),
    (lambda: bs.quantize(X, ROWS, amax=torch.ones(1)), r"amax has shape \(1,\); \(40,\) is needed: one a row of the stored plane"),
    (lambda: bs.quantize(X, ROWS, columnwise=True, amax=torch.ones(40)), r"takes the amax of one plane at a time"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_old_texts_stay_valid_and_the_same():
    """Options that came later stand in the text only when they are not the default."""
    old = "nvfp4:block=1x16:hadamard=True:stochastic=False:nan=propagate"
    assert bs.formats.parse(old) == bs.NVFP4(hadamard=True)
    assert bs.formats.parse(old).spec() == old
    assert bs.formats.parse(ROWS.spec()) == ROWS
    assert ROWS.label == "NVFP4 E2M1 1x16 row_scaled"
