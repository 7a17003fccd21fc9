"""Lightning: a fit with the callback is the plain fit, bit for bit, and leaves nothing behind."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import recollect
from recollect import Recompute, Save, policies

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a framework says while it is imported is not ours
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    pytorch_lightning = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from lightning.pytorch.tuner import Tuner

    from recollect.integrations.lightning import Recollect
    from recollect.integrations.pytorch_lightning import Recollect as OldRecollect

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]

LAYERS = {"model.*": Recompute()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.3)
        self.narrow = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.narrow(self.dropout(self.wide(x).tanh()))


def blocks():
    return nn.Sequential(*(Block() for _ in range(3)))


def module_class(package, **methods):
    """A LightningModule of one of the packages."""

    def __init__(self):  # noqa: N807
        super(made, self).__init__()
        torch.manual_seed(0)
        self.model = blocks()
        self.runs = self.replays = 0
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append([type(block) is Block for block in self.model])
        loss = self.model(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    namespace = {
        "__init__": __init__,
        "training_step": training_step,
        "configure_optimizers": configure_optimizers,
        **methods,
    }
    made = type("Lit", (package.LightningModule,), namespace)
    return made


Lit = module_class(lightning)


def count_runs(module):
    def count(*_):
        module.runs += 1
        module.replays += recollect.is_recomputing()

    for block in module.model:
        block.register_forward_pre_hook(count)
    return module


def data(batches=2):
    generator = torch.Generator().manual_seed(7)
    return DataLoader(TensorDataset(torch.randn(4 * batches, 8, generator=generator)), batch_size=4)


def trainer(*callbacks, package=lightning, **options):
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "accelerator": "cpu",
        "max_epochs": 1,
    }
    return package.Trainer(callbacks=list(callbacks), **{**quiet, **options})


def fit(module, *callbacks, ckpt_path=None, **options):
    torch.manual_seed(1)
    made = trainer(*callbacks, **options)
    made.fit(module, data(), ckpt_path=ckpt_path)
    return made


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_plain(module):
    assert [type(block) for block in module.model] == [Block] * 3
    module.runs = 0
    module.model(torch.randn(2, 8)).sum().backward()
    assert module.runs == 3


@pytest.fixture(scope="module")
def plain():
    """The weights after two steps without a callback."""
    module = Lit()
    fit(module)
    return weights(module)


# --- A fit ---


@pytest.mark.parametrize(
    "decisions",
    [
        LAYERS,
        {Block: Recompute(policy=policies.save_matmuls)},
        {"model.*": Recompute(), "model.*.wide": Save()},
        lambda name, module: Recompute() if isinstance(module, Block) else None,
    ],
    ids=["pattern", "class", "nested", "function"],
)
def test_a_fit_ends_in_the_same_weights_and_runs_every_layer_twice(plain, decisions):
    module = count_runs(Lit())
    fit(module, Recollect(decisions))
    assert_same(weights(module), plain)
    assert module.runs == 2 * 2 * 3
    assert module.seen == [[False] * 3] * 2
    assert_plain(module)


def test_the_other_package(plain):
    module = count_runs(module_class(pytorch_lightning)())
    fit(module, OldRecollect(LAYERS), package=pytorch_lightning)
    assert_same(weights(module), plain)
    assert module.runs == 2 * 2 * 3
    assert_plain(module)


def test_a_plan_is_asked_to_apply_itself_to_the_part_it_is_for(plain):
    models = []

    class Plan:
        def apply(self, model):
            models.append(model)
            return recollect.apply(model, {"*": Recompute()})

    module = count_runs(Lit())
    fit(module, Recollect(Plan(), within="model"))
    assert models == [module.model]
    assert_same(weights(module), plain)
    assert module.runs == 2 * 2 * 3
    assert_plain(module)


def test_decisions_within_a_part(plain):
    module = count_runs(Lit())
    fit(module, Recollect({"0": Recompute()}, within="model"))
    assert_same(weights(module), plain)
    assert module.seen == [[False, True, True]] * 2
    assert module.runs == 2 * (3 + 1)


def test_options_reach_the_regions():
    """A hook that does something else in the replay is found, or not looked for."""

    def fit_with_flip(check):
        module = Lit()
        factors = iter([1.0, 2.0] * 20)
        module.model[0].dropout.register_forward_hook(lambda *args: args[2] * next(factors))
        fit(module, Recollect({"model.0": Recompute()}, determinism_check=check))

    fit_with_flip("none")
    with pytest.raises(recollect.CheckpointError, match=r"region 'model\.0', Block"):
        fit_with_flip("first")


def test_two_callbacks_for_different_parts(plain):
    module = count_runs(Lit())
    fit(module, Recollect({"model.0": Recompute()}), Recollect({"model.2": Recompute()}))
    assert_same(weights(module), plain)
    assert module.seen == [[False, True, False]] * 2
    assert module.runs == 2 * (3 + 2)
    assert_plain(module)


def test_a_module_that_brings_the_callback_itself(plain):
    module = count_runs(module_class(lightning, configure_callbacks=lambda self: [Recollect(LAYERS)])())
    fit(module)
    assert_same(weights(module), plain)
    assert module.runs == 2 * 2 * 3
    assert_plain(module)


@pytest.mark.parametrize("package", [lightning, pytorch_lightning], ids=lambda package: package.__name__)
def test_the_callback_of_the_other_package_will_do(plain, package):
    """Not documented, but nothing stands against it where it is one of a list."""
    module = count_runs(module_class(package)())
    fit(module, (OldRecollect if package is lightning else Recollect)(LAYERS), package=package)
    assert_same(weights(module), plain)
    assert module.runs == 2 * 2 * 3


def test_the_callback_is_copied_and_pickled(plain):
    """As it is for processes that a strategy starts."""
    for callback in (copy.deepcopy(Recollect(LAYERS)), pickle.loads(pickle.dumps(Recollect(LAYERS)))):
        module = count_runs(Lit())
        fit(module, callback)
        assert_same(weights(module), plain)
        assert module.runs == 2 * 2 * 3


def test_several_fits_in_a_row():
    expected, module, callback = Lit(), count_runs(Lit()), Recollect(LAYERS)
    for _ in range(2):
        fit(expected)
        fit(module, callback)
        assert_same(weights(module), weights(expected))
        assert_plain(module)
    another = count_runs(Lit())
    fit(another, callback)
    assert another.runs == 2 * 2 * 3
    assert_plain(another)


def test_one_trainer_for_several_fits():
    expected, module = Lit(), count_runs(Lit())
    for each, made in ((expected, trainer()), (module, trainer(Recollect(LAYERS)))):
        for epochs in (1, 2):
            torch.manual_seed(1)
            made.fit_loop.max_epochs = epochs
            made.fit(each, data())
    assert_same(weights(module), weights(expected))
    assert module.runs == 2 * 2 * 2 * 3


def test_evaluation_is_plain():
    module = count_runs(
        module_class(
            lightning,
            validation_step=lambda self, batch, index: self.model(batch[0]).sum(),
            test_step=lambda self, batch, index: self.model(batch[0]).sum(),
            predict_step=lambda self, batch, index: self.model(batch[0]),
        )()
    )
    made = trainer(Recollect(LAYERS))
    made.validate(module, data(), verbose=False)
    made.test(module, data(), verbose=False)
    made.predict(module, data())
    assert module.runs == 3 * 2 * 3
    module.runs = 0
    made.fit(module, data(), data())  # two steps, two batches of validation, and two as a check before
    assert module.runs == 2 * 2 * 3 + 4 * 3
    assert_plain(module)


# --- How it ends ---


@pytest.mark.parametrize("place", ["setup", "configure_model", "training_step", "on_train_end"])
def test_an_error_leaves_a_plain_module_and_a_plain_strategy(place):
    def fail(self, *args, **kwargs):
        raise ArithmeticError("on purpose")

    module, callback = count_runs(module_class(lightning, **{place: fail})()), Recollect(LAYERS)
    made = trainer(callback)
    with pytest.raises(ArithmeticError):
        made.fit(module, data())
    assert "setup" not in vars(made.strategy)
    assert_plain(module)
    after = count_runs(Lit())
    made.fit(after, data())
    assert after.seen == [[False] * 3] * len(after.seen)
    assert_plain(after)


def test_an_error_in_another_callbacks_end_is_made_up_for():
    class Bad(lightning.pytorch.Callback):
        def on_train_start(self, *_):
            raise ArithmeticError("on purpose")

        def on_exception(self, *_):
            raise LookupError("on purpose")

    module, callback = count_runs(Lit()), Recollect(LAYERS)
    with pytest.raises(LookupError):
        fit(module, Bad(), callback)
    fit(module, callback)
    assert_plain(module)


def test_an_interrupt_leaves_a_plain_module():
    def interrupt(self, *args):
        raise KeyboardInterrupt

    module = count_runs(module_class(lightning, training_step=interrupt)())
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(module, Recollect(LAYERS))
    assert_plain(module)


@pytest.mark.parametrize(
    ("decisions", "options", "error", "message"),
    [
        (3, {}, TypeError, "decisions must be what recollect.apply takes"),
        ({}, {}, ValueError, "decisions must hold at least one pattern, got an empty dict"),
        (LAYERS, {"within": nn.Linear(2, 2)}, TypeError, "within must be the name of a module"),
        (LAYERS, {"determinism_check": "all"}, ValueError, "determinism_check"),
    ],
)
def test_mistakes_that_show_at_once(decisions, options, error, message):
    with pytest.raises(error, match=message):
        Recollect(decisions, **options)


@pytest.mark.parametrize(
    ("decisions", "options", "error", "message"),
    [
        ({"layers.*": Recompute()}, {}, ValueError, "matches no module of Lit"),
        ({"*": 3}, {}, TypeError, r"decisions takes recollect\.Save\(\)"),
        ({"*": Recompute()}, {"within": "modle"}, ValueError, "within: Lit has no module 'modle'"),
    ],
)
def test_mistakes_that_show_when_the_module_is_there(decisions, options, error, message):
    module = count_runs(Lit())
    with pytest.raises(error, match=message):
        fit(module, Recollect(decisions, **options))
    assert_plain(module)


# --- What else a fit has in it ---


@pytest.mark.parametrize("place", ["setup", "configure_model"])
def test_modules_made_late_are_found(plain, place):
    def build(self, *args, **kwargs):
        torch.manual_seed(0)
        self.model = blocks()
        count_runs(self)
        torch.manual_seed(1)

    module = module_class(lightning, **{place: build})()
    module.model = None
    fit(module, Recollect(LAYERS))
    assert_same(weights(module), plain)
    assert module.runs == 2 * 2 * 3


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_checkpoints_are_those_of_a_plain_fit_and_training_goes_on_from_them(tmp_path):
    files = {}
    for name, callbacks in (("plain", []), ("ours", [Recollect(LAYERS)])):
        saving = ModelCheckpoint(dirpath=tmp_path / name, every_n_train_steps=1, save_top_k=-1)
        fit(Lit(), *callbacks, saving, enable_checkpointing=True)
        files[name] = sorted((tmp_path / name).iterdir())
    assert len(files["ours"]) == 2
    for ours, expected in zip(files["ours"], files["plain"], strict=True):
        one, other = (torch.load(file, weights_only=False) for file in (ours, expected))
        assert_same(one["state_dict"], other["state_dict"])
        assert list(one["state_dict"]) == list(other["state_dict"])
    ends = []
    for first, callbacks in ((files["ours"][1], []), (files["plain"][1], [Recollect(LAYERS)])):
        module = count_runs(Lit())
        saving = ModelCheckpoint(dirpath=tmp_path / first.parent.name / "after", every_n_train_steps=1)
        fit(module, *callbacks, saving, ckpt_path=first, max_epochs=2, enable_checkpointing=True)
        ends.append((module, weights(module)))
    assert_same(ends[0][1], ends[1][1])
    assert [module.runs for module, _ in ends] == [2 * 3, 2 * 2 * 3]


def test_a_module_that_is_copied_and_saved_in_the_middle():
    class Copies(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            file = io.BytesIO()
            torch.save(module.model, file)
            file.seek(0)
            self.made = [copy.deepcopy(module.model), torch.load(file, weights_only=False)]

    module, copies = Lit(), Copies()
    fit(module, Recollect(LAYERS), copies)
    for made in copies.made:
        recollect.unapply(made)
        assert_same(weights(made), weights(module.model))
        assert [type(block) for block in made] == [Block] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"gradient_clip_val": 0.01},
        {"detect_anomaly": True},
        {"fast_dev_run": True},
    ],
    ids=lambda options: next(iter(options)) + "-" + str(next(iter(options.values()))),
)
def test_options_of_the_trainer(options):
    expected, module = Lit(), count_runs(Lit())
    fit(expected, **options)
    fit(module, Recollect(LAYERS), **options)
    assert_same(weights(module), weights(expected))
    assert module.runs == 2 * 3 * len(module.seen)


def test_manual_optimization_with_two_losses():
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        out = self.model(batch[0])
        self.manual_backward(out.square().mean(), retain_graph=True)
        self.manual_backward(out.abs().mean())
        optimizer.step()

    made = module_class(lightning, training_step=training_step, automatic_optimization=property(lambda self: False))
    expected, module = made(), count_runs(made())
    fit(expected)
    fit(module, Recollect(LAYERS))
    assert_same(weights(module), weights(expected))


def step_without_log(self, batch, index):
    return self.model(batch[0]).square().mean()  # the compiler has no success with Lightning's `log`


def configure_model(self):
    self.model.compile(backend="eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, of its inputs
@pytest.mark.parametrize("where", ["around", "within"])
def test_compiled(plain, where):
    torch._dynamo.reset()
    methods = {"training_step": step_without_log} | ({"configure_model": configure_model} if where == "within" else {})
    module = count_runs(module_class(lightning, **methods)())
    fit(torch.compile(module, backend="eager") if where == "around" else module, Recollect(LAYERS))
    assert_same(weights(module), plain)
    assert module.runs == 2 * 2 * 3


def test_weight_averaging():
    expected, module = Lit(), count_runs(Lit())
    averages = []
    for each, callbacks in ((expected, []), (module, [Recollect(LAYERS)])):
        averaging = WeightAveraging()
        fit(each, *callbacks, averaging)
        averages.append(weights(each))
    assert_same(averages[1], averages[0])
    assert_plain(module)


def test_the_search_for_a_learning_rate(tmp_path):
    module = count_runs(Lit())
    module.lr = 0.01
    made = trainer(Recollect(LAYERS), default_root_dir=tmp_path)
    Tuner(made).lr_find(module, data(), num_training=4, update_attr=False)
    assert module.runs == 2 * 3 * len(module.seen) > 0
    assert_plain(module)
    made.fit(module, data())
    assert_plain(module)


@pytest.mark.usefixtures("own_environment")
def test_under_ddp():
    expected, module = Lit(), count_runs(Lit())
    fit(expected, strategy="ddp", devices=1)
    made = fit(module, Recollect(LAYERS), strategy="ddp", devices=1)
    torch.distributed.destroy_process_group()
    assert type(made.strategy).__name__ == "DDPStrategy"
    assert_same(weights(module), weights(expected))
    assert module.runs == 2 * 2 * 3
    assert_plain(module)


class Flattened(FullyShardedDataParallel):
    """On the CPU, which has to be asked for."""

    def __init__(self, module, **options):
        super().__init__(module, **{**options, "device_id": torch.device("cpu")})


class FSDP(FSDPStrategy):
    """Lightning refuses its own class, and no other, where there is no accelerator."""


@pytest.fixture
def sharded_fit(one_rank, monkeypatch):
    """A fit under FSDP. Gives the module and its weights."""
    monkeypatch.setattr(torch.distributed.fsdp, "FullyShardedDataParallel", Flattened)

    def run(*callbacks, **options):
        module = count_runs(Lit())
        strategy = FSDP(auto_wrap_policy={Block}, process_group_backend="gloo", **options)
        fit(module, *callbacks, strategy=strategy, devices=1)
        return module, [parameter.detach().clone() for parameter in module.parameters()]

    return run


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_what_a_strategy_wraps_goes_around_the_regions(sharded_fit):
    _, expected = sharded_fit()
    module, found = sharded_fit(Recollect({"model.*": Recompute(), "model.*.wide": Save()}))
    assert {type(one) for one in module.model} == {FullyShardedDataParallel}
    assert {type(one.module) for one in module.model} == {Block}
    assert (module.runs, module.replays) == (2 * 2 * 3, 2 * 3)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_activation_checkpointing_of_the_strategy_is_ours_under_the_patch(sharded_fit):
    _, expected = sharded_fit()
    with recollect.patch_torch(determinism_check="first"):
        module, found = sharded_fit(activation_checkpointing_policy={Block})
    assert (module.runs, module.replays) == (2 * 2 * 3, 2 * 3)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.usefixtures("one_rank")
def test_what_is_sharded_in_configure_model():
    def configure_model(self):
        for part in (*self.model, self.model):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    runs, found, kinds = [], [], []
    for callbacks in ([], [Recollect(LAYERS)]):
        module = count_runs(module_class(lightning, configure_model=configure_model)())
        fit(module, *callbacks, strategy=ModelParallelStrategy(process_group_backend="gloo"), devices=1)
        runs.append(module.runs)
        kinds.append([type(one).__mro__ for one in module.model])
        found.append([parameter.detach().full_tensor() for parameter in module.parameters()])
    assert runs == [2 * 3, 2 * 2 * 3]
    assert kinds[0] == kinds[1]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_fabric_needs_no_callback(plain):
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="cpu")
    module = blocks()
    handle = recollect.apply(module, {"*": Recompute()})
    module, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    torch.manual_seed(1)
    for (x,) in data():
        optimizer.zero_grad()
        fabric.backward(module(x).square().mean())
        optimizer.step()
    handle.remove()
    assert_same({f"model.{name}": value for name, value in weights(module).items()}, plain)
