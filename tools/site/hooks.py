# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: pages from files outside docs/, pages of model families, and links for all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tools.site.families import family_page, read_families
from tools.site.links import relink

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
MODELS = "docs/models.md"
# Files outside docs/, and where the site has them.
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "RELEASING.md": "RELEASING.md",
    "patches/README.md": "patches.md",
    "benchmarks/RESULTS.md": "RESULTS.md",
}


def site_paths() -> dict[str, str]:
    """Map the paths of all pages and pictures, from the root, to their paths in the site."""
    docs = {f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")}
    pictures = (ROOT / "benchmarks" / "results").glob("*.png")
    return docs | PAGES | {f"benchmarks/results/{p.name}": f"results/{p.name}" for p in pictures}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of families below that of models."""
    assert config.nav is not None
    (models,) = (section["Models"] for section in config.nav if "Models" in section)
    families = read_families((ROOT / MODELS).read_text(encoding="utf-8"))
    models.extend({family.name: family.page} for family in families)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/."""
    from mkdocs.structure.files import File

    paths = site_paths()
    for source in (*PAGES, *(path for path in paths if path.endswith(".png"))):
        given = {"abs_src_path": str(ROOT / source)}
        files.append(File.generated(config, paths[source], **given))
    for family in read_families((ROOT / MODELS).read_text(encoding="utf-8")):
        # Its links are as in docs/models.md, of which it is made.
        text = relink(family_page(family), MODELS, family.page, paths, ROOT)
        files.append(File.generated(config, family.page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, which are those of its file in the repository."""
    paths = site_paths()
    sources = {where: source for source, where in paths.items()}
    where = page.file.src_uri
    if where not in sources:
        return markdown
    # A table begins a block of its own, as on the sites that show repositories.
    text = re.sub(r"<!-- (table: .*|end) -->", "", markdown)
    return relink(text, sources[where], where, paths, ROOT)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Name the theme's search dialog, for who hears the page; see `on_post_template`."""
    return _with_names(output)


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Do the same for the page of what is not found, which is no page to MkDocs."""
    return _with_names(output)


def _with_names(output: str) -> str:
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')
