"""The compiled CPU kernels are built before tests start: once, not by each worker, and on no test's time."""

from blockscale.kernels.cpu.build import load


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the process that starts the workers, or the only one
        load()
