"""``softstair zoo``: the trained networks of softstair."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.filesize import decimal

from softstair import zoo
from softstair._errors import SoftstairError
from softstair.cli._args import argument, flag
from softstair.cli._output import in_percent, print_line, print_table
from softstair.data import load
from softstair.data.batches import Examples
from softstair.data.dataset import held_out
from softstair.train.metrics import evaluate
from softstair.train.settings import choose_device


@dataclass(frozen=True)
class Command:
    """List the trained networks of softstair, or evaluate one.

    softstair zoo                 List the networks: bits, size, accuracy.
    softstair zoo card NAME       Show the data, the command and the commit of a network.
    softstair zoo evaluate NAME   Measure the accuracy on the test set of its data.

    int4 means weights of int4 and features of uint4 (activations), ternary means both. `softstair
    export NAME` writes a network as ONNX, QONNX or C, and `softstair verify NAME` compares it.

    Exit code 0: done; 2: an error.
    """

    action: Literal["list", "card", "evaluate"] = argument(
        "ACTION", "list, card or evaluate.", default="list"
    )
    name: str | None = argument("NAME", "Name of a network.", default=None)
    device: str = flag("auto", "Device to evaluate on: auto, cpu, cuda or cuda:N.")
    data_dir: Path = flag(Path("data"), "Folder of the data sets.")

    def __post_init__(self) -> None:
        if self.action == "list" and self.name is not None:
            raise SoftstairError(f"list takes no NAME, but {self.name!r} was given.")
        if self.action != "list" and self.name is None:
            raise SoftstairError(f"{self.action} needs a NAME: {', '.join(zoo.names())}.")

    def run(self) -> int:
        if self.name is None:
            _show_list()
        elif self.action == "card":
            _show_card(self.name)
        else:
            known, used = zoo.about(self.name), choose_device(self.device)
            dataset = load(known.data, self.data_dir)
            _, x, y = held_out(dataset, known.fold, known.folds, known.limit)
            examples = Examples(x, y, known.mean, known.std, used)
            accuracy = evaluate(zoo.load(self.name).to(used), examples)[1]
            expected = zoo.card(self.name).accuracies[0]
            print_line(f"{self.name}: accuracy {accuracy:.2%} (its card: {expected:.2%})")
        return 0


def _show_list() -> None:
    if not zoo.names():
        print_line(f"no networks here; {zoo.where_to_look()}")
        return
    left, right = ("name", "data", "model", "bits"), ("size", "accuracy", "seeds")
    rows = []
    for name in zoo.names():
        known, card, size = zoo.about(name), zoo.card(name), zoo.path_of(name).stat().st_size
        figures = (decimal(size), in_percent(card.accuracies), len(card.accuracies))
        rows.append((name, known.data, known.model, card.bits, *figures))
    print_table("trained networks", left, right, rows, boxed=False)


def _show_card(name: str) -> None:
    known, card, size = zoo.about(name), zoo.card(name), zoo.path_of(name).stat().st_size
    mean = in_percent(card.accuracies)
    input = f"{'×'.join(map(str, known.shape))} bytes x, as (x − {known.mean:g})/{known.std:g}"
    rows = {
        "data": card.data,
        "model": f"{known.model}, {card.bits}, {size:,} bytes",
        "accuracy": f"{card.accuracies[0]:.2%}",
        "over seeds": f"{mean} (seeds: {len(card.accuracies)})",
        "input": input,
        "classes": ", ".join(known.classes),
        "command": card.command,
        "commit": card.commit,
    }
    print_table(None, ("card", name), (), rows.items(), boxed=False)
