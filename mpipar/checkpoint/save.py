"""Saving: what is where is agreed on, all ranks write, and the folder gets its name.

    share out   who writes which bytes                  two small all_gathers a file
    write       through MPI-IO, or by a thread          each value once, no rank more than its share
    finish      sums of all blocks, manifest, rename    one all_reduce of 8 bytes for each 4 MiB

With `async_op` this rank's share is copied first, and a thread writes the copy while training goes
on.  The folder gets its name when all ranks have waited, or begin the next checkpoint.
"""

import json
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.checkpoint import place
from mpipar.checkpoint.agree import on_first, require_whole, same, together, world_of
from mpipar.checkpoint.checksum import Sums
from mpipar.checkpoint.entries import STATE, files_of
from mpipar.checkpoint.share import Share, share_out
from mpipar.checkpoint.write import create, head_sums, write_alone, write_together
from mpipar.errors import CheckpointError, ConfigError, MpiparError, explain
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.mesh import Mesh

SUFFIX = ".safetensors"


class Saving:
    """A checkpoint on its way to disk.

    folder: where it will be.
    """

    def __init__(
        self,
        comm: Communicator,
        folder: Path,
        hidden: Path,
        shares: Mapping[str, Share],
        state: str,
    ) -> None:
        self.folder, self._comm, self._hidden = folder, comm, hidden
        self._shares, self._state = shares, state
        self._sums: dict[str, Sums] = {}
        self._fault = ""
        self._after: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._done = False

    def test(self) -> bool:
        """Say whether this rank has written its share; no communication."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Collective: wait until every rank has written, and give the folder its name.

        A second call does nothing.  Raises CheckpointError on every rank if one could not write;
        then there is no such checkpoint, and those before it are as they were.
        """
        if self._done:
            return self.folder
        if self._thread is not None:
            self._thread.join()
        self._done = True
        IN_FLIGHT.pop(self._comm, None)
        try:
            together(self._comm, self._raise_fault)
            sums = {name: self._total(own) for name, own in self._sums.items()}
            heads = {name: share.head.text for name, share in self._shares.items()}
            args = (self._hidden, self.folder, heads, sums, self._state)
            on_first(self._comm, lambda: place.finish(*args))
        except MpiparError:
            if self._comm.rank == 0:
                shutil.rmtree(self._hidden, ignore_errors=True)
            raise
        on_first(self._comm, self._after)
        return self.folder

    def write(self) -> None:
        """Collective: write through MPI-IO."""
        for name, share in self._shares.items():
            self._sums[name], fault = write_together(self._comm, self._hidden / name, share)
            self._fault = self._fault or fault
            self._add_head(name)

    def start(self) -> None:
        """Copy this rank's share, and let a thread write the copy."""
        for name, share in self._shares.items():
            copies = tuple(piece and piece.copy() for piece in share.pieces)
            self._shares = {**self._shares, name: replace(share, pieces=copies)}
        IN_FLIGHT[self._comm] = self
        self._thread = threading.Thread(target=self._run, name="mpipar checkpoint", daemon=True)
        self._thread.start()

    def then(self, action: Callable[[], None]) -> None:
        """Let rank 0 do something when the folder has its name."""
        self._after = action

    def _run(self) -> None:
        try:
            for name, share in self._shares.items():
                self._sums[name] = write_alone(self._hidden / name, share)
                self._add_head(name)
        except Exception as error:  # told to all ranks by wait
            self._fault = str(error)
        self._shares = {
            n: replace(s, pieces=()) for n, s in self._shares.items()
        }  # free the copies

    def _add_head(self, name: str) -> None:
        if self._comm.rank == 0:
            self._sums[name].values += head_sums(self._shares[name]).values

    def _raise_fault(self) -> None:
        if self._fault:
            raise CheckpointError(self._fault)

    def _total(self, own: Sums) -> np.ndarray:
        """Collective: return the sums of all blocks."""
        if self._comm.size == 1:
            return own.values
        total: np.ndarray = self._comm.all_reduce(own.values.view(np.int64)).view(np.uint64)
        return total


IN_FLIGHT: "weakref.WeakKeyDictionary[Communicator, Saving]" = weakref.WeakKeyDictionary()


def save(
    directory: str | Path,
    tree: Mapping[str, Any],
    mesh: Mesh | Communicator,
    *,
    step: int | None = None,
    keep: int | None = None,
    async_op: bool = False,
) -> Saving:
    """Collective over `mesh.world`: write a checkpoint; its `folder` is where.

        mp.save("runs/gpt", {"model": model, "optimizer": optimizer, "state": {"step": 100}}, mesh)

    directory: on a disk that all ranks share.  tree: modules (or what wraps them: FSDP, Pipeline),
    optimisers and dicts of arrays, each a .safetensors file of whole arrays under the names of
    their state_dicts; "state", of which rank 0's is kept, is what JSON can say.  Of an optimiser
    the moments and steps are saved, not its settings: put an lr that shall come back into "state".
    step: write into directory/step-..., and let directory/latest name it; keep: how many of these
    to leave.  async_op: copy this rank's share, return, and write while training goes on; `wait` of
    what is returned completes it, as does the next save on the mesh.

    An existing checkpoint in `directory` is replaced when the new one is complete.  At no time is
    there a folder of that name that is not complete.

    Raises, on every rank: ConfigError for a tree that cannot be saved, MismatchError if the ranks
    pass different keys, directories, steps, or arrays of one name; CheckpointError for a folder
    that cannot be written or a disk without room; then nothing that was there has changed.
    """
    comm = world_of(mesh)
    if comm in IN_FLIGHT:
        IN_FLIGHT[comm].wait()
    files, state = together(comm, lambda: _parts(tree, step, keep))
    given = {"directory": str(directory), "keys of tree": sorted(files)}
    same(comm, "mp.save", {**given, "step": step, "keep": keep, "async_op": bool(async_op)})
    shares = {key + SUFFIX: share_out(comm, key, entries) for key, entries in sorted(files.items())}
    target = Path(directory) if step is None else Path(directory) / place.step_name(step)
    target = place.real(target)
    hidden = Path(on_first(comm, lambda: str(_prepare(target, shares))))
    saving = Saving(comm, target, hidden, shares, state)
    if step is not None:
        saving.then(lambda: _settle(target, keep))
    if async_op:
        saving.start()
    else:
        saving.write()
        saving.wait()
    return saving


def _parts(tree: Mapping[str, Any], step: Any, keep: Any) -> tuple[Any, str]:
    """Return the entries of each file, and the text of the state."""
    require_whole("step", step, 0)
    require_whole("keep", keep, 1)
    if keep is not None and step is None:
        rule = "only checkpoints of steps are counted"
        raise ConfigError(explain("keep", keep, rule, "Pass step too"))
    if isinstance(tree, Mapping) and not tree:
        rule = "it must map names to what is saved under them"
        raise ConfigError(explain("tree", tree, rule, 'Pass {"model": model}'))
    try:
        text = json.dumps(tree.get(STATE, {}) if isinstance(tree, Mapping) else {}, indent=1)
    except (TypeError, ValueError) as error:
        rule = f"it must be what JSON can say ({error})"
        fix = "Convert arrays with .tolist(), or give them a key of their own"
        raise ConfigError(
            explain('tree["state"]', type(tree[STATE]).__name__, rule, fix)
        ) from error
    return files_of(tree), text


def _prepare(target: Path, shares: Mapping[str, Share]) -> Path:
    """Make the hidden folder and the files in it at their full sizes."""
    folder = place.begin(target)
    try:
        place.check_space(folder, sum(share.head.nbytes for share in shares.values()))
        for name, share in shares.items():
            create(folder / name, share)
    except OSError as error:  # a CheckpointError too
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from error
    return folder


def _settle(target: Path, keep: int | None) -> None:
    place.point(target)
    if keep is not None:
        place.prune(target, keep)
