"""`fully_shard` (FSDP2) and regions: every order, every nesting; collectives are counted, gradients are bit-equal."""

import contextlib
import functools
import itertools
import tempfile

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint as saving
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import recollect
from process_group import collectives, result, run_on_ranks
from recollect import composable, policies
from tools import CountOperators

WIDTH, LAYERS = 8, 3
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RECOMPUTE = {"layers.*": recollect.Recompute()}


# --- A model, in units of different sizes, and how it is trained ---


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(0.2), nn.Linear(hidden, WIDTH))
        self.runs = []

    def forward(self, x):
        self.runs.append(recollect.is_recomputing())
        return x + recollect.region("inner", self.inner)(x).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(4 * number + 8) for number in range(LAYERS))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.last(self.run_layers(self.first(x)))

    def run_layers(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def size_of(*modules):
    return sum(one.numel() for module in modules for one in module.parameters())


def units_of(model):
    """What is sharded together, by the number of its elements."""
    units = {size_of(layer): f"layer {number}" for number, layer in enumerate(model.layers)}
    return {**units, size_of(model.first, model.last): "root"}


UNITS = units_of(Model())


def shard(model, **options):
    after = {"reshard_after_forward": options.pop("reshard_after_forward", True)}
    for layer in model.layers:
        fully_shard(layer, **after, **options)
    return fully_shard(model, **options)


def made(before=None, after=None, **options):
    """A sharded model; `before` and `after` are done to it before and after it is sharded."""
    torch.manual_seed(0)
    model = Model()
    if before is not None:
        before(model)
    shard(model, **options)
    if after is not None:
        after(model)
    return model


def batch_of(rank, step):
    torch.manual_seed(100 * rank + step)  # random numbers in the model follow from it too
    return torch.randn(4, WIDTH, requires_grad=True)


def gradients(model):
    """Of all parameters, whole."""
    return [
        (one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad).clone() for one in model.parameters()
    ]


def optimizer_of(model):
    # A product by a power of two is exact, so that it is all one how a processor adds it, at the end of a shard or not.
    return torch.optim.SGD(model.parameters(), lr=2**-3)


def train(model, rank, steps=3):
    """The gradients of some steps, and what was gathered and reduced in each."""
    optimizer = optimizer_of(model)
    seen, counts = [], []
    for step in range(steps):
        x = batch_of(rank, step)
        with collectives() as counted:
            model(x).square().mean().backward()
        counts.append(in_words(counted))
        seen.append([*gradients(model), x.grad])
        optimizer.step()
        optimizer.zero_grad()
    return seen, counts


def train_alone(rank, steps=3):
    """The same in one process: what all ranks do, one after the other."""
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model)
    seen = []
    for step in range(steps):
        of_ranks, inputs = [], []
        for each in range(distributed.get_world_size()):
            x = batch_of(each, step)
            model(x).square().mean().backward()
            of_ranks.append(gradients(model))
            optimizer.zero_grad()
            inputs.append(x.grad)
        for parameter, *of_each in zip(model.parameters(), *of_ranks, strict=True):
            parameter.grad = sum(of_each) / len(of_each)
        seen.append([*gradients(model), inputs[rank]])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def in_words(counted):
    words = {}
    for (what, size, when), number in sorted(counted.items()):
        words.setdefault(UNITS.get(size, size), {})[f"{what} in {when}"] = number
    return words


def equal(got, expected):
    return all(torch.equal(*pair) for pair in zip(flat(got), flat(expected), strict=True))


def flat(value):
    return list(itertools.chain.from_iterable(map(flat, value))) if isinstance(value, list) else [value]


# --- Regions: what can be made one, and how ---


def applied(model, check="first", decisions=RECOMPUTE):
    recollect.apply(model, decisions, determinism_check=check)


def in_place(model, check="first"):
    for layer in model.layers:
        composable.checkpoint(layer, determinism_check=check)


def inside(model, check="first"):
    """Within the module that is sharded, so that neither gathers nor casts are part of the region."""
    for layer in model.layers:
        layer.forward = functools.partial(recollect.checkpoint, layer.forward, determinism_check=check)


def parts(model, check="first"):
    applied(model, check, {"layers.*.inner": recollect.Recompute()})


def rematted(model, check="first"):
    """Called from outside, as a function."""
    functions = [recollect.remat(layer, determinism_check=check) for layer in model.layers]
    model.run_layers = lambda x: functools.reduce(lambda x, layer: layer(x), functions, x)


def several(model, check="first"):
    """One region over all layers."""
    run_layers = Model.run_layers
    model.run_layers = lambda x: recollect.checkpoint(lambda x: run_layers(model, x), x, determinism_check=check)


def everything(model, check="first"):
    applied(model, check, {"": recollect.Recompute()})


def within_each_other(model, check="first"):
    """A region over all layers in which every layer is one."""
    in_place(model, check)
    several(model, check)


def with_products(model, check="first"):
    applied(model, check, {"layers.*": recollect.Recompute(policy=policies.save_matmuls)})


def with_names(model, check="first"):
    applied(model, check, {"layers.*": recollect.Recompute(policy=recollect.by_name({"inner": recollect.Save()}))})


def with_parts_kept(model, check="first"):
    applied(model, check, {**RECOMPUTE, "layers.*.inner.3": recollect.Save()})


NESTINGS = (applied, in_place, inside, parts, rematted, several, everything, within_each_other)
NESTINGS += (with_products, with_names, with_parts_kept)
PRECISIONS = {"float32": {}, "mixed": {"mp_policy": MIXED}}


def nestings_for(precision):
    # Before 2.13, FSDP does not cast the inputs of a module that a replay calls, with any checkpointing.
    casts = precision == "float32" or torch.__version__ >= (2, 13)
    return [nesting for nesting in NESTINGS if casts or nesting is not everything]


def once_each(after_forward):
    """The least: one gather for the forward, one for the backward if it was let go of, one reduction."""
    words = {}
    for unit in UNITS.values():
        words[unit] = {"gather in forward": 1, "scatter in backward": 1}
        if after_forward and unit != "root":
            words[unit]["gather for backward"] = 1
    return words


def least(counts):
    """The same of what was counted: gathers of the replay are those of the backward."""
    return {
        unit: {
            what: number
            for what, number in {
                "gather in forward": each.get("gather in forward", 0),
                "gather for backward": each.get("gather in replay", 0) + each.get("gather in backward", 0),
                "scatter in backward": each.get("scatter in backward", 0),
                **{one: each[one] for one in each if not one.startswith(("gather", "scatter in backward"))},
            }.items()
            if number
        }
        for unit, each in counts.items()
    }


def every_nesting(rank, *, after_forward, precision):
    """For each nesting: whether gradients are those of the model without regions, and what was counted."""
    options = {"reshard_after_forward": after_forward, **PRECISIONS[precision]}
    expected, counts = train(made(**options), rank)
    found = {"plain": ("equal" if precision == "mixed" or equal(expected, train_alone(rank)) else "differs", counts)}
    for nesting, place in itertools.product(nestings_for(precision), ("before", "after")):
        model = made(**{place: nesting}, **options)
        got, counts = train(model, rank)
        found[f"{nesting.__name__} {place}"] = ("equal" if equal(got, expected) else "differs", counts)
    return found


# --- The scenarios ---


def other_checks(rank):
    """With the checks that are not the default."""
    expected, _ = train(made(), rank)
    found = {}
    for nesting, check in itertools.product((applied, in_place, inside, several), ("default", "values", "none")):
        got, counts = train(made(after=functools.partial(nesting, check=check)), rank)
        found[f"{nesting.__name__} {check}"] = (equal(got, expected), all(map(is_least, counts)))
    return found


def is_least(counts):
    return least(counts) == once_each(after_forward=True)


def accumulate(model, rank):
    """Three batches for one reduction."""
    words = []
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        with collectives() as counted:
            model(batch_of(rank, number)).square().mean().backward()
        words.append(in_words(counted))
    return gradients(model), words


def accumulation(rank):
    found = {}
    for after_forward in (True, False):
        expected, words = accumulate(made(reshard_after_forward=after_forward), rank)
        for nesting in (applied, in_place, inside, several):
            model = made(after=nesting, reshard_after_forward=after_forward)
            got, counts = accumulate(model, rank)
            found[f"{nesting.__name__} {after_forward}"] = (
                equal(got, expected),
                list(map(least, counts)) == list(map(least, words)),
            )
        found[f"plain {after_forward}"] = (
            [sum(each.get("scatter in backward", 0) for each in one.values()) for one in words] == [0, 0, len(UNITS)],
            True,
        )
    return found


def two_at_once(model, rank, *, reverse):
    """Two forwards before their backwards, and a validation in between."""
    optimizer = optimizer_of(model)
    seen = []
    for step in range(2):
        losses = [model(batch_of(rank, 10 * step + number)).square().mean() for number in range(2)]
        with torch.no_grad():
            model(batch_of(rank, 99))
        for loss in reversed(losses) if reverse else losses:
            loss.backward()
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def several_forwards(rank):
    found = {}
    for after_forward, reverse in itertools.product((True, False), (True, False)):
        expected = two_at_once(made(reshard_after_forward=after_forward), rank, reverse=reverse)
        for nesting, check in itertools.product((applied, in_place, inside, several), ("default", "first")):
            model = made(after=functools.partial(nesting, check=check), reshard_after_forward=after_forward)
            got = two_at_once(model, rank, reverse=reverse)
            found[f"{nesting.__name__} {check} {after_forward} {reverse}"] = equal(got, expected)
    return found


def retained(rank):
    """Two backwards over one graph."""
    found = {}
    for after_forward in (True, False):
        gradients_of = []
        for nesting in (None, applied, in_place, inside, several):
            model = made(after=nesting, reshard_after_forward=after_forward)
            loss = model(batch_of(rank, 0)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            gradients_of.append(gradients(model))
            found[f"{nesting and nesting.__name__} {after_forward}"] = equal(gradients_of[-1], gradients_of[0])
    return found


def from_meta(rank):
    """Made without memory, decided, sharded, given memory and values."""
    expected, _ = train(made(), rank)
    torch.manual_seed(0)
    values = Model().state_dict()
    found = {}
    for nesting, place in itertools.product((applied, in_place), ("before", "between", "after")):
        with torch.device("meta"):
            model = Model()
        steps = {
            "before": [nesting, shard, give_memory],
            "between": [shard, nesting, give_memory],
            "after": [shard, give_memory, nesting],
        }
        for do in steps[place]:
            do(model)
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
        got, counts = train(model, rank)
        found[f"{nesting.__name__} {place}"] = equal(got, expected), all(map(is_least, counts))
    return found


def give_memory(model):
    model.to_empty(device="cpu")


def saved_and_loaded(rank):
    """A state is the same with regions and without, and goes from one to the other, between two steps."""
    found = {}
    for nesting in (applied, in_place):
        model = made(before=nesting)
        train(model, rank, steps=2)
        plain = made()
        train(plain, rank, steps=2)
        whole = StateDictOptions(full_state_dict=True)
        states = [get_model_state_dict(one, options=whole) for one in (model, plain)]
        found[f"{nesting.__name__}: names"] = list(states[0]) == list(states[1]) == list(Model().state_dict())
        found[f"{nesting.__name__}: values"] = equal(*(list(one.values()) for one in states))
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        distributed.broadcast_object_list(folder)
        saving.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0], no_dist=False)
        other = made(after=nesting)
        train(other, rank, steps=1)  # a replay was compared before, with other weights
        state = {"model": get_model_state_dict(other)}
        saving.load(state, checkpoint_id=folder[0])
        set_model_state_dict(other, state["model"])
        plain.zero_grad()
        other.zero_grad()
        found[f"{nesting.__name__}: goes on"] = equal(train(other, rank)[0], train(plain, rank)[0])
        twin = made()
        twin.load_state_dict(other.state_dict())
        model.load_state_dict(other.state_dict(), assign=True)  # other shards than those that were guarded
        found[f"{nesting.__name__}: goes on with others"] = equal(train(model, rank)[0], train(twin, rank)[0])
    return found


def counting(modes):
    modes.append(CountOperators())
    return contextlib.nullcontext(), modes[-1]


def what_runs_again(rank):
    """Operators in the replay, by policy."""
    found = {}
    inner = recollect.by_name({"inner": recollect.Save()})
    for name, policy in {"nothing": None, "products": policies.save_matmuls, "a name": inner}.items():
        model, modes = made(), []
        contexts = functools.partial(counting, modes)
        for layer in model.layers:
            layer.forward = recollect.remat(layer.forward, policy=policy, context_fn=contexts)
        model(batch_of(rank, 0)).square().mean().backward()
        found[name] = [mode.counts["addmm"] for mode in modes]
        assert [layer.runs for layer in model.layers] == [[False, True]] * LAYERS
    return found


def inputs_on_disk(rank):
    expected, _ = train(made(), rank)
    with tempfile.TemporaryDirectory() as folder:
        offload = recollect.Offload(to="disk", directory=folder, min_bytes=0)
        decisions = {"layers.*": recollect.Recompute(inputs=offload)}
        before = recollect.offload_stats().bytes_out
        got, counts = train(made(after=functools.partial(applied, decisions=decisions)), rank)
    written = recollect.offload_stats().bytes_out > before
    return {"gradients": equal(got, expected), "collectives": all(map(is_least, counts)), "written": written}


def undone(rank):
    """What was decided before a model was sharded is taken off after."""
    torch.manual_seed(0)
    model = Model()
    handle = recollect.apply(model, RECOMPUTE)
    shard(model)
    model(batch_of(rank, 0)).sum().backward()
    before = [layer.runs for layer in model.layers]
    handle.remove()
    for layer in model.layers:
        layer.runs = []
    model(batch_of(rank, 0)).sum().backward()
    return before, [layer.runs for layer in model.layers]


def sharded_within(rank):
    """Modules that are sharded inside of one that is, and modules that are sharded together."""
    found = {}

    def nested(model):
        for layer in model.layers:
            fully_shard(layer.inner[3])
        shard(model)

    def grouped(model):
        fully_shard(model.layers[0])
        fully_shard([model.layers[1], model.layers[2]])
        fully_shard(model)

    def fetched_ahead(model):
        shard(model)
        for earlier, later in itertools.pairwise(model.layers):
            earlier.set_modules_to_forward_prefetch([later])
            later.set_modules_to_backward_prefetch([earlier])

    for how in (nested, grouped, fetched_ahead):
        results = []
        for nesting in (None, applied, in_place, inside):
            torch.manual_seed(0)
            model = Model()
            how(model)
            if nesting is not None:
                nesting(model)
            results.append(train(model, rank))
            totals = [[sum_of(counts, "gather"), sum_of(counts, "scatter")] for counts in results[-1][1]]
            plain = [[sum_of(counts, "gather"), sum_of(counts, "scatter")] for counts in results[0][1]]
            name = f"{how.__name__} {nesting and nesting.__name__}"
            found[name] = equal(results[-1][0], results[0][0]), totals == plain
    return found


def sum_of(counts, what):
    return sum(number for each in counts.values() for one, number in each.items() if one.startswith(what))


def replicated(rank):
    """Copies of the shards: gradients are reduced between those too, once."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    expected, plain = train(made(mesh=mesh), rank)
    found = {"plain": (True, [sum_of(one, "reduce") for one in plain] == [len(UNITS)] * 3)}
    for nesting in (applied, in_place, inside, several):
        got, counts = train(made(after=nesting, mesh=mesh), rank)
        found[nesting.__name__] = equal(got, expected), counts == plain
    return found


SCENARIOS = {
    **{
        f"nesting {after_forward} {precision}": functools.partial(
            every_nesting, after_forward=after_forward, precision=precision
        )
        for after_forward in (True, False)
        for precision in PRECISIONS
    },
    **{
        one.__name__: one
        for one in (
            *(other_checks, accumulation, several_forwards, retained, from_meta, saved_and_loaded, what_runs_again),
            *(inputs_on_disk, undone, sharded_within, replicated),
        )
    },
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(__name__, tmp_path_factory.mktemp("fsdp"))


# --- What came of it ---


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("after_forward", [True, False], ids=["resharded", "held"])
class TestNestings:
    def test_gradients_are_those_without_regions(self, ranks, after_forward, precision):
        found = result(ranks, f"nesting {after_forward} {precision}")
        assert {name: how for name, (how, _) in found.items() if how != "equal"} == {}

    def test_collectives_are_the_least(self, ranks, after_forward, precision):
        found = result(ranks, f"nesting {after_forward} {precision}")
        for name, (_, counts) in found.items():
            assert list(map(least, counts)) == [once_each(after_forward)] * 3, name

    def test_everything_was_tried(self, ranks, after_forward, precision):
        assert len(result(ranks, f"nesting {after_forward} {precision}")) == 2 * len(nestings_for(precision)) + 1


@pytest.mark.parametrize(
    "name",
    [
        *("other_checks", "accumulation", "several_forwards", "retained", "from_meta", "saved_and_loaded"),
        *("inputs_on_disk", "sharded_within", "replicated"),
    ],
)
def test_it_is_as_without_regions(ranks, name):
    found = result(ranks, name)
    assert found
    assert {one: held for one, held in found.items() if held not in (True, (True, True))} == {}


def test_a_policy_decides_what_runs_again(ranks):
    assert result(ranks, "what_runs_again") == {
        "nothing": [2] * LAYERS,
        "products": [0] * LAYERS,
        "a name": [0] * LAYERS,
    }


def test_decisions_are_taken_off_again(ranks):
    assert result(ranks, "undone") == ([[False, True]] * LAYERS, [[False]] * LAYERS)
