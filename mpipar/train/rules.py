"""What settings of `mpipar train` work together: every rule is (setting, holds, rule, fix).

Nothing here needs another rank or a file: the number of ranks is the only other input, so every
rank comes to the same result before anything is sent.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.errors import ConfigError, explain
from mpipar.models.config import default_hidden
from mpipar.parallel.context.layout import ulysses_degree
from mpipar.partition import divisors
from mpipar.train import memory, outputs

if TYPE_CHECKING:
    from mpipar.train.config import TrainConfig

Rule = tuple[str, bool, str, str]  # setting, whether its value is good, the rule, the fix
Start = Callable[[int], str]  # number of ranks -> the command that starts them

COUNTS = (
    *("dp", "tp", "pp", "cp", "layers", "dim", "heads", "kv_heads", "hidden", "vocab", "seq"),
    *("batch", "accumulate", "steps", "eval_batches", "chunks", "microbatches", "ep", "top_k"),
    *("keep", "max_skipped"),
)  # settings of at least 1
USUAL = {
    **{"vocab": 256, "layers": 4, "dim": 128, "seq": 128, "batch": 8, "sample": 160},
    **{"experts": 8, "shared": 128},
}


def check(config: "TrainConfig", ranks: int, start: Start) -> None:
    """Raise ConfigError for the first setting that cannot work."""
    for rules in (_sizes, _numbers, _outputs):
        _apply(config, rules(config))
    _apply(config, _mesh(config, ranks, start))
    dp = config.copies(ranks)
    for rules_of_copies in (_tensor, _context, _experts, _batch, _pipeline, _memory):
        _apply(config, rules_of_copies(config, dp))


def _apply(config: "TrainConfig", rules: Iterator[Rule]) -> None:
    for name, good, rule, fix in rules:
        if not good:
            raise ConfigError(explain(name, config.value(name), rule, fix))


def _sizes(config: "TrainConfig") -> Iterator[Rule]:
    for name in COUNTS:
        value, fix = getattr(config, name), f"Pass --{flag(name)} 1 or more"
        yield name, value is None or value >= 1, "it is at least 1", fix
    for name in ("eval_every", "save_every", "sample", "seed", "experts", "shared"):
        fix = f"Pass --{flag(name)} 0 or more"
        yield name, getattr(config, name) >= 0, "it is not negative", fix
    dim, heads = config.dim, config.heads
    yield "dim", dim % heads == 0, f"it must be a multiple of heads={heads}", _dim(dim, heads)
    if config.model == "llama":
        rule = f"rotary positions turn pairs, so it must be a multiple of 2 x heads={heads}"
        yield "dim", dim % (2 * heads) == 0, rule, _dim(dim, 2 * heads)
        fix = f"Pass --kv-heads with one of {', '.join(map(str, divisors(heads)))}"
        yield "kv_heads", heads % config.kv == 0, f"it must divide heads={heads}", fix
    else:
        rule = "only llama groups its queries"
        yield "kv_heads", config.kv == heads, rule, "Leave it out, or pass --model llama"


def _dim(dim: int, degree: int) -> str:
    return f"Pass --dim {nearest(dim, degree)}"


def _numbers(config: "TrainConfig") -> Iterator[Rule]:
    for name in ("lr", "min_lr", "weight_decay", "clip", "balance"):
        value = getattr(config, name)
        good = value is None or (math.isfinite(value) and value >= 0)
        yield name, good, "it is a number from 0 up", f"Pass --{flag(name)} 0 or more"
    fix = "Pass --timeout 600, or another number of seconds"
    yield "timeout", config.timeout > 0, "it is more than 0 seconds", fix
    factor = config.capacity_factor
    good = factor is None or (math.isfinite(factor) and factor > 0)
    yield "capacity_factor", good, "it is a number above 0", "Pass 1.25, or leave it out"
    yield "dropout", 0 <= config.dropout < 1, "it is at least 0 and below 1", "Pass 0 for none"
    yield "min_lr", config.lowest_lr <= config.lr, f"it is at most lr={config.lr}", "Lower it"
    rule = f"it is between 0 and steps={config.steps}"
    good = 0 <= config.warmup_steps <= config.steps
    yield "warmup", good, rule, "Pass fewer warm-up steps"


def _outputs(config: "TrainConfig") -> Iterator[Rule]:
    there = "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None
    fix = "Pass --device cpu, or install the extra cuda12 or cuda13"
    yield "device", config.device == "cpu" or there, "it needs CuPy", fix
    for name in ("data", "init", "save", "resume", "log", "plot", "trace"):
        fix = "Pass a path, or leave it out: a shell may have dropped a variable"
        yield name, getattr(config, name) != "", "it is empty", fix
    for name in ("log", "plot"):
        value = getattr(config, name)
        if value is None:
            continue
        reason = outputs.refusal(Path(value))
        yield name, reason is None, reason or "", "Pass the path of a file that can be written"
        own = config.data is None or not outputs.is_part_of(Path(value), Path(config.data))
        rule = f"it must not be part of data={config.data!r}, which it would overwrite"
        yield name, own, rule, "Pass another path"
    if config.log is not None and config.plot is not None:
        apart = not outputs.is_part_of(Path(config.plot), Path(config.log))
        yield "plot", apart, "it must be another file than the log", "Pass another path"
    if config.traced_steps is not None:
        first, last = config.traced_steps
        rule = f"it is the first and the last step, between 1 and steps={config.steps}"
        yield "trace_steps", 1 <= first <= last <= config.steps, rule, "Pass 10:12, for example"
        rule, fix = "only a trace has steps", "Pass --trace with a folder too"
        yield "trace_steps", config.trace is not None, rule, fix
    good = config.trace is None or not config.elastic
    yield "trace", good, "no trace outlives a rank that dies", "Leave out --trace or --elastic"
    rule, fix = "only checkpoints that are saved can be kept", "Pass --save with a folder too"
    yield "keep", config.keep is None or config.save is not None, rule, fix
    if config.plot is not None:
        formats = (".png", ".svg", ".pdf")
        good = Path(config.plot).suffix in formats
        yield "plot", good, "the ending says the format", f"Use one of {', '.join(formats)}"
        installed = importlib.util.find_spec("matplotlib") is not None
        yield "plot", installed, "it needs matplotlib", 'Run pip install "mpipar[plot]"'


def _mesh(config: "TrainConfig", ranks: int, start: Start) -> Iterator[Rule]:
    part = config.model_part()
    others = [name for name in ("pp", "cp", "tp") if getattr(config, name) > 1] or ["tp"]
    sizes = " x ".join(str(getattr(config, name)) for name in others)
    dp = config.copies(ranks)
    if config.dp is None:
        if len(others) == 1:
            name, rule = others[0], f"it must divide the number of ranks, {ranks}"
            fix = f"Pass --{name} with one of {', '.join(map(str, divisors(ranks)))}"
        else:
            name, rule = others[0], f"{' x '.join(others)} = {sizes} = {part} divides {ranks} ranks"
            fix = f"Let them multiply to one of {', '.join(map(str, divisors(ranks)))}"
        yield name, ranks % part == 0, rule, f"{fix}, or start {start(part)}"
    product = f"dp x {' x '.join(others)} = {dp} x {sizes} = {dp * part}"
    rule = f"{product} is not the number of ranks, {ranks}"
    yield "dp", dp * part == ranks, rule, f"Leave --dp out, or start {start(dp * part)}"


def _tensor(config: "TrainConfig", dp: int) -> Iterator[Rule]:
    tp = config.tp
    cut = ("heads", config.heads), ("kv_heads", config.kv), ("hidden", config.ffn)
    for name, value in (*cut, ("shared", config.shared)):
        rule = f"it is cut over the tensor ranks, so it must be a multiple of tp={tp}"
        fix = f"Pass --{flag(name)} {nearest(value, tp)}, or another --tp"
        yield name, value % tp == 0, rule, fix
    for name in ("sequence_parallel", "overlap"):
        good = not getattr(config, name) or tp > 1
        yield name, good, "it is for tensor-parallel ranks", "Leave it out, or pass --tp 2"


def _context(config: "TrainConfig", dp: int) -> Iterator[Rule]:
    cp = config.cp
    rule = "only sequences that are cut over ranks have it"
    yield "cp_layout", config.cp_layout is None or cp > 1, rule, "Leave it out, or pass --cp 2"
    pieces = 2 * cp if config.layout == "zigzag" else cp
    rule = f"each of the cp={cp} context ranks has a part of every sequence"
    yield "seq", cp == 1 or config.seq >= pieces, rule, f"Pass --seq {pieces} or more"
    if cp > 1 and config.layout in ("ulysses", "hybrid"):
        degree = cp if config.layout == "ulysses" else ulysses_degree(cp)
        heads = config.heads // config.tp
        rule = f"{config.layout} spreads the {heads} heads of a rank over {degree} ranks"
        fix = "Pass --cp-layout zigzag, or more --heads"
        yield "heads", heads >= degree, rule, fix


def _experts(config: "TrainConfig", dp: int) -> Iterator[Rule]:
    experts, ep, plane = config.experts, config.ep, dp * config.cp
    if not experts:
        usual = {"ep": 1, "top_k": None, "shared": 0, "balance": None, "capacity_factor": None}
        for name, value in usual.items():
            good = getattr(config, name) == value
            yield name, good, "only experts have it", "Leave it out, or pass --experts 8"
        return
    rule = f"a token chooses among experts={experts}, each at most once"
    yield "top_k", config.chosen <= experts, rule, f"Pass --top-k {experts} or less"
    rule = f"it must divide the dp x cp = {dp} x {config.cp} = {plane} ranks that hold tokens"
    fix = f"Pass --ep with one of {', '.join(map(str, divisors(plane)))}"
    yield "ep", plane % ep == 0, rule, fix
    rule = f"each of the ep={ep} ranks has at least one expert"
    yield "experts", experts >= ep, rule, f"Pass --experts {ep} or more, or less --ep"
    rule = "experts that are spread over ranks have no replica that could go on"
    yield "elastic", not config.elastic or ep == 1, rule, "Leave it out, or pass --ep 1"
    rule = "experts that are spread over ranks are not cut again"
    yield "fsdp", config.fsdp == "none" or ep == 1, rule, "Pass --fsdp none, or --ep 1"


def _batch(config: "TrainConfig", dp: int) -> Iterator[Rule]:
    rule = f"each of the dp={dp} data-parallel ranks needs at least one sequence"
    yield "batch", config.batch >= dp, rule, f"Pass --batch {dp} or more"
    smallest = config.batch // dp
    rule = f"a rank has at least one sequence in each part, and the smallest share is {smallest}"
    fix = f"Pass --accumulate {smallest} or less, or --batch {config.accumulate * dp}"
    yield "accumulate", config.accumulate <= smallest, rule, fix


def _pipeline(config: "TrainConfig", dp: int) -> Iterator[Rule]:
    if config.pp == 1:
        rule = "only a pipeline has them"
        for name in ("schedule", "chunks", "microbatches"):
            yield name, getattr(config, name) is None, rule, "Leave it out, or pass --pp 2"
        return
    m, smallest = config.through_pipeline(dp), config.batch // dp
    rule = (
        f"a rank has a sequence in each of {m} (x accumulate), and the smallest share is {smallest}"
    )
    fix = f"Pass --microbatches {smallest // config.accumulate} or less, or --batch {m * dp}"
    yield "microbatches", m <= smallest, rule, fix
    stages = config.stages(dp)
    rule = f"each of the {stages} stages has at least one layer"
    yield "layers", config.layers >= stages, rule, f"Pass --layers {stages} or more, or less --pp"


def _memory(config: "TrainConfig", dp: int) -> Iterator[Rule]:
    need, have = memory.needed(config, dp), memory.available()
    usual = {**USUAL, "hidden": default_hidden(config.model, config.dim)}

    def share(name: str) -> int:
        value = config.value(name)
        assert isinstance(value, int)
        return value // usual[name]

    rule = (
        f"weights, gradients, moments and activations take at least {memory.amount(need)} on "
        f"each rank, and this machine has {memory.amount(have or 0)}"
    )
    name = max(usual, key=share)
    yield name, have is None or need <= have, rule, f"Pass a smaller --{flag(name)}"


def flag(name: str) -> str:
    """Return the command-line flag of a field, without its dashes."""
    return name.replace("_", "-")


def nearest(value: int, degree: int) -> str:
    """Return the multiples of `degree` around `value`, as "6 or 9"."""
    below = value // degree * degree
    return " or ".join(str(n) for n in (below, below + degree) if n > 0)
