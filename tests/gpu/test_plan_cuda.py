"""Plans on a GPU: budgets hold by the allocator's own count, predictions are close, and gradients are equal."""

import copy
import gc

import pytest
import torch

import models
import recollect
from recollect._bench import Bench
from recollect._problem import peak
from recollect._travel import speeds_of_link
from recollect._tried import decided
from recollect.profile import measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MIB = 2**20


def next_word(model, text):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return models.next_word(model, text)


@pytest.fixture
def gpt():
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that any test before has used
    print(f"{torch.cuda.memory_allocated() / MIB:.1f} MiB are there already")  # shares of a step would be others
    torch.manual_seed(0)
    return models.Gpt(8, 512, 1024, heads=8).cuda(), torch.randint(1024, (8, 513), device="cuda")


def gradients(model, text):
    torch.manual_seed(1)
    model.zero_grad()
    torch.use_deterministic_algorithms(True)
    try:
        loss = next_word(model, text)
        loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return [one.detach().cpu() for one in (loss, *(one.grad for one in model.parameters()))]


def peak_of(model, text):
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        next_word(model, text).backward()
    return torch.cuda.max_memory_allocated()


@pytest.fixture(autouse=True)
def deterministic_products(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def test_predictions_are_close(gpt):
    model, text = gpt
    bench = Bench(model, text, next_word, None)
    profile = measure(bench, repeats=2)
    problem = profile.problem()
    modules = list(zip(map(model.get_submodule, profile.blocks), profile.calls, strict=True))
    print([(one.name, one.kept // MIB, round(1e3 * one.seconds, 2)) for one in profile.kinds[0].options])
    for choice in range(len(profile.kinds[0].options)):
        chosen = [min(choice, len(profile.options(number)) - 1) for number in range(len(profile.blocks))]
        ways = {block: profile.option(number, chosen[number]).decisions for number, block in enumerate(profile.blocks)}
        with bench.leaving_nothing(), decided(model, ways):
            bench.train()
            got = max(mark.peak for mark in bench.weigh(modules))
        assert got == pytest.approx(peak(problem, chosen)[0], rel=0.03), ways


@pytest.mark.parametrize("allow", [["recompute"], ["recompute", "offload"], ["offload"]], ids="-".join)
@pytest.mark.parametrize("budget", ["80%", "55%"])
def test_a_budget_holds(gpt, budget, allow):
    model, text = gpt
    try:
        plan = recollect.plan(model, text, step=next_word, budget=budget, allow=allow, repeats=2)
    except recollect.BudgetError:
        if allow != ["offload"]:
            raise
        pytest.skip("offloading alone does not get that far with a model as small as this")
    assert plan.measured.peak <= plan.budget
    expected = gradients(copy.deepcopy(model), text)
    model.zero_grad()
    with plan.apply(model):
        assert peak_of(model, text) <= plan.budget
        got = gradients(model, text)
    assert all(map(torch.equal, got, expected))


def test_a_step_that_does_not_fit_is_planned_all_the_same(gpt):
    model, text = gpt
    plain = peak_of(model, text)
    model.zero_grad()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, plain * 0.8 / total))
    try:
        plan = recollect.plan(model, text, step=next_word, budget=int(plain * 0.7), repeats=1, allow=["recompute"])
        assert plan.measured.peak <= plan.budget
        assert not plan.plain_marks
        assert plan.plain.peak == pytest.approx(plain, rel=0.05)
        with pytest.raises(ValueError, match="does not fit on the device"):
            recollect.plan(model, text, step=next_word, budget="70%", repeats=1, allow=["offload"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_what_is_free_is_a_budget(gpt):
    model, text = gpt
    plan = recollect.plan(model, text, step=next_word, budget="device", repeats=1)
    assert plan.decisions() == {}


def test_the_link_is_measured():
    out, back = speeds_of_link(torch.device("cuda"), "cpu", None)
    assert 1e9 < out < 1e12
    assert 1e9 < back < 1e12


def test_gradients_wait_on_the_host_and_come_back_as_the_same_tensors(gpt):
    model, text = gpt
    plain = peak_of(model, text)  # leaves gradients behind
    held = [one.grad for one in model.parameters()]
    values = [grad.cpu() for grad in held]
    plan = recollect.plan(model, text, step=next_word, budget="90%", repeats=1, allow=["recompute"])
    assert plan.plain.peak == pytest.approx(plain, rel=0.03)  # they are not there while a step is weighed
    for one, grad, value in zip(model.parameters(), held, values, strict=True):
        assert one.grad is grad
        assert grad.is_cuda
        assert torch.equal(grad.cpu(), value)


def test_a_choice_that_fails_within_the_step_is_ruled_out():
    class Later(models.Layer):
        def forward(self, x):
            return super().forward(x + 1)

    class ChangesInputs(models.Stack):
        def forward(self, x):
            x = x * 1
            for layer in self.layers:
                x = x.add_(layer(x))
            return x

    torch.manual_seed(0)
    model, batch = ChangesInputs(Later, 4, 256).cuda(), torch.randn(8, 256, 256, device="cuda")
    curve = recollect.frontier(model, batch, points=3, repeats=1)  # which knows nothing of it yet
    budget = curve.plain.peak - (curve.plain.peak - curve.points[0].peak) // 4
    plan = recollect.plan(model, batch, budget=budget, repeats=1, allow=["recompute"])
    assert plan.measured.peak <= plan.budget
    assert not any(block.name in block.decisions for block in plan.blocks)


def test_a_step_that_steps_an_optimizer_is_refused_before_it_does(gpt):
    model, text = gpt
    before = [one.detach().cpu() for one in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(model, text):
        loss = next_word(model, text)
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        optimizer.step()
        return loss

    with pytest.raises(ValueError, match="the step changes the model's parameters"):
        recollect.plan(model, text, step=step, budget="80%", repeats=1)
    assert all(torch.equal(one.detach().cpu(), value) for one, value in zip(model.parameters(), before, strict=True))
