"""What is wrong with what was given, in a sentence: for the scripts beside this file."""

import sys
from collections.abc import Callable

__all__ = ["tell"]


def tell(main: Callable[[], int | None]) -> None:
    """Ends the script with what ``main`` returns; an input that it refuses ends it with a sentence
    and 2, as the command softstair does."""
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)
