"""How Sphinx builds the documentation; `scripts/docs` calls it.

The source folder is the clone itself, so that a link from one page to another is the same on GitHub
and in the site. Pages are the Markdown files named in `include_patterns`, nothing else.
"""

from importlib.metadata import version as version_of

project = "hpc_elastic"
author = copyright = "The hpc_elastic authors"
version = release = version_of("hpc_elastic")

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**.md",
    "benchmarks/RESULTS.md",
    "tools/*/README.md",
    "examples/README.md",
    "examples/start/SKILL.md",
    "tests/README.md",
]
exclude_patterns = ["docs/_build/**"]
templates_path = ["_templates"]

# Markdown as GitHub has it: anchors of headings by its rule, and nothing that it would not show.
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]

html_theme = "furo"
html_title = f"hpc_elastic {release}"
html_additional_pages = {"index": "index.html"}  # leads to root_doc, which has a folder's name
html_show_sourcelink = False
html_theme_options = {"footer_icons": []}
pygments_dark_style = "github-dark"

# The addresses that only exist while somebody runs something.
linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1).*"]
linkcheck_timeout = 20
linkcheck_workers = 4
linkcheck_anchors = False
