"""The verbs of ``python -m paper``, a file each, as in ``softstair/cli``."""
