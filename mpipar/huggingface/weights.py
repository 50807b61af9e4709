"""The tensors of a Hugging Face folder: one model.safetensors, or several and an index.

    model.safetensors                   all tensors
    model.safetensors.index.json        {"weight_map": {"wte.weight": "model-00001-of-00002..."}}

Files are mapped, so a rank reads the pages of what it holds.  Folders of a base model leave out
"transformer." or "model." in all names.  Every tensor has a parameter of its shape, or is refused:
a bias that the model here lacks would change the numbers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpipar.arrays import DTYPES, Array, is_device, module_of
from mpipar.checkpoint.format import Place, lay_out, parse
from mpipar.errors import CheckpointError, explain
from mpipar.huggingface.names import sources
from mpipar.models.config import ModelConfig
from mpipar.nn.spec import Spec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # follow from the settings
Tensors = Mapping[str, np.ndarray]


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a folder by name, mapped.

    Raises CheckpointError if files are missing or cut short.
    """
    names = {SINGLE}
    if (folder / INDEX).exists():
        try:
            names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
            {folder / name for name in names}  # all are texts
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / INDEX} is no index of files: {error!r}") from error
    tensors: dict[str, np.ndarray] = {}
    for name in sorted(names):
        tensors |= _of_file(folder / name)
    return tensors


def _of_file(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(text := file.read(8), "little")
            nbytes = path.stat().st_size
            text += file.read(min(size, nbytes))
    except OSError as error:
        others = any(path.parent.glob("pytorch_model*.bin"))
        fix = ". There are weights in pytorch_model*.bin: save them as safetensors" * others
        raise CheckpointError(f"{path} cannot be read: {error.strerror}{fix}") from error
    head = parse(text, str(path))
    if head.nbytes > nbytes:
        raise CheckpointError(f"{path} lacks {head.nbytes - nbytes} bytes: it was cut short")
    raw = np.memmap(path, np.uint8, mode="r")
    return {
        one.name: raw[one.start : one.start + one.nbytes].view(one.dtype).reshape(one.shape)
        for one in head.places
    }


@dataclass(frozen=True)
class Global:
    """A whole parameter, of which rows can be read: one tensor, or several one below the other."""

    parts: tuple[np.ndarray, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        rows = sum(part.shape[0] for part in self.parts)
        return (rows, *self.parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """That of the file."""
        return self.parts[0].dtype

    def first(self, rows: int) -> "Global":
        """Return its first rows, where it is one tensor."""
        return Global(tuple(part[:rows] for part in self.parts))

    def take(self, spec: Spec) -> np.ndarray:
        """Return what a rank holds, in the file's dtype."""
        block = np.empty(spec.block_shape, self.dtype)
        others = tuple(spec.index_along(dim) for dim in range(1, len(spec.shape)))
        rows, start = spec.index_along(0), 0
        for part in self.parts:
            mine = (rows >= start) & (rows < start + len(part))
            block[mine] = part[np.ix_(rows[mine] - start, *others)]
            start += len(part)
        if spec.flat is None:
            return block
        return block.reshape(-1)[spec.flat.start : spec.flat.stop]


def parameters(config: ModelConfig, folder: Path) -> dict[str, Global]:
    """Return all parameters of a folder's model, by global name.

    Raises CheckpointError unless its tensors are just those of such a model.
    """
    tensors = {_short(name): one for name, one in read_tensors(folder).items()}
    if config.layers > len(tensors):
        text = f"{folder} has {len(tensors)} tensors, too few for the {config.layers} layers"
        raise CheckpointError(f"{text} of its config.json: download it again")
    found = {}
    for name, source in sources(config).items():
        parts = []
        for theirs, shape in zip(source.names, source.shapes, strict=True):
            one = tensors.pop(_short(theirs), None)
            if one is None:
                raise CheckpointError(f"{folder} has no tensor {theirs}, which {name} is made of")
            check(f"{theirs} in {folder}", one, shape)
            parts.append(one.T if source.transposed else one)
        found[name] = Global(tuple(parts))
    extra = [name for name in tensors if not name.endswith(BUFFERS)]
    extra = [name for name in extra if name != "lm_head.weight"]  # of a tied model: a copy
    if extra:
        shown = ", ".join(extra[:4]) + f" and {len(extra) - 4} more" * (len(extra) > 4)
        text = f"a {config.model} model of the sizes in config.json has no place for {shown}"
        raise CheckpointError(f"{folder}: {text}. The numbers would be others; check config.json")
    return found


def _short(name: str) -> str:
    return name.removeprefix("transformer.").removeprefix("model.")


def check(called: str, tensor: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError for a tensor of another shape, or of no floating-point numbers."""
    if tensor.shape != shape:
        rule = f"the model of the settings has {shape} there"
        raise CheckpointError(explain(called, tensor.shape, rule, "Settings and weights differ"))
    if tensor.dtype.name not in DTYPES:
        rule = f"weights are {', '.join(DTYPES)}"
        raise CheckpointError(explain(called, tensor.dtype.name, rule, "Save it unquantised"))


def fill(array: Array, spec: Spec, values: Global) -> None:
    """Fill what this rank holds of a parameter, converted to its dtype.

    Raises CheckpointError if the tensor has another shape.
    """
    if values.shape != spec.shape:
        text = explain(spec.name, values.shape, f"the model needs {spec.shape}", "Check the config")
        raise CheckpointError(text)
    mine = values.take(spec).astype(array.dtype).reshape(array.shape)
    array[...] = module_of(array).asarray(mine) if is_device(array) else mine


def write_tensors(folder: Path, tensors: Tensors, most: int) -> None:
    """Write tensors to a folder, in files of at most `most` bytes, unless one is larger."""
    files: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if files[-1] and used + tensor.nbytes > most:
            files.append([])
            used = 0
        files[-1].append(name)
        used += tensor.nbytes
    if len(files) == 1:
        _write(folder / SINGLE, files[0], tensors)
        return
    count = len(files)
    named = {f"model-{n:05}-of-{count:05}.safetensors": group for n, group in enumerate(files, 1)}
    for name, group in named.items():
        _write(folder / name, group, tensors)
    index = {
        "metadata": {"total_size": sum(one.nbytes for one in tensors.values())},
        "weight_map": {tensor: name for name, group in named.items() for tensor in group},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write(path: Path, names: Sequence[str], tensors: Tensors) -> None:
    places = [Place(name, tensors[name].dtype, tensors[name].shape) for name in names]
    head = lay_out(places, "pt")
    with path.open("wb") as file:
        file.write(head.text)
        for place in head.places:
            file.write(np.ascontiguousarray(tensors[place.name]).view(np.uint8).data)
