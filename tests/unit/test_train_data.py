"""Tokens, batches and the errors of bad data."""

from pathlib import Path

import numpy as np
import pytest

from mpipar.errors import ConfigError
from mpipar.train.data import Batches, Corpus, load

SEQ = 8


def text_file(folder: Path, content: bytes, name: str = "text.txt") -> str:
    path = folder / name
    path.write_bytes(content)
    return str(path)


def corpus(n: int = 500, held_out: int = 60) -> Corpus:
    tokens = np.arange(n, dtype=np.uint16)
    return Corpus("numbers", tokens[:-held_out], tokens[-held_out:], None)


def test_bytes_of_a_text_file(tmp_path: Path) -> None:
    content = "größer als vorher, and then some more text".encode() * 10
    made = load(text_file(tmp_path, content), SEQ, 256)
    assert made.text is not None
    assert bytes(np.concatenate([made.train, made.held_out])) == content
    assert len(made.held_out) == len(content) // 10


def test_short_text_holds_out_one_sequence(tmp_path: Path) -> None:
    made = load(text_file(tmp_path, b"x" * 18), SEQ, 256)
    assert (len(made.train), len(made.held_out)) == (9, 9)


def test_folder_in_the_order_of_paths_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    text_file(tmp_path, b"second" * 5, "b/a.txt")
    text_file(tmp_path, b"first" * 5, "a.py")
    text_file(tmp_path, b"third" * 5, "c")
    text_file(tmp_path, b"no", ".hidden")
    text_file(tmp_path, b"no", ".git/config")
    text_file(tmp_path, b"\x00\x01\x02", "image.png")
    made = load(str(tmp_path), SEQ, 256)
    assert bytes(np.concatenate([made.train, made.held_out])) == (
        b"first" * 5 + b"second" * 5 + b"third" * 5
    )
    assert made.note == "1 binary files left out"


@pytest.mark.parametrize("ending", [".bin", ".npy"])
def test_token_files_are_memory_mapped(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"tokens{ending}"
    tokens = np.arange(1000, dtype="<u2")
    tokens.tofile(path) if ending == ".bin" else np.save(path, tokens)
    made = load(str(path), SEQ, 1000)
    assert made.text is None
    assert isinstance(made.train, np.memmap)
    assert np.array_equal(np.concatenate([made.train, made.held_out]), tokens)


def test_standard_library_is_the_default() -> None:
    made = load(None, 128, 256)
    assert 2e6 < len(made.train) < 2e7
    assert made.fingerprint() == load(None, 128, 256).fingerprint()
    assert b"import" in bytes(made.train[:20000])


def test_fingerprint_sees_length_type_and_content() -> None:
    made = corpus()
    prints = {
        made.fingerprint(),
        corpus(501).fingerprint(),
        Corpus("", made.train.astype(np.int32), made.held_out, None).fingerprint(),
        Corpus("", np.where(made.train == 7, 8, made.train), made.held_out, None).fingerprint(),
    }
    assert len(prints) == 4


def bad_data(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Return for each kind of bad data its path and words that the error has to have."""
    (folder / "nothing").mkdir()
    np.save(folder / "floats.npy", np.ones(100))
    np.save(folder / "square.npy", np.ones((10, 10), np.int32))
    np.save(folder / "negative.npy", np.array([1] * 40 + [-1] * 40))
    np.save(folder / "high.npy", np.array([1] * 30 + [300] + [1] * 30))
    (folder / "locked").touch()
    return {
        "missing": (str(folder / "none.txt"), ["no such file"]),
        "empty": (text_file(folder, b"", "empty.txt"), ["empty"]),
        "empty folder": (str(folder / "nothing"), ["no text"]),
        "short": (text_file(folder, b"x" * 17), ["17 tokens", "seq=8", "18", "--seq 7"]),
        "odd": (text_file(folder, b"x" * 51, "odd.bin"), ["51 bytes", "uint16"]),
        "not npy": (text_file(folder, b"x" * 51, "bad.npy"), [".npy"]),
        "float": (str(folder / "floats.npy"), ["float64"]),
        "square": (str(folder / "square.npy"), ["(10, 10)"]),
        "negative": (str(folder / "negative.npy"), ["token -1", "position 40"]),
        "high": (str(folder / "high.npy"), ["token 300", "position 30", "0..255", "--vocab 301"]),
    }


def test_bad_data_is_a_clear_error(tmp_path: Path) -> None:
    for kind, (path, words) in bad_data(tmp_path).items():
        with pytest.raises(ConfigError) as caught:
            load(path, SEQ, 256)
        for word in ["data=", path, *words]:
            assert word in str(caught.value), (kind, word, str(caught.value))


def test_text_outside_a_small_vocabulary(tmp_path: Path) -> None:
    path = text_file(tmp_path, b"a" * 50 + "ä".encode() + b"a" * 50)
    with pytest.raises(ConfigError, match=r"token 195 at position 50.*--vocab 256"):
        load(path, SEQ, 128)
    with pytest.raises(ConfigError, match=r"is that of gpt2/: add its tokenizer.json, or pass a"):
        load(path, SEQ, 128, init="gpt2/")


def test_each_rank_looks_through_its_share(tmp_path: Path) -> None:
    tokens = np.zeros(100, np.uint16)
    tokens[60] = 999
    tokens.tofile(tmp_path / "t.bin")
    for part in (0, 1, 3):
        load(str(tmp_path / "t.bin"), SEQ, 256, part, 4)
    with pytest.raises(ConfigError, match="position 60"):
        load(str(tmp_path / "t.bin"), SEQ, 256, 2, 4)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_layout_never_changes_the_batch(parts: int, accumulate: int) -> None:
    whole = Batches(corpus(), SEQ, 8, seed=3)
    for step in (1, 2, 7):
        (expected,) = whole.step(step)
        cut = [
            rows
            for part in range(parts)
            for rows in Batches(corpus(), SEQ, 8, 3, part, parts).step(step, accumulate)
        ]
        assert len(cut) == parts * accumulate
        assert np.array_equal(np.concatenate([rows.inputs for rows in cut]), expected.inputs)
        assert np.array_equal(np.concatenate([rows.targets for rows in cut]), expected.targets)
        assert [rows.first for rows in cut] == list(
            np.cumsum([0, *(len(rows.inputs) for rows in cut)])[:-1]
        )


def test_uneven_parts() -> None:
    sizes = [len(Batches(corpus(), SEQ, 8, 0, part, 3).step(1)[0].inputs) for part in range(3)]
    assert sizes == [3, 3, 2]


def test_targets_are_the_next_tokens_and_steps_differ() -> None:
    batches = Batches(corpus(), SEQ, 8, seed=0)
    (one,), (two,) = batches.step(1), batches.step(2)
    assert one.inputs.shape == (8, SEQ)
    assert np.array_equal(one.targets, one.inputs + 1)  # the corpus counts up
    assert not np.array_equal(one.inputs, two.inputs)
    assert not np.array_equal(one.inputs, Batches(corpus(), SEQ, 8, seed=1).step(1)[0].inputs)
    assert one.targets.max() < 440  # nothing of what is held out


def test_every_place_may_be_a_start() -> None:
    batches = Batches(corpus(74, 60), SEQ, 50, seed=0)  # 14 tokens: 6 places
    assert set(batches.step(1)[0].inputs[:, 0]) == set(range(6))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_held_out_sequences_do_not_overlap(parts: int) -> None:
    rows = [
        rows
        for part in range(parts)
        for rows in Batches(corpus(), SEQ, 4, 0, part, parts).held_out(3)
    ]
    assert len(rows) == 2 * parts  # every rank runs as many: the last batch has 3 sequences
    targets = np.concatenate([r.targets for r in rows]).ravel()
    assert len(targets) == 7 * SEQ  # 60 tokens have room for 7 sequences, though 12 were asked for
    assert len(set(targets.tolist())) == len(targets)
    assert targets.min() > 440


def test_a_rank_without_held_out_sequences_gets_one_that_does_not_count() -> None:
    rows = [Batches(corpus(), SEQ, 6, 0, part, 3).held_out(3)[1] for part in range(3)]
    assert [len(r.inputs) for r in rows] == [1, 1, 1]  # 7 sequences: one in the second batch
    assert [bool((r.targets >= 0).all()) for r in rows] == [True, False, False]
    assert [bool((r.targets == -100).all()) for r in rows] == [False, True, True]


def test_held_out_takes_what_is_asked_for() -> None:
    rows = Batches(corpus(), SEQ, 2, 0).held_out(2)
    assert [len(r.inputs) for r in rows] == [2, 2]
