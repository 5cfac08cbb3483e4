"""Something between a client and PostgreSQL: it can cut, it can fall silent, and it can pose as a pooler."""

from __future__ import annotations

import socket
import struct
import threading
from types import TracebackType
from typing import Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

__all__ = ["Proxy"]


class Proxy:
    """Forwards to the server of `dsn`; a context manager.

    `is_pooler`: connections are given a process id that is not the backend's, as poolers do.
    """

    def __init__(self, dsn: str, *, is_pooler: bool = False) -> None:
        self._target = conninfo_to_dict(dsn)
        self._is_pooler = is_pooler
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._closing = False
        port = self._listener.getsockname()[1]
        kept = {key: value for key, value in self._target.items() if key not in {"host", "port", "hostaddr"}}
        self.dsn = make_conninfo("", **kept, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._flowing.set()
        socket.create_connection(self._listener.getsockname()).close()
        self.cut()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    @property
    def connected(self) -> bool:
        """Whether anybody has come."""
        return bool(self._open)

    def cut(self) -> None:
        """Break every connection that is open now."""
        for end in self._open:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def fall_silent(self) -> None:
        """Keep every connection open and let nothing through."""
        self._flowing.clear()

    def speak(self) -> None:
        self._flowing.set()

    def _accept(self) -> None:
        while not self._closing:
            client, _ = self._listener.accept()
            if self._closing:
                client.close()
                return
            server = self._connect()
            self._open += [client, server]
            self._spawn(lambda client=client, server=server: self._pump(client, server))
            self._spawn(lambda client=client, server=server: self._answer(server, client))

    def _connect(self) -> socket.socket:
        host, port = str(self._target.get("host") or ""), int(self._target.get("port") or 5432)
        if host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{host}/.s.PGSQL.{port}")
            return server
        return socket.create_connection((host or "127.0.0.1", port))

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        if self._is_pooler:
            self._greet(server, client)
        self._pump(server, client)

    def _greet(self, server: socket.socket, client: socket.socket) -> None:
        """Pass on the server's messages up to the first ReadyForQuery, with a made-up process id."""
        stream = server.makefile("rb", buffering=0)
        while head := _exactly(stream, 5):
            kind, size = head[:1], struct.unpack(">I", head[1:])[0]
            body = _exactly(stream, size - 4)
            if kind == b"K":
                body = struct.pack(">I", 4_000_000) + body[4:]
            client.sendall(head + body)
            if kind == b"Z":
                return

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while content := source.recv(65_536):
                self._flowing.wait()
                sink.sendall(content)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _spawn(self, work: object) -> None:
        thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)


def _exactly(stream: object, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = stream.read(size - len(content))  # type: ignore[attr-defined]
        if not part:
            return b""
        content += part
    return content
