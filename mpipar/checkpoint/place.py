"""Where checkpoints lie: folders that appear as a unit, and the file that says all is there.

    runs/gpt/step-00000200/   model.safetensors  optimizer.safetensors  state.json  manifest.json
    runs/gpt/step-00000300/
    runs/gpt/latest           "step-00000300", for people and scripts
    runs/gpt/.step-00000400.tmp-1f3a/   being written, or left by a job that was killed

A folder is written under a hidden name, synced to disk, and renamed.  manifest.json is written
last: sizes and checksums of the files, and a digest of itself.  A folder without a right one is no
checkpoint, whatever it is called.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.checkpoint.checksum import BLOCK
from mpipar.checkpoint.entries import STATE
from mpipar.errors import CheckpointError

MANIFEST, LATEST = "manifest.json", "latest"
FORMAT = "mpipar checkpoint 1"


@dataclass(frozen=True)
class Found:
    """A complete checkpoint: its folder, its manifest, and when it was saved (ns)."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def saved(self) -> int:
        """When it was saved, in nanoseconds."""
        return int(self.manifest["saved"])


def step_name(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step-{step:08d}"


def real(folder: Path) -> Path:
    """Return what a symbolic link leads to, so that the link stays when the folder is replaced."""
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


def begin(target: Path) -> Path:
    """Make the hidden folder in which a checkpoint is written; sweep what killed jobs have left.

    Raises CheckpointError if that cannot be.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file: pass the path of a folder")
        if target.is_dir() and any(target.iterdir()) and not (target / MANIFEST).exists():
            found = min(path.name for path in target.iterdir())
            text = f"{target} holds something else, {found}: pass a new folder"
            raise CheckpointError(text)
        which = "step-*" if target.name.startswith("step-") else escape(target.name)
        for left in target.parent.glob(f".{which}.tmp-*"):
            _delete(left)
        folder = target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"
        folder.mkdir()
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{target} cannot be made: {error.strerror}") from error
    return folder


def require_room(folder: Path) -> None:
    """Make the folder of a run's checkpoints; raises CheckpointError if none can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.tmp-{secrets.token_hex(4)}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made a folder: {error.strerror}") from error


def check_space(folder: Path, nbytes: int) -> None:
    """Raise CheckpointError if so many bytes do not fit on the disk."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        text = f"{nbytes / 2**20:.1f} MiB are needed for a checkpoint, and {free / 2**20:.1f} are"
        raise CheckpointError(f"{folder.parent} is too full: {text} free. Delete older ones")


def finish(
    folder: Path,
    target: Path,
    heads: Mapping[str, bytes],
    sums: Mapping[str, np.ndarray],
    state: str,
) -> None:
    """Write state and manifest, and give the folder its name; raises CheckpointError.

    heads, sums: of each file.  state: JSON text.
    """
    files = {}
    try:
        for name, values in sums.items():
            nbytes = (folder / name).stat().st_size
            text = values.astype("<u8").tobytes().hex()
            files[name] = {"bytes": nbytes, "head": _digest(heads[name]), "sums": text}
        _write_text(folder / f"{STATE}.json", state)
        manifest = {
            "format": FORMAT,
            "saved": time.time_ns(),
            "block": BLOCK,
            "files": files,
            STATE: _digest(state.encode()),
        }
        _write_text(folder / MANIFEST, _sealed(manifest))
        _sync(folder)
        old = None
        if target.exists():  # a folder cannot be renamed onto one that is not empty
            old = target.parent / f".{target.name}.old-{secrets.token_hex(4)}"
            target.rename(old)
        try:
            folder.rename(target)
        except OSError:
            if old is not None:
                old.rename(target)
            raise
        _sync(target.parent)
        for left in target.parent.glob(f".{escape(target.name)}.old-*"):
            _delete(left)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}") from error


def point(target: Path) -> None:
    """Let `latest` name a folder."""
    new = target.parent / f".{LATEST}.tmp"
    try:
        _write_text(new, target.name + "\n")
        new.replace(target.parent / LATEST)
        _sync(target.parent)
    except OSError as error:
        place = target.parent / LATEST
        raise CheckpointError(f"{place} cannot be written: {error.strerror}") from error


def prune(target: Path, keep: int) -> None:
    """Delete the oldest checkpoints beside a new one until `keep` are left, itself among them."""
    others = [one.folder for one in all_in(target.parent) if one.folder.name != target.name]
    for folder in others[max(0, keep - 1) :]:
        hidden = folder.parent / f".{folder.name}.tmp-{secrets.token_hex(4)}"
        try:
            folder.rename(hidden)
        except OSError:
            continue
        _delete(hidden)


def all_in(parent: Path) -> list[Found]:
    """Return the complete checkpoints of steps in a folder, the newest first."""
    found = [read_manifest(folder) for folder in steps_in(parent)]
    return sorted((one for one in found if one), key=lambda one: one.saved, reverse=True)


def steps_in(parent: Path) -> list[Path]:
    """Return the folders that are called as steps are, and no others, in their order."""
    named = (one for one in parent.glob("step-*") if re.fullmatch(r"step-\d+", one.name))
    return sorted(one for one in named if one.is_dir())


def passed_over(directory: Path) -> list[str]:
    """Return what is wrong with steps in a folder that come after the newest complete one."""
    complete = all_in(directory)
    later = [one for one in steps_in(directory) if complete and one > complete[0].folder]
    return [said for said in map(examine, later) if isinstance(said, str)]


def find(directory: Path) -> Found:
    """Return the checkpoint in a folder, or the newest complete one of the steps in it.

    Where the folder itself was being replaced when a job was killed, it is the one that was moved
    aside.  Raises CheckpointError if there is none.
    """
    if found := read_manifest(directory):
        return found
    place = real(directory)
    aside = [read_manifest(one) for one in place.parent.glob(f".{escape(place.name)}.*")]
    if complete := [one for one in aside if one]:
        return max(complete, key=lambda one: one.saved)
    if steps := all_in(directory):
        return steps[0]
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory} {what}: pass the folder of a checkpoint")
    tried = [directory] if (directory / MANIFEST).exists() else steps_in(directory)[-1:]
    tried = tried or [directory]
    raise CheckpointError(f"{directory} holds no complete checkpoint: {examine(tried[0])}")


def read_manifest(folder: Path) -> Found | None:
    """Return the checkpoint in a folder, if its manifest and the sizes of its files are right."""
    found = examine(folder)
    return found if isinstance(found, Found) else None


def examine(folder: Path) -> Found | str:
    """Return the checkpoint in a folder, or what is wrong with it."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if _sealed({k: v for k, v in manifest.items() if k != "digest"}) != json.dumps(manifest):
            return f"{path} is damaged, its digest is another than when saved"
        if manifest["format"] != FORMAT:
            return f"{path} is of format {manifest['format']!r}, and this version reads {FORMAT!r}"
        sizes = {folder / name: int(about["bytes"]) for name, about in manifest["files"].items()}
    except OSError as error:
        return f"{path}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{path} is damaged, it is no JSON of a checkpoint"
    for file, needed in sizes.items():
        try:
            size = file.stat().st_size
        except OSError as error:
            return f"{file}: {error.strerror}"
        if size < needed:
            return f"{file} lacks {needed - size} of its {needed} bytes, it was cut short"
        if size > needed:
            return f"{file} has {size - needed} more than its {needed} bytes"
    return Found(folder, manifest)


def read_state(found: Found) -> str:
    """Return the text of state.json; raises CheckpointError if it is damaged."""
    path = found.folder / f"{STATE}.json"
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if _digest(text.encode()) != found.manifest[STATE]:
        raise CheckpointError(f"{path} is damaged: load an older checkpoint")
    return text


def read_head(found: Found, name: str) -> bytes:
    """Return the head of a file; raises CheckpointError if it is damaged."""
    path = found.folder / name
    try:
        with open(path, "rb") as file:
            text = file.read(8)
            text += file.read(
                min(int.from_bytes(text, "little"), found.manifest["files"][name]["bytes"])
            )
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if _digest(text) != found.manifest["files"][name]["head"]:
        raise CheckpointError(f"{path} is damaged at its beginning: load an older checkpoint")
    return text


def _sealed(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest, with its own digest at the end."""
    digest = _digest(json.dumps(manifest).encode())
    return json.dumps({**manifest, "digest": digest})


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _write_text(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _delete(folder: Path) -> None:
    """Delete a folder, or the link to one."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
