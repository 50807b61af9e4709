"""What `mpipar train` can be told: one frozen dataclass, from which the command line is made.

The docstring under a field is its help text.  What may be combined with what is in `rules`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Annotated, Literal

from tyro.conf import arg

from mpipar.models.config import ModelConfig, default_hidden
from mpipar.schedule import pipeline
from mpipar.train import rules

Count = Annotated[int | None, arg(metavar="INT")]
Number = Annotated[float | None, arg(metavar="FLOAT")]
File = Annotated[str | None, arg(metavar="PATH")]


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model over a mesh of MPI ranks: pp x dp x cp x tp of them."""

    dp: Count = None
    """Data-parallel ranks; what is left of all ranks if not given."""
    tp: int = 1
    """Tensor-parallel ranks: each layer's matrices are cut over them."""
    pp: int = 1
    """Pipeline ranks: the layers are cut over them."""
    cp: int = 1
    """Context-parallel ranks: each sequence is cut over them."""
    fsdp: Literal["none", "1", "2", "3"] = "none"
    """Shard over the data-parallel ranks: 1 the optimiser's state, 2 gradients too, 3 parameters
    too (ZeRO's stages)."""
    sequence_parallel: bool = False
    """Cut norms, dropout and the residual stream over the tensor-parallel ranks as well."""
    overlap: bool = False
    """Let what travels between tensor-parallel ranks do so beside their matrix products."""
    ep: int = 1
    """Ranks that share out the experts; a group of so many of the dp x cp ranks has them all."""
    cp_layout: Literal["contiguous", "zigzag", "ulysses", "hybrid"] | None = None
    """How a sequence lies on the context-parallel ranks, and what travels: keys and values round a
    ring (contiguous, zigzag), heads (ulysses), or both (hybrid); zigzag if not given."""
    schedule: Annotated[str | None, arg(metavar="NAME")] = None
    """Of the pipeline: gpipe, 1f1b, interleaved, zb1p, zbv, or a CSV file; 1f1b if not given."""
    chunks: Count = None
    """Stages on each pipeline rank; 2 for interleaved if not given."""
    microbatches: Count = None
    """Parts of a rank's sequences that go through the pipeline one after another, times accumulate;
    twice the pipeline ranks if not given, or as many as there are sequences."""

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
    experts: int = 0
    """Experts in each block: MLPs of width hidden, of which a token uses some; 0: one MLP."""
    top_k: Count = None
    """Experts that a token uses; 2 if not given, or as many as there are."""
    shared: int = 0
    """Width of one more expert, which every token uses; 0: none."""
    vocab: int = 256
    """Different tokens; text is read as bytes and needs 256."""
    seq: int = 128
    """Tokens of a sequence."""
    tied: bool | None = None
    """Let the token embedding be the output layer too; yes for gpt2, no for llama if not given."""
    dropout: float = 0.0
    """Share of activations that dropout sets to zero."""
    rotary_base: float = 10000.0
    """Of the angles of rotary positions (llama only)."""
    norm_eps: float = 1e-5
    """What norms add to the variance, or the mean square."""
    init: File = None
    """Folder of the weights to begin with, and of the model that is trained: Hugging Face's
    (config.json, *.safetensors), or a checkpoint. Its tokenizer.json makes tokens of text."""
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
    max_skipped: int = 10
    """Steps in a row that may be left out because loss or gradient is not finite; so many end the
    run."""

    balance: Number = None
    """What each block's balance loss, 1 where experts are used evenly, counts in what is minimised,
    0.01 if not given; the loss shown is the cross-entropy alone. It is that of each micro-batch,
    weighed by tokens, so how many micro-batches there are changes the numbers a little."""
    capacity_factor: Number = None
    """Most tokens of a micro-batch that an expert takes in training, over its even share of them;
    later ones skip it. All are taken if not given."""

    eval_every: int = 100
    """Steps between two measurements of the validation loss; 0 for one at the end only."""
    eval_batches: int = 4
    """Batches of held-out data that the validation loss is measured on."""
    sample: int = 160
    """Tokens of text to generate at the end."""
    log: File = None
    """File for lines of JSON: step, loss, lr, grad_norm, tokens_per_s, mfu, comm_s, skipped for
    each step; step, val_loss for each measurement on held-out data. comm_s are the seconds that
    rank 0 was inside communication calls, waiting included; what travels while it computes is not
    counted. skipped are the steps left out so far; their loss or grad_norm may be null."""
    plot: File = None
    """Image file for the loss curve (.png, .svg, .pdf); needs matplotlib."""

    trace: File = None
    """Folder for a trace: when each rank computed, communicated and waited, in trace.json, which
    ui.perfetto.dev and chrome://tracing show; a summary is printed at the end."""
    trace_steps: Annotated[str | None, arg(metavar="A:B")] = None
    """Steps that the trace is of, from A to B; all that it has room for if not given."""

    save: File = None
    """Folder for checkpoints; each is a folder in it, and `latest` names the newest."""
    save_every: int = 100
    """Steps between two checkpoints; 0 for one at the end only."""
    keep: Count = None
    """Newest checkpoints to leave; all if not given."""
    resume: File = None
    """Checkpoint to go on from, of any mesh, or a folder of them, of which it is the newest. The
    model, data, batch, seed, learning rate and steps are its own where they are not given anew."""

    elastic: bool = False
    """Go on without ranks that die: dp shrinks, and the step is taken again; for Open MPI under
    mpiexec --with-ft ulfm."""

    recompute: bool = False
    """Keep only the inputs of each block for backward, and run the block again there: less memory,
    a third more work."""
    reproducible: bool = False
    """Add in rank order: the same bits in every run."""
    check_collectives: bool = False
    """Compare every collective's shape, type and order between the ranks."""
    timeout: float = 600.0
    """Seconds that a rank waits for others before it ends the job with a report of who waits for
    whom."""
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
    def layout(self) -> str:
        """How a sequence lies on the context-parallel ranks."""
        return self.cp_layout or "zigzag"

    @property
    def order(self) -> str:
        """The schedule of the pipeline."""
        return self.schedule or "1f1b"

    @property
    def balance_weight(self) -> float:
        """What the balance loss counts."""
        return 0.01 if self.balance is None else self.balance

    @property
    def chosen(self) -> int:
        """Experts that a token uses."""
        return min(2, self.experts or 2) if self.top_k is None else self.top_k

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return self.steps // 10 if self.warmup is None else self.warmup

    @property
    def lowest_lr(self) -> float:
        """Learning rate at the end of the cosine."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    @property
    def traced_steps(self) -> tuple[int, int] | None:
        """First and last step of the trace, as far as they can be read; None for all."""
        if self.trace_steps is None:
            return None
        first, _, last = self.trace_steps.partition(":")
        good = first.isdecimal() and last.isdecimal()
        return (int(first), int(last)) if good else (0, 0)

    def fingerprint(self) -> str:
        """Return a hash of all settings."""
        return blake2b(repr(asdict(self)).encode(), digest_size=16).hexdigest()

    def value(self, name: str) -> object:
        """Return a setting, or what follows from the others if it was not given."""
        derived = {"kv_heads": self.kv, "hidden": self.ffn, "warmup": self.warmup_steps}
        return derived.get(name, getattr(self, name))

    def model_part(self) -> int:
        """Return the number of ranks that hold one copy of the model."""
        return self.pp * self.cp * self.tp

    def through_pipeline(self, dp: int) -> int:
        """Return the number of micro-batches in a step of the pipeline, for `dp` copies of it.

        Accumulation is more of them.
        """
        usual = max(1, min(2 * self.pp, self.batch // dp // self.accumulate))
        each = usual if self.microbatches is None else self.microbatches
        return each * self.accumulate

    def stages(self, dp: int) -> int:
        """Return the number of stages that the pipeline's schedule has."""
        m = self.through_pipeline(dp)
        return pipeline.resolve(self.order, self.pp, m, self.chunks).stages

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
            experts=self.experts,
            top_k=self.chosen,
            shared=self.shared,
            dropout=self.dropout,
            tied=self.tied,
            rotary_base=self.rotary_base,
            norm_eps=self.norm_eps,
            seed=self.seed,
            dtype=self.dtype,
        )

    def copies(self, ranks: int) -> int:
        """Return dp for this number of ranks."""
        return ranks // self.model_part() if self.dp is None else self.dp

    def validate(self, ranks: int, start: Callable[[int], str] = "mpiexec -n {}".format) -> None:
        """Check every setting against the others and the number of ranks.

        `start`: gives the command that starts so many ranks, for the messages.
        Raises ConfigError for the first setting that cannot work.
        """
        rules.check(self, ranks, start)
