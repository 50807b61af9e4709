"""What rank 0 shows of a run: a bar that redraws itself, or plain lines where nobody watches.

    gpt2 of 842 k float32 parameters on 4 ranks: dp 4 x tp 1, fsdp 3
    step  30/300   loss 2.9113   31.5 k tokens/s   MFU 41%   communication 12%

Communication is the share of a step that rank 0 is inside communication calls, waiting for others
included; what travels while it computes is not in it.

Under a launcher the ranks' output is a pipe even in a terminal, so `terminal.width` asks who
reads it.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.checkpoint import place
from mpipar.train import terminal
from mpipar.train.config import TrainConfig
from mpipar.train.outputs import silence_stdout
from mpipar.train.report import Facts, Report, Row, unwritable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LINES = 20  # plain lines in a run


class Display(Report):
    """Shows a run on standard output."""

    def __init__(self, config: TrainConfig, columns: int | None = None) -> None:
        """Take the configuration; `columns` of the terminal, None for plain lines."""
        from rich.console import Console

        self.config = config
        self.every = max(1, config.steps // LINES)
        self.console = Console(
            file=sys.stdout,
            force_terminal=columns is not None,
            width=columns or 10_000,  # plain lines are never broken
            highlight=False,
            markup=False,
            emoji=False,
        )
        self.bar = make_bar(self.console) if columns is not None else None
        self.task = self.bar.add_task("", total=config.steps, told="") if self.bar else None

    def begin(self, facts: Facts) -> None:
        """Say what is trained, on what, and how fast the machine is."""
        config, corpus = self.config, facts.corpus
        self.say(
            f"{config.model} of {count(facts.parameters)} {config.dtype} parameters "
            f"on {ranks(facts.ranks)}: {facts.layout}"
        )
        self.say(
            f"data: {corpus.name}, {count(len(corpus.train))} tokens to train on, "
            f"{count(len(corpus.held_out))} held out" + (f"; {corpus.note}" if corpus.note else "")
        )
        self.say(f"peak of matrix products, all ranks together: {count(facts.peak)}FLOP/s")
        if facts.first > 1:
            source = f" of {self.config.resume}" if self.config.resume else ""
            self.say(f"goes on after step {facts.first - 1}{source}")
        for why in place.passed_over(Path(self.config.resume)) if self.config.resume else ():
            self.say(f"a later checkpoint is passed over: {why}")
        if self.bar is not None and self.task is not None:
            self.bar.start()
            self.bar.update(self.task, completed=facts.first - 1)

    def step(self, row: Row) -> None:
        """Move the bar on, or print every so many steps."""
        step = int(row["step"])
        seconds = self.config.batch * self.config.seq / row["tokens_per_s"]
        told = (
            f"loss {row['loss']:.4f}   {count(row['tokens_per_s'])} tokens/s   "
            f"MFU {row['mfu']:.0%}   communication {row['comm_s'] / seconds:.0%}"
        )
        if row["skipped"]:
            told += f"   skipped {row['skipped']}"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, advance=1, told=told)
        elif step == 1 or step % self.every == 0 or step == self.config.steps:
            digits = len(str(self.config.steps))
            self.say(f"step {step:{digits}}/{self.config.steps}   {told}")

    def validation(self, row: Row) -> None:
        """Print the loss on held-out data."""
        self.say(f"step {int(row['step'])}: validation loss {row['val_loss']:.4f}")

    def note(self, text: str) -> None:
        """Print it."""
        self.say(text)

    def stopped(self, row: Row) -> None:
        """Say why the run ends, and how it goes on."""
        self.close()
        saved = "nothing was saved, as there is no --save"
        if row["saved"] is not None:
            saved = f"saved in {row['saved']}, goes on with --resume {self.config.save}"
        when = f"after step {row['step']}/{self.config.steps}"
        self.say(f"stopped by {row['stopped']} {when}: {saved}")

    def end(self, sample: str) -> None:
        """Print what the model writes and where the files are."""
        self.close()
        if sample:
            self.say(f"sample:\n{sample}")
        for what in ("log", "plot", "save"):
            if path := getattr(self.config, what):
                self.say(f"{what}: {path}")

    def traced(self, path: str, summary: str) -> None:
        """Print where the time went."""
        self.say(f"\n{summary}\n\ntrace: {path} (shown by ui.perfetto.dev)")

    def say(self, text: str) -> None:
        """Print a line at once, above the bar; if the reader has left, the run goes on."""
        try:
            self.console.print(text, soft_wrap=True)
            sys.stdout.flush()
        except (BrokenPipeError, SystemExit):  # rich makes the second of the first
            silence_stdout()
        except OSError as error:
            silence_stdout()
            raise unwritable("stdout", "standard output", error) from error

    def close(self) -> None:
        """Take the bar off."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def display(config: TrainConfig) -> Display:
    """Return the display that suits whoever reads this job's output."""
    return Display(config, terminal.width())


def make_bar(console: "Console") -> "Progress":
    """Return a progress bar with room for what a step tells."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
        console=console,
    )


def ranks(number: int) -> str:
    """Return "1 rank" or "4 ranks"."""
    return f"{number} rank{'s' * (number != 1)}"


def count(number: float) -> str:
    """Return a number with three digits and k, M, G or T: "31.5 k"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"
