"""Pages of the API site that are not in ``docs/``: a hook of mkdocs, named in ``mkdocs.yml``.

README.md, CHANGELOG.md, CONTRIBUTING.md and paper/RESULTS.md are taken from the repository. Each
public module has a page with every name of its ``__all__``.
"""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from softstair.train.options import describe
from softstair.train.recipe import GROUPS

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "paper/RESULTS.md": "RESULTS.md",
}
MODULES = (
    "softstair",
    "softstair.noise",
    "softstair.ste",
    "softstair.nn",
    "softstair.deploy",
    "softstair.data",
    "softstair.models",
    "softstair.train",
    "softstair.zoo",
)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def api_page(name: str) -> str:
    """Return the page of a public module: its summary and each name of its ``__all__``."""
    module = importlib.import_module(name)
    lines = [f"# {name}", "", (module.__doc__ or "").strip().partition("\n")[0], ""]
    if name == "softstair":
        lines += ["```python", "import softstair as ss", "```", ""]
    for public in module.__all__:
        value = getattr(module, public)
        if isinstance(value, ModuleType):
            continue
        path = f"{name}.{public}"
        if path in sys.modules:  # a function and the module that defines it
            path = f"{value.__module__}.{value.__qualname__}"
        lines += [f"::: {path}", ""]
        if value in GROUPS.values():
            lines += option_table(value)
    return "\n".join(lines)


def option_table(options: type) -> list[str]:
    """Return the lines of a table of the fields, whose help texts are not docstrings."""
    default = options()
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for name, known in describe(options).items():
        lines.append(f"| `{name}` | `{getattr(default, name)!r}` | {known.help} |")
    return [*lines, ""]


def relink(text: str, page: Path) -> str:
    """Return a page's text with its links made relative to ``docs/``.

    Files outside ``docs/`` that are pages of the site become links to these pages. The site does
    not hold other files: their links become the text and the path in the repository.
    """

    def replace(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if re.match(r"[a-z]+:", target):
            return link[0]
        path = (page.parent / target).resolve().relative_to(ROOT)
        if path.parts[0] == "docs":
            site_path = path.relative_to("docs").as_posix()
        elif path.as_posix() in FROM_ROOT:
            site_path = FROM_ROOT[path.as_posix()]
        else:
            return f"{link['text']} (`{path}`)"
        return f"[{link['text']}]({site_path}{anchor})"

    return LINK.sub(replace, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in ``docs/``."""
    from mkdocs.structure.files import File

    for source, target in FROM_ROOT.items():
        text = relink((ROOT / source).read_text(encoding="utf-8"), ROOT / source)
        files.append(File.generated(config, target, content=text))
    for name in MODULES:
        files.append(File.generated(config, f"api/{name}.md", content=api_page(name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files that the site does not hold."""
    if page.file.generated_by:
        return markdown
    return relink(markdown, Path(page.file.abs_src_path))
