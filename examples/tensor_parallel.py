"""Tensor parallel: layers split over two ranks, recomputed, their inputs kept in parts: one half on each rank.

By python alone it starts both ranks itself; `torchrun --nproc-per-node 2` does too.
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn

import recollect


def train(rank: int, size: int) -> None:
    distributed.init_process_group("gloo", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    for layer in layers:
        parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = nn.Sequential(*layers)
    recollect.apply(model, {"*": recollect.Recompute(inputs=recollect.Shard("tp", mesh=mesh, min_bytes=0))})
    runs: list[bool] = []
    layers[0][1].register_forward_pre_hook(lambda *_: runs.append(recollect.is_recomputing()))
    model(torch.randn(8, 64, requires_grad=True) * 2).square().mean().backward()
    if rank == 0:
        print(f"runs of the first layer: {runs.count(False)} in forward, {runs.count(True)} in backward", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 9999))
        spawn(train, (2,), nprocs=2)
