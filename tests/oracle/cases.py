"""Which formats, shapes, dtypes, strides and kinds of data a test runs: every option, the rest drawn by seed."""

import itertools
from dataclasses import dataclass

import numpy as np

from . import inputs
from .formats import Format

WIDTHS = (464, 640, 1504, 2880)


def _product(name: str, **options: tuple) -> list[Format]:
    keys = list(options)
    return [Format(name, dict(zip(keys, chosen, strict=True))) for chosen in itertools.product(*options.values())]


MXFP8 = _product(
    "MXFP8",
    element=("e4m3", "e5m2"),
    block=((1, 32), (32, 32)),
    scale_rounding=("up", "floor"),
    nan=("propagate", "ignore"),
)
MXFP4 = _product("MXFP4", block=((1, 32), (32, 32)), scale_rounding=("up", "floor"), nan=("propagate", "ignore"))
NVFP4 = [
    *_product("NVFP4", block=((1, 16), (16, 16)), nan=("propagate", "ignore")),
    *_product("NVFP4", hadamard=(True,), stochastic=(False, True), nan=("propagate", "ignore")),
    *_product("NVFP4", block=((1, 16), (16, 16)), stochastic=(True,), nan=("propagate", "ignore")),
]
NVFP4_ROWS = [
    *_product("NVFP4", row_scaled=(True,), stochastic=(False, True), nan=("propagate", "ignore")),
    *_product("NVFP4", row_scaled=(True,), hadamard=(True,), stochastic=(False, True)),
]
NVFP4_FOUR = [
    *_product("NVFP4", four_over_six=("mae", "mse"), scale_max=(448, 256), block=((1, 16), (16, 16)), nan=("propagate", "ignore")),
    *_product("NVFP4", four_over_six=("mae", "mse"), row_scaled=(True,)),
]
FP8_TENSOR = _product("FP8Tensor", element=("e4m3", "e5m2"), power_of_two=(False, True), eps=(0.0, 0.5))
FP8_BLOCK = _product(
    "FP8Block",
    element=("e4m3", "e5m2"),
    block=((1, 128), (128, 128)),
    power_of_two=(True, False),
    eps=(0.0, 1e-3),
)
FROM_ROW = [
    Format(name, {**options, "columnwise_source": "rowwise_dequantized"})
    for name, options in (
        ("MXFP8", {}),
        ("MXFP8", {"element": "e5m2", "scale_rounding": "floor"}),
        ("MXFP4", {}),
        ("NVFP4", {}),
        ("NVFP4", {"hadamard": True, "stochastic": True}),
        ("NVFP4", {"row_scaled": True, "nan": "ignore"}),
        ("NVFP4", {"four_over_six": "mae"}),
        ("FP8Tensor", {}),
        ("FP8Block", {"power_of_two": False}),
    )
]
EVERY = [*FROM_ROW, *MXFP8, *MXFP4, *NVFP4, *NVFP4_ROWS, *NVFP4_FOUR, *FP8_TENSOR, *FP8_BLOCK]
FEW = [
    Format("MXFP8"),
    Format("MXFP8", {"element": "e5m2", "block": (32, 32), "scale_rounding": "floor"}),
    Format("NVFP4"),
    Format("NVFP4", {"block": (16, 16)}),
    Format("NVFP4", {"hadamard": True, "stochastic": True}),
    Format("NVFP4", {"row_scaled": True}),
    Format("NVFP4", {"four_over_six": "mse"}),
    Format("NVFP4", {"four_over_six": "mae", "scale_max": 256, "block": (16, 16)}),
    FROM_ROW[0],
    Format("MXFP4"),
    Format("MXFP4", {"block": (32, 32), "scale_rounding": "floor"}),
    Format("FP8Tensor"),
    Format("FP8Tensor", {"element": "e5m2", "power_of_two": True}),
    Format("FP8Block"),
    Format("FP8Block", {"block": (128, 128), "power_of_two": False}),
]


@dataclass(frozen=True)
class Case:
    """One input of one format."""

    fmt: Format
    rows: int
    columns: int
    dtype: str
    stride: str
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.fmt}-{self.rows}x{self.columns}-{self.dtype}-{self.stride}-{self.kind}"

    def tensor(self):
        """(torch tensor, float32 numpy) of this case."""
        return inputs.tensor(self.kind, self.rows, self.columns, self.seed, self.dtype, self.stride)

    @property
    def rng(self) -> tuple[int, int] | None:
        """(seed, offset) for stochastic rounding, else None."""
        if not self.fmt.option("stochastic", False):
            return None
        return (self.seed * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63, self.seed * 7919 % 2**31


def draw(formats: list[Format], per_format: int, seed: int = 0) -> list[Case]:
    """per_format cases of each format; each kind, dtype and stride comes in turn, shapes are drawn."""
    result = []
    for number, fmt in enumerate(formats):
        rng = np.random.default_rng((seed, number))
        order = rng.permutation(len(inputs.KINDS))
        for index in range(per_format):
            rows, columns = (int(v) for v in rng.choice(inputs.ROWS, 2))
            if index % 5 == 4:
                rows, columns = min(rows, 65), int(rng.choice(WIDTHS))
                if rng.integers(0, 2):
                    rows, columns = columns, rows
            kind = inputs.KINDS[order[index % len(order)]]
            dtype = ("float32", "bfloat16", "float16")[(index + number) % 3]
            stride = inputs.STRIDES[int(rng.integers(0, 4))]
            result.append(Case(fmt, rows, columns, dtype, stride, kind, 1000 * number + index + seed))
    return result
