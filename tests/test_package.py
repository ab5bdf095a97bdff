"""What the package says about itself: its version and what changed in it."""

import ast
import re
import tomllib
from pathlib import Path

import softstair

ROOT = Path(__file__).parents[1]


def test_the_version_of_the_package_is_read_from_its_source() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in settings["project"]
    assert "version" in settings["project"]["dynamic"]
    source = (ROOT / settings["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [softstair.__version__]


def test_the_changelog_has_a_section_for_the_version_and_one_for_the_next() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", softstair.__version__]


def imports_of(module: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules that one imports anywhere in its code, in functions and for types too."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                imported.add(submodule if submodule in modules else node.module)
    return {name for name in imported if name in modules and name != module}


def test_no_module_imports_itself_through_others() -> None:
    source = Path(softstair.__file__).parents[1]
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in source.glob("softstair/**/*.py")
    }
    del modules["softstair"]  # imported before any of its modules; some read its version later
    graph = {name: imports_of(name, path, modules) for name, path in modules.items()}
    reachable = {name: set(direct) for name, direct in graph.items()}
    for middle in modules:
        for name in modules:
            if middle in reachable[name]:
                reachable[name] |= reachable[middle]
    circular = {name for name in modules if name in reachable[name]}
    assert circular == set()
