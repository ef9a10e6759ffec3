"""Hook of mkdocs: the site has what the pages link to, wherever it lies in the repository.

A page links to other pages and to files by their path in the repository, which is what forges and editors follow. In
the site, the Markdown files below are pages beside those of docs/, and other files that a page links to are copies.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "data/README.md": "built-in-base.md",
}
"""Pages outside of docs/, by their path in the repository: path in the site."""
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(?:(?<=\]\()|(?<=\]: ))(?!\w+:|#)([^)\s#]+)")
"""What `[text](target)` and `[name]: target` lead to, where that is in the repository."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/, and the files that any page links to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page in files.documentation_pages():
        for link in _LINK.findall(page.content_string):
            source = _source(page.src_uri, link)
            if (ROOT / source).is_file() and not files.get_file_from_path(_uri(source)):
                files.append(File.generated(config, _uri(source), abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Point the links to where their targets are in the site; all pages are in one folder."""
    return _LINK.sub(lambda link: _uri(_source(page.file.src_uri, link[0])), markdown)


def _source(page: str, link: str) -> str:
    """Path in the repository of what `page` of the site links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_SOURCES.get(page, f"docs/{page}")), link))


def _uri(source: str) -> str:
    """Path in the site of a file of the repository."""
    return PAGES.get(source) or (source.removeprefix("docs/") if source.startswith("docs/") else f"files/{source}")
