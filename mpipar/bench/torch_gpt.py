"""The peer of `mpipar bench train --peer torch`: the same GPT in PyTorch, a process for each rank.

It is started as a program of its own and imports nothing of mpipar, so that its time and memory are
PyTorch's alone:

    python torch_gpt.py '{"mode": "ddp", "rank": 0, "ranks": 2, "address": "tcp://...", ...}'

It answers in lines of JSON.  The first says that it is ready; after that it sleeps until a line
comes, a number of steps to take, and answers with their seconds and the most memory it ever had:

    -> {"parameters": 3290624}
    5
    -> {"seconds": [0.63, 0.62, 0.62, 0.63, 0.62], "rss_mb": 610.2}

The gradients go by DistributedDataParallel ("ddp") or fully_shard ("fsdp") over gloo; one process
has neither.  The end of its input is the end of the program.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Settings = dict[str, Any]


def build(settings: Settings) -> Any:
    """Return the module: forward(tokens, targets), both (B, S), is the mean loss."""
    torch = importlib.import_module("torch")
    nn, functional = torch.nn, torch.nn.functional
    dim, heads = settings["dim"], settings["heads"]

    class Block(nn.Module):  # type: ignore[name-defined]
        """Attention and feed-forward layer, each behind a norm and added to its input."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.projection = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def attention(self, x: Any) -> Any:
            """Return causal attention of x (B, S, C), before the projection."""
            batch, seq, _ = x.shape
            parts = self.qkv(x).view(batch, seq, 3, heads, dim // heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)  # (B, H, S, D) each
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).reshape(batch, seq, dim)

        def forward(self, x: Any) -> Any:
            """Map x (B, S, C) to (B, S, C)."""
            x = x + self.projection(self.attention(self.norm1(x)))
            hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
            return x + self.down(hidden)

    class GPT(nn.Module):  # type: ignore[name-defined]
        """Embeddings, blocks, a norm, and the token embedding again as the output layer."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(settings["vocab"], dim)
            self.positions = nn.Embedding(settings["seq"], dim)
            self.blocks = nn.ModuleList([Block() for _ in range(settings["layers"])])
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, settings["vocab"], bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Any, targets: Any) -> Any:
            """Return the mean loss."""
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))  # (B, S, V)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    return GPT()


def count(module: Any) -> int:
    """Return the number of parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def distributed(module: Any, mode: str, ranks: int) -> Any:
    """Return the module with its gradients, or its parameters too, spread over the ranks."""
    torch = importlib.import_module("torch")
    if ranks == 1:
        return module
    if mode == "ddp":
        return torch.nn.parallel.DistributedDataParallel(module)
    fsdp = importlib.import_module("torch.distributed.fsdp")
    device_mesh = importlib.import_module("torch.distributed.device_mesh")
    mesh = device_mesh.init_device_mesh("cpu", (ranks,))
    for block in module.blocks:
        fsdp.fully_shard(block, mesh=mesh)
    return fsdp.fully_shard(module, mesh=mesh)


def stepper(settings: Settings, module: Any) -> Callable[[], float]:
    """Return a function that takes a step together with the other ranks, and gives its seconds."""
    torch = importlib.import_module("torch")
    barrier = importlib.import_module("torch.distributed").barrier
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    numbers = np.random.default_rng((settings["seed"], settings["rank"]))
    shape = (settings["batch"], settings["seq"])

    def step() -> float:
        tokens = torch.from_numpy(numbers.integers(0, settings["vocab"], shape))
        targets = torch.roll(tokens, -1, 1)
        barrier()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        module(tokens, targets).backward()
        optimizer.step()
        return time.perf_counter() - start

    return step


def peak_mb() -> float:
    """Return the most memory that this process ever had in use, in units of 2^20 bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux; macOS counts bytes
        most = importlib.import_module("resource")
        return most.getrusage(most.RUSAGE_SELF).ru_maxrss / 2**20
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main(settings: Settings) -> None:
    """Answer the lines of standard input until it ends."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(settings["threads"])
    group = importlib.import_module("torch.distributed")
    place = {"rank": settings["rank"], "world_size": settings["ranks"]}
    group.init_process_group("gloo", init_method=settings["address"], **place)
    module = build(settings)
    parameters = count(module)
    step = stepper(settings, distributed(module, settings["mode"], settings["ranks"]))
    print(json.dumps({"parameters": parameters}), flush=True)
    for line in sys.stdin:
        seconds = [step() for _ in range(int(line))]
        print(json.dumps({"seconds": seconds, "rss_mb": peak_mb()}), flush=True)
    group.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
