"""The verbs of the command ``softstair``, a file each; ``softstair_command.py`` runs them.

To add a verb, write ``cli/<verb>.py`` with a frozen dataclass ``Command`` whose fields are the
flags (see ``_args.py``) and whose ``run()`` returns the exit code, and add a line to ``VERBS``.
"""

from softstair_command import VERBS, main

__all__ = ["VERBS", "main"]
