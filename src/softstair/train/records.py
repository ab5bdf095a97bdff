"""Reading run directories: recipes, metrics, summaries and checkpoints of other runs too."""

import json
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, Literal

from softstair import _check
from softstair._errors import SoftstairError, first_line
from softstair.data import version
from softstair.train.recipe import OPTIONS, Recipe, fields_with

MAX_JSON_BYTES = 1 << 20
MAX_THREADS = 1024
NETWORK = "network.safetensors"
"""The file of the trained network in a run directory."""
FROZEN = "frozen.safetensors"
"""The file of its integers, where it can be frozen."""
SUMMARY = {
    "valid_accuracy", "best_valid_accuracy", "test_accuracy", "epochs", "images_per_second",
    "seconds", "config", "frozen",
}  # fmt: skip
"""Entries of summary.json."""
AGAIN = "`resume` (of a grid, the same command)"
"""How to continue a run."""

Role = Literal["start", "teacher"]
FLOAT_RUNS: dict[Role, str] = {"start": "init_from", "teacher": "teacher"}
"""The float runs that a run may use, and the fields of the recipe that name them."""


class RunError(SoftstairError):
    """A run that cannot begin, continue or be read."""


def check_same_recipe(given: Recipe, begun: Recipe, path: Path) -> None:
    """Raise RunError if a run was begun with another recipe than the given one."""
    if not (names := begun.differences(given)):
        return
    # Another number of epochs rescales times in epochs, which were not given.
    rescaled = names[0] in fields_with("scales_with_epochs") and "epochs" in names
    name = "epochs" if rescaled else names[0]
    raise RunError(
        f"the run in {str(path)!r} was begun with {name} = {begun[name]!r}, but this "
        f"recipe has {given[name]!r}: use the same `{name}` and the same preset, or give "
        "another `out`.",
        field=name,
    )


def refuse_other_data(paths: Iterable[Path], names: Container[str], data_dir: Path | str) -> None:
    """Raise RunError if one of these runs was begun with another version of its data."""
    for path in paths:
        try:
            recipe, recorded = recipe_of(path), data_version_of(path)
        except RunError:
            continue  # a run that cannot be read is reported where it is needed
        if recipe is None or recorded is None or recipe.data.name not in names:
            continue
        present = version(recipe.data.name, data_dir)
        if present is not None and present != recorded:
            raise RunError(
                f"the run in {str(path)!r} was begun with the data {recorded!r}, but "
                f"{str(data_dir)!r} holds {present!r}: give its `data_dir`, or another `out`.",
                field="data_dir",
            )


def recipe_of(path: Path) -> Recipe | None:
    """Return the recipe of a run directory; None if it holds no run."""
    config = read_json(path, "config.json")
    if config is None:
        return None
    try:
        values = config.get("recipe")
        if not isinstance(values, dict):
            raise SoftstairError("it is not a JSON object")
        if missing := [name for name in OPTIONS if name not in values]:
            raise SoftstairError(f"{', '.join(missing[:3])} missing")
        return Recipe.from_flat(values)
    except ValueError as error:
        versions = _check.shortened(config.get("versions"))
        raise RunError(
            f"the recipe in {str(path / 'config.json')!r} cannot be read ({first_line(error)}): "
            f"use the version that wrote it, {versions}, or give another `out`.",
            field="out",
        ) from None


def data_version_of(path: Path) -> str | None:
    """Return the version of the data set that a run recorded; None if it recorded none."""
    version: str | None = (read_json(path, "config.json") or {}).get("data", {}).get("version")
    return version


def summary_of(path: Path) -> dict[str, Any] | None:
    """Return the result of a run; None if it is not complete."""
    summary = read_json(path, "summary.json")
    if summary is not None and not summary.keys() >= SUMMARY:
        raise _damaged(path, "summary.json", "it is not a summary")
    return summary


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    try:
        summary = read_json(path, "summary.json")  # first, since it is written last
        text = (path / "metrics.jsonl").read_text(encoding="utf-8")
        if summary is None:
            text = text[: text.rfind("\n") + 1]  # the last line may be incomplete
        lines = [json.loads(line) for line in text.splitlines()]
        epochs = len(lines) if summary is None else summary["epochs"]
        if not lines or [line["epoch"] for line in lines] != list(range(epochs)):
            raise ValueError("its lines are not those of consecutive epochs")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise _damaged(path, "metrics.jsonl", first_line(error)) from None
    return lines


def _damaged(path: Path, name: str, reason: str) -> RunError:
    return RunError(
        f"{str(path / name)!r} is damaged or was edited ({reason}): delete summary.json in this "
        f"directory, and {AGAIN} writes it again from the checkpoint."
    )


def read_json(path: Path, name: str) -> dict[str, Any] | None:
    """Return the object in a JSON file of a run directory; None if there is no such file."""
    file = path / name
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is too long")
        data = json.loads(file.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise RunError(
            f"{str(file)!r} is damaged or was edited ({first_line(error)}): restore it, or give "
            "another `out`."
        ) from None
    return data
