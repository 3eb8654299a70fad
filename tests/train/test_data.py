"""Where the bytes come from and which of them a step sees."""

from __future__ import annotations

import hashlib

import pytest
import torch

from blockscale.train import Batches, Corpus, DataError

CPU = torch.device("cpu")


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_the_standard_library_is_read_the_same_twice_without_tests_or_packages():
    first, second = Corpus.load(Corpus.Config()), Corpus.load(Corpus.Config())
    assert first.sha256 == second.sha256
    assert first.sha256 == hashlib.sha256(as_bytes(first.training) + as_bytes(first.validation)).hexdigest()
    assert first.training.numel() > 3_000_000
    assert first.validation.numel() > 200_000
    assert b"class OrderedDict" in as_bytes(first.training) + as_bytes(first.validation)
    assert b"pytest_configure" not in as_bytes(first.training)


def test_a_folder_holds_out_every_sixteenth_file_in_the_order_of_names(tmp_path):
    for index in range(40):
        folder = tmp_path / ("b" if index % 2 else "a")
        folder.mkdir(exist_ok=True)
        (folder / f"{index:02d}.txt").write_bytes(bytes([index]) * 10)
    (tmp_path / ".hidden").write_bytes(b"secret")
    order = [*range(0, 40, 2), *range(1, 40, 2)]
    held_out = [order[15], order[31]]
    corpus = Corpus.load(Corpus.Config(path=str(tmp_path)))
    assert as_bytes(corpus.validation) == b"".join(bytes([index]) * 10 for index in held_out)
    assert as_bytes(corpus.training) == b"".join(bytes([index]) * 10 for index in order if index not in held_out)
    assert corpus.files == 40


def test_a_single_file_holds_out_its_end_and_max_bytes_cuts_it(tmp_path):
    data = bytes(range(256)) * 10
    (tmp_path / "x").write_bytes(data)
    corpus = Corpus.load(Corpus.Config(path=str(tmp_path / "x")))
    assert as_bytes(corpus.training) == data[:2400]
    assert as_bytes(corpus.validation) == data[2400:]
    cut = Corpus.load(Corpus.Config(path=str(tmp_path / "x"), max_bytes=160))
    assert as_bytes(cut.training) + as_bytes(cut.validation) == data[:160]
    assert cut.validation.numel() == 10


@pytest.mark.parametrize("kind", ["missing", "empty file", "empty folder", "too small"])
def test_unusable_data_is_named_with_what_would_do(tmp_path, kind):
    path = tmp_path / "data"
    if kind == "empty file":
        path.write_bytes(b"")
    elif kind == "empty folder":
        path.mkdir()
        (path / ".hidden").write_bytes(b"x")
    elif kind == "too small":
        path.write_bytes(b"x" * 1000)
    expected = {
        "missing": "does not exist: name a file or a folder",
        "empty file": "is empty",
        "empty folder": "folder without files",
        "too small": "too small: 62 bytes for validation .* needs 132",
    }
    with pytest.raises(DataError, match=expected[kind]) as error:
        Batches(Batches.Config(size=4, context=32), Corpus.load(Corpus.Config(path=str(path))), seed=0)
    assert str(path) in str(error.value)


def test_a_batch_depends_on_seed_and_step_alone(text_file):
    corpus = Corpus.load(Corpus.Config(path=str(text_file)))
    config = Batches.Config(size=4, context=32)
    first = [Batches(config, corpus, seed=1).starts(step) for step in range(5)]
    again = Batches(config, corpus, seed=1)
    for step in (4, 0, 2, 1, 3):
        torch.rand(step + 1)
        assert torch.equal(again.starts(step), first[step])
    assert len({tuple(starts.tolist()) for starts in first}) == 5
    assert not torch.equal(Batches(config, corpus, seed=2).starts(0), first[0])


def test_targets_are_the_inputs_one_byte_further(text_file):
    corpus = Corpus.load(Corpus.Config(path=str(text_file)))
    batches = Batches(Batches.Config(size=4, context=32, validation=3), corpus, seed=1)
    inputs, targets = batches.training(2, CPU)
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == torch.int64
    for row, start in enumerate(batches.starts(2).tolist()):
        assert bytes(inputs[row].tolist()) == as_bytes(corpus.training)[start : start + 32]
        assert bytes(targets[row].tolist()) == as_bytes(corpus.training)[start + 1 : start + 33]
    validation = list(batches.validation(CPU))
    assert len(validation) == 3
    assert bytes(validation[0][0][0].tolist()) == as_bytes(corpus.validation)[:32]
    assert bytes(validation[-1][1][-1].tolist()) == as_bytes(corpus.validation)[-32:]
