# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.site`: look at the words of pages, build the site, look at what it loads.

MkDocs builds strictly: a link, an anchor or a name of the API that is not there fails. `make docs`
runs this in an environment of its own, which has neither torch nor vLLM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.site.followed import broken_links
from tools.site.hooks import ROOT, site_paths
from tools.site.loaded import loaded_from_elsewhere, shown_as_written

SITE = ROOT / "site"
# Other papers of the repository; the schemas come with check-jsonschema.
SCHEMAS = {
    "vendor.citation-file-format": "CITATION.cff",
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
}


def main() -> int:
    """Build the site; 1 if something is wrong with it."""
    tools = [sys.executable, "-m"]
    pages = [str(ROOT / path) for path in site_paths() if path.endswith(".md")]
    pages += [str(path) for path in sorted(ROOT.glob("docs/reference/*.md"))]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    commands = [["codespell_lib", *pages]]
    for schema, files in SCHEMAS.items():
        paths = [str(path) for path in sorted(ROOT.glob(files))]
        commands.append(["check_jsonschema", "--quiet", "--builtin-schema", schema, *paths])
    commands.append(["mkdocs", "build", "--quiet", "--site-dir", str(SITE)])
    for command in commands:
        if subprocess.run([*tools, *command], cwd=ROOT, env=environment).returncode:
            print(f"make docs: {command[0]} has found something", file=sys.stderr)
            return 1
    found = []
    files = frozenset(str(path.relative_to(SITE)) for path in SITE.rglob("*") if path.is_file())
    pages = {
        f: (SITE / f).read_text(encoding="utf-8") for f in sorted(files) if f.endswith(".html")
    }
    # The page of what is not found is shown at any address, with links from the root.
    followed = {name: text for name, text in pages.items() if name != "404.html"}
    found += broken_links(followed, files)
    for name, text in pages.items():
        found += [f"{name} loads {address}" for address in loaded_from_elsewhere(text)]
        found += [f"{name} shows as it was written: {line}" for line in shown_as_written(text)]
    if found:
        print("make docs:", *found, sep="\n  ", file=sys.stderr)
        return 1
    print(f"{Path(SITE).relative_to(ROOT)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
