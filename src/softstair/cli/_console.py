"""The terminal, as every verb prints to it."""

from typing import Any

from rich import console

__all__ = ["Console", "say"]


class Console(console.Console):
    """rich's, but paths and figures are printed as they are, and a reader may leave early."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"highlight": False, "emoji": False, **settings})

    def on_broken_pipe(self) -> None:
        # rich would exit with 1, which here means that the answer is no.
        raise BrokenPipeError


def say(sentence: str) -> None:
    """Prints a sentence as it is."""
    Console(markup=False).print(sentence, soft_wrap=True)
