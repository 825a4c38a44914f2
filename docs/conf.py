"""Sphinx's settings; `docs/build.py` copies this file next to the pages."""

from ksana_jax import __version__

project, release, version = "ksana_jax", __version__, __version__
copyright = "the ksana_jax authors; Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"ksana_jax {__version__}"
html_copy_source = False

myst_heading_anchors = 3  # links to headings are checked too
autodoc_default_options = {"members": True, "member-order": "bysource"}
maximum_signature_line_length = 90
default_role = "code"  # `name` in a docstring
nitpick_ignore_regex = [("py:.*", ".*")]  # names in signatures that have no page of their own
