"""A mirror on loopback that counts its requests, and small idx files."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import os
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manyhands.data.download import RemoteFile

CHECKOUT = Path(__file__).resolve().parents[3]
PROCESS_DEADLINE_S = 30.0


class Mirror:
    """Serves `files`; `tricks` answer in their own way; a cleared `gate` holds answers back."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tricks: dict[str, Callable[[http.server.BaseHTTPRequestHandler], None]] = {}
        self.requests: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.closing = threading.Event()
        handler = functools.partial(_Handler, self)
        self.server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/mnist"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        self.closing.set()
        self.gate.set()
        self.server.shutdown()
        self.thread.join(timeout=5)
        self.server.server_close()
        assert not self.thread.is_alive()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # so that server_close joins them: nothing outlives the test

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that hangs up early, or is killed, is what some tests are about


class _Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, mirror: Mirror, *args: object) -> None:
        self.mirror = mirror
        super().__init__(*args)

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        self.mirror.requests[name] += 1
        self.mirror.gate.wait(timeout=20)
        if name in self.mirror.tricks:
            self.mirror.tricks[name](self)
        elif name in self.mirror.files:
            content = self.mirror.files[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        else:
            self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def make_mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Mirror]]:
    monkeypatch.setenv("no_proxy", "*")
    mirrors: list[Mirror] = []

    def make() -> Mirror:
        mirrors.append(Mirror())
        return mirrors[-1]

    yield make
    for mirror in mirrors:
        mirror.close()


@pytest.fixture
def mirror(make_mirror: Callable[[], Mirror]) -> Mirror:
    return make_mirror()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that outlives neither the test nor its deadline, so that reads end."""
    processes: list[subprocess.Popen[str]] = []
    watchdogs: list[threading.Timer] = []

    def start_one(*command: str, **options: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, text=True, **options)
        processes.append(process)
        watchdogs.append(threading.Timer(PROCESS_DEADLINE_S, process.kill))
        watchdogs[-1].start()
        return process

    yield start_one
    for watchdog in watchdogs:
        watchdog.cancel()
        watchdog.join(timeout=5)
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


@pytest.fixture
def remote() -> Callable[[str, bytes], RemoteFile]:
    """How a file of this content is announced."""

    def announce(name: str, content: bytes) -> RemoteFile:
        return RemoteFile(name, len(content), hashlib.sha256(content).hexdigest())

    return announce


@pytest.fixture
def small_mnist() -> dict[str, bytes]:
    """The four files in little: 40 training and 20 test images; image i has the one grey i."""
    files = {}
    for stem, count in (("train", 40), ("t10k", 20)):
        images = b"".join(bytes([i]) * 784 for i in range(count))
        labels = bytes(i % 10 for i in range(count))
        files[f"{stem}-images-idx3-ubyte.gz"] = gzip.compress(
            struct.pack(">IIII", 2051, count, 28, 28) + images
        )
        files[f"{stem}-labels-idx1-ubyte.gz"] = gzip.compress(
            struct.pack(">II", 2049, count) + labels
        )
    return files


@pytest.fixture
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without MNIST; gives the cache folder, which does not exist yet."""
    monkeypatch.delenv("MANYHANDS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "manyhands" / "mnist"


@pytest.fixture
def real_mnist() -> Path:
    """The folder with the real files, where this machine has them."""
    roots = [CHECKOUT.parent / "shared" / "data"]
    if os.environ.get("MANYHANDS_DATA"):
        roots.insert(0, Path(os.environ["MANYHANDS_DATA"]))
    for folder in (folder for root in roots for folder in (root, root / "mnist")):
        if (folder / "train-images-idx3-ubyte.gz").is_file():
            return folder
    pytest.skip("the real MNIST files are not here: set MANYHANDS_DATA to the folder with them")


@pytest.fixture
def examples() -> Path:
    return CHECKOUT / "examples"
