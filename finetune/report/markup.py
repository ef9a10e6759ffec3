"""The pages' common ground: the document around them, sections, tables, and the way everything else becomes text.

Every function returns markup. Whatever comes from outside passes through `escape`, most of it by way of `table`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --text: #1c2126; --soft: #66707a; --line: #d9dee3; --ground: #fff; --box: #f5f7f9;
  --trained: #b9ecc8; --bar: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ec; --soft: #98a2ac; --line: #39414a; --ground: #14181c; --box: #1d2329;
    --trained: #17502c; --bar: #56b4e9; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { margin: 1rem 0 0; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .5rem; font-size: 1.25rem; border-bottom: 1px solid var(--line); }
h3 { margin: 1.5rem 0 .5rem; font-size: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
h4 { margin: 0; font-size: .85rem; color: var(--soft); }
.wide { overflow-x: auto; }
.wide + .wide { margin-top: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.2rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: normal; }
tbody th { font-weight: normal; white-space: nowrap; }
.numbers td, .numbers thead th + th { text-align: right; }
img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
pre, .answer { background: var(--box); border-radius: 6px; padding: .8rem; margin: 0; }
pre { overflow-x: auto; font-size: .9rem; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem; }
.answer p { margin: .3rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; overflow-y: auto; max-height: 24rem; line-height: 1.9; }
.tokens span, .tokens mark { border-left: 1px solid var(--line); }
.tokens span { color: var(--soft); }
mark { background: var(--trained); color: inherit; }
"""


# Control characters but tab and line break: a page may be printed on a terminal, and none of them belongs in HTML.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


def document(title: str, body: str) -> str:
    """A whole page that needs nothing but itself: `title`, a plain text, above the markup `body`."""
    name = escape(title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{name}</h1>{body}</main>\n"
        "</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    """A heading and what it is about; nothing where there is nothing."""
    return f"<section><h2>{title}</h2>{body}</section>\n" if body else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A table of plain texts whose first column names the row; `numbers` aligns the others to the right."""
    lines = [
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    ]
    if not lines:
        return ""
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    thead = f"<thead><tr>{cells}</tr></thead>" if head else ""
    kind = ' class="numbers"' if numbers else ""
    return f'<div class="wide"><table{kind}>{thead}<tbody>{"".join(lines)}</tbody></table></div>'


def escape(text: str) -> str:
    """`text` as markup that shows it and does nothing else."""
    # JSON can hold half of a surrogate pair, which no file in UTF-8 can.
    return html.escape(text.translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8"))
