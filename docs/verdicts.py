"""Writes the tables of docs/reproduction.md anew from results/reproduction/*.csv.

python docs/verdicts.py
"""

import re
from pathlib import Path

from softstair.experiments import Training, load
from softstair.experiments.claims import judged

DOCS = Path(__file__).parent
TABLES = DOCS.parent / "results" / "reproduction"


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


def accuracies(trainings: list[Training]) -> str:
    """A row for each unit of the full scale."""
    lines = [
        "| configuration | epochs | fold | validation | before the drop | best epoch's | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in trainings:
        if int(one.settings["epochs"]) < 500:
            continue
        before = [epoch.valid_accuracy for epoch in one.curve[390:400]]
        cells = [one.valid_accuracy, sum(before) / len(before), one.best_valid_accuracy or 0.0]
        numbers = " | ".join(f"{100 * cell:.2f}" for cell in (*cells, one.test_accuracy or 0.0))
        name, epochs = f"`{one.configuration}`", one.settings["epochs"]
        lines.append(f"| {name} | {epochs} | {one.fold} | {numbers} |")
    return "\n".join(lines)


def rewritten(page: str) -> str:
    """The page with its tables as they are now."""
    trainings = everything()
    for name, table in (("verdicts", verdicts(trainings)), ("full scale", accuracies(trainings))):
        pattern = rf"<!-- {name} -->\n.*?<!-- end of {name} -->"
        whole = f"<!-- {name} -->\n{table}\n<!-- end of {name} -->"
        page, found = re.subn(pattern, lambda _, whole=whole: whole, page, flags=re.DOTALL)
        assert found == 1, name
    return page


if __name__ == "__main__":
    path = DOCS / "reproduction.md"
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
