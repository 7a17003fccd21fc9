"""What the tests of chains share: the plain chain, and gradients to compare."""

import torch


def plain(step, state, length):
    for _ in range(length):
        state = step(state)
    return state


def grads_of(loss, tensors):
    for tensor in tensors:
        tensor.grad = None
    loss.backward()
    found = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return found


def same(got, expected):
    return len(got) == len(expected) and all(
        (one is None and other is None) or torch.equal(one, other) for one, other in zip(got, expected, strict=True)
    )
