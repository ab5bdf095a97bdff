"""Names that come from files, and those that go into C."""

import re

__all__ = ["checked", "comment"]

RESERVED = frozenset(
    "auto break case char const continue default do double else enum extern float for goto if "
    "inline int long register restrict return short signed sizeof static struct switch typedef "
    "union unsigned void volatile while asm class main memory board softstair trace cortex clean "
    "emulated input scores".split()
)
LONGEST = 40


def checked(name: str) -> str:
    """The name of the generated files and functions, if it can be one.

    >>> checked("network")
    'network'
    """
    good = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None
    taken = good and (name in RESERVED or name.startswith(("ss_", "softstair", "layer_")))
    if not good or taken or len(name) > LONGEST:
        raise ValueError(
            f"name must be a C identifier of small letters, digits and underscores, of at most "
            f"{LONGEST} characters and not a word of C or of the runtime, but {name!r} was given: "
            "choose one such as network."
        )
    return name


def comment(text: str) -> str:
    """The text as it may stand within a comment of C: letters, digits and a few signs.

    >>> comment("features.0 */ evil();")
    'features.0 __ evil___'
    """
    # Not even question marks: two of them may begin a trigraph, such as that of a backslash.
    return re.sub(r"[^A-Za-z0-9_. \-]", "_", str(text))[:60]
