"""The examples, commands, names and flags of the first version's pages still work."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from softstair.cli import main
from test_docs import GIVEN, blocks, parse_command

PAGES = sorted((Path(__file__).parent / "first_version").glob("*.md"))
API = json.loads((Path(__file__).parent / "first_version/api.json").read_text(encoding="utf-8"))
# Lightning's and Hugging Face's examples are run by the tests of the callbacks.
RUNNABLE = [page for page in PAGES if blocks(page, "python") and page.stem != "integrations"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.nightly
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": page.stem}
    names |= GIVEN.get(page.name, lambda _: {})(monkeypatch)
    for block in blocks(page, "python"):
        if file := re.match(r"# (\w+)\.py\n", block):
            Path(f"{file[1]}.py").write_text(block, encoding="utf-8")
            monkeypatch.setitem(sys.modules, file[1], None)
            monkeypatch.delitem(sys.modules, file[1])
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_parse(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            parse_command(line)


@pytest.mark.parametrize("module", API["names"])
def test_public_names_exist(module: str) -> None:
    names = API["names"][module].split()
    assert [name for name in names if not hasattr(import_module(module), name)] == []


FLAGS = [
    (verb, flag)
    for verb, line in API["flags"].items()
    for flag in line.split()
    if flag != "--help"  # it is shown whatever follows
]


@pytest.mark.parametrize(("verb", "flag"), FLAGS, ids="".join)
def test_flags_are_known(verb: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With an unknown flag after it, no command is run, and an error names that one."""
    assert main([verb, *shlex.split(flag), "--no-such-flag"]) == 2
    message = capsys.readouterr().err
    assert f"'{flag}'" not in message or "unknown" not in message, message
