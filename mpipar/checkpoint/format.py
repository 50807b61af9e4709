"""The head of a .safetensors file: which tensors lie where.

    8 bytes   length of the JSON text, little-endian
    JSON      {"wte.weight": {"dtype": "F32", "shape": [1000, 64], "data_offsets": [0, 256000]},
               ...}, padded with spaces to a whole page
    data      the tensors, row-major, little-endian, one behind the other without gaps

Tensors stand in the order of their element size, largest first, and then of their names, so each
is aligned to its elements.  https://huggingface.co/docs/safetensors
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.errors import CheckpointError, ConfigError, explain

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
NAMES = {code: name for name, code in CODES.items()}
TOO_LARGE = (OverflowError, RecursionError)  # of numbers that are none, and of deep nesting
ALIGNMENT = 4096  # bytes, a page: rows of a power of two are then written page by page


@dataclass(frozen=True)
class Place:
    """A tensor in a file: name, dtype, global shape, and the byte at which it begins."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Head:
    """The text at the beginning of a file, the places of its tensors, and the file's size."""

    text: bytes
    places: tuple[Place, ...]
    nbytes: int


def lay_out(tensors: Iterable[Place], made_for: str = "mpipar") -> Head:
    """Return the head of a file with these tensors; raises ConfigError for a dtype it cannot hold.

    Starts are counted from the beginning of the file.  made_for: what readers find as its format;
    transformers wants "pt".
    """
    if sys.byteorder != "little":
        rule = "safetensors files are little-endian"
        raise ConfigError(explain("sys.byteorder", sys.byteorder, rule, "Save elsewhere"))
    table: dict[str, Any] = {"__metadata__": {"format": made_for}}
    at = 0
    ordered = sorted(tensors, key=lambda one: (-one.dtype.itemsize, one.name))
    for one in ordered:
        if one.dtype.name not in CODES:
            rule = f"a file holds {', '.join(CODES)}"
            raise ConfigError(explain(f"dtype of {one.name}", one.dtype.name, rule, "Convert it"))
        offsets = [at, at + one.nbytes]
        table[one.name] = {
            "dtype": CODES[one.dtype.name],
            "shape": list(one.shape),
            "data_offsets": offsets,
        }
        at += one.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    text = len(text).to_bytes(8, "little") + text
    places = []
    for one in ordered:
        start = len(text) + table[one.name]["data_offsets"][0]
        places.append(Place(one.name, one.dtype, one.shape, start))
    return Head(text, tuple(places), len(text) + at)


def parse(text: bytes, path: str) -> Head:
    """Return the head that begins a file; raises CheckpointError for bytes that are none."""
    try:
        table = json.loads(text[8:])
        table.pop("__metadata__", None)
        places = []
        for name, about in table.items():
            if about["dtype"] not in tuple(NAMES):
                what = f"{path} has a tensor {name} of dtype {about['dtype']!r}"
                raise CheckpointError(f"{what}; these are read: {', '.join(NAMES)}")
            dtype, shape = dtype_of(NAMES[about["dtype"]]), tuple(map(int, about["shape"]))
            place = Place(name, dtype, shape, len(text) + int(about["data_offsets"][0]))
            places.append(place)
            begin, end = map(int, about["data_offsets"])
            if begin < 0 or min(shape, default=0) < 0 or place.nbytes != end - begin:
                raise ValueError(f"bytes {begin} to {end} are not a tensor {name} of {shape}")
    except (ValueError, KeyError, TypeError, AttributeError, *TOO_LARGE) as error:
        raise CheckpointError(f"{path} is no .safetensors file: {error!r}") from error
    places.sort(key=lambda place: place.start)
    end = max((place.start + place.nbytes for place in places), default=len(text))
    return Head(text, tuple(places), end)
