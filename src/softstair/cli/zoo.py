"""``softstair zoo``: the trained networks that are part of softstair."""

from dataclasses import dataclass
from typing import Literal

from rich.filesize import decimal

from softstair import zoo
from softstair._errors import SoftstairError
from softstair.cli._args import argument, flag
from softstair.cli._mean import mean_of
from softstair.cli._table import print_line, print_table
from softstair.cli.export import ExportFlags


@dataclass(frozen=True)
class Command(ExportFlags):
    """List the trained networks that are part of softstair, evaluate or export them.

    softstair zoo                 List the networks: bits, size, accuracy.
    softstair zoo card NAME       Show the data, the command and the commit of a network.
    softstair zoo evaluate NAME   Measure the accuracy on the test set of its data.
    softstair zoo export NAME     Write it as ONNX, QONNX or C: the same as softstair export NAME.

    int4 means weights of int4 and features of uint4 (activations), ternary means both. `softstair
    verify NAME` compares the exported network with the trained one.

    Exit code 0: done; 2: an error.
    """

    action: Literal["list", "card", "evaluate", "export"] = argument(
        "ACTION", "list, card, evaluate or export.", default="list"
    )
    name: str | None = argument("NAME", "Name of a network.", default=None)
    device: str = flag("auto", "Device to evaluate on: auto, cpu, cuda or cuda:N.")

    def __post_init__(self) -> None:
        if self.action == "list" and self.name is not None:
            raise SoftstairError(f"list takes no NAME, but {self.name!r} was given.")
        if self.action != "list" and self.name is None:
            raise SoftstairError(f"{self.action} needs a NAME: {', '.join(zoo.names())}.")
        names = ("to", "out", "last_layer", "scratch", "fit_flash", "fit_ram", "threads")
        for flag_name in names:
            if self.action != "export" and getattr(self, flag_name) != getattr(Command, flag_name):
                raise SoftstairError(f"`{flag_name}` is a flag of export, not of {self.action}.")

    def run(self) -> int:
        if self.name is None:
            _show_list()
        elif self.action == "card":
            _show_card(zoo.card(self.name))
        elif self.action == "evaluate":
            known = zoo.card(self.name)
            accuracy = zoo.evaluate(self.name, self.data_dir, self.device)
            print_line(f"{self.name}: accuracy {accuracy:.2%} (its card: {known.accuracy:.2%})")
        else:
            return self.export(zoo.path_of(self.name))
        return 0


def _show_list() -> None:
    left, right = ("name", "data", "model", "bits"), ("size", "accuracy", "seeds")
    rows = [
        (
            card.name,
            card.recipe.data,
            card.recipe.model,
            card.bits,
            decimal(card.bytes),
            mean_of(card.accuracies).in_percent(),
            len(card.accuracies),
        )
        for card in map(zoo.card, zoo.names())
    ]
    print_table("trained networks", left, right, rows, boxed=False)


def _show_card(card: zoo.Card) -> None:
    rows = {
        "data": card.data,
        "model": f"{card.recipe.model}, {card.bits}, {card.bytes:,} bytes",
        "accuracy": f"{card.accuracy:.2%}",
        "over seeds": f"{mean_of(card.accuracies).in_percent()} (seeds: {len(card.accuracies)})",
        "input": f"{'×'.join(map(str, card.shape))} bytes x, as (x − {card.mean:g})/{card.std:g}",
        "classes": ", ".join(card.classes),
        "command": card.command,
        "commit": card.commit,
    }
    print_table(None, ("card", card.name), (), rows.items(), boxed=False)
