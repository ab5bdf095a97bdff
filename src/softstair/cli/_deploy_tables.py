"""What an integer network costs, and how it compares, as tables."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.progress import Progress
from rich.table import Table

from softstair.cli._console import Console, say
from softstair.deploy import Comparison, IntegerNetwork
from softstair.deploy import costs as costs_of

__all__ = ["comparisons", "costs", "counting", "say"]


def costs(network: IntegerNetwork) -> None:
    """Prints a line for every layer with weights."""
    table = Table(title="weights, products, and how wide the sums get", pad_edge=False)
    table.add_column("layer", overflow="fold", min_width=12)
    columns = ("weights", "bits", "bytes", "products", "least", "greatest", "bits")
    for name in columns:
        table.add_column(name, justify="right")
    found = costs_of(network)
    for one in found:
        whole = one.sum_bits > 0
        sums = [f"{one.low:,}", f"{one.high:,}", str(one.sum_bits)] if whole else ["float", "", ""]
        numbers = [f"{one.weights:,}", str(one.weight_bits), f"{one.bytes:,}", f"{one.products:,}"]
        table.add_row(one.name, *numbers, *sums)
    table.add_section()
    total = [sum(getattr(one, name) for one in found) for name in ("weights", "bytes", "products")]
    table.add_row("all", f"{total[0]:,}", "", f"{total[1]:,}", f"{total[2]:,}", "", "", "")
    Console(markup=False).print(table)


def comparisons(
    compared: Mapping[str, Comparison], examples: int, name: str, last_layer: str
) -> None:
    """Prints how many numbers of each layer differ, for each way to run the network."""
    last = None if last_layer == "float" else f"the last layer in {last_layer}"
    table = Table(title=f"mismatches on {examples:,} examples, {name}", caption=last)
    table.add_column("layer", overflow="fold")
    table.add_column("numbers", justify="right")
    for way in compared:
        table.add_column(way, justify="right")
    first = next(iter(compared.values()))
    for layer, count in first.compared.items():
        wrong = [f"{one.wrong[layer]:,}" if layer in one.wrong else "" for one in compared.values()]
        table.add_row(layer, f"{count:,}", *wrong)
    Console(markup=False).print(table)
    for way, one in compared.items():
        say(f"{way}: {one}")


@contextmanager
def counting(examples: int) -> Iterator[Callable[[int], None]]:
    """A bar that moves as examples are compared, on a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("comparing", total=examples)
        yield lambda done: bar.update(task, completed=done)
