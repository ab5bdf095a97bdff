"""What the package says about itself: its version and what changed in it."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from importlib.util import find_spec
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


@cache
def import_graph() -> dict[str, set[str]]:
    """The modules that each module of softstair imports."""
    source = Path(softstair.__file__).parents[1]
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in source.glob("softstair/**/*.py")
    }
    del modules["softstair"]  # imported before any of its modules; some read its version later
    return {name: imports_of(name, path, modules) for name, path in modules.items()}


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph()
    reachable = {name: set(direct) for name, direct in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reachable[name]:
                reachable[name] |= reachable[middle]
    circular = {name for name in graph if name in reachable[name]}
    assert circular == set()


def test_modules_import_from_no_row_below_their_own() -> None:
    """In the table of CONTRIBUTING.md, which has every module and folder of the package."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| module or folder of `softstair` |")
    rows = re.findall(r"^\| (`.+?`) \|", table.partition("\n\n")[0], re.MULTILINE)
    row_of = {name: n for n, row in enumerate(rows) for name in re.findall(r"`(\w+)/?`", row)}
    top = lambda module: module.split(".")[1]
    graph = import_graph()
    assert set(row_of) == {top(module) for module in graph} - {"__main__"}
    upward = {
        (module, imported)
        for module, all_imported in graph.items()
        for imported in all_imported
        if top(module) != "__main__" and row_of[top(imported)] > row_of[top(module)]
    }
    assert upward == set()


MOST_LINES = 7_500


def in_another_process(code: str) -> str:
    """Run code where nothing of softstair is imported yet; return what it prints."""
    run = [sys.executable, "-c", code]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout


def test_importing_softstair_executes_few_lines_and_no_training() -> None:
    code = "import sys, softstair; print(*(m.__file__ for n, m in sys.modules.items()"
    files = in_another_process(f"{code} if n.partition('.')[0] == 'softstair'))").split()
    rooms = {Path(file).relative_to(Path(softstair.__file__).parent).parts[0] for file in files}
    assert rooms.isdisjoint({"train", "data", "cli", "deploy", "models.py", "zoo"})
    assert sum(len(Path(file).read_bytes().splitlines()) for file in files) <= MOST_LINES


def test_public_names_stay_the_same_when_every_module_is_imported() -> None:
    """A lazy name that a module beside it has too would become that module."""
    names = {*softstair.__all__, *softstair._ROOMS, *softstair._NAMES}
    before = {name: getattr(softstair, name) for name in names}
    slow = "softstair.integrations."  # they import frameworks
    for module in import_graph():
        if not module.startswith(slow) and (find_spec("triton") or "triton" not in module):
            import_module(module)
    assert {name: getattr(softstair, name) for name in names} == before
    assert names <= {*dir(softstair)}


def test_lazy_names_are_imported_from_the_package() -> None:
    code = "from softstair import deploy, report; print(report.__name__, deploy.__name__)"
    assert in_another_process(code).split() == ["report", "softstair.deploy"]
