"""Checkpoints of a run: one every so many steps, written while the next steps run; and back again.

    step    97   98   99   100       101   102          ...  300
    save                   copy ---- write ---- named        copy, write, named

A run that goes on from step 100 is the one that never stopped: data, dropout and learning rate
depend on the step, and all else is in the checkpoint.  On the same mesh its losses are the same
bit for bit, on another one to rounding.  None is begun while steps are skipped, so that the newest
is from before what made their numbers infinite.  A run that ends so saves what it has, and keeps
all that are there.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mpipar import checkpoint
from mpipar.checkpoint import Saving, place
from mpipar.checkpoint.agree import on_first
from mpipar.errors import ConfigError, MpiparError, explain
from mpipar.optim import Optimizer
from mpipar.parallel.mesh import Mesh
from mpipar.train.again import FREE, kept
from mpipar.train.agree import mark
from mpipar.train.config import TrainConfig
from mpipar.train.held import Held
from mpipar.train.step import Streak


class Checkpoints:
    """Saves a run and goes on with it, as its settings say."""

    def __init__(
        self, config: TrainConfig, mesh: Mesh, held: Held, optimizer: Optimizer, streak: Streak
    ) -> None:
        """Take what there is to save."""
        self.config, self.mesh, self.streak = config, mesh, streak
        self.tree = {"model": held.saved, "optimizer": optimizer}
        self.saving: Saving | None = None
        self.newest = None if config.resume is None else Path(config.resume)  # complete one
        self._step = -1  # of the one begun last
        save = config.save
        if save is not None:
            try:
                on_first(mesh.world, lambda: place.require_room(Path(save)))
            except MpiparError as error:
                raise mark(error) from None

    def resume(self, again: bool = False) -> int:
        """Collective: load the checkpoint to go on from, if there is one; return its step, or 0.

        again: that may be one that this run has saved.

        Raises, on every rank, CheckpointError if there is none, and ConfigError if it is of another
        model or has no step left, or if checkpoints of another run lie where this one saves.
        """
        source = self.config.resume
        world = self.mesh.world
        if again and world.process_group.raw.bcast(world.rank == 0 and self._newest_saved()):
            source = self.config.save
        step = 0
        try:
            if source is not None:
                step = self._check(checkpoint.load(source, {}, self.mesh)["state"])
                checkpoint.load(source, self.tree, self.mesh)
            if not again:
                on_first(self.mesh.world, self._check_folder)
        except MpiparError as error:  # all ranks have it
            raise mark(error) from None
        return step

    def after(self, step: int) -> None:
        """Collective: begin a checkpoint if it is time for one; complete the one being written."""
        config = self.config
        if config.save is None:
            return
        if self.saving is not None and self._is_written():
            self._complete()
        due = config.save_every and step % config.save_every == 0 and not self.streak.in_row
        if step == config.steps or due:
            self._begin(step)

    def stop(self, step: int) -> Path | None:
        """Collective: leave a complete checkpoint of this step; return where, if any are saved."""
        if self.config.save is None:
            return None
        if self._step != step:
            self._begin(step)
        return self.finish()

    def finish(self) -> Path | None:
        """Collective: complete the checkpoint that is being written; return the newest, if any."""
        if self.saving is not None:
            self._complete()
        return self.newest

    def _begin(self, step: int) -> None:
        """Collective: begin a checkpoint, when the one before is complete."""
        self.finish()
        config = self.config
        assert config.save is not None
        state = {"step": step, "skipped": self.streak.count, **kept(config)}
        keep = None if self.streak.in_row else config.keep
        how: dict[str, Any] = {"step": step, "keep": keep, "async_op": True}
        try:
            self.saving = checkpoint.save(
                config.save, {**self.tree, "state": state}, self.mesh, **how
            )
        except MpiparError as error:
            raise mark(error) from None
        self._step = step

    def _complete(self) -> None:
        assert self.saving is not None
        try:
            self.newest = self.saving.wait()
        except MpiparError as error:
            raise mark(error) from None
        finally:
            self.saving = None

    def _check_folder(self) -> None:
        """Raise ConfigError if the folder to save in has the checkpoints of another run."""
        save, resume, newest = self.config.save, self.config.resume, self._newest_saved()
        if save is None or newest is None:
            return
        here, source = Path(save).resolve(), Path(resume or "/").resolve()
        if here not in (source, source.parent) and newest != place.step_name(0):
            rule = f"it holds the checkpoints of a run, the newest {newest}"
            fix = f"Go on with that one by --resume {save}, or name another folder"
            raise ConfigError(explain("save", save, rule, fix))

    def _newest_saved(self) -> str | None:
        """Return the name of the newest checkpoint where this run saves, if there is one."""
        found = [] if self.config.save is None else place.all_in(Path(self.config.save))
        return found[0].folder.name if found else None

    def _is_written(self) -> bool:
        """Collective: say whether all ranks have written their shares."""
        assert self.saving is not None
        waits = np.array([not self.saving.test()], np.int32)
        return not self.mesh.world.all_reduce(waits, "max")[0]

    def _check(self, state: Any) -> int:
        """Return the step of a state; raises ConfigError if a run cannot go on from there."""
        own, source = asdict(self.config.model_config()), self.config.resume
        state = state if isinstance(state, dict) else {}
        model, step = state.get("model"), state.get("step")
        least = 0 if "run" in state else 1  # a run may stop before its first step; weights alone
        if not isinstance(model, dict) or not isinstance(step, int) or step < least:
            rule = "it holds no run: its state must say which model and which step it is of"
            fix = "Begin with its weights by --init, if mpipar convert made it"
            raise ConfigError(explain("resume", source, rule, fix))
        for name, value in model.items():
            if name in own and name not in FREE and own[name] != value:
                rule = f"the checkpoint {source} is of a model with {value!r}"
                raise ConfigError(explain(name, own[name], rule, "Pass that"))
        if step >= self.config.steps:
            rule = f"it counts all steps, and the checkpoint {source} has taken {step}"
            raise ConfigError(explain("steps", self.config.steps, rule, "Pass more --steps"))
        self.streak.count = int(state.get("skipped", 0))
        return step
