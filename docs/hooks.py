"""What the built pages need and the theme lacks (mkdocs.yml, `hooks`).

Landmarks for screen readers, tables and commands that a keyboard can scroll, no empty headers.
"""

CONTENT = {
    "<pre>": '<pre tabindex="0">',
    "<table>": '<div class="table-responsive" tabindex="0"><table>',
    "</table>": "</table></div>",
    "<th></th>": "<td></td>",
}
PAGE = {
    '<div class="navbar ': '<div role="banner" class="navbar ',
    '<div class="row-fluid">': '<div class="row-fluid" role="main">',  # of 404.html
}


def _replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def on_page_content(html: str, **_: object) -> str:
    """The page's own part."""
    return _replaced(html, CONTENT)


def on_post_page(output: str, **_: object) -> str:
    """The whole page."""
    return _replaced(output, PAGE)


def on_post_template(output_content: str, **_: object) -> str:
    """A page without a Markdown file: 404.html."""
    return _replaced(output_content, PAGE)
