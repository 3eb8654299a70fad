"""Options of formats and recipes that do not go together: the message names the option, its value and what is legal."""

import pytest
import torch

import blockscale as bs

X = torch.ones(40, 32)
ROWS = bs.NVFP4(row_scaled=True)
FROZEN, OFFSETS = bs.quantize_grouped(torch.ones(1, 8, 32), None, bs.MXFP4(), columnwise=True), torch.tensor([0, 40])
MX, Recipe = bs.MXFP8(), bs.recipes.Recipe
TURNED = bs.quantize_grouped(torch.ones(1, 32, 16), None, bs.NVFP4(hadamard=True), columnwise=True)

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
    (lambda: bs.quantize(X, bs.Hybrid(bs.NVFP4(), bs.NVFP4()), amax=torch.ones(1)), r"the planes have formats of their own"),
    (lambda: bs.quantize(X, bs.Hybrid(bs.MXFP8(), bs.FP8Block()), layout="swizzled"), r"layout='swizzled' is not legal for hybrid"),
    (
        lambda: bs.MXFP8(columnwise_source="row"),
        r"columnwise_source='row' is not legal; it must be one of 'original', 'rowwise",
    ),
    (lambda: bs.MXFP8(block=(32, 32), columnwise_source="rowwise_dequantized"), r"is for blocks of one row"),
    (lambda: bs.Hybrid(bs.MXFP8(columnwise_source="rowwise_dequantized"), bs.MXFP8()), r"rowwise has a columnwise_source"),
    (lambda: bs.formats.parse("hybrid;mxfp8"), r"hybrid;ROWWISE;COLUMNWISE;SOURCE is needed"),
    (lambda: Recipe(MX, MX, MX, "dequantized"), r"gradient is a format but backward='dequantized' does not quantize it"),
    (lambda: Recipe(MX, MX, None, "exact"), r"backward='exact' is not one of"),
    (lambda: Recipe(MX, bs.NVFP4(hadamard=True), MX), r"weight with hadamard=True is not legal"),
    (lambda: Recipe(bs.Hybrid(MX, bs.NVFP4(hadamard=True)), MX, MX), r"hadamard must be the same for input and gradient"),
    (lambda: Recipe(linears=(("fc3", Recipe()),)), r"linears has 'fc3'; a recipe .* for one of"),
    (lambda: bs.recipes.parse_recipe("bf16|bf16"), r"has 2 parts; input\|weight\|gradient"),
    (lambda: bs.recipes.MXFP8Training().with_backward("dequantized").with_backward("quantized"), r"needs a gradient format"),
    (lambda: bs.grouped_gemm(X, TURNED, role="dgrad", offsets=torch.tensor([0, 40])), r"hadamard is True for b; the columnwise"),
    (
        lambda: bs.frozen_linear(X, FROZEN, OFFSETS, recipe=bs.recipes.MXFP8Training().with_backward("dequantized")),
        r"recipe has backward='dequantized'; a frozen layer has only quantized weights",
    ),
    (
        lambda: bs.frozen_linear(X, FROZEN, OFFSETS, recipe=bs.recipes.FP8DelayedTraining()),
        r"recipe has FP8Delayed inputs or gradients; a frozen layer keeps no amax history",
    ),
]
WRONG_TYPES = [
    (lambda: bs.Hybrid(MX, bs.Hybrid(MX, MX)), r"columnwise is Hybrid; a format of one plane such as MXFP8\(\) is needed"),
    (lambda: bs.recipes.W4A8Training(MX), r"weight is MXFP8; MXFP4 or NVFP4 is needed"),
    (lambda: bs.recipes.CustomTraining(lambda role, linear: "mxfp8"), r"input is str; a blockscale format or None is needed"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), WRONG_TYPES, ids=[message[:40] for _, message in WRONG_TYPES])
def test_a_wrong_type_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_old_texts_stay_valid_and_the_same():
    """Options that came later stand in the text only when they are not the default."""
    old = "nvfp4:block=1x16:hadamard=True:stochastic=False:nan=propagate"
    assert bs.formats.parse(old) == bs.NVFP4(hadamard=True)
    assert bs.formats.parse(old).spec() == old
    assert bs.formats.parse(ROWS.spec()) == ROWS
    assert ROWS.label == "NVFP4 E2M1 1x16 row_scaled"
