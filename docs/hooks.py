"""What the built pages need and the theme lacks (mkdocs.yml, `hooks`).

Landmarks for screen readers, tables and commands that a keyboard can scroll, no empty headers;
formulas between dollars, as the forges set them, become MathML, which needs no script.
"""

import re

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig

CONTENT = {
    "<pre>": '<pre tabindex="0">',
    "<table>": '<div class="table-responsive" tabindex="0"><table>',
    "</table>": "</table></div>",
    "<th></th>": "<td></td>",
}
PAGE = {
    '<div class="navbar ': '<div role="banner" class="navbar ',
    '<h4 class="modal-title"': '<h4 class="modal-title" aria-level="2"',
    'id="mkdocs-search-query"': 'id="mkdocs-search-query" aria-label="Search"',
    '<div class="row-fluid">': '<div class="row-fluid" role="main">',  # of 404.html
}


def _replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


class _Formula(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]  # noqa: ARG002
        formula = convert(m[2], display="block" if m[1] == "$$" else "inline")
        return self.md.htmlStash.store(formula), m.start(), m.end()


class _Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # After code (190), before a backslash escapes what follows it (180).
        md.inlinePatterns.register(_Formula(r"(\$\$?)(\S|\S[^$]*\S)\1", md), "formula", 185)


def on_config(config: MkDocsConfig, **_: object) -> None:
    """Formulas, wherever Markdown stands outside code."""
    config.markdown_extensions.append(_Formulas())  # type: ignore[arg-type]


def on_page_content(html: str, **_: object) -> str:
    """The page's own part."""
    return _replaced(html, CONTENT)


def on_post_page(output: str, **_: object) -> str:
    """The whole page."""
    return _replaced(output, PAGE)


def on_post_template(output_content: str, **_: object) -> str:
    """A page without a Markdown file: 404.html."""
    return _replaced(output_content, PAGE)
