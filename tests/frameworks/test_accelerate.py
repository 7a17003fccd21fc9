"""Accelerate: a model that is decided and then prepared, and one that the FSDP plugin checkpoints by itself."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

import recollect
from recollect import Recompute

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a framework says while it is imported is not ours
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # with one rank


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.dropout = nn.Dropout(dropout)
        self.narrow = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.narrow(self.dropout(self.wide(x).tanh()))


class Model(nn.Module):
    def __init__(self, dropout=0.3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(3))
        self.runs = self.replays = 0

        def count(*_):
            self.runs += 1
            self.replays += recollect.is_recomputing()

        for layer in self.layers:
            layer.register_forward_pre_hook(count)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def train(accelerator, model):
    """Two steps. Gives the weights, whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(7)).to(accelerator.device)
    torch.manual_seed(1)
    for _ in range(2):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.distributed_type == DistributedType.FSDP:
        sharded = [one for one in prepared.modules() if isinstance(one, FullyShardedDataParallel | FSDPModule)]
        assert len(sharded) in (1 + 3, 1 + 2 * 3)  # in version 2 the wrappers of the layers are too
    # No method of accelerate: how it gathers a state dict depends on the kind of machine.
    return {name: whole(parameter.detach()) for name, parameter in prepared.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def assert_same(found, expected):
    """By value: the names differ by the wrappers."""
    assert len(found) == len(expected) > 0
    assert all(torch.equal(*pair) for pair in zip(found.values(), expected.values(), strict=True))


@pytest.fixture
def accelerator_of(own_environment):
    """Makes accelerators, which share a state that outlives them."""

    def make(plugin=None, **options):
        AcceleratorState._reset_state(reset_partial_state=True)
        made = accelerate.Accelerator(cpu=True, **options)
        if plugin is not None:
            # Accelerate shards on accelerators only. The process group of the test is enough to do it here.
            if made.mixed_precision != "no":
                plugin.set_mixed_precision(made.mixed_precision)
            for state in (made.state, accelerate.PartialState()):
                state.distributed_type = DistributedType.FSDP
                state.device = torch.device("cpu")
            made.state.fsdp_plugin = plugin
        return made

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def fsdp(version, **options):
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        use_orig_params=True if version == 1 else None,
        **options,
    )


LAYERS = {"layers.*": Recompute()}


@pytest.mark.parametrize(
    "options",
    [{}, {"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 2}],
    ids=["plain", "bfloat16", "accumulated"],
)
@pytest.mark.parametrize("decisions", [LAYERS, {"": Recompute()}], ids=["layers", "all"])
def test_a_decided_model_is_prepared(accelerator_of, options, decisions):
    expected = train(accelerator_of(**options), Model())
    model = Model()
    with recollect.apply(model, decisions):
        assert_same(train(accelerator_of(**options), model), expected)
    assert model.runs == 2 * 2 * 3


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_decided_model_is_sharded(accelerator_of, version, precision):
    expected = train(accelerator_of(fsdp(version), mixed_precision=precision), Model())
    model = Model()
    with recollect.apply(model, LAYERS):
        assert_same(train(accelerator_of(fsdp(version), mixed_precision=precision), model), expected)
    assert model.runs == 2 * 2 * 3


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("decided", ["layers.0", "layers.1"])
def test_all_layers_are_sharded_where_one_is_decided(accelerator_of, version, decided):
    """Accelerate takes the class from the first module with that name, which may be a decided one or not."""
    expected = train(accelerator_of(fsdp(version)), Model())
    model = Model()
    with recollect.apply(model, {decided: Recompute()}):
        assert_same(train(accelerator_of(fsdp(version)), model), expected)
    assert model.runs == 2 * (3 + 1)


@pytest.mark.usefixtures("one_rank")
def test_decisions_after_it_was_prepared(accelerator_of):
    accelerator, model = accelerator_of(fsdp(2)), Model()
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with recollect.apply(prepared, LAYERS):
        accelerator.backward(prepared(torch.randn(4, 8)).square().mean())
    assert model.runs == 2 * 3


def test_states_are_saved_and_loaded_and_the_model_is_unwrapped(accelerator_of, tmp_path):
    accelerator, model = accelerator_of(mixed_precision="bf16"), Model()
    names = list(model.state_dict())
    recollect.apply(model, {"": Recompute()})
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.save_state(tmp_path)
    accelerator.backward(prepared(torch.randn(4, 8)).square().mean())
    optimizer.step()
    assert not any(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    accelerator.load_state(tmp_path)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert list(accelerator.get_state_dict(prepared)) == names
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert bare is model
    assert bare(torch.randn(4, 8)).dtype == torch.float32


# --- Checkpointed by the plugin, under the patch ---


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("version", "options"),
    [(1, {}), (2, {}), (2, {"activation_checkpointing_offload": True})],
    ids=["version 1", "version 2", "offloaded"],
)
def test_activation_checkpointing_of_the_plugin_is_ours_under_the_patch(accelerator_of, version, options):
    expected = train(accelerator_of(fsdp(version)), Model(dropout=0.0))
    model = Model(dropout=0.0)
    with recollect.patch_torch(determinism_check="values"):
        plugin = fsdp(version, activation_checkpointing=True, **options)
        assert_same(train(accelerator_of(plugin), model), expected)
    assert (model.runs, model.replays) == (2 * 2 * 3, 2 * 3)


@pytest.mark.usefixtures("one_rank")
def test_dropout_under_version_1(accelerator_of):
    expected = train(accelerator_of(fsdp(1)), Model())
    with recollect.patch_torch(determinism_check="first"):
        assert_same(train(accelerator_of(fsdp(1, activation_checkpointing=True)), Model()), expected)


@pytest.mark.usefixtures("one_rank")
def test_version_2_asks_for_other_dropout_masks_in_the_replay_and_that_is_found(accelerator_of):
    """It passes `preserve_rng_state=False`, which is wrong for a model with dropout."""
    accelerator = accelerator_of(fsdp(2, activation_checkpointing=True))
    with (
        recollect.patch_torch(determinism_check="first"),
        pytest.warns(UserWarning, match="draws random numbers .* and was told preserve_rng_state=False"),
        pytest.raises(recollect.CheckpointError, match="drawn from in the forward and is not preserved"),
    ):
        train(accelerator, Model())
