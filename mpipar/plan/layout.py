"""One way to run a job on a number of ranks, and all the ways that `mpipar train` can run it.

The rules are those of training: tp divides heads, kv heads and the feed-forward width; a stage has
a layer at least; a rank has a sequence at least; FSDP and pipelines meet as they do there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd
from typing import Any

from mpipar.errors import ConfigError, explain
from mpipar.models.config import ModelConfig
from mpipar.models.stages import layer_split
from mpipar.partition import divisors
from mpipar.schedule import pipeline

SCHEDULES = ("1f1b", "interleaved", "zb1p", "zbv")  # gpipe is 1f1b with more memory
MOST_MICROBATCHES = 512
ACTIONS = 20_000  # of a pipeline that is tried
OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class Job:
    """What is to be trained: a model, the sequences of a step over all ranks, the optimiser."""

    model: ModelConfig
    batch: int
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        """Raise ConfigError for no sequences, an unknown optimiser, or experts."""
        if self.batch < 1:
            raise ConfigError(explain("batch", self.batch, "it is at least 1", "Pass --batch 8"))
        if self.optimizer not in OPTIMIZERS:
            rule = f"it is one of {', '.join(OPTIMIZERS)}"
            raise ConfigError(explain("optimizer", self.optimizer, rule, "Choose one of them"))
        if self.model.experts:
            rule = "models with experts are not planned yet"
            raise ConfigError(explain("experts", self.model.experts, rule, "Leave it out"))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.model.seq


@dataclass(frozen=True)
class Layout:
    """The sizes of a mesh and the settings of training on it.

    microbatches: parts of a rank's sequences, one after the other: of a pipeline, or accumulated.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    fsdp: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    cp_layout: str = "zigzag"
    sequence_parallel: bool = False
    recompute: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def plane(self) -> int:
        """The ranks that hold the same part of the model: dp x cp."""
        return self.dp * self.cp

    @property
    def stages(self) -> int:
        """The stages of the pipeline."""
        return self.pp * self.chunks

    @cached_property
    def pipeline(self) -> pipeline.PipelineSchedule:
        """The schedule; of one rank, that of accumulation."""
        chunks = self.chunks if self.schedule == "interleaved" else None
        return schedule_of(self.schedule, self.pp, self.microbatches, chunks)

    @property
    def name(self) -> str:
        """The mesh as text: pp2 dp4 tp2."""
        sizes = {axis: getattr(self, axis) for axis in ("pp", "dp", "cp", "tp")}
        shown = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        return " ".join(shown) or "1 rank"

    def rows(self, job: Job) -> int:
        """Return the most sequences in a micro-batch of a rank."""
        return ceil(ceil(job.batch / self.dp) / self.microbatches)

    def tokens(self, job: Job) -> int:
        """Return the most tokens in a micro-batch of a rank."""
        return self.rows(job) * -(-job.model.seq // self.cp)

    def layers(self, job: Job) -> tuple[int, ...]:
        """Return the layers of each stage."""
        return split(job.model, self.stages)

    def flags(self) -> str:
        """Return the flags of `mpipar train` for it."""
        said = [f"--{axis} {getattr(self, axis)}" for axis in ("pp", "dp", "cp", "tp")]
        found = [flag for flag in said if not flag.endswith(" 1")]
        if self.fsdp:
            found.append(f"--fsdp {self.fsdp}")
        if self.cp > 1:
            found.append(f"--cp-layout {self.cp_layout}")
        if self.pp > 1:
            found.append(f"--schedule {self.schedule} --microbatches {self.microbatches}")
            found += [f"--chunks {self.chunks}"] * (self.schedule == "interleaved")
        elif self.microbatches > 1:
            found.append(f"--accumulate {self.microbatches}")
        for flag in ("sequence_parallel", "recompute"):
            found += [f"--{flag.replace('_', '-')}"] * getattr(self, flag)
        return " ".join(found)


_schedules: dict[tuple[str, int, int, int | None], pipeline.PipelineSchedule] = {}
_splits: dict[tuple[ModelConfig, int], tuple[int, ...]] = {}


def schedule_of(name: str, p: int, m: int, chunks: int | None) -> pipeline.PipelineSchedule:
    """Return a pipeline schedule, made once."""
    key = (name, p, m, chunks)
    if key not in _schedules:
        _schedules[key] = pipeline.make(*key)
    return _schedules[key]


def split(config: ModelConfig, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, found once."""
    if (config, stages) not in _splits:
        _splits[config, stages] = tuple(map(len, layer_split(config, stages)))
    return _splits[config, stages]


def layouts(job: Job, ranks: int, fixed: Mapping[str, Any] | None = None) -> Iterator[Layout]:
    """Yield every layout of a job on `ranks` ranks, those with the values of `fixed` only.

    Raises ConfigError if there is none, naming what does not divide and what would.
    """
    fixed = {name: value for name, value in (fixed or {}).items() if value is not None}
    if ranks < 1:
        raise ConfigError(explain("ranks", ranks, "a job has at least one rank", "Pass --ranks 8"))
    axes = _axes(job, ranks, fixed)
    found = False
    for pp in axes["pp"]:
        for cp in axes["cp"]:
            for tp in axes["tp"]:
                dp, rest = divmod(ranks, pp * cp * tp)
                if rest or not _wanted(fixed, "dp", dp) or dp > job.batch:
                    continue
                for layout in _settings(job, Layout(pp=pp, dp=dp, cp=cp, tp=tp), fixed):
                    found = True
                    yield layout
    if not found:
        raise ConfigError(_why_none(job, ranks, axes, fixed))


def _axes(job: Job, ranks: int, fixed: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the sizes that each axis can have; ConfigError for a fixed one that it cannot."""
    model, parts = job.model, divisors(ranks)
    whole = gcd(model.heads, model.kv_heads, model.hidden)
    rules = {
        "pp": (f"a stage has one of the {model.layers} layers", lambda n: n <= model.layers),
        "cp": (f"a rank has two of the {model.seq} tokens", lambda n: n == 1 or model.seq >= 2 * n),
        "tp": (
            f"it must divide heads={model.heads}, kv_heads={model.kv_heads}, hidden={model.hidden}",
            lambda n: whole % n == 0,
        ),
        "dp": (f"a rank has one of the {job.batch} sequences", lambda n: n <= job.batch),
    }
    axes = {}
    for axis, (rule, holds) in rules.items():
        can = [n for n in parts if holds(n)]
        if axis in fixed and fixed[axis] not in can:
            fix = f"Pass --{axis} with one of {', '.join(map(str, can))}"
            both = f"it must divide the {ranks} ranks, and {rule}"
            raise ConfigError(explain(axis, fixed[axis], both, fix))
        axes[axis] = [fixed[axis]] if axis in fixed else can
    return axes


def _wanted(fixed: Mapping[str, Any], name: str, value: Any) -> bool:
    return name not in fixed or fixed[name] == value


def _settings(job: Job, mesh: Layout, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Yield the layouts of one mesh."""
    options: dict[str, list[Any]] = {
        "fsdp": [0, 1, 2, 3] if mesh.plane > 1 else [0],
        "cp_layout": _cp_layouts(job, mesh),
        "sequence_parallel": [False, True] if mesh.tp > 1 else [False],
        "recompute": [False, True],
    }
    for name, values in options.items():
        if name in fixed:
            options[name] = [fixed[name]] if fixed[name] in values or name == "recompute" else []
    base = vars(mesh)
    for schedule, chunks in _schedules_of(job, mesh, fixed):
        for m in _microbatches(job, mesh, chunks, fixed):
            for fsdp in options["fsdp"]:
                if not _meets(fsdp, mesh.pp, schedule):
                    continue
                for cp_layout in options["cp_layout"]:
                    for sequence in options["sequence_parallel"]:
                        for again in options["recompute"]:
                            yield Layout(
                                **{
                                    **base,
                                    "fsdp": fsdp,
                                    "schedule": schedule,
                                    "chunks": chunks,
                                    "microbatches": m,
                                    "cp_layout": cp_layout,
                                    "sequence_parallel": sequence,
                                    "recompute": again,
                                }
                            )


def _cp_layouts(job: Job, mesh: Layout) -> list[str]:
    if mesh.cp == 1:
        return ["zigzag"]
    heads = job.model.heads // mesh.tp
    return ["zigzag", "ulysses"] if heads % mesh.cp == 0 else ["zigzag"]


def _schedules_of(job: Job, mesh: Layout, fixed: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (schedule, stages on a rank) of a pipeline."""
    if mesh.pp == 1:
        yield from [("1f1b", 1)] * _wanted(fixed, "chunks", 1)
        return
    names = [fixed["schedule"]] if "schedule" in fixed else SCHEDULES
    for name in names:
        kind = pipeline.PIPELINES[name]
        chunks = [kind.chunks] if kind.chunks else [fixed.get("chunks", 2)]
        for count in chunks:
            if mesh.pp * count <= job.model.layers and _wanted(fixed, "chunks", count):
                yield name, count


def _microbatches(job: Job, mesh: Layout, chunks: int, fixed: Mapping[str, Any]) -> list[int]:
    """Return powers of two times pp (or of one), and one sequence each, as far as all have one."""
    most = job.batch // mesh.dp
    if "microbatches" in fixed:
        return [fixed["microbatches"]] if 1 <= fixed["microbatches"] <= most else []
    limit = min(most, MOST_MICROBATCHES, max(1, ACTIONS // (3 * mesh.pp * chunks)))
    found, m = [], mesh.pp
    while m <= limit:
        found.append(m)
        m *= 2
    return found or [limit]


def _meets(fsdp: int, pp: int, schedule: str) -> bool:
    """Say whether training can shard so with such a pipeline."""
    if pp == 1 or fsdp == 0:
        return True
    return fsdp < 3 and schedule in ("gpipe", "1f1b", "interleaved")


def _why_none(job: Job, ranks: int, axes: dict[str, list[int]], fixed: Mapping[str, Any]) -> str:
    """Return the error for a job of which no layout exists."""
    products = {pp * cp * tp for pp in axes["pp"] for cp in axes["cp"] for tp in axes["tp"]}
    copies = sorted(ranks // n for n in products if ranks % n == 0)
    if not copies:
        said = " x ".join(f"{axis} {fixed[axis]}" for axis in ("pp", "cp", "tp") if axis in fixed)
        rule = f"{said} does not divide the {ranks} ranks"
        return explain("ranks", ranks, rule, f"Pass a multiple of {min(products)}")
    if copies[0] > job.batch:
        rule = f"each of at least {copies[0]} data-parallel ranks has a sequence"
        return explain(
            "batch", job.batch, rule, f"Pass --batch {copies[0]} or more, or fewer ranks"
        )
    text = ", ".join(f"{name} {value}" for name, value in fixed.items()) or "nothing"
    rule = f"no mesh of these ranks has {text}"
    return explain("ranks", ranks, rule, "Leave some of these flags out")
