"""Loading: every rank finds its parts in the files, whatever mesh wrote them, and reads only those.

rank 0     which folder, manifest, heads, state      sent to all, some KiB
each rank  names, shapes and dtypes are those of its arrays?     all raise if not
each rank  reads its runs of each tensor into the arrays         or the ranks of a node together
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.checkpoint import place
from mpipar.checkpoint.agree import on_first, require_whole, same, together, world_of
from mpipar.checkpoint.entries import STATE, Entry, Files, files_of
from mpipar.checkpoint.format import Head, parse
from mpipar.checkpoint.layout import runs_of
from mpipar.checkpoint.read import Target, read
from mpipar.checkpoint.save import IN_FLIGHT, SUFFIX
from mpipar.errors import CheckpointError, ConfigError, explain
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.mesh import Mesh


def load(
    directory: str | Path,
    like: Mapping[str, Any],
    mesh: Mesh | Communicator,
    *,
    step: int | None = None,
) -> dict[str, Any]:
    """Collective over `mesh.world`: fill the modules, optimisers and arrays of `like` in place.

        state = mp.load("runs/gpt", {"model": model, "optimizer": optimizer}, mesh)["state"]

    directory: a checkpoint, or a folder with those of steps, of which the newest complete one is
    loaded, or that of `step`.  like: a tree as for `save`, on any mesh; files that it has no key
    for are left alone, so {} reads the state only.  Returns the tree, with "state" as it was saved.
    An optimiser gets its moments and steps; its lr, weight decay and other settings stay those it
    was made with.

    Raises, on every rank: CheckpointError if there is no complete checkpoint, or what was to be
    read is damaged (arrays may be filled in part then); ConfigError if names, shapes or dtypes are
    not those of `like`, or an array in it is read-only, and MismatchError if the ranks pass
    different keys, directories or steps; then nothing was changed.
    """
    comm = world_of(mesh)
    if comm in IN_FLIGHT:
        IN_FLIGHT[comm].wait()
    files = together(comm, lambda: _wanted(like, step))
    given = {"directory": str(directory), "keys of like": sorted(files), "step": step}
    same(comm, "mp.load", given)
    folder = Path(directory) if step is None else Path(directory) / place.step_name(step)
    told = json.loads(on_first(comm, lambda: _look(folder, [key + SUFFIX for key in files])))
    found = place.Found(Path(told["folder"]), told["manifest"])
    heads = {}
    for key, entries in sorted(files.items()):
        name = key + SUFFIX
        heads[name] = parse(bytes.fromhex(told["heads"][name]), str(found.folder / name))
        _compare(comm, key, entries, heads[name])
    _read_all(comm, found, files, heads)
    return {**like, STATE: json.loads(told[STATE])}


def _wanted(like: Mapping[str, Any], step: Any) -> Files:
    """Return the entries of each file; raises ConfigError for what cannot be filled."""
    require_whole("step", step, 0)
    files = files_of(like, "like")
    for key, entries in files.items():
        for entry in entries:
            if isinstance(entry.array, np.ndarray) and not entry.array.flags.writeable:
                rule = f"{entry.name} is filled in place, but it is read-only"
                raise ConfigError(explain(f"like[{key!r}]", "an array", rule, "Pass a copy of it"))
    return files


def _look(directory: Path, names: Sequence[str]) -> str:
    """Return what all ranks have to know of a checkpoint, as JSON."""
    found = place.find(directory)
    for name in names:
        if name not in found.manifest["files"]:
            there = ", ".join(sorted(found.manifest["files"]))
            raise CheckpointError(f"{found.folder} has no {name}, only {there}")
    return json.dumps(
        {
            "folder": str(found.folder),
            "manifest": found.manifest,
            "heads": {name: place.read_head(found, name).hex() for name in names},
            STATE: place.read_state(found),
        }
    )


def _compare(comm: Communicator, key: str, entries: Sequence[Entry], head: Head) -> None:
    """Collective: raise ConfigError on every rank unless the file has just what the ranks want."""
    places = {one.name: number for number, one in enumerate(head.places)}
    wanted = np.zeros(len(places), np.int64)
    problems = []
    for entry in entries:
        if entry.name not in places:
            problems.append(f"{entry.name} is missing in the file")
            continue
        wanted[places[entry.name]] = 1
        one = head.places[places[entry.name]]
        given = (one.dtype.name, one.shape)
        need = (entry.array.dtype.name, tuple(entry.spec.shape))
        if given != need:
            problems.append(f"{entry.name} is {given} in the file, needed {need}")
    if comm.size > 1:
        wanted = comm.all_reduce(wanted, "max")
    extra = [one.name for one, count in zip(head.places, wanted, strict=True) if not count]
    problems += [f"{name} is in the file only" for name in extra]

    def check() -> None:
        if problems:
            shown = problems[:8] + [f"and {len(problems) - 8} more"] * (len(problems) > 8)
            rule = "names, dtypes and whole shapes must be those that were saved"
            fix = "Build what was saved"
            raise ConfigError(explain(f"like[{key!r}]", shown, rule, fix))

    together(comm, check)


def _read_all(
    comm: Communicator, found: place.Found, files: Mapping[str, Sequence[Entry]],
    heads: Mapping[str, Head],
) -> None:  # fmt: skip
    """Collective: read this rank's parts of all files."""
    for key, entries in sorted(files.items()):
        name = key + SUFFIX
        about = found.manifest["files"][name]
        sums = np.frombuffer(bytes.fromhex(about["sums"]), "<u8")
        places = {one.name: one for one in heads[name].places}
        targets = []
        for entry in sorted(entries, key=lambda entry: places[entry.name].start):
            one = places[entry.name]
            if entry.on_update is not None:
                entry.on_update()
            runs = runs_of(entry.spec).in_bytes(one.dtype.itemsize, one.start)
            targets.append(Target(entry.array, runs))
        read(comm, found.folder / name, about["bytes"], sums, targets)
