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


def rooms() -> tuple[dict[str, int], list[set[str]]]:
    """The table of CONTRIBUTING.md: the row of each name, and the names that a row may import."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| room of `src/softstair/` |")
    cells = [line.split(" | ") for line in table.partition("\n\n")[0].splitlines()[2:]]
    named = [[re.findall(r"`(\w+)/?`", cell) for cell in (row[0], row[-1])] for row in cells]
    row_of = {name: place for place, (names, _) in enumerate(named) for name in names}
    return row_of, [set(allowed) for _, allowed in named]


def test_modules_import_what_their_room_may_import() -> None:
    """Their own row, the rows that it names, and what these may import."""
    row_of, allowed = rooms()
    reached: list[set[int]] = []
    for place, names in enumerate(allowed):
        above = {row_of[name] for name in names}
        assert all(row < place for row in above)
        reached.append({place}.union(*(reached[row] for row in above)))
    top = lambda module: module.split(".")[1]
    graph = import_graph()
    assert set(row_of) == {top(module) for module in graph} - {"__main__"}
    forbidden = {
        (module, imported)
        for module, all_imported in graph.items()
        for imported in all_imported
        if top(module) != "__main__" and row_of[top(imported)] not in reached[row_of[top(module)]]
    }
    assert forbidden == set()


MOST_LINES = 7_500


def in_another_process(code: str) -> str:
    """Run code where nothing of softstair is imported yet; return what it prints."""
    run = [sys.executable, "-c", code]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout


def test_importing_softstair_executes_few_lines_and_no_training() -> None:
    code = "import sys, softstair; print(*(m.__file__ for n, m in sys.modules.items()"
    files = in_another_process(f"{code} if n.partition('.')[0] == 'softstair'))").split()
    rooms = {Path(file).relative_to(Path(softstair.__file__).parent).parts[0] for file in files}
    assert rooms.isdisjoint({"train", "data", "cli", "deploy", "models", "zoo"})
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


# The paper and the benchmarks, which are not in the wheel

PUBLIC = ("", ".noise", ".ste", ".nn", ".deploy", ".data", ".models", ".train", ".zoo")
"""Modules whose ``__all__`` is public: those of the API site."""


PRIVATE = """
softstair: __version__ _accelerate _check kernels
softstair._accelerate: moments products
softstair._check: choice ending integer invalid shortened suggestion wrong
softstair._errors: SoftstairError first_line import_extra is_out_of_memory
softstair._files: check_output output_file replacing write
softstair.deploy.c: build write
softstair.deploy.frozen: FrozenNetwork
softstair.deploy.onnx: model
softstair.anneal: SMALLEST_STD
softstair.cli: main
softstair.cli._args: argument flag words_of
softstair.cli._output: Console Progress Stoppable plural print_line print_table same_command table
softstair.cli.train: MAX_FOLDS check_workers
softstair.convert.options: StairName name_of parse parse_layers stair_named stairs_of
softstair.data.augment: Augmentation Moves
softstair.data.batches: Examples PLAIN
softstair.models: DEFAULTS
softstair.regularise: FORWARDS Forward regularise
softstair.schedule: INTERVALS Interval NoisePath POWERS Power
softstair.train: checkpoint records
softstair.train.captured: optimiser_tensors
softstair.train.execution: Compiled use_batch_kernel
softstair.train.fit: Step
softstair.train.groups: REPLACED
softstair.train.metrics: CHUNK refresh_statistics
softstair.train.network: deployed examples_of make_network stair_network
softstair.train.optimiser: make_optimiser
softstair.train.parallel: StopRequest torchrun_ranks
softstair.train.pool: MAX_RUNS_PER_GPU Pool ProcessPool Task cores worker_count
softstair.train.progress: Event error_message train_with_events
softstair.train.recipe: OPTIONS PresetName fields_with
softstair.train.records: metrics_of read_json recipe_of refuse_other_data summary_of
softstair.train.run: source_commit
softstair.train.settings: choose_device choose_threads memory_errors training_settings
softstair.train.state: State
softstair.train.teacher: FloatRun Teacher
softstair.train.updates: Rates
softstair_command: call dispatch
"""
"""What the paper and the benchmarks import beyond these, by module. Remove what nothing needs any
more; add nothing."""


def names_from(folder: str) -> set[str]:
    """What the files of a folder import of packages of this repository, as module.name."""
    names = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    ours = ("softstair", "softstair_command", "paper", "benchmarks")
    return {name for name in names if name.partition(".")[0] in ours}


def test_nothing_points_back() -> None:
    top = lambda folder: {name.partition(".")[0] for name in names_from(folder)}
    assert top("src") == {"softstair", "softstair_command"}
    assert top("paper") == {"softstair", "softstair_command", "paper"}
    assert "paper" in top("benchmarks")


def test_the_list_of_private_names_is_what_is_imported() -> None:
    public = {"softstair"}
    for part in PUBLIC:
        module = f"softstair{part}"
        public |= {module, *(f"{module}.{name}" for name in import_module(module).__all__)}
    listed, module = set(), ""
    for word in PRIVATE.split():
        if word.endswith(":"):
            module = word.removesuffix(":")
        else:
            listed.add(f"{module}.{word}")
    imported = names_from("paper") | names_from("benchmarks")
    private = {name for name in imported if name.startswith("softstair")} - public
    assert private == listed
