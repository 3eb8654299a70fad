"""Every bit test runs twice: on the compiled CPU kernels (tests need a C++ compiler) and on the reference."""

import pytest

from blockscale.kernels.cpu.build import load
from blockscale.ops import backend


@pytest.fixture(autouse=True, params=["cpu", "reference"])
def each_backend(request):
    if request.param == "cpu":
        assert load().library is not None, load().why
        yield
    else:
        with backend.only_reference():
            yield
