"""Digests: which changes of a value they see, and which they let pass.

Through the front door: a region saves one tensor in its forward and another in its replay.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recollect
from recollect import CheckpointError, checkpoint
from tools import Identity, leaf


def numbers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def compare(then, now, check="values"):
    """Run a region that saves `then` in the forward and `now` in the replay."""
    values = iter([then, now])
    checkpoint(lambda x: Identity.apply(x, None, next(values)), leaf(1), determinism_check=check).sum().backward()


def is_seen(then, now):
    try:
        compare(then, now)
    except CheckpointError as error:
        return "Recomputed values differ" in str(error)
    return False


def with_changed(tensor, place, value):
    changed = tensor.clone()
    changed[place] = value
    return changed


def dropped(tensor, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return F.dropout(tensor, 0.5)


A = numbers(32, 64)
SQUARE = numbers(64, 64)
LONG = numbers(3 * 4096 + 5)
SCORES = numbers(40, 50)
MASK = numbers(40, 50, seed=1) > 0
COUNTS = torch.arange(-50, 50)
WAVES = torch.view_as_complex(numbers(50, 2))

OTHERS = {
    "rows permuted": (A, A[torch.arange(32).roll(1)]),
    "rows in reverse": (A, A.flip(0)),
    "columns permuted": (A, A.flip(1)),
    "transposed": (SQUARE, SQUARE.T),
    "transposed, both as views": (SQUARE.T, SQUARE),
    "rolled by one": (LONG, LONG.roll(1)),
    "rolled by a power of two": (LONG, LONG.roll(4096)),
    "signs": (A, -A),
    "one sign": (A, with_changed(A, (3, 4), -A[3, 4])),
    "another dropout mask": (dropped(A.abs(), 1), dropped(A.abs(), 2)),
    "another mask of as many ones": ((A > 0).float(), (A > 0).float().flip(0)),
    "scaled": (A, A * 1.001),
    "shifted": (A, A + 1e-3),
    "one number of many": (LONG, with_changed(LONG, 9000, 0.0)),
    "the last number": (LONG, with_changed(LONG, -1, 0.0)),
    "a scalar": (torch.tensor(1.0), torch.tensor(1.01)),
    "tiny numbers": (A * 1e-20, A.flip(0) * 1e-20),
    "huge numbers": (A * 1e30, A * 1.1e30),
    "zero to something": (torch.zeros(9), torch.ones(9)),
    "a NaN more": (A, with_changed(A, 0, float("nan"))),
    "NaN for inf": (with_changed(A, 0, float("inf")), with_changed(A, 0, float("nan"))),
    "-inf for inf": (with_changed(A, 0, float("inf")), with_changed(A, 0, -float("inf"))),
    "NaN elsewhere": (with_changed(A, 0, float("nan")), with_changed(A, 1, float("nan"))),
    "float64": (A.double(), A.double() * (1 + 1e-9)),
    "bfloat16": (A.bfloat16(), (A * 1.1).bfloat16()),
    "half": (A.half(), (A * 1.02).half()),
    "8 bits": (A.to(torch.float8_e4m3fn), (A * 1.5).to(torch.float8_e4m3fn)),
    "an integer by one": (COUNTS, with_changed(COUNTS, 7, COUNTS[7] + 1)),
    "integers permuted": (COUNTS, COUNTS.flip(0)),
    "large integers": (COUNTS * 2**55, with_changed(COUNTS * 2**55, 3, 1 - 47 * 2**55)),
    "a bit that is the sign": (torch.zeros(3, dtype=torch.int64), torch.tensor([0, -(2**63), 0])),
    "bytes": (COUNTS.to(torch.uint8), with_changed(COUNTS.to(torch.uint8), 0, 0)),
    "unsigned": (COUNTS.abs().to(torch.uint16), COUNTS.flip(0).abs().add(1).to(torch.uint16)),
    "a bool": (MASK, with_changed(MASK, (0, 0), not MASK[0, 0])),
    "bools permuted": (MASK, MASK.flip(0)),
    "many bools": (LONG > 0, (LONG > 0).roll(1)),
    "imaginary part": (WAVES, torch.complex(WAVES.real, WAVES.imag * 1.01)),
    "conjugate": (WAVES, WAVES.conj()),
    "two conjugates": (WAVES.conj(), WAVES.flip(0).conj()),
    "parts swapped": (WAVES, torch.complex(WAVES.imag, WAVES.real)),
    "a slice": (LONG[::3], LONG.roll(1)[::3]),
    "expanded": (torch.ones(1).expand(5), torch.tensor([1.1]).expand(5)),
}


@pytest.mark.parametrize(("then", "now"), [pytest.param(*pair, id=name) for name, pair in OTHERS.items()])
def test_other_values_are_seen(then, now):
    assert is_seen(then, now)


@pytest.mark.parametrize("hidden", [-float("inf"), float("inf"), float("nan"), -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mask_does_not_hide_what_stands_beside_it(hidden, dtype):
    """Half of the places, as in a causal mask; of what is left everything is another value."""
    other = numbers(40, 50, seed=2)
    then, now = (scores.masked_fill(MASK, hidden).to(dtype) for scores in (SCORES, other))
    assert is_seen(then, now)


@pytest.mark.parametrize("width", [64, 1024, 4096, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_whichever_two_rows_are_swapped(width, dtype):
    """A width may be that of the blocks in which a digest is computed."""
    rows = (numbers(12, width) * 100).to(dtype)
    swaps = [(i, j) for i in range(12) for j in range(i)]
    missed = [(i, j) for i, j in swaps if not is_seen(rows, with_changed(rows, [i, j], rows[[j, i]]))]
    assert not missed, f"{len(missed)} of {len(swaps)}: {missed}"


def test_two_rows_far_apart_are_swapped():
    """In a tensor that is too large to be looked at in one go."""
    rows = torch.arange(1160.0)[:, None].expand(1160, 4096).contiguous()
    missed = [
        (i, j)
        for i, j in [(0, 1024), (5, 1100), (127, 1024), (140, 1037)]
        if not is_seen(rows, with_changed(rows, [i, j], rows[[j, i]]))
    ]
    assert not missed


def noisy(tensor, eps, seed=3):
    return (tensor.double() * (1 + eps * numbers(*tensor.shape, dtype=torch.float64, seed=seed))).to(tensor.dtype)


def neighbours(tensor):
    """Every number the next one up or down, or as it is: what the order of a sum can change, in 16 bits."""
    steps = torch.randint(-1, 2, tensor.shape, generator=torch.Generator().manual_seed(4), dtype=torch.int16)
    return (tensor.view(torch.int16) + steps).view(tensor.dtype)


class Pair(torch.Tensor):
    """Two tensors that go through every operator side by side, as DTensor has one inside."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __repr__(self):
        return f"Pair({self.a}, {self.b})"

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def side(name):
            return [getattr(value, name) if isinstance(value, Pair) else value for value in args]

        results = func(*side("a"), **(kwargs or {})), func(*side("b"), **(kwargs or {}))
        return Pair(*results) if isinstance(results[0], torch.Tensor) else results[0]


SAME = {
    "itself": (A, A),
    "a copy": (A, A.clone()),
    "other strides": (SQUARE.T, SQUARE.T.contiguous()),
    "a slice of something": (LONG[::3], LONG[::3].clone()),
    "expanded": (torch.ones(1).expand(5), torch.ones(5)),
    "NaN": (A.log(), A.log()),
    "inf and NaN": (A.log() / 0, A.log() / 0),
    "the sign of zero": (torch.zeros(5), -torch.zeros(5)),
    "nothing in it": (torch.empty(0), torch.empty(0)),
    "nothing in it, with a shape": (torch.empty(3, 0, 2), torch.empty(3, 0, 2)),
    "no integers": (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)),
    "a scalar": (torch.tensor(2), torch.tensor(2)),
    "float32, last bits": (A, noisy(A, 1e-7)),
    "float32, many, last bits": (LONG, noisy(LONG, 2e-7)),
    "float64, last bits": (A.double(), noisy(A.double(), 1e-15)),
    "half, last bit": (A.half(), neighbours(A.half())),
    "bfloat16, last bit": (A.bfloat16(), neighbours(A.bfloat16())),
    "a scalar in half, last bit": (torch.tensor(1.0).half(), torch.tensor(1 + 2**-10).half()),
    "a scalar in bfloat16, last bit": (torch.tensor(1.0).bfloat16(), torch.tensor(1 + 2**-7).bfloat16()),
    "8 bits": (A.to(torch.float8_e5m2), A.to(torch.float8_e5m2)),
    "huge, last bits": (A * 1e30, noisy(A * 1e30, 1e-7)),
    "tiny, last bits": (A * 1e-15, noisy(A * 1e-15, 1e-7)),
    "nearly nothing, last bits": (A * 1e-25, noisy(A * 1e-25, 1e-7)),
    "complex, last bits": (WAVES, WAVES * (1 + 1e-7)),
    "two conjugates": (WAVES.conj(), WAVES.conj().resolve_conj()),
    "negative view": (WAVES.conj().imag, WAVES.conj().imag.clone()),
    "sparse": (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
    "sparse rows": (torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csr()),
    "meta": (torch.empty(3, device="meta"), torch.empty(3, device="meta")),
    "a wrapper": (Pair(A, SQUARE), Pair(A.clone(), noisy(SQUARE, 1e-7))),
    "a parameter": (nn.Parameter(A), nn.Parameter(A)),
    "a buffer": (nn.Buffer(A), nn.Buffer(A)),
}


@pytest.mark.parametrize(("then", "now"), [pytest.param(*pair, id=name) for name, pair in SAME.items()])
def test_the_same_values_pass(then, now):
    if isinstance(then, nn.Parameter):
        then, now = then.detach(), now.detach()  # as a leaf it would have to be the same one
    compare(then, now)
    compare(then, now, "first")


def test_of_a_wrapper_every_part_is_looked_at():
    assert is_seen(Pair(A, SQUARE), Pair(A, SQUARE.flip(0)))
    assert is_seen(Pair(SQUARE, A), Pair(SQUARE.flip(0), A))


def test_a_plain_subclass_is_looked_at():
    class Tagged(torch.Tensor):
        pass

    assert is_seen(A.as_subclass(Tagged), A.flip(0).as_subclass(Tagged))
    assert is_seen(nn.Buffer(A), nn.Buffer(A.flip(0)))


# --- The tolerance ---


@pytest.fixture
def _tolerances_come_back(monkeypatch):
    monkeypatch.setattr(recollect._digest, "_tolerances", dict(recollect._digest._tolerances))


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@pytest.mark.usefixtures("_tolerances_come_back")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("for_all", [True, False])
def test_the_tolerance_can_be_set(dtype, for_all):
    one, other = A.to(dtype), (A * 1.25).to(dtype)
    assert is_seen(one, other)
    recollect.set_tolerance(0.9, *([] if for_all else [dtype]))
    assert not is_seen(one, other)
    recollect.set_tolerance(0, *([] if for_all else [dtype]))
    assert not is_seen(one, one.clone())
    assert is_seen(one, torch.cat([other[:1], one[1:]]))


@pytest.mark.usefixtures("_tolerances_come_back")
def test_the_tolerance_of_one_dtype_is_not_that_of_another():
    recollect.set_tolerance(10, torch.bfloat16)
    assert is_seen(A, A.flip(0))
    assert not is_seen(A.bfloat16(), A.flip(0).bfloat16())
    recollect.set_tolerance(10)
    assert is_seen(COUNTS, COUNTS + 1), "integers are exact"


@pytest.mark.usefixtures("_tolerances_come_back")
@pytest.mark.parametrize("bad", [-1, -1e-9, float("nan"), float("inf"), "1e-3", None, True, [1]])
def test_a_tolerance_is_a_number_from_zero_up(bad):
    with pytest.raises((ValueError, TypeError), match="tolerance must be"):
        recollect.set_tolerance(bad)


@pytest.mark.usefixtures("_tolerances_come_back")
@pytest.mark.parametrize("bad", [torch.int64, torch.bool, "float32", 3])
def test_a_tolerance_is_for_floating_point(bad):
    with pytest.raises((ValueError, TypeError), match="dtype must be"):
        recollect.set_tolerance(1e-3, bad)
