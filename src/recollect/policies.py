"""Policies that users ask for by name. Made of operators, so they see what reaches the dispatcher.

An operator that this version of torch does not have is left out.
"""

from __future__ import annotations

from typing import Any

from recollect._torch import decides_nothing_new, find_operators, is_pointwise, makes_from_nothing
from recollect.policy import Asked, Decision, Operators, Policy, Question, SaveOrCopy

__all__ = [
    "save_attention",
    "save_collectives",
    "save_everything_but_pointwise",
    "save_matmuls",
    "save_nothing",
]


def _save(name: str, operators: tuple[str, ...]) -> Policy:
    return Operators(dict.fromkeys(find_operators(operators), SaveOrCopy()), f"recollect.policies.{name}")


save_matmuls = _save(
    "save_matmuls",
    (
        "aten.mm",
        "aten.addmm",
        "aten._addmm_activation",
        "aten.bmm",
        "aten.baddbmm",
        "aten.addbmm",
        "aten.mv",
        "aten.addmv",
        "aten.dot",
        "aten.vdot",
        "aten.linear",
        "aten.matmul",
        "aten._int_mm",
        "aten._scaled_mm",
        "aten._scaled_mm_v2",
        "aten._grouped_mm",
        "aten._scaled_grouped_mm",
        "aten._scaled_grouped_mm_v2",
        "mkldnn._linear_pointwise",
    ),
)
"""Keep the outputs of matrix products: linear layers, batched products, their scaled and grouped forms."""

save_attention = _save(
    "save_attention",
    (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._scaled_dot_product_attention_math_for_mps",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
        "aten._cudnn_attention_forward",
        "higher_order.flex_attention",
    ),
)
"""Keep the outputs of attention: every fused kernel of `scaled_dot_product_attention`, and flex attention.

Its math backend is no operator but a series of products and a softmax; `save_matmuls` keeps the products.
"""

save_collectives = _save("save_collectives", ("_c10d_functional.*", "_dtensor.*"))
"""Keep what functional collectives give, so that a replay does not communicate again.

The in-place collectives of `torch.distributed` (`dist.all_reduce(x)`) change their argument and cannot be kept: put
them in a named region.
"""


class _Nothing(Policy):
    settled = True

    def decide(self, what: Any, question: Question) -> Decision | None:
        return None

    def __repr__(self) -> str:
        return "recollect.policies.save_nothing"


save_nothing: Policy = _Nothing()
"""Recompute everything: plain checkpointing, by name."""


def _everything_but_pointwise(what: Any, question: Question) -> Decision | None:
    if isinstance(what, str) or is_pointwise(what) or decides_nothing_new(what) or makes_from_nothing(what):
        return None
    return SaveOrCopy()


class _ButPointwise(Asked):
    def decides_names(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "recollect.policies.save_everything_but_pointwise"


save_everything_but_pointwise: Policy = _ButPointwise(_everything_but_pointwise)
"""Keep what is costly to compute: everything but operators that work element by element, copies and views."""
