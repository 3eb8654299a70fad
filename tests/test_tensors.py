"""Quantized tensors as objects: what they print, files, devices, layouts there and back, padded exchange."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from support import assert_same, normal, offsets_of

import blockscale as bs

FORMATS = (
    bs.MXFP8(),
    bs.MXFP8("e5m2", (32, 32), "floor", "ignore"),
    bs.MXFP4(),
    bs.MXFP4((32, 32), "floor"),
    bs.NVFP4(),
    bs.NVFP4((16, 16)),
    bs.NVFP4(row_scaled=True),
    bs.NVFP4((16, 16), four_over_six="mae", scale_max=256),
    bs.NVFP4(hadamard=True, stochastic=True),
    bs.Hybrid(bs.MXFP8(), bs.NVFP4(row_scaled=True), "rowwise_dequantized"),
    bs.FP8Tensor("e5m2", power_of_two=True, eps=0.25),
    bs.FP8Block(),
    bs.FP8Block(block=(128, 128), power_of_two=False),
)
IDS = [fmt.spec() for fmt in FORMATS]
LAYOUTS = ("compact", "swizzled", "swizzled_8x4", "linear")
PLANES = [(True, False), (False, True), (True, True)]
SIZES, CAPACITY = [37, 0, 128, 1, 130], 330
RNG = torch.tensor([1, 2])


def legal(fmt, layouts):
    return [name for name in layouts if fmt.has_codes or "swizzled" not in name]


def plain(fmt, rowwise=True, columnwise=True, layout="compact", rows=133, K=70):
    x = normal(rows, K, seed=1, spread=2.0)
    return bs.quantize(x, fmt, rowwise=rowwise, columnwise=columnwise, layout=layout, rng=RNG)


def grouped(fmt, rowwise=True, columnwise=True, layout="compact"):
    x = normal(CAPACITY, 70, seed=1, spread=2.0)
    return bs.quantize_grouped(x, offsets_of(SIZES), fmt, rowwise=rowwise, columnwise=columnwise, layout=layout, rng=RNG)


def assert_equal(got, want):
    """Same kind, shape, format, planes and bits."""
    assert type(got) is type(want)
    assert (got.shape, got.format, got.planes.keys()) == (want.shape, want.format, want.planes.keys())
    for which, plane in want.planes.items():
        mine = got.planes[which]
        assert mine.layout == plane.layout
        assert (mine.amax is None) == (plane.amax is None)
        for one, other in zip(mine.tensors(), plane.tensors(), strict=True):
            assert_same(one, other, which)
    if isinstance(want, bs.GroupedTensor):
        assert_same(got.offsets, want.offsets, "offsets")
        assert got.matrix_rows == want.matrix_rows
    else:
        assert got.extent == want.extent


# what a person reads


def test_repr():
    text = repr(plain(bs.MXFP8(), columnwise=False))
    assert text == (
        "BlockScaledTensor(133 x 70; mxfp8:element=e4m3:block=1x32:scale_rounding=up:nan=propagate; "
        "rowwise: data (133, 70) uint8, scale (256, 4) uint8 compact; 10,334 bytes on cpu)"
    )
    text = repr(grouped(bs.NVFP4(), layout="swizzled"))
    for part in (
        "GroupedTensor(330 x 70 in 5 groups;",
        "nvfp4:block=1x16",
        "rowwise: data (330, 40) uint8",
        "swizzled",
        "columnwise",
    ):
        assert part in text
    assert text.endswith(f"{grouped(bs.NVFP4()).nbytes:,} bytes on cpu)")
    assert "float32" in repr(plain(bs.FP8Block()))
    assert "meta" in repr(plain(bs.MXFP8()).to("meta"))
    assert all(len(repr(make(fmt))) < 400 for fmt in FORMATS for make in (plain, grouped))


def test_nbytes_counts_every_plane():
    for fmt in FORMATS:
        for make in (plain, grouped):
            q = make(fmt)
            assert q.nbytes == sum(t.numel() * t.element_size() for p in q.planes.values() for t in p.tensors())
            assert make(fmt, columnwise=False).nbytes + make(fmt, rowwise=False).nbytes == q.nbytes


def test_absent_planes():
    q = plain(bs.MXFP8(), columnwise=False)
    assert q.columnwise is None
    assert list(q.planes) == ["rowwise"]
    assert list(grouped(bs.MXFP8(), rowwise=False).planes) == ["columnwise"]


# files


@pytest.mark.parametrize(("rowwise", "columnwise"), PLANES)
@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_safetensors_and_torch_save(tmp_path, fmt, rowwise, columnwise):
    tensors = {}
    for layout in legal(fmt, LAYOUTS):
        tensors[f"plain.{layout}"] = plain(fmt, rowwise, columnwise, layout)
    for layout in legal(fmt, ("compact", "swizzled")):
        tensors[f"grouped.{layout}"] = grouped(fmt, rowwise, columnwise, layout)
    tensors["a group"] = grouped(fmt, rowwise, columnwise).group(2)
    bs.save(tensors, tmp_path / "q.safetensors")
    torch.save(tensors, tmp_path / "q.pt")
    for loaded in (bs.load(tmp_path / "q.safetensors"), torch.load(tmp_path / "q.pt", weights_only=True)):
        assert loaded.keys() == tensors.keys()
        for name, want in tensors.items():
            assert_equal(loaded[name], want)
            for which in want.planes:
                assert_same(loaded[name].dequantize(plane=which), want.dequantize(plane=which), name)
    assert sorted(os.listdir(tmp_path)) == ["q.pt", "q.safetensors"]


@pytest.mark.parametrize("G", [0, 3])
@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_weights_stay_weights(tmp_path, fmt, G):
    """Quantized matrices (G, N, K) know their N after a file, a device and another layout, without groups too."""
    w = bs.quantize_grouped(normal(G, 40, 33, seed=1), None, fmt, columnwise=True, rng=RNG)
    offsets = offsets_of([5, 0, 4][:G])
    x = normal(9 if G else 0, 33, seed=2)
    want = bs.grouped_gemm(x, w, offsets=offsets)
    assert want.shape == (x.shape[0], 40)
    bs.save({"w": w}, tmp_path / "w")
    torch.save(w, tmp_path / "w.pt")
    others = [bs.load(tmp_path / "w")["w"], torch.load(tmp_path / "w.pt", weights_only=True), w.to("cpu")]
    others += [w.with_layout(layout).with_layout("compact") for layout in legal(fmt, ("compact", "swizzled"))]
    for other in others:
        assert_equal(other, w)
        assert_same(bs.grouped_gemm(x, other, offsets=offsets), want, "product")


def test_no_rows_and_no_tensors(tmp_path):
    empty = {"plain": plain(bs.MXFP8(), rows=0), "grouped": bs.quantize_grouped(torch.empty(0, 33), offsets_of([]), bs.NVFP4())}
    for tensors in (empty, {}):
        bs.save(tensors, str(tmp_path / "q"))
        loaded = bs.load(str(tmp_path / "q"))
        assert loaded.keys() == tensors.keys()
        for name, want in tensors.items():
            assert_equal(loaded[name], want)


def test_shared_planes_can_be_saved(tmp_path):
    """One tensor under two names, and planes that share memory (a square block's scales need not be stored twice)."""
    q = plain(bs.FP8Block(block=(128, 128)))
    other = bs.BlockScaledTensor(q.shape, q.format, q.rowwise, bs.Plane(q.columnwise.data, q.rowwise.scale, None, "compact"))
    bs.save({"a": q, "b": q, "c": other}, tmp_path / "q")
    for loaded in bs.load(tmp_path / "q").values():
        assert_equal(loaded, q)


def test_load_refuses_other_files(tmp_path):
    (tmp_path / "text").write_text("no tensors here, whatever the name says")
    with pytest.raises(ValueError, match=r"path='.*text' is not a safetensors file"):
        bs.load(tmp_path / "text")
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match=r"path='.*other' has no 'blockscale' metadata"):
        bs.load(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        bs.load(tmp_path / "missing")


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch, error):
    old, new = plain(bs.MXFP8()), plain(bs.NVFP4())
    bs.save({"q": old}, tmp_path / "q")

    def half(flat, filename, metadata):
        with open(filename, "wb") as f:
            f.write(b"half of a fi")
        raise error

    monkeypatch.setattr("blockscale.tensors.io.save_file", half)
    with pytest.raises(type(error)):
        bs.save({"q": new}, tmp_path / "q")
    monkeypatch.undo()
    assert_equal(bs.load(tmp_path / "q")["q"], old)
    assert os.listdir(tmp_path) == ["q"]
    bs.save({"q": new}, tmp_path / "q")
    assert_equal(bs.load(tmp_path / "q")["q"], new)


def test_a_killed_save_leaves_the_old_file(tmp_path):
    """The process dies in the middle of writing: the file under its name is the whole old one."""
    path = tmp_path / "q"
    bs.save({"q": plain(bs.MXFP8())}, path)
    program = textwrap.dedent(f"""
        import os, signal, torch, blockscale as bs, blockscale.tensors.io as io
        def dying(flat, filename, metadata):
            with open(filename, "wb") as f:
                f.write(b"half")
                f.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        io.save_file = dying
        bs.save({{"q": bs.quantize(torch.zeros(3, 3), bs.MXFP8())}}, {str(path)!r})
    """)
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert_equal(bs.load(path)["q"], plain(bs.MXFP8()))


# devices


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_to(fmt):
    for make in (plain, grouped):
        q = make(fmt)
        moved = q.to("meta")
        assert moved.device.type == "meta"
        assert all(t.is_meta for p in moved.planes.values() for t in p.tensors())
        assert (moved.shape, moved.format, moved.nbytes) == (q.shape, q.format, q.nbytes)
        assert_equal(q.to("cpu"), q)
        assert_equal(q.to(torch.device("cpu")), q)
        if make is grouped:
            assert moved.offsets.is_meta
            assert q.to("cpu").group(2).extent == q.group(2).extent


# layouts


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.has_codes], ids=lambda f: f.spec())
def test_every_layout_and_back(fmt):
    made = {layout: plain(fmt, layout=layout) for layout in LAYOUTS}
    for start, end in itertools.product(LAYOUTS, repeat=2):
        converted = made[start].with_layout(end)
        assert_equal(converted, made[end])
        assert_equal(converted.with_layout(start), made[start])
    both = {layout: grouped(fmt, layout=layout) for layout in ("compact", "swizzled")}
    for start, end in itertools.product(both, repeat=2):
        converted = both[start].with_layout(end)
        assert_equal(converted, both[end])
        assert_equal(converted.with_layout(start), both[start])
    assert not torch.equal(made["compact"].rowwise.scale.flatten(), made["swizzled"].rowwise.scale)
    for layout in LAYOUTS:
        for which in ("rowwise", "columnwise"):
            assert_same(made[layout].dequantize(plane=which), made["linear"].dequantize(plane=which), layout)
            assert_same(
                grouped(fmt).group(2, layout).dequantize(plane=which), both["swizzled"].group(2).dequantize(plane=which), layout
            )


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.kind.startswith("fp8")], ids=lambda f: f.spec())
def test_layouts_of_float_scales(fmt):
    assert_equal(plain(fmt).with_layout("linear"), plain(fmt, layout="linear"))
    assert_equal(plain(fmt, layout="linear").with_layout("compact"), plain(fmt))


# padded exchange


@pytest.mark.parametrize("alignment", [32, 64, 128, 256])
@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_padded_there_and_back(fmt, alignment):
    for layout in legal(fmt, ("compact", "swizzled")):
        q = grouped(fmt, layout=layout)
        padded = q.to_padded(alignment)
        sizes = [-(-size // alignment) * alignment for size in SIZES]
        assert_same(padded.offsets, offsets_of(sizes), "offsets")
        assert padded.capacity >= sum(sizes)
        assert padded.planes.keys() == q.planes.keys()
        assert_equal(padded.from_padded(q.offsets, q.capacity), q)
        for which in ("rowwise", "columnwise"):
            if getattr(fmt, "hadamard", False) and which == "columnwise":
                continue  # its values are those of transform blocks, not of rows
            values, want = padded.dequantize(plane=which), q.dequantize(plane=which)
            for g, (start, size) in enumerate(zip(padded.offsets.tolist(), SIZES, strict=False)):
                rows = want[q.offsets[g] : q.offsets[g + 1]]
                assert_same(values[start : start + size], rows, f"{which} {g}")
                assert not values[start + size : start + sizes[g]].any()
                assert rows.any() == (size > 0)


@pytest.mark.parametrize("alignment", [32, 128])
@pytest.mark.parametrize("fmt", [bs.MXFP8(), bs.NVFP4(), bs.FP8Block()], ids=lambda f: f.spec())
def test_padded_is_the_quantization_of_padded_rows(fmt, alignment):
    """Padding with zero rows before quantization and after it give the same planes (code 0 scales decode zeros)."""
    q = grouped(fmt).to_padded(alignment)
    x, rows = normal(CAPACITY, 70, seed=1, spread=2.0), torch.zeros(q.capacity, 70)
    for g, size in enumerate(SIZES):
        start, source = int(q.offsets[g]), sum(SIZES[:g])
        rows[start : start + size] = x[source : source + size]
    want = bs.quantize_grouped(rows, q.offsets, fmt, columnwise=True)
    for which, plane in want.planes.items():
        assert_same(q.planes[which].data, plane.data, which)
        assert_same(q.dequantize(plane=which), want.dequantize(plane=which), which)
        if fmt.kind != "fp8block":  # a block of zeros has the float scale 1 when it is quantized
            assert_same(q.planes[which].scale, plane.scale, which)
