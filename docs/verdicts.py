"""Writes the tables of docs/reproduction.md anew from results/reproduction and results/variations.

python docs/verdicts.py
"""

from pathlib import Path

from parts import put

from softstair import noise as noises
from softstair.experiments import Training, load
from softstair.experiments.claims import judged
from softstair.experiments.claims.static import FULL
from softstair.experiments.statistics import mean_of
from softstair.experiments.studies import studies

DOCS = Path(__file__).parent
TABLES = DOCS.parent / "results" / "reproduction"
VARIATIONS = DOCS.parent / "results" / "variations"


def everything() -> list[Training]:
    """Every unit that was trained for the reproduction."""
    return [one for table in sorted(TABLES.glob("*.csv")) for one in load(table)]


def verdicts(trainings: list[Training]) -> str:
    """A row for each of the paper's claims."""
    head = ["| claim | the paper says | verdict | measured |", "|---|---|---|---|"]
    rows = [
        f"| {one.claim} | {one.says} | **{one.verdict}** | {one.measured} |"
        for one in judged(trainings)
    ]
    return "\n".join([*head, *rows])


def shorter(trainings: list[Training]) -> str:
    """A row for each claim that trainings shorter than the paper's say something about."""
    head = ["| claim | verdict | measured |", "|---|---|---|"]
    short = [one for one in trainings if not _is_full(one)]
    tested = [one for one in judged(short) if one.verdict != "not tested"]
    rows = [f"| {one.claim} | **{one.verdict}** | {one.measured} |" for one in tested]
    return "\n".join([*head, *rows])


def means(trainings: list[Training], data: str, full: bool = False) -> str:
    """A row for each configuration of the shorter trainings of a data set, or of those that are as
    long as the paper's, the best first."""
    head = ["| configuration | folds | validation, % |", "|---|---|---|"]
    rows = []
    found = studies(
        one for one in trainings if one.settings["data"] == data and _is_full(one) == full
    )
    for study in found:
        if len(found) > 1:
            rows.append(f"| **{study.scale}** | | |")
        folds: dict[str, list[float]] = {}
        for one in study.trainings:
            if one.is_done:
                folds.setdefault(one.configuration, []).append(one.valid_accuracy)
        best = sorted(folds.items(), key=lambda item: -mean_of(item[1]).value)
        rows += [
            f"| `{name}` | {len(each)} | {mean_of(each).in_hundredths()} |" for name, each in best
        ]
    return "\n".join([*head, *rows])


def _is_full(one: Training) -> bool:
    return int(one.settings["epochs"]) >= FULL.get(one.settings["data"], 0)


def accuracies(trainings: list[Training], data: str) -> str:
    """A row for each unit of a data set at full scale, the best first."""
    lines = [
        "| configuration | epochs | fold | validation | before the drop | best epoch's | test |",
        "|---|---|---|---|---|---|---|",
    ]
    full = [one for one in trainings if one.settings["data"] == data and _is_full(one)]
    for one in sorted(full, key=lambda one: -one.valid_accuracy):
        drop = int(float(one.settings["drop"]))
        before = [epoch.valid_accuracy for epoch in one.curve[drop - 10 : drop]]
        cells = [one.valid_accuracy, sum(before) / len(before), one.best_valid_accuracy or 0.0]
        numbers = " | ".join(f"{100 * cell:.2f}" for cell in (*cells, one.test_accuracy or 0.0))
        fresh = ", fresh statistics" if one.settings.get("statistics") == "fresh" else ""
        name, epochs = f"`{one.configuration}`{fresh}", one.settings["epochs"]
        lines.append(f"| {name} | {epochs} | {one.fold} | {numbers} |")
    return "\n".join(lines)


def variations(trainings: list[Training]) -> str:
    """A row for each configuration and number of epochs that was trained in other ways too: as the
    rest is, which is in bfloat16, and as the names of the tables end."""
    plain = [(one, "bfloat16") for one in trainings if one.settings["statistics"] == "running"]
    apart = _apart("cifar10")
    found: dict[tuple[str, str], dict[str, str]] = {}
    for one, how in (*plain, *apart):
        if one.fold == 0:
            row = found.setdefault((one.configuration, one.settings["epochs"]), {})
            row[how] = f"{100 * one.valid_accuracy:.2f}"
    columns = {
        "bfloat16": "bfloat16",
        "tf32": "TF32",
        "float32": "float32",
        "seed-1": "seed 1",
        "fresh-unaugmented": "fresh, not augmented",
    }
    lines = [
        f"| configuration | epochs | {' | '.join(columns.values())} |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for name, epochs in sorted({(one.configuration, one.settings["epochs"]) for one, _ in apart}):
        cells = (found[name, epochs].get(column, "") for column in columns)
        lines.append(f"| `{name}` | {epochs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def widths(trainings: list[Training]) -> str:
    """A row for each width of static noise that DSCNN was trained with, the widest first."""
    fresh = [one for one in trainings if one.settings["statistics"] == "fresh"]
    found: dict[tuple[str, str, float], list[float]] = {}
    for one in (*fresh, *(one for one, _ in _apart("speech"))):
        noise, forward, still = (one.settings[key] for key in ("noise", "forward", "static_std"))
        if (one.settings["data"], forward, still) == ("speech", "mode", "true"):
            std0 = one.settings.get("std0", "None")
            std = noises.get(noise).std_within(0.5) if std0 == "None" else float(std0)
            found.setdefault((one.settings["epochs"], noise, std), []).append(one.valid_accuracy)
    lines = ["| epochs | noise | std, quanta | folds | validation, % |", "|---|---|---|---|---|"]
    for (epochs, noise, std), each in sorted(found.items(), key=_place):
        mean = mean_of(each).in_hundredths()
        lines.append(f"| {epochs} | {noise} | {std:.3f} | {len(each)} | {mean} |")
    return "\n".join(lines)


def _place(item: tuple[tuple[str, str, float], list[float]]) -> tuple[int, int, float]:
    (epochs, noise, std), _ = item
    return -int(epochs), list(noises.names()).index(noise), -std


def _apart(data: str) -> list[tuple[Training, str]]:
    """The units of a data set that were trained in other ways, and how, by the table's name."""
    return [
        (one, table.stem.split("-", 3)[3])
        for table in sorted(VARIATIONS.glob(f"{data}-*.csv"))
        for one in load(table)
    ]


def rewritten(page: str) -> str:
    """The page with its tables as they are now."""
    trainings = everything()
    tables = {
        "full scale": accuracies(trainings, "cifar10"),
        "variations": variations(trainings),
        "verdicts": verdicts(trainings),
        "shorter": shorter(trainings),
        "speech at full scale": means(trainings, "speech", full=True),
        "widths": widths(trainings),
        **{data: means(trainings, data) for data in ("cifar10", "svhn", "speech")},
    }
    return put(tables, page)


if __name__ == "__main__":
    path = DOCS / "reproduction.md"
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
