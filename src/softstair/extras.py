"""Packages that the core does without, and some rooms need."""

import importlib
from types import ModuleType

__all__ = ["needed"]


def needed(name: str, extra: str = "cli") -> ModuleType:
    """The module of that name; where it is not installed, an ImportError that says what to do.

    >>> needed("json").loads("1")
    1
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"this needs the package {package}, which is not installed: run pip install "
            f"'softstair[{extra}]'.",
            name=package,
        ) from None
