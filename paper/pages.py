"""Writes the tables of docs/reproduction.md and docs/beyond.md, all of docs/claims.md and
results/configurations.csv anew from the tables in results/.

python -m paper.pages
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from docs.parts import put
from paper import Training, load
from paper.claims import Finding, Judgement, judged
from paper.design import DESIGNS, FORWARDS
from paper.studies import DYNAMIC, FULL, STATIC, decisive, select, studies
from paper.verdicts import before_the_drop, final
from softstair import noise as noises
from softstair.cli._mean import Mean, mean_of
from softstair.schedule import POWERS

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "results"
DATA = {"cifar10": "CIFAR-10", "svhn": "SVHN, regenerated", "speech": "Speech v0.01"}
PAPER = {
    "uniform-mode-static": "86",
    "uniform-random-static": "82",
    "uniform-expectation-std-partition-homogeneous": "79",
    "uniform-expectation-std-same_start-homogeneous": "79",
}
"""Levels in the paper's text, in per cent."""
CELLS = {
    "static, mode": "uniform-mode-static",
    "static, random": "uniform-random-static",
    **{f"partition, {name}": f"uniform-{name}-std-partition-homogeneous" for name in FORWARDS},
    "same end, expectation": "uniform-expectation-std-same_end-homogeneous",
}
"""The configurations of CIFAR-10 that are compared with each other at full length."""
PAIRS = (
    ("partition, mode", "static, mode"),
    ("partition, random", "static, random"),
    ("partition, expectation", "static, mode"),
    ("static, mode", "static, random"),
    ("partition, mode", "partition, random"),
    ("partition, random", "partition, expectation"),
    ("partition, expectation", "same end, expectation"),
)
INTERVALS = ("partition", "same_start", "overlapped", "same_end")
STEPS = {"cifar10": 156, "svhn": 228, "speech": 69}
"""Steps of an epoch, in batches of 256: four fifths of the training examples."""
LAST = 20
NONE = "–"


def reproduction() -> list[Training]:
    """Every training in results/reproduction."""
    paths = sorted((RESULTS / "reproduction").iterdir())
    return [training for path in paths for training in load(path)]


def variations(pattern: str) -> list[Training]:
    """The trainings of the tables in results/variations whose names match."""
    return [run for path in sorted((RESULTS / "variations").glob(pattern)) for run in load(path)]


# Cells of a table


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def without_empty(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the columns that have a value in some row."""
    keep = [at for at in range(len(head)) if any(row[at] not in (NONE, "0") for row in rows)]
    pick = lambda cells: [cells[at] for at in keep]
    return table(pick(head), map(pick, rows))


def number(share: float | Mean | None, digits: int | None = None) -> str:
    """A share times 100, with one decimal; with two if it is of one training."""
    if share is None:
        return NONE
    value, folds = (share.value, share.folds) if isinstance(share, Mean) else (share, 0)
    digits = (2 if folds == 1 else 1) if digits is None else digits
    return f"{100 * value:z.{digits}f}".replace("-", "−")


def spread(mean: Mean | None) -> str:
    """The half interval of three folds or more; the range of two."""
    if mean is None or mean.folds == 1:
        return NONE
    if mean.margin is not None:
        return f"± {number(mean.margin, 2 if mean.margin < 0.0005 else 1)}"
    return f"{number(mean.least)} to {number(mean.most)}"


def average(values: Iterable[float | None]) -> Mean | None:
    """The mean of values, if each of them is there."""
    known = list(values)
    there = [value for value in known if value is not None]
    return mean_of(there) if there and len(there) == len(known) else None


def tail(training: Training, epochs: int = LAST) -> float:
    """The mean validation accuracy of the last epochs."""
    last = training.curve[-epochs:]
    return sum(epoch.valid_accuracy for epoch in last) / len(last)


def accuracy(training: Training) -> float:
    """The validation accuracy of the last epoch."""
    return training.curve[-1].valid_accuracy


def in_training(training: Training) -> float:
    """The accuracy on training examples over the last epoch."""
    return training.curve[-1].train_accuracy


def is_full(training: Training) -> bool:
    """Whether it is as long as the paper's."""
    return int(training.settings["epochs"]) >= FULL[training.settings["data"]]


def is_fresh(training: Training) -> bool:
    return training.settings["statistics"] == "fresh"


def grouped(trainings: Iterable[Training]) -> dict[str, list[Training]]:
    """Trainings by their configuration, the best first; by running statistics, where there are."""
    groups: dict[str, list[Training]] = {}
    for run in trainings:
        groups.setdefault(run.configuration, []).append(run)

    def level(name: str) -> float:
        running = [run for run in groups[name] if not is_fresh(run)]
        return -mean_of(run.valid_accuracy for run in running or groups[name]).value

    return {name: groups[name] for name in sorted(groups, key=level)}


# The first screen


def coverage(trainings: Sequence[Training]) -> str:
    """A row for each data set: how its units were trained."""
    rows = []
    for name, design in DESIGNS.items():
        data = name.removeprefix("paper-")
        units = {(unit.configuration, unit.recipe.fold) for unit in design.units()}
        kinds: dict[tuple[str, int], set[tuple[bool, bool]]] = {}
        for run in select(trainings, {"data": data}):
            if (run.configuration, run.fold) in units:
                kind = is_full(run), is_fresh(run)
                kinds.setdefault((run.configuration, run.fold), set()).add(kind)
        best = {unit: max(reached, key=[*KINDS].index) for unit, reached in kinds.items()}
        counts = Counter(best.values())
        never = len(units) - len(best)
        shown = [len(units), counts[True, False], counts[True, True]]
        shown += [counts[False, False] + counts[False, True], never]
        rows.append([DATA[data], *(f"{count:,}" for count in shown)])
    head = ["data set", "units in the paper", "full length, running statistics"]
    return table(
        [*head, "full length, fresh statistics only", "shortened only", "never trained"], rows
    )


KINDS = {(False, True): 0, (False, False): 1, (True, True): 2, (True, False): 3}
"""(full length, fresh statistics), the nearest to the paper last."""


def summary(findings: Sequence[Finding]) -> str:
    """How many claims hold under the paper's evaluation, at full length."""
    words = [
        next(
            (judgement.verdict for judgement in finding.tested if _is_papers(judgement)),
            "not tested",
        )
        for finding in findings
    ]
    counts = Counter(words)
    order = ("holds", "holds in part", "does not hold", "not tested")
    listed = ", ".join(f"{word} {counts[word]}" for word in order)
    return f"At full length and with running statistics, of {len(words)} claims: {listed}."


def claims(findings: Sequence[Finding]) -> str:
    """A row for each claim: its verdicts, and of how many trainings they are."""
    rows = []
    for place, finding in enumerate(findings, 1):
        kinds = {
            (_full(judgement), judgement.study.is_fresh): judgement
            for judgement in reversed(finding.tested)
        }
        cells = [f"[{place}](claims.md#{anchor(place, finding)})", finding.says]
        cells.append(DATA[finding.data])
        for kind in ((True, False), (False, False), (True, True)):
            judgement = kinds.get(kind)
            cells += [judgement.verdict, str(judgement.trainings)] if judgement else [NONE, "0"]
        rows.append(cells)
    head = ["claim", "the paper says", "data"]
    for kind in ("full length, running", "shortened, running", "full length, fresh"):
        head += [f"{kind} statistics", "trainings"]
    return table(head, rows)


def _is_papers(verdict: Judgement) -> bool:
    """Whether it is of full length and of running statistics."""
    return _full(verdict) and not verdict.study.is_fresh


def _full(verdict: Judgement) -> bool:
    return verdict.study.epochs >= FULL[verdict.study.data]


def anchor(place: int, finding: Finding) -> str:
    """The anchor of a claim's section."""
    title = "".join(c for c in finding.claim.lower() if c.isalnum() or c in "- ")
    return f"{place}-{title.replace(' ', '-')}"


# Levels


def levels(trainings: Sequence[Training], data: str) -> str:
    """A row for each configuration of a data set at full length, the best first."""
    full = [run for run in select(trainings, {"data": data}) if is_full(run)]
    head = ["configuration", "paper", "folds", "validation", "95 % or range", "before the drop"]
    head += [f"last {LAST} epochs", "test", "fresh: folds", "fresh: validation"]
    head += ["fresh: 95 % or range", "fresh: test"]
    rows = []
    for name, group in grouped(full).items():
        running = [run for run in group if not is_fresh(run)]
        fresh = [run for run in group if is_fresh(run)]
        valid = average(run.valid_accuracy for run in running)
        cells = [f"`{name}`", PAPER.get(name, NONE) if data == "cifar10" else NONE]
        cells += [str(len(running)), number(valid), spread(valid)]
        cells += [number(average(before_the_drop(run) for run in running))]
        cells += [number(average(tail(run) for run in running))]
        cells += [number(average(run.test_accuracy for run in running))]
        valid = average(run.valid_accuracy for run in fresh)
        cells += [str(len(fresh)), number(valid), spread(valid)]
        cells += [number(average(run.test_accuracy for run in fresh))]
        rows.append(cells)
    return without_empty(head, rows)


def differences(trainings: Sequence[Training], data: str, epochs: str) -> str:
    """Differences A − B between configurations with running statistics, paired by fold: before the
    drop, after the last epoch, and on the test set if there is one."""
    wanted = {"data": data, "epochs": epochs, "statistics": "running"}
    running = select(trainings, wanted)
    values = (before_the_drop, accuracy, lambda run: run.test_accuracy)
    rows = []
    for pair in PAIRS:
        left, right = (
            [run for run in running if run.configuration == CELLS[name]] for name in pair
        )
        gaps = [paired_mean(left, right, value) for value in values]
        cells = [cell for gap in gaps for cell in (number(gap), spread(gap))]
        rows.append([*pair, str(gaps[0].folds), *cells])
    heads = [(name, f"{name}: 95 %") for name in ("before the drop", "validation", "test")]
    return without_empty(["A", "B", "folds", *(cell for two in heads for cell in two)], rows)


def by_schedule(trainings: Sequence[Training]) -> str:
    """Schedules of uniform noise on fold 0 of CIFAR-10 at full length by forward pass: validation
    and test."""
    rows = []
    for interval in ("none", *INTERVALS):
        wanted = STATIC if interval == "none" else {**DYNAMIC, "power": "homogeneous"}
        wanted = {**wanted, "interval": interval, "noise": "uniform"}
        name = "static noise" if interval == "none" else interval.replace("_", " ")
        rows.append([name, *_on_fold_0(trainings, [{**wanted, "forward": f} for f in FORWARDS])])
    return table(["schedule", *FORWARDS, *(f"{forward}: test" for forward in FORWARDS)], rows)


def by_type(trainings: Sequence[Training]) -> str:
    """Types of static noise on fold 0 of CIFAR-10 at full length: validation and test."""
    rows = []
    for forward in ("mode", "random"):
        wanted = [{**STATIC, "forward": forward, "noise": noise} for noise in noises.names()]
        rows.append([forward, *_on_fold_0(trainings, wanted)])
    return table(["forward", *noises.names(), *(f"{name}: test" for name in noises.names())], rows)


def _on_fold_0(trainings: Sequence[Training], wanted: Iterable[dict[str, str]]) -> list[str]:
    """Validation of each of these settings, and then test; running statistics, no float network."""
    fixed = {"data": "cifar10", "fold": "0", "statistics": "running"}
    full = [run for run in select(trainings, fixed) if is_full(run)]
    ours = [run for run in full if not run.recipe.is_float]
    groups = [select(ours, each) for each in wanted]
    valid = [average(run.valid_accuracy for run in group) for group in groups]
    test = [average(run.test_accuracy for run in group) for group in groups]
    return [*map(number, valid), *map(number, test)]


def by_tail(trainings: Sequence[Training]) -> str:
    """The verdicts on Speech Commands at full length with running statistics, by the last epoch and
    by the mean of the last 20."""
    ours = select(trainings, {"data": "speech"})
    smooth = [
        replace(
            run,
            curve=(*run.curve[:-1], replace(run.curve[-1], valid_accuracy=tail(run))),
        )
        for run in ours
    ]
    rows = []
    for last, mean in zip(judged(ours), judged(smooth), strict=True):
        words = [next((v.verdict for v in f.tested if _is_papers(v)), NONE) for f in (last, mean)]
        if words != [NONE, NONE] and last.name != "speech-variability":  # of these epochs already
            rows.append([last.says, *words])
    return table(["the paper says", "last epoch", f"mean of the last {LAST} epochs"], rows)


def by_law(trainings: Sequence[Training]) -> str:
    """How far each decay interval is above the next on Speech Commands at full length, by the power
    law; running statistics."""
    wanted = {"data": "speech", "epochs": "120", "noise": "uniform", "statistics": "running"}
    ours = select(trainings, {**wanted, **DYNAMIC})
    rows = []
    for upper, lower in pairwise(INTERVALS):
        for power in POWERS:
            cells = [f"{upper} above {lower}".replace("_", " "), power]
            for forward in FORWARDS:
                group = select(ours, {"power": power, "forward": forward})
                left, right = (select(group, {"interval": name}) for name in (upper, lower))
                gap = paired_mean(left, right, accuracy)
                cells += [number(gap), spread(gap)]
            rows.append(cells)
    head = [name for forward in FORWARDS for name in (forward, f"{forward}: 95 %")]
    return table(["difference", "power law", *head], rows)


def paired_mean(
    left: Iterable[Training],
    right: Iterable[Training],
    value: Callable[[Training], float | None],
) -> Mean | None:
    """The mean of left less right over the folds for which both have the value."""
    sides = [{run.fold: value(run) for run in side} for side in (left, right)]
    known = [{fold: share for fold, share in side.items() if share is not None} for side in sides]
    gaps = [known[0][fold] - known[1][fold] for fold in known[0] if fold in known[1]]
    return mean_of(gaps) if gaps else None


# Shortened trainings, and other settings


def by_interval(trainings: Sequence[Training], data: str, epochs: str, **wanted: str) -> str:
    """Decay intervals by forward pass: uniform noise, running statistics."""
    wanted |= {"data": data, "epochs": epochs, "noise": "uniform", "statistics": "running"}
    ours = select(trainings, wanted)
    rows = []
    static = [_validation(ours, {**STATIC, "forward": forward}) for forward in FORWARDS]
    rows.append(["static noise", NONE, *map(number, static)])
    for interval in INTERVALS:
        for power in POWERS:
            wanted = {**DYNAMIC, "interval": interval, "power": power}
            cells = [_validation(ours, {**wanted, "forward": forward}) for forward in FORWARDS]
            rows.append([interval.replace("_", " "), power, *map(number, cells)])
    return table(["decay interval", "power law", *FORWARDS], rows)


def static_noises(trainings: Sequence[Training]) -> str:
    """Static noise types by data set and forward pass, over fewer epochs than the paper's, on the
    folds that all types of a row have."""
    rows = []
    for study in studies(run for run in trainings if not is_full(run)):
        for forward in ("mode", "random"):
            wanted = {**STATIC, "forward": forward}
            group = select(study.trainings, wanted)
            if group:
                types = {run.settings["noise"] for run in group}
                shared = set.intersection(
                    *({run.fold for run in select(group, {"noise": noise})} for noise in types)
                )
                group = [run for run in group if run.fold in shared]
                cells = [_validation(group, {"noise": noise}) for noise in noises.names()]
                about = [DATA[study.data], str(study.epochs), study.statistics]
                about += [forward, str(len(shared))]
                rows.append([*about, *map(number, cells)])
    head = ["data", "epochs", "statistics", "forward", "folds"]
    return table([*head, *noises.names()], rows)


def _validation(trainings: Sequence[Training], wanted: dict[str, str]) -> Mean | None:
    return average(run.valid_accuracy for run in select(trainings, wanted))


def per_layer(trainings: Sequence[Training]) -> str:
    """How far partition with mode lies from static mode, by the steps that a layer is annealed
    in: in validation, and in training, which has the statistics of each batch."""
    rows = []
    for study in studies([*trainings, *variations("speech-*-epochs.parquet")]):
        uniform = {"noise": "uniform", "forward": "mode"}
        partition = select(study.trainings, {**PARTITION, **uniform})
        static = select(study.trainings, {**STATIC, **uniform})
        gaps = [paired_mean(partition, static, value) for value in (accuracy, in_training)]
        if gaps[0] is not None:
            steps = float(partition[0].settings["period"]) * STEPS[study.data]
            cells = [DATA[study.data], str(study.epochs), study.statistics, str(gaps[0].folds)]
            cells += [f"{steps:,.0f}"]
            for gap in gaps:
                cells += [number(gap), spread(gap)]
            rows.append((steps, cells))
    head = ["data", "epochs", "statistics", "folds", "steps per layer", "partition less static"]
    head += ["95 % or range", "in training", "training: 95 % or range"]
    return table(head, [row for _, row in sorted(rows, key=lambda row: row[0])])


# docs/beyond.md


def gaps_in_training(trainings: Sequence[Training]) -> str:
    """How far partition lies below static noise in training, with the mode: in the shortest and in
    the longest trainings of each data set."""
    every = [*trainings, *variations("speech-*-epochs.parquet")]
    rows = []
    for data in DATA:
        wanted = {"data": data, "noise": "uniform", "forward": "mode", "statistics": "running"}
        ours = select(every, wanted)
        lengths = {int(run.settings["epochs"]) for run in select(ours, PARTITION)}
        for epochs in (min(lengths), max(lengths)):
            group = select(ours, {"epochs": str(epochs)})
            partition, static = select(group, PARTITION), select(group, STATIC)
            steps = float(partition[0].settings["period"]) * STEPS[data]
            gap = paired_mean(static, partition, in_training)
            level = number(average(map(in_training, static)))
            about = [DATA[data], str(epochs), str(gap.folds), f"{steps:,.0f}"]
            rows.append([*about, level, number(gap), spread(gap)])
    head = ["data", "epochs", "folds", "steps per layer", "static noise, in training"]
    return table([*head, "static noise above partition", "95 % or range"], rows)


def gains(trainings: Sequence[Training]) -> str:
    """What partition gains over static noise, by data set and forward."""
    rows = []
    for data, epochs in LONGEST.items():
        for forward in ("mode", "random"):
            wanted = {"data": data, "epochs": epochs, "forward": forward, "noise": "uniform"}
            group = select(trainings, {**wanted, "statistics": "running"})
            partition, static = select(group, PARTITION), select(group, STATIC)
            cells = [DATA[data], epochs, forward]
            cells += [number(average(map(accuracy, side))) for side in (static, partition)]
            for value in (accuracy, lambda run: run.test_accuracy, in_training):
                gap = paired_mean(partition, static, value)
                cells += [number(gap), spread(gap)]
            rows.append(cells)
    head = ["data", "epochs", "forward", "static noise", "partition", "gain", "gain: 95 %"]
    head += ["gain, test", "test: 95 %", "gain in training", "training: 95 %"]
    return table(head, rows)


def random_above_expectation(trainings: Sequence[Training]) -> str:
    """Partition with random sampling less partition with the expectation, for each length."""
    rows = []
    for study in studies(trainings):
        sides = [
            select(study.trainings, {**PARTITION, "noise": "uniform", "forward": forward})
            for forward in ("random", "expectation")
        ]
        gap = paired_mean(*sides, accuracy)
        if gap is not None:
            cells = [number(average(map(accuracy, side))) for side in sides]
            about = [DATA[study.data], str(study.epochs), study.statistics, str(gap.folds)]
            rows.append([*about, *cells, number(gap), spread(gap)])
    head = ["data", "epochs", "statistics", "folds", "random", "expectation"]
    return table([*head, "random above expectation", "95 % or range"], rows)


def beside_same_end(trainings: Sequence[Training]) -> str:
    """How far same end lies below partition, by data set and forward."""
    rows = []
    for data, epochs in LONGEST.items():
        for forward in FORWARDS:
            wanted = {"data": data, "epochs": epochs, "forward": forward, "noise": "uniform"}
            group = select(trainings, {**wanted, "statistics": "running"})
            ends = select(group, {**PARTITION, "interval": "same_end"})
            folds = {run.fold for run in ends}
            partition = [run for run in select(group, PARTITION) if run.fold in folds]
            gap = paired_mean(partition, ends, accuracy)
            cells = [DATA[data], epochs, forward, str(gap.folds)]
            for value in (accuracy, in_training):
                cells += [number(average(map(value, side))) for side in (partition, ends)]
            best = average(run.best_valid_accuracy for run in ends)
            rows.append([*cells, number(best), number(gap), spread(gap)])
    head = ["data", "epochs", "forward", "folds", "partition", "same end"]
    head += ["partition, in training", "same end, in training", "same end, best epoch"]
    return table([*head, "partition above same end", "95 % or range"], rows)


def types_in_training(trainings: Sequence[Training]) -> str:
    """Static noise types of VGG8 on fold 0: validation, and accuracy in training."""
    rows = []
    for data in ("cifar10", "svhn"):
        for forward in ("mode", "random"):
            epochs = LONGEST[data]
            wanted = {**STATIC, "data": data, "epochs": epochs, "forward": forward, "fold": "0"}
            group = select(trainings, {**wanted, "statistics": "running"})
            sides = [select(group, {"noise": noise}) for noise in noises.names()]
            cells = [number(average(map(value, side)) if side else None)
                     for value in (accuracy, in_training) for side in sides]  # fmt: skip
            rows.append([DATA[data], epochs, forward, *cells])
    head = ["data", "epochs", "forward", *noises.names()]
    return table([*head, *(f"{name}, in training" for name in noises.names())], rows)


PARTITION = {**DYNAMIC, "interval": "partition", "power": "homogeneous"}
LONGEST = {"cifar10": "500", "svhn": "100", "speech": "120"}
"""The most epochs for which all decay intervals were trained."""


def precisions(trainings: Sequence[Training]) -> str:
    """The two cells of partition below the paper's levels: in other precisions, with another
    seed."""
    rows = []
    for name in BELOW:
        long = select([run for run in trainings if is_full(run)], {"data": "cifar10", "fold": "0"})
        groups = {
            ("500", "bfloat16", "0"): long,
            ("500", "bfloat16", "1"): variations("cifar10-500-epochs-seed-1.csv"),
            ("100", "bfloat16", "0"): variations("cifar10-100-epochs-bfloat16.csv"),
            ("100", "float32", "0"): variations("cifar10-100-epochs-float32.csv"),
        }
        for about, group in groups.items():
            (run,) = (run for run in group if run.configuration == name and not is_fresh(run))
            cells = [number(run.valid_accuracy), number(run.test_accuracy)]
            rows.append([f"`{name}`", *about, *cells])
    return table(["configuration", "epochs", "precision", "seed", "validation", "test"], rows)


BELOW = (
    "uniform-random-std-partition-homogeneous",
    "uniform-expectation-std-partition-homogeneous",
)


def centred(trainings: Sequence[Training]) -> str:
    """Static uniform noise on Speech Commands at full length: the input as in the paper with both
    kinds of statistics, and the input centred."""
    every = [*trainings, *variations("speech-120-epochs-centred.csv")]
    wanted = {**STATIC, "data": "speech", "noise": "uniform", "epochs": "120"}
    rows = []
    for forward in ("mode", "random"):
        for centre, kind in (("false", "running"), ("true", "running"), ("false", "fresh")):
            settings = {"forward": forward, "centre_input": centre, "statistics": kind}
            group = select(every, {**wanted, **settings})
            valid, last = (average(map(of, group)) for of in (final, tail))
            shown = [number(valid), spread(valid), number(last)]
            shown.append(number(average(run.test_accuracy for run in group)))
            about = [forward, "x" if centre == "false" else "(x − 128)/16", kind, str(len(group))]
            rows.append([*about, *shown])
    head = ["forward", "input", "statistics", "folds", "validation", "95 % or range"]
    return table([*head, f"last {LAST} epochs", "test"], rows)


def digits() -> str:
    """Dynamic means on the digits."""
    rows = []
    for run in variations("digits-dynamic-means.csv"):
        std = "static" if run.settings["static_std"] == "true" else "dynamic"
        rows.append([std, run.settings["learning_rate"], number(run.valid_accuracy)])
    return table(["std", "learning rate", "validation"], sorted(rows, reverse=True))


def widths(trainings: Sequence[Training]) -> str:
    """A row for each width of static noise that DSCNN was trained with, with fresh statistics."""
    every = [run for run in (*trainings, *variations("speech-*.csv")) if is_fresh(run)]
    groups: dict[tuple[int, int, float], list[Training]] = {}
    for run in select(every, {**STATIC, "data": "speech", "forward": "mode"}):
        noise, std0 = run.settings["noise"], run.settings.get("std0", "None")
        std = noises.get(noise).std_within(0.5) if std0 == "None" else float(std0)
        if run.settings["centre_input"] == "false":
            key = -int(run.settings["epochs"]), list(noises.names()).index(noise), -std
            groups.setdefault(key, []).append(run)
    rows = []
    for (epochs, noise, std), group in sorted(groups.items()):
        valid = average(run.valid_accuracy for run in group)
        test = average(run.test_accuracy for run in group)
        about = [str(-epochs), noises.names()[noise], f"{-std:.3f}", str(len(group))]
        rows.append([*about, number(valid), spread(valid), number(test)])
    head = ["epochs", "noise", "std, quanta", "folds", "validation", "95 % or range", "test"]
    return table(head, rows)


def means() -> str:
    """Shares of weights at each level after training with dynamic means, over layers."""
    with open(RESULTS / "dynamic-means.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shown = []
    for name in sorted({row["configuration"] for row in rows}):
        mine = [row for row in rows if row["configuration"] == name]
        least = [min(float(row[f"at {level}"]) for row in mine) for level in (-1, 0, 1)]
        most = [max(float(row[f"at {level}"]) for row in mine) for level in (-1, 0, 1)]
        cells = [f"{number(a)} to {number(b)}" for a, b in zip(least, most, strict=True)]
        shown.append([f"`{name}`", *cells])
    return table(["configuration", "at −1", "at 0", "at 1"], shown)


def means_at_full_length(trainings: Sequence[Training]) -> str:
    """Dynamic mean and std over 500 epochs: accuracy in training after some epochs, and validation
    beside the same unit over 50."""
    epochs = (90, 100, 140, 150, 350, 500)
    wanted = {"data": "cifar10", "static_mean": "false", "fold": "0", "statistics": "running"}
    rows = []
    for forward in ("mode", "random"):
        ours = select(trainings, {**wanted, "forward": forward})
        (long,) = (run for run in ours if is_full(run))
        same = [run for run in ours if run.configuration == long.configuration]
        (short,) = (run for run in same if run is not long)
        cells = [number(long.curve[epoch - 1].train_accuracy) for epoch in epochs]
        rows.append([forward, *cells, number(accuracy(long), 2), number(accuracy(short), 2)])
    head = ["forward", *(f"after {epoch}, in training" for epoch in epochs)]
    return table([*head, "validation", "validation over 50 epochs"], rows)


def cost() -> str:
    """Seconds of training steps of a unit of CIFAR-10, and hours of the whole design."""
    bench = json.loads((RESULTS / "speed-h200.json").read_text(encoding="utf-8"))["partition"]
    units = len(DESIGNS["paper-cifar10"])
    rows = []
    for name, key in (("static noise, mode", "static_"), ("partition, mode", "")):
        seconds = bench[f"{key}seconds"]
        hours = units * seconds / 3600
        rate = f"{bench[f'{key}images_per_second']:,.0f}"
        rows.append([name, rate, f"{seconds:.0f}", f"{hours:.0f}"])
    return table(["training", "images/s", "seconds of a unit", f"hours of {units:,} units"], rows)


# The other files


def left_out(trainings: Sequence[Training]) -> str:
    """The configurations that decide nothing, each with its mean validation accuracy."""
    names = []
    for study in studies(trainings):
        kept = {run.configuration for run in decisive(study).trainings}
        for name, group in grouped(study.trainings).items():
            if name not in kept:
                mean = number(average(run.valid_accuracy for run in group))
                names.append(f"`{name}` ({study.epochs} epochs, {mean} %)")
    return f"  {', '.join(names)}."


def evidence(findings: Sequence[Finding]) -> str:
    """A section for each claim: the rows that each of its verdicts follows from."""
    sections = []
    for place, finding in enumerate(findings, 1):
        lines = [f"## {place} {finding.claim}", f"{DATA[finding.data]}. {finding.says}"]
        lines += [] if finding.tested else ["", f"Not tested. {finding.measured}"]
        for judgement in finding.tested:
            scale = f"{judgement.study.epochs} epochs, {judgement.study.statistics} statistics"
            without = f" Without {', '.join(judgement.missing)}." if judgement.missing else ""
            trained = (
                f"from {judgement.trainings} training{'' if judgement.trainings == 1 else 's'}"
            )
            lines += [
                "",
                f"**{scale}: {judgement.verdict}**, {trained}.{without}",
                "",
                rows_of(judgement),
            ]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def rows_of(verdict: Judgement) -> str:
    """Accuracies, and then differences."""
    rows = []
    for label, cell in verdict.cells.items():
        mean, test = cell.mean, NONE if "drop" in label else number(cell.test)
        about = [label, str(cell.configurations), str(mean.folds)]
        rows.append([*about, number(mean), NONE, spread(mean), test])
    for label, gap in verdict.gaps.items():
        is_std = label.startswith("std")
        shown = number(gap.value if is_std else gap), spread(gap)
        rows.append([label, NONE, NONE if is_std else str(gap.folds), NONE, *shown, NONE])
    head = ["quantity", "configurations", "folds", "validation, %", "difference, points"]
    return table([*head, "95 % or range", "test, %"], rows)


def configurations(trainings: Sequence[Training]) -> str:
    """A row for each configuration of each study, as CSV: means over folds, in per cent."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["data", "epochs", "statistics", "configuration", "folds", "validation"]
    writer.writerow([*head, "half_interval_95", "least", "most", "test"])
    for study in studies(trainings):
        about = [study.data, study.epochs, study.statistics]
        for name, group in grouped(run for run in study.trainings if run.is_done).items():
            mean = mean_of(run.valid_accuracy for run in group)
            test = average(run.test_accuracy for run in group)
            shown = [mean.value, mean.margin, mean.least, mean.most, test and test.value]
            cells = ["" if value is None else f"{100 * value:.2f}" for value in shown]
            writer.writerow([*about, name, mean.folds, *cells])
    return text.getvalue()


def written() -> dict[Path, str]:
    """Every file that this script writes, as it is to be."""
    trainings = reproduction()
    findings = judged(trainings)
    page, proof = DOCS / "reproduction.md", DOCS / "claims.md"
    parts = {
        "coverage": coverage(trainings),
        "summary": summary(findings),
        "claims": claims(findings),
        "CIFAR-10": levels(trainings, "cifar10"),
        "differences": differences(trainings, "cifar10", "500"),
        "schedules": by_schedule(trainings),
        "noise types": by_type(trainings),
        "speech": levels(trainings, "speech"),
        "last epochs": by_tail(trainings),
        "speech intervals": by_interval(trainings, "speech", "120"),
        "speech laws": by_law(trainings),
        "decay intervals": by_interval(trainings, "cifar10", "50"),
        "SVHN intervals": by_interval(trainings, "svhn", "100", fold="0"),
        "SVHN differences": differences(trainings, "svhn", "100"),
        "static noise": static_noises(trainings),
        "steps per layer": per_layer(trainings),
        "precisions": precisions(trainings),
        "widths": widths(trainings),
        "centred": centred(trainings),
        "dynamic means": means(),
        "dynamic means at full length": means_at_full_length(trainings),
        "digits": digits(),
        "cost": cost(),
    }
    stairs = [run for run in trainings if not run.recipe.is_float]
    more = {
        "gaps in training": gaps_in_training(stairs),
        "gains": gains(stairs),
        "random above expectation": random_above_expectation(stairs),
        "same end": beside_same_end(stairs),
        "noise types": types_in_training(stairs),
    }
    beyond = DOCS / "beyond.md"
    return {
        page: put(parts, page.read_text(encoding="utf-8")),
        beyond: put(more, beyond.read_text(encoding="utf-8")),
        proof: put(
            {"left out": left_out(trainings), "evidence": evidence(findings)},
            proof.read_text(encoding="utf-8"),
        ),
        RESULTS / "configurations.csv": configurations(trainings),
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
