"""Text to tokens and back: by a folder's tokenizer.json, or byte by byte."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpipar.checkpoint import place
from mpipar.errors import CheckpointError, ConfigError, explain
from mpipar.huggingface.settings import is_folder

FILE = "tokenizer.json"


class Text(Protocol):
    """A way from text to tokens and back."""

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens (S,) int64."""

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text."""


class Bytes:
    """A token is a byte."""

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of the text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text, with a mark for what is none."""
        return readable(tokens)


class Tokenizer:
    """A tokenizer.json, by the library `tokenizers`."""

    def __init__(self, path: Path) -> None:
        """Read it; raises ConfigError where the library is missing or the file is damaged."""
        try:
            import tokenizers
        except ImportError as error:
            rule = "reading it needs the library tokenizers"
            fix = 'Install the extra: pip install ".[tokenizers]"; or pass tokens'
            raise ConfigError(explain("tokenizer", str(path), rule, fix)) from error
        try:
            self._made: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain exceptions
            rule = f"it cannot be read: {error}"
            raise ConfigError(explain("tokenizer", str(path), rule, "Copy it again")) from error

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of the text."""
        return np.asarray(self._made.encode(text).ids, np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of the tokens."""
        return str(self._made.decode(tokens.tolist()))


def has_tokenizer(folder: str | Path) -> bool:
    """Say whether there is a tokenizer.json beside the weights."""
    return (_place(Path(folder)) / FILE).is_file()


def _place(folder: Path) -> Path:
    """Return where the weights of a folder lie: in the newest checkpoint, if it holds several."""
    try:
        return folder if is_folder(folder) else place.find(folder).folder
    except CheckpointError:  # who reads the weights says so
        return folder


def text_of(folder: str | Path, vocab: int) -> Text:
    """Return the way of a model's folder; raises ConfigError if there is none."""
    path = _place(Path(folder))
    if (path / FILE).is_file():
        return Tokenizer(path / FILE)
    if vocab == 256:
        return Bytes()
    rule = f"there is no {FILE} in {path}, and {vocab} tokens are not bytes"
    raise ConfigError(explain("prompt", "text", rule, "Pass --prompt-tokens, or add the file"))


def readable(tokens: np.ndarray) -> str:
    """Return bytes as text, with a mark for what is none or would upset a terminal."""
    text = bytes(tokens.clip(0, 255).astype(np.uint8)).decode("utf-8", "replace")
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{MIDDLE DOT}" for char in text
    )
