"""The numbers that a right audit finds in shipped libraries (downloads gigabytes: slow).

BLOCKSCALE_WHEELS names a folder that keeps the downloads between runs.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from audit.support_audit import Config, Result, audit
from blockscale.guard.audit.names import family

pytestmark = pytest.mark.slow
TE = "transformer-engine-cu13"
GROUPED = "transformer_engine::dispatch::mxfp8::group_quantize_kernel::group_quantize_mxfp8_kernel"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    kept = os.environ.get("BLOCKSCALE_WHEELS")
    return Path(kept) if kept else tmp_path_factory.mktemp("wheels")


def fetch(folder: Path, package: str, version: str) -> Path:
    """The wheel of a release, downloaded when it is not there."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "-d", str(folder), f"{package}=={version}"], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{package} {version} cannot be downloaded here")
    return next(folder.glob(pattern))


@lru_cache(maxsize=8)
def found(wheel: Path) -> tuple[Result, float]:
    started = time.perf_counter()
    result = audit([str(wheel)], Config())
    return result, time.perf_counter() - started


def counts(result: Result, rule: str) -> Counter[str]:
    return Counter(finding.arch for finding in result.findings if finding.rule == rule)


def families(result: Result, rule: str, arch: str) -> Counter[str]:
    return Counter(family(finding.kernel) for finding in result.findings if (finding.rule, finding.arch) == (rule, arch))


@pytest.mark.parametrize(("version", "calls"), [("2.18.0", 4562), ("2.19.0", 7670), ("2.20.2", 7996)])
def test_driver_calls_of_transformer_engine(version, calls, wheels):
    result, _ = found(fetch(wheels, TE, version))
    assert counts(result, "syscall") == {"sm_120f": calls}
    assert not result.unreadable


def test_transformer_engine_is_read_whole(wheels):
    result, seconds = found(fetch(wheels, TE, "2.20.2"))
    library = {"cubins": 629, "kernels": 174_816}
    # its second library, libnccl_ep.so, adds 12 cubins with 90 kernels
    assert (result.cubins, result.kernels) == (library["cubins"] + 12, library["kernels"] + 90)
    assert result.by_arch["sm_120f"] == 20_850
    assert seconds < 60


def test_driver_calls_by_family(wheels):
    largest = families(found(fetch(wheels, TE, "2.20.2"))[0], "syscall", "sm_120f")
    assert largest[GROUPED] == 4896
    assert largest["transformer_engine::dispatch::mxfp8::quantize_kernel::quantize_mxfp8_kernel"] == 1224
    assert sorted(largest.values())[-4:] == [448, 576, 1224, 4896]


def test_handoff_of_transformer_engine(wheels):
    old = families(found(fetch(wheels, TE, "2.19.0"))[0], "tma-handoff", "sm_100a")
    new = families(found(fetch(wheels, TE, "2.20.2"))[0], "tma-handoff", "sm_100a")
    assert (old[GROUPED], new[GROUPED]) == (4896, 0)
    assert sum(new.values()) == 1012


@pytest.mark.parametrize(
    ("package", "version", "calls"), [("nvidia-cublas", "13.10.0.20", {"sm_120": 88}), ("flashinfer-cubin", "0.6.13", {})]
)
def test_other_libraries(package, version, calls, wheels):
    result, seconds = found(fetch(wheels, package, version))
    assert counts(result, "syscall") == calls
    assert counts(result, "tma-handoff") == {}
    assert not result.unreadable
    if package == "flashinfer-cubin":
        assert result.cubins == 15_970
        assert seconds < 15 or os.getloadavg()[0] > 3
    else:
        assert {family(f.kernel) for f in result.findings if f.rule == "syscall"} == {"symv_tma_ws_kernel"}


@pytest.mark.parametrize(("version", "grouped"), [("2.18.0", 2400), ("2.19.0", 4800), ("2.20.2", 0)])
def test_generic_accesses_of_transformer_engine(version, grouped, wheels):
    result, _ = found(fetch(wheels, TE, version))
    assert families(result, "generic-on-shared", "sm_100a")[GROUPED] == grouped
