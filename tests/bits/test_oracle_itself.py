"""The oracle on numbers worked by hand from the specification pages."""

import numpy as np
import pytest
from oracle import activations, blocks, codes, formats, fp8, grouped, layouts, mxfp8, nvfp4, philox
from oracle.formats import Format

F32 = np.float32
INF, NAN = F32(np.inf), F32(np.nan)
BY_HAND = {
    "e4m3": [
        (0.0, 0x00), (-0.0, 0x80), (1.0, 0x38), (-2.0, 0xC0), (448.0, 0x7E), (464.0, 0x7E), (1e30, 0x7E), (-INF, 0xFE),
        (NAN, 0x7F), (-NAN, 0x7F), (2.0**-9, 0x01), (2.0**-10, 0x00), (-(2.0**-11), 0x80), (1.5 * 2.0**-9, 0x02),
        (1.0625, 0x38), (1.1875, 0x3A), (2.0**-6, 0x08), (7.5 * 2.0**-9, 0x08), (240.0, 0x77), (248.0, 0x78),
    ],
    "e5m2": [
        (0.0, 0x00), (-0.0, 0x80), (1.0, 0x3C), (-1.5, 0xBE), (57344.0, 0x7B), (61440.0, 0x7B), (INF, 0x7B),
        (-INF, 0xFB), (NAN, 0x7F), (-NAN, 0x7F), (2.0**-16, 0x01), (2.0**-17, 0x00), (1.125, 0x3C), (1.375, 0x3E),
        (2.0**-14, 0x04), (3.5 * 2.0**-16, 0x04),
    ],
    "e2m1": [
        (0.0, 0), (-0.0, 8), (0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (6.0, 7),
        (5.01, 7), (-0.25, 8), (-0.26, 9), (INF, 7), (-INF, 15), (NAN, 7), (-NAN, 7),
    ],
}  # fmt: skip


@pytest.mark.parametrize("element", BY_HAND)
def test_encode(element):
    values, expected = zip(*BY_HAND[element], strict=True)
    assert codes.encode(np.array(values, dtype=F32), element).tolist() == list(expected)


@pytest.mark.parametrize(("element", "count"), [("e4m3", 0x7F), ("e5m2", 0x7C), ("e2m1", 8)])
def test_encode_is_the_nearest_code_found_by_search(element, count):
    table = codes.decode(np.arange(count), element).astype(np.float64)
    middle = (table[1:] + table[:-1]) / 2
    rng = np.random.default_rng(0)
    x = codes.floats(rng.integers(0, 0x7F800001, 200_000, dtype=np.uint32)).astype(np.float64)
    x = np.concatenate([x, rng.uniform(0, 2 * table[-1], 200_000).astype(F32), table, middle.astype(F32)])
    code = np.searchsorted(middle, x, side="left")
    on_the_middle = (code < count - 1) & (x == middle[np.minimum(code, count - 2)])
    code = np.where(on_the_middle & (code % 2 == 1), code + 1, code)
    assert np.array_equal(codes.encode(x.astype(F32), element), code)


def test_decode():
    assert codes.decode(np.array([0x7E, 0x01, 0x80, 0x38]), "e4m3").tolist() == [448.0, 2.0**-9, 0.0, 1.0]
    assert codes.decode(np.array([0x7B, 0x01, 0xBE, 0x7C]), "e5m2").tolist() == [57344.0, 2.0**-16, -1.5, np.inf]
    assert codes.decode(np.arange(16), "e2m1").tolist() == [
        0,
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        6,
        0,
        -0.5,
        -1,
        -1.5,
        -2,
        -3,
        -4,
        -6,
    ]
    assert np.isnan(codes.decode(np.array([0x7F]), "e4m3"))[0]
    assert np.isnan(codes.decode(np.array([0x7F]), "e5m2"))[0]


def test_e8m0():
    above = np.nextafter(F32(1), INF), np.nextafter(F32(2.0**-127), INF), np.nextafter(F32(2.0**-126), INF)
    v = np.array([0, 1e-45, 2.0**-127, above[1], 2.0**-126, above[2], 1, above[0], 2.0**127, codes.FLT_MAX, INF, NAN], F32)
    assert codes.e8m0_ceil(v).tolist() == [0, 0, 0, 1, 1, 2, 127, 128, 254, 254, 254, 255]
    amax = np.array([0, 1e-40, 1.0, 1.99, 448, 2.0**-118, INF, NAN], F32)
    assert codes.e8m0_floor(amax, 8).tolist() == [0, 0, 119, 119, 127, 1, 0xF7, 255]
    assert codes.e8m0_floor(amax, 15).tolist() == [0, 0, 112, 112, 120, 0, 0xF0, 255]
    assert codes.e8m0_decode(np.array([0, 1, 127, 254])).tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert np.isnan(codes.e8m0_decode(np.array([255])))[0]


def test_pack():
    packed = codes.pack_e2m1(np.array([[1, 2, 15, 0]], dtype=np.uint8))
    assert packed.tolist() == [[0x21, 0x0F]]
    assert codes.unpack_e2m1(packed).tolist() == [[1, 2, 15, 0]]


def test_round_to():
    assert codes.round_to(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8], F32), "bfloat16").tolist() == [1.0, 1 + 2.0**-6]
    assert codes.round_to(np.array([1 + 2.0**-11, 65520.0], F32), "float16").tolist() == [1.0, np.inf]


def test_blocks():
    x = np.array([[1, -5, NAN], [2, 3, -0.5]], dtype=F32)
    assert blocks.row_blocks(x, 2)[1].tolist() == [[2, 3], [-0.5, 0]]
    assert blocks.tiles(x, 2)[0, 0].tolist() == [1, -5, 2, 3]
    assert blocks.amax(x) == 5
    assert blocks.amax(x[:, 2:], -1).tolist() == [0, 0.5]
    assert blocks.amax(x[:0]) == 0


def test_philox_known_answers():
    assert philox.philox4x32((0, 0, 0, 0), (0, 0)).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox.philox4x32((ones,) * 4, (ones,) * 2).tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_element_bits():
    r = philox.element_bits(np.array([0x11223344, 0, 0, 0xAABBCCDD], dtype=np.uint32))
    assert [hex(v) for v in r[:4]] == ["0x3344", "0x2233", "0x1122", "0x4411"]
    assert [hex(v) for v in r[12:]] == ["0xccdd", "0xbbcc", "0xaabb", "0xddaa"]
    assert not r[4:12].any()
    assert philox.block_bits(2, 3, (0, 0), 0, 0)[0, 0, 0] == 0xE8D5


def test_mxfp8_row_by_hand():
    x = np.zeros((1, 65), dtype=F32)
    x[0, :3] = 448, 1, -2
    x[0, 32:34] = 449, -0.0
    x[0, 64] = 2.0**-127
    row = mxfp8.quantize(x)["rowwise"]
    assert row.scale.tolist() == [[127, 128, 0]]
    assert row.data[0, :4].tolist() == [0x7E, 0x38, 0xC0, 0]
    assert row.data[0, 32:34].tolist() == [0x76, 0x80]
    assert row.data[0, 64] == 0x38
    floor = mxfp8.quantize(x, scale_rounding="floor")["rowwise"]
    assert floor.scale.tolist() == [[127, 127, 0]]
    assert floor.data[0, 32] == 0x7E
    e5m2 = mxfp8.quantize(x, element="e5m2")["rowwise"]
    assert e5m2.scale[0, 0] == 120
    assert e5m2.data[0, 0] == codes.encode(F32(448 * 128), "e5m2")
    back = mxfp8.dequantize(row, "rowwise", x.shape)
    assert back[0, [0, 1, 2, 32, 64]].tolist() == [448, 1, -2, 448, 2.0**-127]
    assert np.signbit(back[0, 33])


def test_mxfp8_columns_tiles_and_specials():
    x = np.ones((33, 2), dtype=F32)
    x[32, 1] = INF
    x[0, 0] = NAN
    column = mxfp8.quantize(x)["columnwise"]
    assert column.scale.tolist() == [[255, 119], [119, 254]]
    assert column.data[:, 0].tolist() == [0x7F] * 32 + [0x78]
    assert column.data[32, 1] == 0x7E
    ignore = mxfp8.quantize(x, nan="ignore")["columnwise"]
    assert ignore.scale.tolist() == [[119, 119], [119, 254]]
    assert ignore.data[:2, 0].tolist() == [0x7F, 0x78]
    tile = mxfp8.quantize(x, block=(32, 32))
    assert tile["rowwise"].scale[:, 0].tolist() == [255] * 32 + [254]
    assert tile["columnwise"].scale.tolist() == [[255, 255], [254, 254]]
    assert np.isinf(mxfp8.dequantize(column, "columnwise", x.shape)[32, 1])
    assert mxfp8.quantize(x, scale_rounding="floor")["columnwise"].scale[1, 1] == 0xF7


def test_nvfp4_by_hand():
    assert nvfp4.global_scales(F32(2688)) == (1, 1)
    assert nvfp4.global_scales(F32(0)) == (1, 1)
    assert nvfp4.global_scales(INF) == (1, 1)
    assert nvfp4.global_scales(F32(1344)) == (2, 0.5)
    assert nvfp4.global_scales(F32(1e-38))[0] == codes.FLT_MAX
    x = np.zeros((2, 18), dtype=F32)
    x[0, :6] = 6, 0.25, 0.75, -5, -0.0, 1.3
    x[0, 16:] = 2688, -1000
    x[1, 17] = NAN
    both = nvfp4.quantize(x)
    row = both["rowwise"]
    assert row.amax == 2688
    assert row.scale.tolist() == [[0x38, 0x7E], [0x00, 0x7F]]
    assert row.data[0, :3].tolist() == [0x07, 0xE2, 0x38]
    assert row.data[0, 8] == 0xC7
    assert not row.data[0, 9:].any()
    assert row.data[1, 8] == 0x77
    assert not row.data[1, 9:].any()
    assert both["columnwise"].data.shape == (18, 8)
    assert both["columnwise"].scale[17, 0] == 0x7F
    assert nvfp4.quantize(x, nan="ignore")["rowwise"].data[1, 8] == 0x70
    back = nvfp4.dequantize(row, "rowwise", x.shape)
    assert back[0, [0, 1, 2, 3, 16, 17]].tolist() == [6, 0, 1, -4, 2688, -896]
    assert np.isnan(back[1, 16])
    tile = nvfp4.quantize(x, block=(16, 16))["rowwise"]
    assert tile.scale.tolist() == [[0x38, 0x7F], [0x38, 0x7F]]


def test_nvfp4_infinity_decodes_to_2688():
    x = np.zeros((1, 32), dtype=F32)
    x[0, :2] = -INF, 6
    x[0, 16] = 6
    row = nvfp4.quantize(x)["rowwise"]
    assert row.scale.tolist() == [[0x7E, 0x38]]
    assert nvfp4.dequantize(row, "rowwise", x.shape)[0, [0, 1, 16]].tolist() == [-2688, 0, 6]


def test_hadamard():
    ones = nvfp4.hadamard_transform(np.eye(16, dtype=F32)[None] * 4)[0]
    assert ones[0].tolist() == [1.0] * 16
    assert ones[3, :8].tolist() == [-1, 1, 1, -1, -1, 1, 1, -1]
    total = nvfp4.hadamard_transform(np.ones(16, dtype=F32))
    assert total[0] == nvfp4.SIGNS.sum() / 4
    assert total.dtype == F32
    partial = nvfp4.quantize(np.ones((1, 1), dtype=F32), hadamard=True)["columnwise"]
    assert partial.amax == 0.25
    assert partial.data.tolist() == [[0x77] * 8]


def test_stochastic_codes():
    y = np.array([0.25, 0.25, 2.25, -4.5, 6.0, 100.0, -0.0, 0.5, NAN], dtype=F32)
    r = np.array([32767, 32768, 16383, 0, 65535, 0, 0, 65535, 0])
    assert nvfp4.stochastic_codes(y, r).tolist() == [1, 0, 5, 15, 7, 7, 8, 1, 7]


def test_fp8_by_hand():
    assert fp8.encode_scale(F32([896, 0, INF, 300, 1e-40]), "e4m3", False, 0.0).tolist()[:3] == [0.5, 1, 1]
    assert fp8.encode_scale(F32([896, 300, 1e-40, 0]), "e4m3", True, 0.0).tolist() == [0.5, 1, 2.0**127, 1]
    assert fp8.encode_scale(F32(1e-40), "e4m3", False, 0.0) == codes.FLT_MAX
    assert fp8.encode_scale(F32(0), "e5m2", False, 57344.0) == 1
    x = np.array([[896, NAN, 2], [-INF, -0.0, 1]], dtype=F32)
    finite = fp8.quantize_tensor(x[:1])
    assert finite["rowwise"].data.tolist() == [[0x7E, 0x7F, 0x38]]
    assert finite["rowwise"].scale.tolist() == [2.0]
    infinite = fp8.quantize_tensor(x)["columnwise"]
    assert infinite.scale == 1
    assert infinite.data.tolist() == [[0x7E, 0xFE], [0x7F, 0x80], [0x40, 0x38]]
    assert fp8.dequantize_tensor(finite["rowwise"], "rowwise", (1, 3))[0, 0] == 896


def test_fp8_block_by_hand():
    x = np.ones((2, 130), dtype=F32)
    x[0, 0], x[1, 129] = 448, 1792
    row, column = fp8.quantize_block(x).values()
    assert row.scale.tolist() == [[1, 1 / 256], [1 / 256, 4]]
    assert column.scale[0, [0, 1, 129]].tolist() == [
        1,
        1 / 256,
        4,
    ]
    assert column.data.shape == (130, 2)
    assert row.data[1, 128:].tolist() == [0x28, 0x7E]
    square = fp8.quantize_block(x, block=(128, 128))
    assert square["rowwise"].scale.tolist() == [[1, 4]] == square["columnwise"].scale.tolist()
    assert fp8.dequantize_block(square["columnwise"], "columnwise", x.shape, block=(128, 128))[1, 129] == 1792
    assert fp8.dequantize_block(column, "columnwise", x.shape)[0, 0] == 448


def test_layouts_by_hand():
    i, j = np.array([0, 1, 32, 0, 0, 128, 127]), np.array([0, 0, 0, 1, 4, 0, 3])
    assert layouts.swizzle_offset(i, j, 2).tolist() == [0, 16, 4, 1, 512, 1024, 511]
    assert layouts.offset_8x4(np.array([1, 0, 8, 9]), np.array([0, 4, 0, 5]), 2).tolist() == [4, 32, 64, 101]
    codes_ = np.array([[7, 8, 9, 10, 11]], dtype=np.uint8)
    assert layouts.compact(codes_).shape == (128, 8)
    assert layouts.compact(codes_, True).shape == (4, 128)
    flat = layouts.swizzled(codes_)
    assert flat.size == 1024
    assert flat[512] == 11
    assert flat[3] == 10
    assert flat.sum() == 45
    column = layouts.swizzled(codes_, True)
    assert column.size == 512
    assert column[[0, 16, 64]].tolist() == [7, 8, 11]
    small = layouts.swizzled_8x4(codes_)
    assert small.size == 64
    assert small[32] == 11
    assert layouts.arrange(codes_, "linear") is codes_


def test_grouped_by_hand():
    offsets = np.array([0, 1, 1, 130])
    x = np.ones((200, 40), dtype=F32)
    x[129, 39] = 448
    e = grouped.Extents(offsets, 200, 40)
    assert (e.t.tolist(), e.T.tolist(), e.tiles, e.Kt) == ([1, 0, 2], [0, 1, 1, 3], 4, 1)
    mx = grouped.quantize(x, offsets, Format("MXFP8"))
    assert mx["rowwise"].scale.shape == (512, 4)
    assert mx["rowwise"].scale[[0, 1, 128, 256], 0].tolist() == [
        119,
        0,
        119,
        119,
    ]
    assert mx["rowwise"].scale[256, 1] == 127
    assert mx["rowwise"].data[130:].sum() == 0
    column = mx["columnwise"].scale
    assert column.shape == (16, 128)
    assert column[[0, 4, 7, 8, 9], 39].tolist() == [119, 119, 119, 127, 0]
    swizzled = grouped.quantize(x, offsets, Format("MXFP8"), "swizzled")
    assert swizzled["columnwise"].scale[512 + 512 + 7 * 16 + 4] == 127
    assert swizzled["rowwise"].scale[512 * 2 + 1] == 127
    nv = grouped.quantize(x, offsets, Format("NVFP4"))
    assert nv["columnwise"].data.size == 64 * 40 * 4
    assert nv["columnwise"].data[64 * 40 + 64 * 2 * 39 + 64] == 0x07
    assert nv["columnwise"].scale[1024 + 16 * 39 + 8] == 0x7E
    assert nv["columnwise"].amax.tolist() == [1, 0, 448]
    nv_swizzled = grouped.quantize(x, offsets, Format("NVFP4"), "swizzled")["columnwise"].scale
    assert nv_swizzled[1024 + 2 * 512 + 7 * 16 + 4] == 0x7E
    fp = grouped.quantize(x, offsets, Format("FP8Tensor"))
    assert fp["columnwise"].data[128 * 40 + 256 * 39 + 128] == 0x7E
    assert fp["rowwise"].scale.tolist() == [
        F32(1 / 448),
        1,
        1,
    ]
    block = grouped.quantize(x, offsets, Format("FP8Block"))
    assert block["columnwise"].scale.shape == (4, 40)
    assert block["columnwise"].scale[2, 39] == 1
    assert block["rowwise"].scale[129, 0] == 1
    assert block["rowwise"].scale[130:].sum() == 0
    assert (
        formats.dequantize(formats.quantize(x[:1], Format("FP8Block"))["rowwise"], Format("FP8Block"), "rowwise", (1, 40))[0, 0]
        == 1
    )
    assert grouped.dequantize(x, offsets, Format("MXFP8"), "rowwise")[[0, 129, 130], 39].tolist() == [1, 448, 0]


def test_exp_sigmoid_tanh():
    x = np.array([0, 1, 89, INF, -104, -INF], dtype=F32)
    assert activations.exp(x).tolist() == [1, F32(np.e), np.inf, np.inf, 0, 0]
    assert np.isnan(activations.exp(F32([NAN])))[0]
    assert activations.sigmoid(F32([0, 200, -200])).tolist() == [0.5, 1, 0]
    assert activations.tanh(F32([0, 20, -20, INF])).tolist() == [0, 1, -1, 1]
    dense = np.linspace(-80, 80, 100_001).astype(F32)
    assert np.max(np.abs(activations.exp(dense) / np.exp(dense.astype(np.float64)) - 1)) < 1.2e-7
    assert np.max(np.abs(activations.tanh(dense) - np.tanh(dense.astype(np.float64)))) < 1.2e-7
    assert activations.exp(dense).dtype == activations.sigmoid(dense).dtype == activations.tanh(dense).dtype == F32


def test_split_and_join():
    h = np.arange(8, dtype=F32)[None]
    a, b = activations.split(h, 2)
    assert a.tolist() == [[0, 1, 4, 5]]
    assert b.tolist() == [[2, 3, 6, 7]]
    assert activations.join(a, b, 2).tolist() == h.tolist()
    assert activations.split(h, None)[1].tolist() == [[4, 5, 6, 7]]


def test_activations_by_hand():
    s, p = F32([0.5]), F32([[4]])
    swiglu = F32([[0, 3]])
    assert activations.forward(F32([[200, 3]]), "swiglu", s).tolist() == [[300]]
    assert activations.backward(swiglu, p, "swiglu", s)[0].tolist() == [[3, 0]]
    clamped = F32([[200, -9]])
    assert activations.forward(clamped, "clamped_swiglu").tolist()[0][0] == pytest.approx(-42, abs=1e-3)
    assert activations.backward(clamped, p, "clamped_swiglu")[0].tolist() == [[0, 0]]
    assert activations.forward(F32([[-2, 3]]), "squared_relu", s).tolist() == [[0, 4.5]]
    dh, ds, size = activations.backward(F32([[-2, 3]]), F32([[1, 2]]), "squared_relu", s)
    assert dh.tolist() == [[0, 6]]
    assert ds.tolist() == [18]
    assert size.tolist() == [18]
    assert activations.forward(F32([[400, 2500]]), "situ").tolist() == [[100]]
    assert activations.backward(F32([[0, 2500]]), p, "situ")[0].tolist() == [[50, 0]]
    assert np.isnan(activations.forward(F32([[NAN, 1]]), "clamped_swiglu")).all()
    assert activations.forward(F32([[1.001]]), "squared_relu", dtype="bfloat16").tolist() == [[1]]
