"""Processes that share a GPU: MPS is started for them, and ends with them or with their parent."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from softstair.train import Recipe, mps
from softstair.train.parallel import StopRequest
from softstair.train.pool import ProcessPool, Task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPS runs on Linux")

PROGRAM = """#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit
if [ "$1" = -f ]; then
    echo "$PPID $PWD" >>"$MPS_STARTED"
    echo $$ >pid
    {begin}
    mkfifo control
    while read -r command <control; do
        case $command in quit) {quit} ;; esac
    done
elif [ -p control ] && kill -0 "$(cat pid)"; then
    read -r command
    case $command in
        start_server*) {server} ;;
        get_server_list) cat servers ;;
        *) echo "$command" >control ;;
    esac
else
    echo "Cannot find MPS control daemon process"
    exit 1
fi
"""
"""What ``nvidia-cuda-mps-control`` does for the commands that are given to it."""
VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES")


class Fake:
    """A program in the place of NVIDIA's, and the daemon that it has started."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, folder / "started"

    def install(
        self, begin: str = ":", server: str = "echo 4711 >servers", quit: str = "exit"
    ) -> None:
        program = self._folder / mps.PROGRAM
        program.write_text(PROGRAM.format(begin=begin, server=server, quit=quit))
        program.chmod(0o755)

    @property
    def was_started(self) -> bool:
        return self._started.exists()

    @property
    def folder(self) -> Path:
        return Path(self._started.read_text().split()[1])

    @property
    def group(self) -> int:
        return int(self._started.read_text().split()[0])

    @property
    def is_alive(self) -> bool:
        """Whether a process of its group is left, other than those that nobody waits for."""
        fields = (_after_name(path) for path in Path("/proc").glob("[0-9]*/stat"))
        return any(each[2:3] == [str(self.group)] and each[0] != "Z" for each in fields)

    @property
    def is_gone(self) -> bool:
        return not self.is_alive and not self.folder.exists()


def _after_name(stat: Path) -> list[str]:
    """Return state, parent, group and more of a process."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("MPS_STARTED", str(tmp_path / "started"))
    monkeypatch.setattr(mps, "DEFAULT_PIPE", tmp_path / "control")
    for name in (*VARIABLES, "SOFTSTAIR_MPS"):
        monkeypatch.delenv(name, raising=False)
    daemon = Fake(tmp_path)
    daemon.install()
    yield daemon
    assert not daemon.was_started or daemon.is_gone


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def pool(device: str = "cuda", most: int = 2) -> ProcessPool:
    return ProcessPool([], lambda key, event: None, lambda threads: most, {"device": device}, most)


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """The values of VARIABLES in the processes of a pool, which train nothing."""
    start = f"""
import os, pathlib, sys
values = [os.environ.get(name, "none") for name in {VARIABLES}]
pathlib.Path({str(tmp_path)!r}, f"process-{{os.getpid()}}").write_text(" ".join(values))
sys.stdin.read()
"""
    monkeypatch.setattr("softstair.train.pool.START", start)

    def read() -> list[list[str]]:
        files = lambda: [path for path in tmp_path.glob("process-*") if path.read_text()]
        assert wait_until(lambda: len(files()) == 2)
        return [path.read_text().split() for path in files()]

    return read


@pytest.mark.parametrize(("visible", "numbers"), [(None, "none"), ("2,5", "0,1")])
def test_processes_on_a_gpu_find_the_daemon_and_it_ends_with_them(
    visible: str | None,
    numbers: str,
    fake: Fake,
    environments: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pool() as workers:
        folder = fake.folder
        assert workers.uses_mps
        assert fake.is_alive
        assert folder.stat().st_mode & 0o777 == 0o700
        assert environments() == [[str(folder), str(folder), numbers]] * 2
        before = time.monotonic()
    assert fake.is_gone
    assert time.monotonic() - before < 5


def test_the_beginning_of_a_run_says_whether_mps_is_used(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ['{"kind": "begin", "threads": 1}', '{"kind": "done"}']
    start = f"for _ in iter(input, None): print(*{lines}, sep=chr(10), flush=True)"
    monkeypatch.setattr("softstair.train.pool.START", start)
    said: list[bool] = []
    hear = lambda _, event: event["kind"] == "begin" and said.append(event["mps"])
    for device in ("cpu", "cuda"):
        task = Task("run", Recipe(), Path("run"))
        with ProcessPool([task], hear, lambda _: 2, {"device": device}, most=2) as workers:
            workers.run(StopRequest())
    assert said == [False, True]


@pytest.mark.parametrize(
    ("device", "most", "name", "value"),
    [
        ("cpu", 2, "", ""),
        ("cuda", 1, "", ""),
        ("cuda", mps.MAX_CLIENTS + 1, "", ""),
        ("cuda", 2, "SOFTSTAIR_MPS", "0"),
        ("cuda", 2, "CUDA_MPS_PIPE_DIRECTORY", "/own"),
        ("cuda", 2, "PATH", "/nowhere"),
        ("cuda", 2, "CUDA_VISIBLE_DEVICES", ""),
        ("cuda", 2, "CUDA_VISIBLE_DEVICES", "0,-1"),
        ("cuda", 2, "CUDA_VISIBLE_DEVICES", "MIG-2a"),
    ],
)
def test_mps_is_not_started(
    device: str, most: int, name: str, value: str, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("softstair.train.pool.Worker", lambda *_: None)
    workers = pool(device, most)
    workers.__enter__()
    assert not workers.uses_mps
    assert not fake.was_started


def listening(pipe: Path, kind: socket.SocketKind) -> socket.socket:
    """Return a socket that listens at a pipe, as NVIDIA's daemon does."""
    server = socket.socket(socket.AF_UNIX, kind)
    server.bind(str(pipe))
    server.listen()
    return server


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_daemon_of_the_user_is_left_to_the_processes(
    kind: socket.SocketKind, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        pipe = Path(short, "control")
        monkeypatch.setattr(mps, "DEFAULT_PIPE", pipe)
        with listening(pipe, kind), mps.started(2) as environment:
            assert environment == {}
            assert not fake.was_started
        assert pipe.exists()  # nobody listens any more
        with mps.started(2) as environment:
            assert fake.was_started
            assert environment["CUDA_MPS_PIPE_DIRECTORY"] != short


def test_a_daemon_that_was_killed_is_replaced(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    (tmp_path / "servers").touch()
    with subprocess.Popen(
        [mps.PROGRAM, "-f"], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    ) as daemon:
        assert wait_until(mps.DEFAULT_PIPE.is_fifo)
        (tmp_path / "started").unlink()
        with mps.started(2) as variables:
            assert (variables, fake.was_started) == ({}, False)
        daemon.kill()
    assert mps.DEFAULT_PIPE.is_fifo()
    with mps.started(2) as variables:
        assert variables["CUDA_MPS_PIPE_DIRECTORY"] == str(fake.folder)


HANGS = "mkfifo servers; (printf 47; sleep 60) >servers </dev/null &"


@pytest.mark.parametrize(
    "broken", [{"begin": "exit 1"}, {"begin": "sleep 60"}, {"server": ":"}, {"server": HANGS}]
)
def test_training_begins_without_a_daemon_that_does_not_start(
    broken: dict[str, str],
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if "sleep 60" in str(broken):
        monkeypatch.setattr(mps, "START_TIMEOUT", 1.0)
    fake.install(**broken)
    before = time.monotonic()
    with mps.started(2) as environment:
        assert environment == {}
        assert fake.was_started
        assert wait_until(lambda: fake.is_gone)
    assert time.monotonic() - before < 5
    assert capfd.readouterr() == ("", "")


def test_signals_of_a_scheduler_leave_the_daemon_to_the_processes(fake: Fake) -> None:
    with mps.started(2):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.killpg(fake.group, number)
        time.sleep(0.1)
        assert fake.is_alive


def test_a_daemon_that_does_not_quit_is_killed(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "SCRIPT", mps.SCRIPT.replace(f"sleep {mps.END_TIMEOUT}", "sleep 0.2"))
    fake.install(quit="sleep 60")
    with mps.started(2) as environment:
        assert environment
        before = time.monotonic()
    assert time.monotonic() - before < 5


def test_a_daemon_whose_shell_was_killed_ends_too(fake: Fake) -> None:
    with mps.started(2):
        os.kill(fake.group, signal.SIGKILL)
    assert fake.is_gone


def test_the_daemon_ends_if_a_process_cannot_start(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("softstair.train.pool.Worker", fail)
    with pytest.raises(OSError, match="no more"):
        pool().__enter__()
    assert fake.is_gone


PARENT = """
import importlib.util, pathlib, sys, time
spec = importlib.util.spec_from_file_location("mps", sys.argv[1])  # importing torch takes seconds
mps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mps)
mps.DEFAULT_PIPE = pathlib.Path("/nowhere")
with mps.started(2) as environment:
    print(len(environment), flush=True)
    time.sleep(60)
"""


def test_the_daemon_ends_when_its_parent_is_killed(fake: Fake) -> None:
    words = [sys.executable, "-c", PARENT, mps.__file__]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"2\n"
        assert fake.is_alive
        assert fake.folder.exists()
        parent.kill()
    assert wait_until(lambda: fake.is_gone)
