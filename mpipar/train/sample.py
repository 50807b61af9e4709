"""What the model writes at the end of a run: tokens drawn one by one, shown as text."""

from functools import partial
from typing import Any

import numpy as np

from mpipar import models, partition
from mpipar.errors import NonFiniteError
from mpipar.parallel.mesh import Mesh
from mpipar.train.config import TrainConfig
from mpipar.train.data import Corpus
from mpipar.train.held import Held

PROMPT = 32  # tokens that the sample starts from
TEMPERATURE = 0.8


def sample(held: Held, corpus: Corpus, config: TrainConfig, mesh: Mesh) -> str:
    """Collective: return what the model writes after the first held-out tokens, and those before.

    Where every data-parallel rank has the whole model only the first ones write, and the others
    wait; every rank of the first ones' mesh.cp writes the same.  Experts are asked by all ranks.
    """
    text = ""
    needed = config.fsdp != "none" or config.experts > 0
    if config.sample and (mesh.dp.rank == 0 or needed):
        sizes = partition.blocks(config.vocab, mesh.tp.size)
        gather = partial(mesh.tp.all_gather, sizes=sizes)
        prompt = np.asarray(corpus.held_out[: min(PROMPT, config.seq // 2) or 1], np.int64)
        settings: dict[str, Any] = {"temperature": TEMPERATURE, "gather": gather}
        try:
            with held.alone():
                written = models.generate(held, prompt, config.sample, seed=config.seed, **settings)
        except NonFiniteError:  # on all ranks that write; the log has said so
            written = np.zeros(0, np.int64)
        tokens = np.concatenate([prompt, written])
        text = corpus.text.decode(tokens) if corpus.text else " ".join(map(str, tokens))
    mesh.world.barrier()
    return text
