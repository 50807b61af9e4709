"""Text to tokens to batches, the same for every layout of the mesh.

Tokens are bytes, or a tokenizer's, unless the data is a file of tokens.  Where they come from
(`--data`):

    nothing       the top-level modules of Python's standard library on this machine, by name (4 MB)
    a file        its bytes
    a folder      the bytes of its text files, by path; hidden and binary files are left out
    *.bin *.npy   tokens: uint16, or any 1-D integer array; memory-mapped, never loaded as a whole

The last tenth is held out for validation.  Sequence j of step s (from 1) starts at a place drawn
from (seed, s, j) alone, so each rank cuts its part of the global batch without being told:

    batch 8 on dp = 3, accumulate 2      rank 0: [0 1] [2]    rank 1: [3 4] [5]    rank 2: [6] [7]

A context-parallel rank takes of each sequence only the tokens at its own positions.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpipar import partition, rng
from mpipar.errors import ConfigError, explain
from mpipar.huggingface.text import Bytes, Text
from mpipar.models.transformer import IGNORE

HELD_OUT = 0.1
SAMPLE = 1 << 16  # bytes of each piece that the fingerprint reads
SAMPLES = 64


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out; both 1-D integer arrays."""

    name: str
    train: np.ndarray
    held_out: np.ndarray
    text: Text | None  # how tokens are text; None: they are numbers
    note: str = ""  # what was left out, if anything

    def fingerprint(self) -> str:
        """Return a hash of the length and of 64 pieces spread over the tokens."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.train, self.held_out):
            digest.update(f"{part.dtype} {len(part)} ".encode())
            step = max(SAMPLE, len(part) // SAMPLES)
            for start in range(0, len(part), step):
                digest.update(np.ascontiguousarray(part[start : start + SAMPLE]).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Rows:
    """Some consecutive sequences of a global batch."""

    first: int  # index of the first one in the global batch
    inputs: np.ndarray  # (rows, tokens) int64
    targets: np.ndarray  # (rows, tokens) int64: the inputs one token on
    positions: np.ndarray  # (tokens,): where these are in the sequence; all of 0..seq-1 or some


def load(
    path: str | None,
    seq: int,
    vocab: int,
    part: int = 0,
    parts: int = 1,
    tokenizer: Text | None = None,
    init: str | None = None,
) -> Corpus:
    """Read the tokens, check them and hold some out.

    tokenizer: makes the tokens of a text, in place of its bytes.
    init: the folder of weights that the vocabulary is of, if there is one.
    `part` of `parts`: the share of the tokens that this rank looks through for bad ones.
    Raises ConfigError for a missing, empty, unreadable or too short file or folder, and for a
    token outside the vocabulary.
    """
    name = "Python's standard library" if path is None else path
    tokens, is_text, note = read_library() if path is None else read(Path(path))
    text: Text | None = Bytes() if is_text else None
    if is_text and tokenizer is not None:
        tokens = tokenizer.encode(bytes(tokens).decode("utf-8", "replace"))
        text, is_text = tokenizer, False
    check_length(name, tokens, seq)
    mine = partition.block(len(tokens), parts, part)
    check_vocabulary(name, tokens, vocab, mine, is_text, init)
    cut = len(tokens) - max(int(len(tokens) * HELD_OUT), seq + 1)
    return Corpus(name, tokens[:cut], tokens[cut:], text, note)


def read(path: Path) -> tuple[np.ndarray, bool, str]:
    """Return (tokens, whether they are bytes, what was left out) of a file or folder."""
    try:
        if path.is_dir():
            return read_folder(path)
        if path.stat().st_size == 0:
            raise ConfigError(explain("data", str(path), "the file is empty", "Pass another one"))
        if path.suffix == ".npy":
            return read_npy(path), False, ""
        if path.suffix == ".bin":
            return read_bin(path), False, ""
        return np.memmap(path, np.uint8, mode="r"), True, ""
    except FileNotFoundError as error:
        rule, fix = "there is no such file or folder", "Check the path, or leave --data out"
        raise ConfigError(explain("data", str(path), rule, fix)) from error
    except OSError as error:
        rule = f"it cannot be read ({error.strerror or error})"
        raise ConfigError(explain("data", str(path), rule, "Check its permissions")) from error


def read_bin(path: Path) -> np.ndarray:
    """Map a file of uint16 tokens."""
    if path.stat().st_size % 2:
        rule = f"a .bin file holds uint16 tokens, but it has {path.stat().st_size} bytes"
        raise ConfigError(explain("data", str(path), rule, "Rename it if it is text"))
    return np.memmap(path, np.dtype("<u2"), mode="r")


def read_npy(path: Path) -> np.ndarray:
    """Map a .npy file of a 1-D integer array."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        rule = f"it is not a readable .npy array ({error})"
        raise ConfigError(explain("data", str(path), rule, "Write it with numpy.save")) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        rule = f"tokens are a 1-D integer array, not {tokens.dtype} {tokens.shape}"
        raise ConfigError(explain("data", str(path), rule, "Save tokens.astype('uint16').ravel()"))
    return tokens


def read_folder(path: Path) -> tuple[np.ndarray, bool, str]:
    """Concatenate the text files under a folder, in the order of their paths."""
    texts, skipped = [], 0
    for file in sorted(visible_files(path), key=lambda file: file.relative_to(path).as_posix()):
        content = np.fromfile(file, np.uint8)
        if (content[:SAMPLE] == 0).any():  # no text has a zero byte
            skipped += 1
        else:
            texts.append(content)
    if not sum(map(len, texts)):
        rule = f"the folder has no text in it ({skipped} binary files)"
        raise ConfigError(explain("data", str(path), rule, "Pass a folder of text files"))
    return np.concatenate(texts), True, f"{skipped} binary files left out" if skipped else ""


def visible_files(path: Path) -> Iterator[Path]:
    """Yield the regular files under a folder that are not hidden."""
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and Path(folder, name).is_file():
                yield Path(folder, name)


def read_library() -> tuple[np.ndarray, bool, str]:
    """Concatenate the top-level modules of this machine's Python standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"), key=lambda file: file.name)
    if not files:
        rule = f"there are no sources of the standard library in {folder}"
        raise ConfigError(explain("data", None, rule, "Pass --data with a text file or folder"))
    return np.concatenate([np.fromfile(file, np.uint8) for file in files]), True, ""


def check_length(name: str, tokens: np.ndarray, seq: int) -> None:
    """Raise ConfigError if one sequence to train on and one to hold out do not fit."""
    need = 2 * (seq + 1)
    if len(tokens) < need:
        rule = f"it has {len(tokens)} tokens; with seq={seq} at least {need} are needed"
        fix = "Pass more data" + f", or --seq {len(tokens) // 2 - 1} or less" * (len(tokens) > 3)
        raise ConfigError(explain("data", name, rule, fix))


def check_vocabulary(
    name: str, tokens: np.ndarray, vocab: int, where: slice, is_text: bool, init: str | None = None
) -> None:
    """Raise ConfigError if a token of the slice `where` is negative or not below `vocab`.

    The vocabulary can be chosen unless it is that of the weights in `init`.
    """
    if is_text and vocab >= 256:
        return
    for start in range(where.start, where.stop, 1 << 24):
        piece = tokens[start : min(start + (1 << 24), where.stop)]
        bad = np.flatnonzero((piece < 0) | (piece >= vocab))
        if len(bad):
            place, token = start + int(bad[0]), int(piece[bad[0]])
            rule = f"token {token} at position {place} is outside the vocabulary 0..{vocab - 1}"
            largest = 255 if is_text else int(piece.max())
            fix = f"Pass --vocab {largest + 1} or more" if token >= 0 else "Tokens count from 0"
            if init is not None:
                fix = f"The vocabulary is that of {init}: "
                fix += "add its tokenizer.json, or pass" if is_text else "pass"
                fix += " a file of its tokens"
            raise ConfigError(explain("data", name, rule, fix))


@dataclass(frozen=True)
class Batches:
    """Cuts this data-parallel rank's sequences out of the global batches."""

    corpus: Corpus
    seq: int
    batch: int  # sequences of a global batch
    seed: int
    part: int = 0  # this rank's coordinate along dp
    parts: int = 1
    positions: np.ndarray | None = None  # of the tokens that this rank takes; None: all

    def step(self, step: int, accumulate: int = 1) -> list[Rows]:
        """Return the micro-batches of this rank for training step `step` (from 1)."""
        mine = partition.block(self.batch, self.parts, self.part)
        keys = np.arange(mine.start, mine.stop, dtype=np.uint64)
        keys += np.uint64((step - 1) * self.batch)
        room = np.uint64(len(self.corpus.train) - self.seq)
        starts = rng.bits(rng.key(self.seed, "batch"), keys) % room
        sizes = partition.blocks(len(starts), accumulate)
        cuts = zip(partition.offsets(sizes), sizes, strict=True)
        return [
            self._rows(self.corpus.train, starts[cut : cut + size], mine.start + cut)
            for cut, size in cuts
        ]

    def held_out(self, batches: int) -> list[Rows]:
        """Return this rank's part of up to `batches` global batches of held-out sequences.

        Every rank runs as many: one without sequences gets one that does not count.
        """
        tokens = len(self.corpus.held_out) - 1
        count = min(batches * self.batch, tokens // self.seq)
        stride = (tokens - self.seq) // max(1, count - 1)  # at least seq: no two overlap
        starts = np.arange(count) * stride
        mine = []
        for first in range(0, count, self.batch):
            whole = starts[first : first + self.batch]
            here = partition.block(len(whole), self.parts, self.part)
            none = here.start == here.stop
            rows = self._rows(self.corpus.held_out, whole[:1] if none else whole[here], here.start)
            if none:
                rows.targets[...] = IGNORE
            mine.append(rows)
        return mine

    def _rows(self, tokens: np.ndarray, starts: np.ndarray, first: int) -> Rows:
        span = starts.astype(np.int64)[:, None] + np.arange(self.seq + 1)  # (rows, seq + 1)
        window = np.asarray(tokens[span], np.int64)
        at = np.arange(self.seq) if self.positions is None else self.positions
        return Rows(first, window[:, at], window[:, at + 1], at)
