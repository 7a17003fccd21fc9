"""Patterns over the names of modules, and the names that are offered where a pattern matches nothing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect._patterns import ModulePattern, close_names

NAMES = ["", "embed", "layers", "layers.0", "layers.3", "layers.12", "layers.0.attn", "layers.0.attn.q", "head.attn"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", [""]),
        ("layers", ["layers"]),
        ("layers.*", ["layers.0", "layers.3", "layers.12"]),
        ("layers.?", ["layers.0", "layers.3"]),
        ("layers.[0-2]", ["layers.0"]),
        ("layers.[!0-2]", ["layers.3"]),
        ("layers.1*", ["layers.12"]),
        ("*", ["embed", "layers"]),
        ("*.attn", ["head.attn"]),
        ("*.*.attn", ["layers.0.attn"]),
        ("**.attn", ["layers.0.attn", "head.attn"]),
        ("layers.**", ["layers", "layers.0", "layers.3", "layers.12", "layers.0.attn", "layers.0.attn.q"]),
        ("layers.**.q", ["layers.0.attn.q"]),
        ("**.layers.**.attn.**", ["layers.0.attn", "layers.0.attn.q"]),
        ("**", NAMES),
        ("**.*", NAMES[1:]),
        ("Layers.*", []),
        ("layers*0", []),
        ("layers?0", []),
        ("layers[!a]0", []),
    ],
)
def test_a_pattern_is_made_of_parts(pattern, expected):
    assert [name for name in NAMES if ModulePattern(pattern).matches(name)] == expected


@pytest.mark.parametrize("pattern", [".", "layers.", ".layers", "layers..attn", "layers.**attn", "***"])
def test_a_pattern_that_cannot_mean_anything_is_refused(pattern):
    with pytest.raises(ValueError, match=re.escape(f"got {pattern!r}")):
        ModulePattern(pattern)


PARTS = st.lists(st.sampled_from(["a", "b", "ab", "0"]), max_size=5)


@given(st.lists(st.sampled_from(["a", "*", "**", "?", "a*", "[ab]"]), max_size=5), PARTS)
def test_it_means_what_a_regular_expression_says(pattern, name):
    words = {"*": r"\.[^.]*", "**": r"(\.[^.]+)*", "?": r"\.[^.]", "a*": r"\.a[^.]*", "[ab]": r"\.[ab]", "a": r"\.a"}
    expected = re.fullmatch("".join(words[part] for part in pattern), "".join(f".{part}" for part in name))
    assert ModulePattern(".".join(pattern)).matches(".".join(name)) is bool(expected)


@pytest.mark.parametrize(
    ("wanted", "names", "expected"),
    [
        ("layer.*", ["embed", "layers.0", "layers.1"], ["layers.*"]),
        ("layers.*.atn", ["layers.0.attn", "layers.0.mlp", "layers.1.attn"], ["layers.*.attn"]),
        ("layers.9", ["layers.0", "layers.1", "layers.2"], ["layers.0", "layers.1", "layers.2"]),
        ("layers.9", [f"layers.{i}" for i in range(5)], ["layers.0", "layers.1", "...", "layers.4"]),
        ("attn", ["model.decoder.blocks.0.attn", "model.head"], ["model.decoder.blocks.*.attn"]),
        ("xyz", ["", "embed", "head"], ["embed", "head"]),
        ("xyz", [""], []),
    ],
)
def test_close_names(wanted, names, expected):
    found = close_names(wanted, names)
    assert found[: len(expected)] == expected
    assert bool(found) is bool(expected)
