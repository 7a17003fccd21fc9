"""The code blocks of the README, and those of each page of docs/, run in order as one program. What the README promises
to print is printed, links lead somewhere, and the map is true."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"
DOCS = README.parent / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]


def blocks(language, page=README):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def run(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    model = folder / "model.py"
    source = "\n".join(blocks("python", page))
    model.write_text(source)
    exec(compile(source, str(model), "exec"), {"__name__": "model"})


def rounded(text):
    """Sums are not the same to the last digit everywhere."""
    return re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", text)


def test_the_code_runs_and_prints_what_it_says(capsys, tmp_path, monkeypatch):
    run(README, tmp_path, monkeypatch)
    printed = re.sub(r"[^\s(]*model\.py:\d+", "model.py:N", capsys.readouterr().out)
    table, error = (re.sub(r"model\.py:\d+", "model.py:N", block) for block in blocks("text"))
    assert rounded(error) in rounded(printed)
    if not torch.__version__.startswith("2.13"):
        return  # attention consists of other operators there
    lines = iter(printed.splitlines())
    assert all(line in lines for line in table.splitlines() if line != " ... (and so on)")  # in this order


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if blocks("python", page)], ids=lambda page: page.stem)
def test_the_code_of_the_docs_runs(page, tmp_path, monkeypatch):
    run(page, tmp_path, monkeypatch)


def test_it_opens_with_code_and_one_picture():
    text = README.read_text()
    assert text.index("```python") < text.index("![") < text.index("make demo") < text.index("## Install")
    assert len(blocks("python")[0].strip().splitlines()) <= 12


def anchors(page):
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


def test_the_readme_leads_to_every_page():
    links = re.findall(r"\]\((docs/[^)#]+)", README.read_text())
    assert {README.parent / link for link in links} >= set(DOCS.glob("*.md"))


def test_the_map_is_true():
    (drawn,) = [block for block in blocks("text", DOCS / "map.md") if block.startswith("src/recollect/")]
    names = set(re.findall(r"^\s+(\w+\.py)\s", drawn, flags=re.MULTILINE))
    package = README.parent / "src" / "recollect"
    files = {path.name for path in package.rglob("*.py")}
    assert names == files
