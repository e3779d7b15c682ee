"""Makes the mistakes of FSDP trainings on a CPU, with one gloo rank; prints `name:` and the traceback of each."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from tempfile import mkdtemp
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class Network(nn.Module):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, device=device)
        self.head = nn.Linear(8, 8, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))  # type: ignore[no-any-return]


def sharded(network: nn.Module, *inner: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (1,))
    for module in (*inner, network):
        fully_shard(module, mesh=mesh)
    return network


def row() -> torch.Tensor:
    return torch.ones(1, 8)


def part_of_the_model() -> None:
    sharded(Network()).inner(row())


def reads_a_weight() -> None:
    network = Network()
    row() @ sharded(network, network.head).head.weight.t()


def weights_without_data() -> None:
    sharded(Network("meta"))(row())


def tied() -> None:
    network = Network()
    network.head.weight = network.inner.weight
    sharded(network, network.inner)(row())


def part_first() -> None:
    network = Network()
    sharded(network, network.inner).inner(row())
    network(row())


def two_trained_dtypes() -> None:
    network = Network()
    network.head.to(torch.bfloat16)
    sharded(network)(row())


def bitsandbytes_step(name: str = "AdamW8bit") -> None:
    import bitsandbytes

    network = sharded(nn.Linear(128, 128))
    optimizer = getattr(bitsandbytes.optim, name)(network.parameters(), lr=1e-3)
    network(torch.ones(1, 128)).sum().backward()
    optimizer.step()


def saves_what_it_holds() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sharded(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))).save_pretrained(mkdtemp())


def moved() -> None:
    network = sharded(Network())
    view = network.inner.weight.view(-1)
    network.to(torch.float64)
    del view


def version_1(change: Callable[[Network], object]) -> None:
    network = Network()
    change(network)
    FullyShardedDataParallel(network, device_id=torch.device("cpu"), use_orig_params=False)


def stored_as_bytes(network: Network) -> None:
    network.inner.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)


def loads_a_shard() -> None:
    nn.Linear(8, 8).load_state_dict({"weight": torch.zeros(0), "bias": torch.zeros(8)})


MISTAKES: dict[str, tuple[str, Callable[[], object]]] = {
    "part of the model": ("fsdp-sharded-weight", part_of_the_model),
    "reads a weight": ("fsdp-sharded-weight", reads_a_weight),
    "weights without data": ("fsdp-meta", weights_without_data),
    "tied": ("fsdp-tied-groups", tied),
    "part first": ("fsdp-part-first", part_first),
    "two trained dtypes": ("fsdp-trained-dtypes", two_trained_dtypes),
    "bitsandbytes": ("fsdp-optimizer", bitsandbytes_step),
    "bitsandbytes, 32 bit": ("fsdp-optimizer", lambda: bitsandbytes_step("PagedAdamW32bit")),
    "saves what it holds": ("fsdp-saved-shards", saves_what_it_holds),
    "moved": ("fsdp-moved", moved),
    "version 1: dtypes": ("fsdp-dtypes", lambda: version_1(lambda network: network.head.to(torch.bfloat16))),
    "version 1: frozen": ("fsdp-frozen", lambda: version_1(lambda network: network.head.requires_grad_(False))),
    "version 1: integers": ("fsdp-integers", lambda: version_1(stored_as_bytes)),
    "loads a shard": ("shards-in-checkpoint", loads_a_shard),
}
"""Mistake → the form of its error, and what makes it."""


if __name__ == "__main__":
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    for name, (_, mistake) in MISTAKES.items():
        print(f"{name}:")
        try:
            mistake()
        except Exception:
            print(traceback.format_exc())
