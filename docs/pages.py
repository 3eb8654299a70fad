"""Run the Python blocks of the documentation, and compare or write what they print.

A page's blocks share one namespace and run in order. A ``text`` fence titled "Output" holds what the block above it prints;
one titled "Error" ends with the exception that the block raises, as ``Type: message``.

    python docs/pages.py            write what the blocks of all pages print into the pages
    python docs/pages.py PAGE ...   of these pages
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent
_BLOCK = re.compile(r'```python\n(?P<code>.*?)```(?:\n+```text title="(?P<title>Output|Error)"\n(?P<text>.*?)```)?', re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A Python block: its code, the title of the fence below it (None: there is none) and its text, and its place in the page."""

    code: str
    title: str | None
    text: str
    line: int
    span: tuple[int, int]


def pages() -> list[Path]:
    """All pages, by name."""
    return sorted(DOCS.rglob("*.md"))


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page."""
    found = []
    for m in _BLOCK.finditer(text):
        line = text.count("\n", 0, m.start("code")) + 1
        found.append(Block(m["code"], m["title"], m["text"] or "", line, m.span("text")))
    return found


def run(block: Block, page: str, names: dict[str, object]) -> str:
    """What a block prints, with the exception that an "Error" fence asks for as its last line.

    Raises:
        AssertionError: an Error fence and nothing was raised. Any exception of a block without one.
    """
    out = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.code, page, "exec", dont_inherit=True)
    with contextlib.redirect_stdout(out):
        try:
            exec(code, names)
        except Exception as error:
            if block.title != "Error":
                raise
            print(f"{type(error).__name__}: {error}")
        else:
            if block.title == "Error":
                raise AssertionError(f"{page}:{block.line}: nothing was raised")
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def write(page: Path) -> None:
    """Put what the blocks of a page print into its fences. Blocks run in a folder of their own."""
    text, names, shift = page.read_text(), {"__name__": "__main__"}, 0
    back = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            results = [(b, run(b, page.name, names)) for b in blocks(text)]
        finally:
            os.chdir(back)
    for block, printed in results:
        if block.title:
            start, end = (i + shift for i in block.span)
            text = text[:start] + printed + text[end:]
            shift += len(printed) - (end - start)
        elif printed:
            print(f"{page.name}:{block.line}: prints, but has no Output fence", file=sys.stderr)
    page.write_text(text)


if __name__ == "__main__":
    for path in [Path(p).resolve() for p in sys.argv[1:]] or pages():
        write(path)
