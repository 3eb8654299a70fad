"""The whole training job with its own settings: every recipe ends as close to bf16 as it must. Minutes a recipe."""

import pytest
import torch
from train_helpers import Quiet, never

from blockscale.train import CHOICES, Job


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    torch.set_num_threads(1)
    return Job(Job.Config(recipes=tuple(CHOICES), device="cpu"), tmp_path_factory.mktemp("run")).run(Quiet(), never)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("recipe", CHOICES)
def test_ends_near_bf16(result, recipe):
    state = result.state(recipe)
    loss, gap = state.validation[-1][1], result.gap_percent(recipe)
    print(f"{recipe}: {state.validation[0][1]:.4f} -> {loss:.4f}, gap {gap} %, {state.seconds:.0f} s")
    assert len(state.losses) == 100
    assert loss < 2.6 < 5 < state.validation[0][1]
    if recipe != "bf16":
        assert abs(gap) <= CHOICES[recipe].bound_percent
