"""Parts of a page that are written anew from what was measured; each is between two comments."""

import re
from collections.abc import Mapping

__all__ = ["put"]


def put(parts: Mapping[str, str], page: str) -> str:
    """The page with each part, by its name, as it is now."""
    for name, part in parts.items():
        pattern = rf"<!-- {name} -->\n.*?<!-- end of {name} -->"
        whole = f"<!-- {name} -->\n{part}\n<!-- end of {name} -->"
        page, found = re.subn(pattern, lambda _, whole=whole: whole, page, flags=re.DOTALL)
        assert found == 1, name
    return page
