"""Every recipe starts alike, learns, ends near bf16; what is measured is what it says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from train_helpers import Quiet, never, tiny_config

from blockscale.train import CHOICES, Job, JobError, Transformer, check, parse_recipes
from blockscale.train.measure import compare, count_saved_bytes, expert_gradients
from blockscale.train.model import Experts
from blockscale.train.optimizer import OptimizerConfig, learning_rate

#: the others run plain torch on the CPU and are slow; test_all_recipes.py has them
ALL = ("bf16", "mxfp8", "nvfp4", "fp8block", "fp8current", "fp8delayed", "w4a8")


@pytest.fixture(scope="module")
def result(text_file, tmp_path_factory):
    torch.set_num_threads(1)
    return Job(tiny_config(text_file, ALL, steps=60), tmp_path_factory.mktemp("run")).run(Quiet(), never)


def test_every_recipe_has_the_same_weights_and_batches_and_ends_elsewhere(result):
    assert len(result.states) == len(ALL)
    assert len({state.initial_sha256 for state in result.states}) == 1
    assert len({state.batches_sha256 for state in result.states}) == 1
    assert len({state.final_sha256 for state in result.states}) == len(ALL)
    assert {len(state.losses) for state in result.states} == {60}


@pytest.mark.parametrize("recipe", ALL)
def test_the_loss_falls_and_stays_near_bf16(result, recipe):
    state = result.state(recipe)
    first, last = sum(state.losses[:5]) / 5, sum(state.losses[-5:]) / 5
    assert first > 3.5
    assert last < 2.2
    assert [step for step, _ in state.validation] == [0, 10, 20, 30, 40, 50, 60]
    if recipe != "bf16":
        assert abs(result.gap_percent(recipe)) < 2 * CHOICES[recipe].bound_percent
    assert result.gap_percent("bf16") is None


def test_gradient_errors_are_of_the_size_of_each_format(result):
    errors = {state.recipe: state.measurement.gradient_error for state in result.states}
    assert errors["bf16"] == 0.0
    for recipe in ("mxfp8", "fp8block", "fp8current"):
        assert 0.01 < errors[recipe] < 0.15, recipe
    assert 0.15 < errors["nvfp4"] < 0.6
    assert 0.05 < errors["w4a8"] < 0.6
    names = list(result.states[1].measurement.gradient_errors)
    assert names == [f"blocks.{block}.experts.moe.experts.fc{fc}.weight" for block in (0, 1) for fc in (1, 2)]


def test_narrow_formats_save_less_for_backward():
    experts = Experts.Config(num_experts=4, intermediate=128)
    model = Transformer(Transformer.Config(width=128, layers=1, experts=experts), context=256, seed=0)
    tokens = torch.randint(256, (4, 257), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    saved = {name: expert_gradients(model, batch, CHOICES[name].make())[1] for name in ("bf16", "mxfp8", "nvfp4")}
    # the layer's bfloat16 input alone is 4 * 256 * 128 * 2 bytes
    assert 262_144 < saved["nvfp4"] < saved["mxfp8"] < saved["bf16"]


def test_initial_weights_ignore_torchs_generator_and_follow_the_seed():
    config = tiny_config("unused", ALL).model
    torch.manual_seed(1)
    first = Transformer(config, 32, seed=5).state_dict()
    torch.manual_seed(2)
    second, other = Transformer(config, 32, seed=5).state_dict(), Transformer(config, 32, seed=6).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["blocks.0.experts.moe.experts.fc1.weight"], other["blocks.0.experts.moe.experts.fc1.weight"])


def test_a_loss_that_is_not_finite_ends_that_recipe_alone(text_file, tmp_path, monkeypatch):
    loss, calls = Transformer.loss, []

    def breaking(self, inputs, targets):
        value, aux_loss = loss(self, inputs, targets)
        if torch.is_grad_enabled():
            calls.append(1)
        # calls: one measurement for bf16's baseline and one of its own, then its steps
        return (value * float("nan") if len(calls) == 6 else value), aux_loss

    monkeypatch.setattr(Transformer, "loss", breaking)
    found = Job(tiny_config(text_file, ("bf16", "mxfp8"), steps=8), tmp_path).run(Quiet(), never)
    assert found.states[0].diverged_at == 3
    assert found.states[0].step == 4
    assert found.states[1].diverged_at is None
    assert found.states[1].step == 8
    assert math.isnan(found.gap_percent("mxfp8"))


def test_saved_bytes_counts_distinct_storages_without_parameters():
    class Toy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(10, 20, bias=False)

        def moe_layers(self):
            return [self.layer]

    toy, x = Toy(), torch.randn(3, 10, requires_grad=True)
    with count_saved_bytes(toy) as saved:
        toy.layer(x)
        toy.layer(x)
    assert saved.total == 3 * 10 * 4
    assert "forward" not in toy.layer.__dict__


def test_relative_error_is_of_all_gradients_together():
    baseline = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])}
    measured = compare({"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([12.0])}, baseline, 7)
    assert measured.gradient_errors == {"a": 0.1, "b": 0.0}
    assert measured.gradient_error == pytest.approx(0.5 / 13)
    assert measured.saved_bytes == 7


def test_learning_rate_warms_up_and_decays():
    config = OptimizerConfig(learning_rate=3e-3, warmup=0.1, floor=0.1)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[0] == pytest.approx(3e-4)
    assert rates[9] == pytest.approx(3e-3)
    assert rates[10] == pytest.approx(3e-3)
    assert rates[99] == pytest.approx(3e-4, rel=0.01)
    assert all(after < before for before, after in itertools.pairwise(rates[10:]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp3", "unknown recipe 'fp3'; choose from bf16, mxfp8, nvfp4, fp8block, fp8current"),
        ("bf16,bf16", "named twice"),
        (" , ", "names none; choose from bf16"),
    ],
)
def test_bad_recipes_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_recipes(text)
    assert parse_recipes("NVFP4, bf16") == ("nvfp4", "bf16")


@pytest.mark.parametrize("steps", [0, -3])
def test_steps_below_one_are_refused(text_file, steps):
    with pytest.raises(JobError, match=f"steps is {steps}; it must be 1 or more"):
        check(tiny_config(text_file, ALL, steps=steps))
