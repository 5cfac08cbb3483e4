"""Sphinx configuration. Built with ``-W``: a broken reference fails the build. Nothing is fetched from the network."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "Scriba"
author = "The Scriba authors"
project_copyright = "The Scriba authors"
release = re.search(r'__version__ = "([^"]+)"', (ROOT / "scriba" / "__init__.py").read_text())[1]  # type: ignore[index]
version = release

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = True

html_theme = "furo"
html_title = "Scriba"
html_static_path = ["_static"]
html_show_sphinx = False
