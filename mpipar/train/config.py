"""What `mpipar train` can be told: one frozen dataclass, from which the command line is made.

The docstring under a field is its help text.  `validate` checks everything that does not need
another rank or a file, with the number of ranks as its only other input, so every rank comes to
the same result before anything is sent.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from mpipar.errors import ConfigError, explain
from mpipar.models.config import ModelConfig, default_hidden
from mpipar.train import memory, outputs

Count = Annotated[int | None, arg(metavar="INT")]
Number = Annotated[float | None, arg(metavar="FLOAT")]
File = Annotated[str | None, arg(metavar="PATH")]
Rule = tuple[str, bool, str, str]  # parameter, whether its value is good, the rule, the fix

COUNTS = (
    *("dp", "tp", "layers", "dim", "heads", "kv_heads", "hidden", "vocab", "seq"),
    *("batch", "accumulate", "steps", "eval_batches"),
)  # settings of at least 1


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model over a mesh of data-parallel times tensor-parallel MPI ranks."""

    dp: Count = None
    """Data-parallel ranks; what is left of all ranks if not given."""
    tp: int = 1
    """Tensor-parallel ranks: each layer's matrices are cut over them."""

    model: Literal["gpt2", "llama"] = "gpt2"
    """GPT-2 style, or Llama style (RMSNorm, rotary positions, SwiGLU, grouped queries)."""
    layers: int = 4
    """Transformer blocks."""
    dim: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads."""
    kv_heads: Count = None
    """Heads of keys and values (llama only); as many as heads if not given."""
    hidden: Count = None
    """Width of the feed-forward layer; 4 x dim (gpt2) or 8/3 x dim (llama) if not given."""
    vocab: int = 256
    """Different tokens; text is read as bytes and needs 256."""
    seq: int = 128
    """Tokens of a sequence."""
    dropout: float = 0.0
    """Share of activations that dropout sets to zero."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the parameters. A CPU only stores bfloat16 and computes in float32."""

    data: File = None
    """A text file, a folder of them, or a .bin (uint16) or .npy token file; Python's own
    standard library if not given."""
    batch: int = 8
    """Sequences of a step, over all ranks together."""
    accumulate: int = 1
    """Parts that each rank cuts its sequences of a step into, to save memory."""
    steps: int = 300
    """Steps of the optimiser."""
    seed: int = 0
    """Of initial weights, order of the data and dropout."""

    lr: float = 3e-3
    """Highest learning rate."""
    min_lr: Number = None
    """Learning rate at the end of the cosine; a tenth of lr if not given."""
    warmup: Count = None
    """Steps of linear warm-up; a tenth of the steps if not given."""
    weight_decay: float = 0.1
    """Of AdamW, on matrices only."""
    clip: float = 1.0
    """Norm that gradients are clipped to; 0 for no clipping."""

    eval_every: int = 100
    """Steps between two measurements of the validation loss; 0 for one at the end only."""
    eval_batches: int = 4
    """Batches of held-out data that the validation loss is measured on."""
    sample: int = 160
    """Tokens of text to generate at the end."""
    log: File = None
    """File for lines of JSON: step, loss, lr, grad_norm, tokens_per_s, mfu, comm_s for each step;
    step, val_loss for each measurement on held-out data."""
    plot: File = None
    """Image file for the loss curve (.png, .svg, .pdf); needs matplotlib."""

    reproducible: bool = False
    """Add in rank order: the same bits in every run."""
    check_collectives: bool = False
    """Compare every collective's shape, type and order between the ranks."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the arrays live."""

    @property
    def kv(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn(self) -> int:
        """Width of the feed-forward layer."""
        return default_hidden(self.model, self.dim) if self.hidden is None else self.hidden

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return self.steps // 10 if self.warmup is None else self.warmup

    @property
    def lowest_lr(self) -> float:
        """Learning rate at the end of the cosine."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    def fingerprint(self) -> str:
        """Return a hash of all settings."""
        return blake2b(repr(asdict(self)).encode(), digest_size=16).hexdigest()

    def value(self, name: str) -> object:
        """Return a setting, or what follows from the others if it was not given."""
        derived = {"kv_heads": self.kv, "hidden": self.ffn, "warmup": self.warmup_steps}
        return derived.get(name, getattr(self, name))

    def model_config(self) -> ModelConfig:
        """Return the part of the settings that defines the model."""
        return ModelConfig(
            model=self.model,
            vocab=self.vocab,
            layers=self.layers,
            dim=self.dim,
            heads=self.heads,
            kv_heads=self.kv,
            seq=self.seq,
            hidden=self.ffn,
            dropout=self.dropout,
            seed=self.seed,
            dtype=self.dtype,
        )

    def mesh(self, ranks: int) -> tuple[int, int]:
        """Return (dp, tp) for this number of ranks."""
        return (ranks // self.tp if self.dp is None else self.dp), self.tp

    def validate(self, ranks: int, start: Callable[[int], str] = "mpiexec -n {}".format) -> None:
        """Check every setting against the others and the number of ranks.

        `start`: gives the command that starts so many ranks, for the messages.
        Raises ConfigError for the first setting that cannot work.
        """
        for rules in (self._sizes, self._numbers, self._outputs):
            _check(self, rules())
        _check(self, self._mesh_rules(ranks, start))
        _check(self, self._memory(self.mesh(ranks)[0]))

    def _sizes(self) -> Iterator[Rule]:
        for name in COUNTS:
            value, fix = getattr(self, name), f"Pass --{flag(name)} 1 or more"
            yield name, value is None or value >= 1, "it is at least 1", fix
        for name in ("eval_every", "sample", "seed"):
            fix = f"Pass --{flag(name)} 0 or more"
            yield name, getattr(self, name) >= 0, "it is not negative", fix
        fix = f"Pass --dim {nearest(self.dim, self.heads)}"
        yield "dim", self.dim % self.heads == 0, f"it is a multiple of heads={self.heads}", fix
        if self.model == "llama":
            fix = f"Pass --dim {nearest(self.dim, 2 * self.heads)}"
            rule = f"rotary positions turn pairs, so it is a multiple of 2 x heads={self.heads}"
            yield "dim", self.dim % (2 * self.heads) == 0, rule, fix
            fix = f"Pass --kv-heads with one of {', '.join(map(str, divisors(self.heads)))}"
            yield "kv_heads", self.heads % self.kv == 0, f"it divides heads={self.heads}", fix
        else:
            rule = "only llama groups its queries"
            yield "kv_heads", self.kv == self.heads, rule, "Leave it out, or pass --model llama"

    def _numbers(self) -> Iterator[Rule]:
        for name in ("lr", "min_lr", "weight_decay", "clip"):
            value = getattr(self, name)
            good = value is None or (math.isfinite(value) and value >= 0)
            yield name, good, "it is a number from 0 up", f"Pass --{flag(name)} 0 or more"
        yield "dropout", 0 <= self.dropout < 1, "it is at least 0 and below 1", "Pass 0 for none"
        yield "min_lr", self.lowest_lr <= self.lr, f"it is at most lr={self.lr}", "Pass a lower one"
        rule = f"it is between 0 and steps={self.steps}"
        yield "warmup", 0 <= self.warmup_steps <= self.steps, rule, "Pass fewer warm-up steps"

    def _outputs(self) -> Iterator[Rule]:
        rule, fix = "training runs on the CPU in this version", "Pass --device cpu, or leave it out"
        yield "device", self.device == "cpu", rule, fix
        for name in ("log", "plot"):
            value = getattr(self, name)
            if value is None:
                continue
            reason = outputs.refusal(Path(value))
            yield name, reason is None, reason or "", "Pass the path of a file that can be written"
            own = self.data is None or not outputs.is_part_of(Path(value), Path(self.data))
            rule = f"it must not be part of data={self.data!r}, which it would overwrite"
            yield name, own, rule, "Pass another path"
        if self.log is not None and self.plot is not None:
            apart = not outputs.is_part_of(Path(self.plot), Path(self.log))
            yield "plot", apart, "it must be another file than the log", "Pass another path"
        if self.plot is not None:
            formats = (".png", ".svg", ".pdf")
            rule = "the ending says the format"
            yield (
                "plot",
                Path(self.plot).suffix in formats,
                rule,
                f"Use one of {', '.join(formats)}",
            )
            installed = importlib.util.find_spec("matplotlib") is not None
            yield "plot", installed, "it needs matplotlib", 'Run pip install "mpipar[plot]"'

    def _memory(self, dp: int) -> Iterator[Rule]:
        need, have = memory.needed(self, dp), memory.available()
        usual = {"vocab": 256, "layers": 4, "dim": 128, "seq": 128, "batch": 8, "sample": 160}
        usual["hidden"] = default_hidden(self.model, self.dim)
        name = max(usual, key=lambda name: self._number(name) // usual[name])
        rule = (
            f"weights, gradients, moments and activations take at least {memory.amount(need)} on "
            f"each rank, and this machine has {memory.amount(have or 0)}"
        )
        yield name, have is None or need <= have, rule, f"Pass a smaller --{flag(name)}"

    def _number(self, name: str) -> int:
        value = self.value(name)
        assert isinstance(value, int)
        return value

    def _mesh_rules(self, ranks: int, start: Callable[[int], str]) -> Iterator[Rule]:
        dp, tp = self.mesh(ranks)
        if self.dp is None:
            rule = f"it divides the number of ranks, {ranks}"
            fix = f"Pass --tp with one of {', '.join(map(str, divisors(ranks)))}"
            yield "tp", ranks % tp == 0, rule, f"{fix}, or start {start(tp)}"
        rule = f"dp x tp = {dp} x {tp} = {dp * tp} is not the number of ranks, {ranks}"
        fix = f"Leave --dp out, or start {start(dp * tp)}"
        yield "dp", dp * tp == ranks, rule, fix
        for name, value in (("heads", self.heads), ("kv_heads", self.kv), ("hidden", self.ffn)):
            rule = f"it is cut over the tensor ranks, so it is a multiple of tp={tp}"
            fix = f"Pass --{flag(name)} {nearest(value, tp)}, or another --tp"
            yield name, value % tp == 0, rule, fix
        rule = f"each of the dp={dp} data-parallel ranks gets at least one sequence"
        yield "batch", self.batch >= dp, rule, f"Pass --batch {dp} or more"
        smallest = self.batch // dp
        rule = (
            f"a rank has at least one sequence in each part, and the smallest share is {smallest}"
        )
        fix = f"Pass --accumulate {smallest} or less, or --batch {self.accumulate * dp}"
        yield "accumulate", self.accumulate <= smallest, rule, fix


def _check(config: TrainConfig, rules: Iterator[Rule]) -> None:
    for name, good, rule, fix in rules:
        if not good:
            raise ConfigError(explain(name, config.value(name), rule, fix))


def flag(name: str) -> str:
    """Return the command-line flag of a field, without its dashes."""
    return name.replace("_", "-")


def divisors(n: int) -> list[int]:
    """Return the numbers that divide n."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest(value: int, degree: int) -> str:
    """Return the multiples of `degree` around `value`, as "6 or 9"."""
    below = value // degree * degree
    return " or ".join(str(n) for n in (below, below + degree) if n > 0)
