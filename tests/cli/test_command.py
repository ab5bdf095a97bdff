"""Where the command begins, before the package is there."""

import subprocess
import sys
from importlib.metadata import entry_points

import softstair

INTERRUPTED = """
import builtins, sys
real = builtins.__import__

def interrupted(name, *rest, **more):
    if name.startswith("softstair"):
        raise KeyboardInterrupt
    return real(name, *rest, **more)

import softstair_command
builtins.__import__ = interrupted
sys.exit(softstair_command.main())
"""


def test_an_interrupt_while_it_is_imported_is_a_sentence() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == ("softstair: interrupted before it began: give the same command again.\n")


def test_it_is_the_command() -> None:
    """Installed by its name, with the exit codes of the verbs."""
    (installed,) = entry_points(group="console_scripts", name="softstair")
    assert installed.value == "softstair_command:main"
    command = [sys.executable, "-c", "import softstair_command as c, sys; sys.exit(c.main())"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"softstair {softstair.__version__}\n")
    assert subprocess.run([*command, "fly"], capture_output=True).returncode == 2
