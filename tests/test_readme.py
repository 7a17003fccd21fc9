"""The README's code blocks run, in order, as one program; what it promises to print is printed."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def rounded(text):
    """Sums are not the same to the last digit everywhere."""
    return re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", text)


def test_the_code_runs_and_prints_what_it_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model.py"
    source = "\n".join(blocks("python"))
    model.write_text(source)
    exec(compile(source, str(model), "exec"), {"__name__": "model"})
    printed = re.sub(r"[^\s(]*model\.py:\d+", "model.py:N", capsys.readouterr().out)
    table, error = (re.sub(r"model\.py:\d+", "model.py:N", block) for block in blocks("text")[:2])
    assert rounded(error) in rounded(printed)
    if not torch.__version__.startswith("2.13"):
        return  # attention consists of other operators there
    lines = iter(printed.splitlines())
    assert all(line in lines for line in table.splitlines() if line != " ... (and so on)")  # in this order


def test_it_opens_with_code_and_one_picture():
    text = README.read_text()
    assert text.index("```python") < text.index("![") < text.index("make demo") < text.index("## Install")
    assert len(blocks("python")[0].strip().splitlines()) <= 12


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)]+)\)", README.read_text()))
def test_links_lead_somewhere(link):
    assert (README.parent / link).exists()


def test_the_map_is_true():
    (drawn,) = [block for block in blocks("text") if block.startswith("src/recollect/")]
    names = set(re.findall(r"^\s+(\w+\.py)\s", drawn, flags=re.MULTILINE))
    package = README.parent / "src" / "recollect"
    files = {path.name for path in package.rglob("*.py")}
    assert names == files
