"""Render formulas, and make pages usable by keyboard and screen reader (mkdocs.yml, `hooks`).

Formulas between dollars, as the forges set them, become MathML, which needs no script.
"""

import re

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig


class _Formula(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]  # noqa: ARG002
        formula = convert(m[2], display="block" if m[1] == "$$" else "inline")
        return self.md.htmlStash.store(formula), m.start(), m.end()


class _Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # After code (190), before a backslash escapes what follows it (180).
        md.inlinePatterns.register(_Formula(r"(\$\$?)(\S|\S[^$]*\S)\1", md), "formula", 185)


# The theme scrolls code and tables in elements that a keyboard reaches only where a mouse hovers.
CONTENT = {
    "<th></th>": "<td></td>",
    "<pre><span>": '<pre tabindex="0"><span>',
    "<table>": '<div class="scrolled" tabindex="0"><table>',
    "</table>": "</table></div>",
}


def on_config(config: MkDocsConfig, **_: object) -> None:
    """Add the formulas to Markdown's extensions."""
    config.markdown_extensions.append(_Formulas())  # type: ignore[arg-type]


def on_page_content(html: str, **_: object) -> str:
    """Return a page's content with its tables and commands in the tab order."""
    for old, new in CONTENT.items():
        html = html.replace(old, new)
    return html


def on_post_page(output: str, **_: object) -> str:
    """Return a page whose search dialog has a name for screen readers."""
    unnamed = 'data-md-component="search" role="dialog"'
    return output.replace(unnamed, f'{unnamed} aria-label="Search"')


def on_post_template(output_content: str, **_: object) -> str:
    """Return a page of the theme (404.html) whose search dialog has a name."""
    return on_post_page(output_content)
