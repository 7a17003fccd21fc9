"""DTensors on a GPU: their random operators draw by a tracker that CPUs do not have. A mesh of one rank will do."""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import recollect

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def mesh():
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("tp",))
    distributed.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_dropout_of_dtensors_is_the_same_again(mesh, placement):
    def function(x):
        return (F.dropout(x.sin(), 0.5) * F.dropout(x, 0.3)).exp()

    x = distribute_tensor(torch.randn(64, 64, device="cuda"), mesh, [placement]).requires_grad_()

    def run(call):
        torch.manual_seed(0)
        y = call(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return y.to_local(), grad.to_local(), torch.rand(3, device="cuda")

    expected = run(function)
    for _ in range(2):
        assert all(map(torch.equal, run(lambda x: recollect.checkpoint(function, x)), expected))


def test_the_state_of_the_tracker_moves_as_without_regions(mesh):
    def function(x):
        return F.dropout(x.sin(), 0.5).exp()

    x = distribute_tensor(torch.randn(64, 64, device="cuda"), mesh, [Shard(0)]).requires_grad_()

    def run(call):
        torch.manual_seed(0)
        first = call(x)
        first.sum().backward()
        return call(x).to_local()  # what is drawn after a backward

    assert torch.equal(run(lambda x: recollect.checkpoint(function, x)), run(function))
