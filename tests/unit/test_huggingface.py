"""Folders of Hugging Face: what is read, refused and written; tokens and text."""

import json
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar import models
from mpipar.checkpoint.format import parse
from mpipar.errors import CheckpointError, ConfigError
from mpipar.huggingface.convert import from_checkpoint, to_checkpoint
from mpipar.huggingface.initial import model_of
from mpipar.huggingface.settings import read_settings, write_settings
from mpipar.huggingface.text import text_of
from mpipar.huggingface.weights import read_tensors
from mpipar.models.config import ModelConfig
from tests.launch import run

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(vocab=100, layers=2, dim=24, heads=4, seq=50, norm_eps=1e-6),
        ModelConfig(vocab=100, layers=2, dim=24, heads=4, tied=False, dtype="bfloat16"),
        ModelConfig("llama", vocab=90, dim=32, heads=4, kv_heads=2, rotary_base=5e5, tied=True),
    ],
)
def test_settings_there_and_back(config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(write_settings(config))
    assert read_settings(tmp_path) == config


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function in .*='relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"head_dim": 16}, "head_dim in .*=16: a llama model here has 4"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ("llama", {"model_type": "mamba"}, "model_type in .*='mamba'"),
        ("llama", {"num_hidden_layers": None}, "config.json: layers=None"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": "x"}, "no description of a model"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("gpt2", {"tie_word_embeddings": "x"}, "tie_word_embeddings"),
        ("gpt2", {"model_type": ["gpt2"]}, "model_type"),
    ],
)
def test_settings_that_would_change_the_numbers(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    told = json.loads((GOLDEN / kind / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | changes))
    with pytest.raises(ConfigError, match=words):
        read_settings(tmp_path)


def test_older_names_of_settings(tmp_path: Path) -> None:
    told = json.loads((GOLDEN / "llama" / "config.json").read_text())
    base = told.pop("rope_parameters")["rope_theta"]
    kind = told.pop("dtype")
    told |= {"rope_theta": base, "torch_dtype": kind, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert read_settings(tmp_path) == read_settings(GOLDEN / "llama")


def test_files_that_are_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama", folder)
    file = folder / "model-00002-of-00005.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match="lacks 10 bytes"):
        read_tensors(folder)
    file.write_bytes(b"not a head")
    with pytest.raises(CheckpointError, match=r"is no \.safetensors file"):
        read_tensors(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        read_tensors(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no index"):
        read_tensors(folder)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gpt2", {"n_layer": 10**12}, "too few for the 1000000000000 layers"),
        ("gpt2", {"n_layer": 1}, "no place for h.1.attn.c_attn.bias, .* and 8 more"),
        ("gpt2", {"n_inner": 100}, r"c_fc.weight in .*=\(32, 128\): .* \(32, 100\)"),
        ("llama", {"vocab_size": 68}, r"embed_tokens.weight in .*=\(67, 32\)"),
        ("llama", {"num_key_value_heads": 8}, r"k_proj.weight in .*=\(16, 32\)"),
    ],
)
def test_weights_that_are_not_of_the_settings(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    for file in (GOLDEN / kind).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    told = json.loads((GOLDEN / kind / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | changes))
    with pytest.raises(CheckpointError, match=words):
        model_of(tmp_path)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "dtype 'F8_E4M3'"),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "dtype"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "not a tensor"),
        ({"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}, "not a tensor"),
        ({"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4]}, "not a tensor"),
        ({"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}, "no .safetensors"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4]}, "no .safetensors"),
    ],
)
def test_heads_that_no_file_has(about: dict[str, Any], words: str) -> None:
    text = json.dumps({"a": about}).encode()
    with pytest.raises(CheckpointError, match=words):
        parse(len(text).to_bytes(8, "little") + text, "file")


def test_names_of_the_base_model(tmp_path: Path) -> None:
    """Without "transformer.", as in the first GPT-2 files."""
    from safetensors.numpy import load_file, save_file

    shutil.copy(GOLDEN / "gpt2" / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "gpt2" / "model.safetensors")
    short = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    save_file(short, tmp_path / "model.safetensors")
    with mp.Communicator(MPI.COMM_SELF) as comm:
        saved = to_checkpoint(tmp_path, tmp_path / "saved", comm)
        whole = to_checkpoint(GOLDEN / "gpt2", tmp_path / "whole", comm)
    assert (saved / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    del tensors["transformer.h.1.ln_1.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        mp.Communicator(MPI.COMM_SELF) as comm,
        pytest.raises(CheckpointError, match=r"no tensor transformer\.h\.1\.ln_1\.bias"),
    ):
        to_checkpoint(tmp_path, tmp_path / "other", comm)


def command(*arguments: str | Path) -> CompletedProcess[str]:
    return run([sys.executable, "-m", "mpipar", *arguments])


def test_commands(tmp_path: Path) -> None:
    saved, back = tmp_path / "saved", tmp_path / "back"
    assert command("convert", GOLDEN / "llama", saved, "--dtype", "bfloat16").returncode == 0
    assert command("convert", saved, back).returncode == 0
    assert model_of(back).dtype == "bfloat16"
    flags = ["--prompt-tokens", "1", "2", "--tokens", "5", "--temperature", "0"]
    written = [command("generate", "--checkpoint", one, *flags).stdout for one in (saved, back)]
    assert written[0] == written[1]
    assert written[0].startswith("1 2 ")
    assert len(written[0].split()) == 7
    failed = command("generate", "--checkpoint", saved)
    assert failed.returncode == 2
    assert "67 tokens are not bytes" in failed.stderr
    failed = command("convert", saved, back)
    assert failed.returncode == 2
    assert "holds something else" in failed.stderr


def test_a_tokenizer_beside_the_weights(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    kind = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(kind)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    shutil.copy(GOLDEN / "gpt2" / "config.json", tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    text = text_of(tmp_path, 61)
    np.testing.assert_array_equal(text.encode("b a c b"), [1, 0, 2, 1])
    assert text.decode(np.array([1, 0])) == "b a"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        text_of(tmp_path, 61)


def test_live_against_transformers(tmp_path: Path) -> None:
    """A model drawn here, exported, gives the same logits there."""
    reason = "transformers and torch are not installed"
    transformers = pytest.importorskip("transformers", reason=reason)
    torch = pytest.importorskip("torch", reason=reason)
    sizes: dict[str, Any] = {"layers": 2, "dim": 32, "heads": 4, "vocab": 50, "seq": 20}
    for config in (ModelConfig(**sizes), ModelConfig("llama", kv_heads=2, **sizes)):
        model = models.build(config)
        tokens = np.random.default_rng(0).integers(0, 50, (2, 9))
        state = {"step": 0, "model": vars(config)}
        folder = tmp_path / config.model
        with mp.Communicator(MPI.COMM_SELF) as comm:
            mp.save(folder / "saved", {"model": model, "state": state}, comm)
            from_checkpoint(folder / "saved", folder / "out", comm, 1 << 30)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").eval()
        with torch.no_grad():
            logits = theirs(torch.tensor(tokens)).logits.numpy()
        np.testing.assert_allclose(model(tokens).data, logits, atol=1e-4)


def test_where_a_model_is_written(tmp_path: Path) -> None:
    """Through links, which stay; never over what is there, or beside it; names are no patterns."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".other.tmp-1").mkdir()
    saved, names = tmp_path / "link", ["link", "dangling", "*[a]"]
    with mp.Communicator(MPI.COMM_SELF) as comm:
        for name in names:
            to_checkpoint(GOLDEN / "gpt2", tmp_path / name, comm)
        mp.save(saved, {"state": {"step": 3}, "more": {"a": np.ones(2)}}, comm)
        assert mp.load(saved, {}, comm)["state"] == {"step": 3}
        with pytest.raises(CheckpointError, match="holds something else"):
            to_checkpoint(GOLDEN / "gpt2", saved, comm)
        (tmp_path / "new").symlink_to(tmp_path / "made")
        from_checkpoint(tmp_path / "dangling", tmp_path / "new", comm, 1 << 30)
        assert read_settings(tmp_path / "made") == read_settings(GOLDEN / "gpt2")
    links = {"link", "dangling", "new"}
    assert {one.name for one in tmp_path.iterdir() if one.is_symlink()} == links
    assert {one.name for one in tmp_path.iterdir()} == {*names, *links, *HERE}


HERE = ("there", "nowhere", "made", ".other.tmp-1")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "has weights, but no config.json"),
        ("pytorch_model.bin", "has weights, but no config.json"),
        ("config.json", "model.safetensors cannot be read: No such file or directory$"),
    ],
)
def test_folders_with_half_of_a_model(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes((GOLDEN / "gpt2" / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=words):
        model_of(tmp_path)
