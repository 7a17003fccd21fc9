"""The wrappers of torch.distributed, which frameworks build on: under the patch they are ours, within FSDP too."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import recollect
from recollect import policies
from tools import CountOperators

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # with one rank


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 16, bias=False)
        self.dropout = nn.Dropout(0.3)
        self.narrow = nn.Linear(16, 8, bias=False)
        self.out = nn.Linear(8, 8, bias=False)
        self.replays = 0

    def forward(self, x):
        self.replays += recollect.is_recomputing()
        return x + self.out(self.narrow(self.dropout(self.wide(x).tanh())).tanh()).tanh()


def model_of(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def step(model):
    torch.manual_seed(1)
    # The reentrant variant passes gradients only where an input needs one.
    loss = model(torch.ones(4, 8, requires_grad=True)).square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one.clone() for one in gradients]


def wrap_each(model, wrapper=checkpoint_wrapper):
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Block)
    )
    return model


def shard_each(model):
    mesh = init_device_mesh("cpu", (1,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


def flatten_each(model):
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
    )


def in_wrappers(wrapper):
    return functools.partial(wrap_each, wrapper=wrapper)


WRAPPERS = {
    "plain": wrap_each,
    "reentrant": in_wrappers(functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)),
    "offloaded": in_wrappers(lambda block: offload_wrapper(checkpoint_wrapper(block))),
    "checked": in_wrappers(functools.partial(checkpoint_wrapper, determinism_check="values", early_stop=False)),
    "then sharded": lambda model: shard_each(wrap_each(model)),
    "then flattened": lambda model: flatten_each(wrap_each(model)),
    "flattened first": lambda model: wrap_each(flatten_each(model)),
}


def blocks_of(model):
    return [module for module in model.modules() if isinstance(module, Block)]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("how", WRAPPERS)
@pytest.mark.parametrize(
    "patch", [{"determinism_check": "first"}, {"policy": policies.save_matmuls}], ids=["", "policy"]
)
def test_a_wrapped_model_has_the_gradients_of_the_plain_one(how, patch):
    expected = step(model_of())
    with recollect.patch_torch(**patch):
        model = WRAPPERS[how](model_of())
        found = step(model)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert [block.replays for block in blocks_of(model)] == [1, 1, 1]


def test_names_stay_in_the_state_dict():
    with recollect.patch_torch():
        model = wrap_each(model_of())
        assert list(model.state_dict()) == list(model_of().state_dict())
        model.load_state_dict(model_of().state_dict())


class EverySecond:
    """As torchtitan chooses: attention and every second product are kept, the rest is recomputed."""

    def __init__(self):
        self.products = {False: 0, True: 0}

    def __call__(self, context, operator, *args, **kwargs):
        if operator is torch.ops.aten.mm.default:
            self.products[context.is_recompute] += 1
            if self.products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_checkpointing_with_a_policy_that_counts():
    expected = step(model_of())
    with recollect.patch_torch():
        # Bound before the patch and after it: names that a module imported are ours too.
        contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts)
        assert create_selective_checkpoint_contexts is contexts.func
        wrapper = functools.partial(
            checkpoint_wrapper, context_fn=lambda: contexts(EverySecond()), early_stop=False, preserve_rng_state=True
        )
        model = wrap_each(model_of(), wrapper)
        with CountOperators() as operators:
            found = step(model)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    # Three products in a block: all in the forward, the second in the replay, two for each in the backward.
    assert operators.counts["mm"] == 3 * 3 + 3 * 1 + 3 * 3 * 2
