"""Sphinx's settings. The pages are plain Markdown that reads as well on a code host; what only the site has
is added here: the tree of pages, and drawings in the place of Mermaid diagrams.
"""

import re
from pathlib import Path

from docutils import nodes
from pygments.lexers.sql import PostgresLexer
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from django_pgjobs import __version__

project = "django_pgjobs"
author = copyright = "The django_pgjobs developers"
version = release = __version__

extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True
pygments_style = "tango"
pygments_dark_style = "monokai"

myst_heading_anchors = 3  # those that code hosts make, so that links to them work in both places
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"django_pgjobs {version}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

SHELVES = {"tutorial": "Tutorial", "how-to": "How to", "reference": "Reference", "explanation": "Explanation"}


def add_tree(app: Sphinx, page: str, source: list[str]) -> None:
    """Make a tree out of the links of the index: each shelf has its pages in the order of their links."""
    if page != "index":
        return
    for shelf, caption in SHELVES.items():
        pages = dict.fromkeys(re.findall(rf"\]\(({shelf}/[\w-]+)\.md\)", source[0]))
        tree = ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""]
        source[0] += "\n".join(tree)


class Drawings(SphinxPostTransform):
    """Put the drawing beside a page, if there is one, in the place of its Mermaid diagram."""

    default_priority = 0

    def run(self, **_: object) -> None:
        for diagram in self.document.findall(nodes.literal_block):
            if diagram.get("language") == "mermaid":
                drawing = Path(self.app.srcdir, self.env.docname).with_suffix(".svg")
                diagram.replace_self(nodes.raw("", drawing.read_text(), format="html"))


def setup(app: Sphinx) -> None:
    app.add_lexer("sql", PostgresLexer)
    app.connect("source-read", add_tree)
    app.add_post_transform(Drawings)
