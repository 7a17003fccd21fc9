"""Convolutional models as torchvision and timm have them, in torch alone: BatchNorm, skips within and across regions.

Gradients, running statistics and counters must be those of the plain model after every step.
"""

import copy

import pytest
import torch
from torch import nn

import recollect
from recollect import Offload, Recompute, Save, policies
from tools import LiveBytes


class BasicBlock(nn.Module):
    """Two convolutions around which the input goes, changed where the shape changes."""

    def __init__(self, channels, planes, stride=1, dropout=0.0):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout2d(dropout)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = (
            None
            if stride == 1 and channels == planes
            else nn.Sequential(nn.Conv2d(channels, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))
        )

    def forward(self, x):
        out = self.dropout(self.relu(self.bn1(self.conv1(x))))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8, dropout=0.2))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, stride=2), BasicBlock(16, 16))
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class DoubleConv(nn.Sequential):
    def __init__(self, channels, planes):
        super().__init__(
            nn.Conv2d(channels, planes, 3, padding=1),
            nn.BatchNorm2d(planes),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.1),
            nn.Conv2d(planes, planes, 3, padding=1),
            nn.BatchNorm2d(planes),
            nn.ReLU(inplace=True),
        )


class Up(nn.Module):
    def __init__(self, channels, planes):
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, planes, 2, stride=2)
        self.conv = DoubleConv(2 * planes, planes)

    def forward(self, x, skip):
        return self.conv(torch.cat([skip, self.up(x)], dim=1))


class UNet(nn.Module):
    """The outputs of the way down are inputs of the way up: from region to region, past those in between."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([DoubleConv(3, 4), DoubleConv(4, 8), DoubleConv(8, 16)])
        self.up = nn.ModuleList([Up(16, 8), Up(8, 4)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skips = []
        for down in self.down[:-1]:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


DECISIONS = {
    "resnet-by-type": (ResNet, {BasicBlock: Recompute()}),
    "resnet-by-pattern": (ResNet, {"layer*.*": Recompute(), "stem": Recompute()}),
    "resnet-by-stage": (ResNet, {"layer*": Recompute()}),
    "resnet-convolutions-kept": (ResNet, {BasicBlock: Recompute(), nn.Conv2d: Save()}),
    "resnet-by-operator": (ResNet, {BasicBlock: Recompute(policy=policies.save_everything_but_pointwise)}),
    "resnet-norms-kept": (ResNet, {BasicBlock: Recompute(), nn.BatchNorm2d: Save()}),
    "resnet-offloaded": (ResNet, {"layer1.*": Offload(), "layer2.*": Recompute()}),
    "resnet-whole": (ResNet, {"": Recompute()}),
    "unet-by-type": (UNet, {DoubleConv: Recompute(), Up: Recompute(), "up.*.conv": Save()}),
    "unet-by-pattern": (UNet, {"down.*": Recompute(), "up.*": Recompute()}),
    "unet-way-up": (UNet, {"up.*": Recompute(), "up.*.up": Save()}),
    "unet-within": (UNet, {DoubleConv: Recompute()}),
    "unet-norms-kept": (UNet, {DoubleConv: Recompute(), nn.BatchNorm2d: Save()}),
}


def pair(make, **to):
    """A model and its copy."""
    torch.manual_seed(0)
    model = make().to(**to)
    return model, copy.deepcopy(model)


def batch(step, size=16, **to):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, 3, size, size, generator=generator).to(**to)


def train(model, steps=3, *, autocast=False, **to):
    """What there is to compare after every step: the loss, all gradients, and all that a model remembers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(batch(step, **to)).float().square().mean()
        loss.backward()
        seen.append({"loss": loss.detach()})
        seen[-1] |= {
            f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        seen[-1] |= {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.step()
    return seen


def assert_same(found, expected):
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        wrong = [name for name in other if not torch.equal(one[name], other[name])]
        assert wrong == [], f"in step {step}"
        assert all(one[name].stride() == other[name].stride() for name in other)


def batches_seen(model):
    return {int(one.num_batches_tracked) for one in model.modules() if isinstance(one, nn.BatchNorm2d)}


@pytest.mark.parametrize("case", DECISIONS)
def test_every_step_is_that_of_the_plain_model(case):
    make, decisions = DECISIONS[case]
    plain, model = pair(make)
    expected = train(plain)
    with recollect.apply(model, decisions):
        assert_same(train(model), expected)
    assert batches_seen(model) == {3}


@pytest.mark.parametrize("case", DECISIONS)
def test_in_evaluation_mode(case):
    """The statistics are used and do not move: fine-tuning as it is often done."""
    make, decisions = DECISIONS[case]
    plain, model = pair(make)
    train(plain, 1)
    model.load_state_dict(plain.state_dict())
    expected = train(plain.eval())
    with recollect.apply(model, decisions):
        assert_same(train(model.eval()), expected)
    assert batches_seen(model) == {1}


@pytest.mark.parametrize("case", ["resnet-by-type", "resnet-norms-kept", "unet-by-pattern"])
def test_frozen_norms_in_a_model_that_trains(case):
    make, decisions = DECISIONS[case]
    plain, model = pair(make)
    for each in (plain, model):
        for module in each.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval().requires_grad_(False)
    expected = train(plain)
    with recollect.apply(model, decisions):
        assert_same(train(model), expected)
    assert batches_seen(model) == {0}


@pytest.mark.parametrize("case", DECISIONS)
@pytest.mark.parametrize("how", ["channels_last", "bfloat16"])
def test_other_formats(case, how):
    make, decisions = DECISIONS[case]
    to = {
        "channels_last": {"memory_format": torch.channels_last},
        "bfloat16": {"autocast": True},
    }[how]
    plain, model = pair(make, **{name: value for name, value in to.items() if name != "autocast"})
    expected = train(plain, 2, **to)
    with recollect.apply(model, decisions):
        assert_same(train(model, 2, **to), expected)


@pytest.mark.parametrize("make", [ResNet, UNet])
def test_between_training_and_evaluation(make):
    """A step, an evaluation without gradients, a step: the statistics that the evaluation uses are the plain ones."""
    plain, model = pair(make)
    decisions = DECISIONS[f"{make.__name__.lower()}-by-type"][1]
    results = []
    for each in (plain, model):
        handle = recollect.apply(each, decisions) if each is model else None
        seen = train(each, 1)
        with torch.no_grad():
            seen.append({"evaluation": each.eval()(batch(9))})
        seen += train(each.train(), 1)
        if handle is not None:
            handle.remove()
        results.append(seen)
    assert_same(results[1], results[0])


@pytest.mark.parametrize("make", [ResNet, UNet])
def test_two_backward_passes_count_one_batch(make):
    plain, model = pair(make)
    gradients = []
    for each in (plain, model):
        handle = recollect.apply(each, DECISIONS[f"{make.__name__.lower()}-by-type"][1]) if each is model else None
        torch.manual_seed(3)
        loss = each(batch(0)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([p.grad for p in each.parameters()])
        if handle is not None:
            handle.remove()
    assert all(torch.equal(*both) for both in zip(*gradients, strict=True))
    assert_same([model.state_dict()], [plain.state_dict()])
    assert batches_seen(model) == {1}


@pytest.mark.parametrize("make", [ResNet, UNet])
def test_two_forwards_before_their_backwards(make):
    """As in contrastive training: the second forward moves the statistics that the first replay must not meet."""
    plain, model = pair(make)
    gradients = []
    for each in (plain, model):
        handle = recollect.apply(each, DECISIONS[f"{make.__name__.lower()}-by-type"][1]) if each is model else None
        torch.manual_seed(3)
        one, other = each(batch(0)), each(batch(1))
        (one - other).square().mean().backward()
        gradients.append([p.grad for p in each.parameters()])
        if handle is not None:
            handle.remove()
    assert all(torch.equal(*both) for both in zip(*gradients, strict=True))
    assert_same([model.state_dict()], [plain.state_dict()])
    assert batches_seen(model) == {2}


@pytest.mark.parametrize("make", [ResNet, UNet])
def test_less_is_kept(make):
    plain, model = pair(make)
    kept = []
    for each in (plain, model):
        handle = recollect.apply(each, DECISIONS[f"{make.__name__.lower()}-by-type"][1]) if each is model else None
        with LiveBytes() as alive:
            loss = each(batch(0)).square().mean()
            kept.append(alive.now)
        loss.backward()
        if handle is not None:
            handle.remove()
    assert kept[1] < 0.75 * kept[0]
