"""The documentation: every Python block runs and prints what the page says; pictures are what the script draws; the site builds."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PAGES = load("pages")


def names():
    return [str(p.relative_to(DOCS)) for p in PAGES.pages()]


@pytest.mark.parametrize("page", names())
def test_blocks_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, shared = PAGES.blocks((DOCS / page).read_text()), {"__name__": "__main__"}
    assert found, "a page without an example"
    for block in found:
        printed = PAGES.run(block, page, shared)
        assert printed == block.text, f"{page}:{block.line}"


@pytest.mark.parametrize("page", names())
def test_every_fence_is_known(page):
    """A fence that the runner does not see is not checked: each is python, or text below python, or a shell line."""
    text = (DOCS / page).read_text()
    opening = re.findall(r"^ *```(\S.*)$", text, re.MULTILINE)
    assert set(opening) <= {"python", 'text title="Output"', 'text title="Error"', "sh"}
    below = sum(b.title is not None for b in PAGES.blocks(text))
    assert sum(o.startswith("text") for o in opening) == below
    assert sum(o == "python" for o in opening) == len(PAGES.blocks(text))


def test_a_wrong_output_is_seen():
    block = PAGES.blocks('```python\nprint(1 + 1)\n```\n\n```text title="Output"\n3\n```\n')[0]
    assert (PAGES.run(block, "page", {}), block.text) == ("2\n", "3\n")
    silent = PAGES.blocks('```python\npass\n```\n\n```text title="Error"\nValueError: no\n```\n')[0]
    with pytest.raises(AssertionError, match="nothing was raised"):
        PAGES.run(silent, "page", {})


def content(svg):
    """What a picture shows: its words, and how many shapes it has. Coordinates may move a little with matplotlib's version."""
    text = svg.read_text()
    return re.findall(r"<text [^>]*>([^<]*)</text>", text), text.count("<path "), text.count("<use ")


def test_pictures_are_what_the_script_draws(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'blockscale[plot]'")
    drawn = load("pictures").draw(tmp_path)
    committed = sorted(p.name for p in (DOCS / "pictures").glob("*.svg"))
    assert sorted(p.name for p in drawn) == committed
    for picture in drawn:
        words, _, _ = shown = content(picture)
        assert words
        assert shown == content(DOCS / "pictures" / picture.name), picture.name


def test_every_picture_is_shown():
    shown = {m for p in PAGES.pages() for m in re.findall(r"pictures/(\w+\.svg)", p.read_text())}
    assert shown == {p.name for p in (DOCS / "pictures").glob("*.svg")}


def test_the_site_builds(tmp_path):
    """Strict: a broken link, anchor or picture is an error."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'blockscale[docs]'")
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'blockscale[docs]'")
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(site),
        "--config-file",
        str(ROOT / "mkdocs.yml"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    built = {str(p.relative_to(site)) for p in site.rglob("*.html")} - {"404.html"}
    assert built == {name.replace(".md", ".html") for name in names()}
    assert not list(site.rglob("*.py"))
    shutil.rmtree(site)
