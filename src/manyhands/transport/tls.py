"""TLS 1.3 between the members of one run: a small authority, credentials, and a stream on top.

When a run starts, the coordinator creates an `Authority` in memory and issues `Credentials` to each member:
the authority's certificate, the member's own, and its private key (EC P-256). Both sides of a link must
show a certificate of that authority; without one, or with one of another run, the handshake fails. The
launcher passes credentials on. They are never on a command line, and a private key is never in a file that
has a name. Where a scheduler starts the processes, each derives the same authority from a secret that all
have.

Hostnames are not checked: members move between hosts and have several addresses, so a name in the network
proves nothing. What counts is the authority, which has certified this run's members only.

Cost: about a millisecond per certificate and per handshake; bulk data runs at the speed of AES-GCM on one
core.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from manyhands.errors import ProtocolError, UsageError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CLOCK_SKEW = datetime.timedelta(days=1)
"""Tolerance for slow clocks of other hosts, which would find a new certificate "not yet valid"."""
MAX_NAME = 64
"""Longest common name that X.509 allows."""
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve's base point: private keys are the numbers below it."""
RECORD_BYTES = 16 * 1024
"""Most data in one TLS record."""
HANDSHAKE_RECORD = b"\x16"
"""The first byte of every TLS connection."""

Handshake = Generator[int, None, str]
"""A handshake on a non-blocking socket: yields the selectors event that it waits for, and returns the other
side's name. The caller can serve other connections in between."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Credentials:
    """Certificates that one member shows and trusts, as PEM text. The key is not in the repr."""

    authority: str
    certificate: str
    key: str = field(repr=False)

    def server_context(self) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # Links are never resumed. And a client that only sends would leave the tickets unread, so that its
        # close becomes a reset, which can drop its last frames.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=self.authority)
            with _nameless_file(self.certificate + self.key) as path:
                # Without a password, OpenSSL would ask for one on the terminal if the key is encrypted.
                context.load_cert_chain(path, password="")
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"The credentials are not a certificate and its key in PEM: {error}. Use those of "
                "the run's Authority.issue()."
            ) from error
        return context


@contextlib.contextmanager
def _nameless_file(text: str) -> Iterator[str]:
    """Return a path to `text` in a file in memory, without a name on any disk.

    ssl loads keys from files only. This one disappears with its descriptor, even after SIGKILL.
    """
    descriptor = os.memfd_create("manyhands", os.MFD_CLOEXEC)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


@dataclass(frozen=True)
class Authority:
    """The certificate authority of one run. Its key never leaves the process that created it."""

    name: str
    certificate: x509.Certificate = field(repr=False)
    _key: ec.EllipticCurvePrivateKey = field(repr=False)
    _until: datetime.datetime = field(repr=False)

    @classmethod
    def create(cls, name: str, *, valid_days: float = 365) -> Authority:
        """Return a new authority. Its certificates are valid for `valid_days`, longer than any run."""
        from cryptography.hazmat.primitives.asymmetric import ec

        return cls._with_key(name, ec.generate_private_key(ec.SECP256R1()), valid_days)

    @classmethod
    def from_secret(cls, name: str, secret: str, *, valid_days: float = 365) -> Authority:
        """Return the authority of all processes that know a secret: each derives it, and trusts the others'.

        The private key depends on the secret alone (HKDF, RFC 5869), so the secret must be impossible to
        guess. Two authorities of one secret have different certificates with the same key and name, which is
        what signatures are checked against.
        """
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        if not secret:
            raise ValueError("The secret is empty. Give one such as secrets.token_hex(32).")
        # 16 bytes more than the order of the curve: the bias of the remainder is negligible.
        kdf = HKDF(hashes.SHA256(), length=48, salt=None, info=b"manyhands authority 1")
        number = int.from_bytes(kdf.derive(secret.encode("utf-8", "surrogatepass")))
        key = ec.derive_private_key(1 + number % (P256_ORDER - 1), ec.SECP256R1())
        return cls._with_key(name, key, valid_days)

    @classmethod
    def _with_key(cls, name: str, key: ec.EllipticCurvePrivateKey, valid_days: float) -> Authority:
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=valid_days)
        certificate = _certificate(
            name, key.public_key(), signed_by=(name, key), until=until, ca=True
        )
        return cls(name, certificate, key, until)

    def issue(self, member_name: str, *, trusts: Iterable[Authority] = ()) -> Credentials:
        """Return credentials for a member; its links show `member_name` as the peer on the other side.
        `trusts`: other authorities whose certificates it accepts."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(
            member_name, key.public_key(), signed_by=(self.name, self._key), until=self._until
        )
        pem = serialization.Encoding.PEM
        return Credentials(
            authority="".join(
                each.certificate.public_bytes(pem).decode() for each in (self, *trusts)
            ),
            certificate=certificate.public_bytes(pem).decode(),
            key=key.private_bytes(
                pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ).decode(),
        )


def _certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    *,
    signed_by: tuple[str, ec.EllipticCurvePrivateKey],
    until: datetime.datetime,
    ca: bool = False,
) -> x509.Certificate:
    """Return a certificate for `name`; with `ca`, that of an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def subject(name: str) -> x509.Name:
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            raise UsageError(
                f"{name!r} can't be the name in a certificate: it takes 1 to {MAX_NAME} printable "
                "characters, such as worker0."
            )
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    issuer, issuer_key = signed_by
    builder = x509.CertificateBuilder(
        issuer_name=subject(issuer),
        subject_name=subject(name),
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=datetime.datetime.now(datetime.UTC) - CLOCK_SKEW,
        not_valid_after=until,
    )
    usage = x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=ca, path_length=0 if ca else None)
    builder = builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)
    extensions: list[x509.ExtensionType] = [x509.SubjectKeyIdentifier.from_public_key(key)]
    if not ca:
        public = issuer_key.public_key()
        extensions.append(x509.AuthorityKeyIdentifier.from_issuer_public_key(public))
        # Every member both listens and connects.
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        extensions.append(x509.ExtendedKeyUsage(both))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def certificate_name(sock: ssl.SSLSocket) -> str:
    """Return the common name in the other side's certificate."""
    certificate = sock.getpeercert() or {}
    subject: Iterable[tuple[tuple[str, str], ...]] = certificate.get("subject", ())  # type: ignore[assignment]
    return next((value for rdn in subject for key, value in rdn if key == "commonName"), "unnamed")


def listening_side(sock: ssl.SSLSocket) -> Handshake:
    """Do the handshake of the listener. Returns the name in the other side's certificate."""
    first: bytes | None = None
    while True:
        try:
            if first is None:
                # OpenSSL would take other bytes for the start of an SSLv2 hello, and wait for the rest.
                first = socket.socket.recv(sock, 1, socket.MSG_PEEK)
                if first not in (b"", HANDSHAKE_RECORD):
                    raise ProtocolError(
                        f"it does not begin with a TLS handshake, but with {first!r}"
                    )
            sock.do_handshake()
        except (ssl.SSLWantReadError, BlockingIOError):
            yield selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            yield selectors.EVENT_WRITE
        else:
            return certificate_name(sock)


class DeadlinePassed(Exception):
    """Not a TimeoutError, which the kernel raises for a connection that it has given up."""


def wait_ready(sock: socket.socket, events: int, deadline: float | None) -> None:
    """Wait until poll() reports one of `events` or an error. Raises DeadlinePassed."""
    poller = select.poll()
    poller.register(sock, events)
    left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not poller.poll(None if left_s is None else math.ceil(left_s * 1000)):
        raise DeadlinePassed


class WouldBlock(Exception):
    """Raised if nothing can be read or written before poll() reports one of `events`."""

    def __init__(self, events: int) -> None:
        super().__init__(events)
        self.events = events


class TlsStream:
    """The bytes of one TLS connection, read by one thread and written by another at the same time.

    OpenSSL forbids two calls on one connection at once, and CPython 3.11 does not prevent them. So the socket
    is non-blocking: each SSL_read and SSL_write is a short call under one lock, and all waiting is done
    outside of it. Reading is tried before waiting: poll() does not report bytes that OpenSSL has decrypted
    already.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()

    @property
    def has_pending(self) -> bool:
        """If true, there are decrypted bytes, which poll() does not report."""
        with self._lock:
            return self._sock.pending() > 0

    def recv_into(self, view: memoryview, deadline: float | None) -> int:
        """Fill some of `view`; 0 if the other side has closed."""
        return self._waiting(self.try_recv_into, view, deadline)

    def send(self, parts: list[memoryview]) -> None:
        # OpenSSL wants the same bytes again after waiting: `parts` begins with them.
        self._waiting(self.try_send, parts, None)

    def try_recv_into(self, view: memoryview) -> int:
        return self._try(self._sock.recv_into, view)

    def try_send(self, parts: list[memoryview]) -> None:
        """Send and remove what can be sent now; WouldBlock if something is left."""
        if len(parts) > 1 and sum(map(len, parts)) <= RECORD_BYTES:
            parts[:] = [memoryview(b"".join(parts))]  # one record, one packet
        while parts:
            sent = self._try(self._sock.send, parts[0])
            parts[0] = parts[0][sent:]
            if not parts[0]:
                del parts[0]

    def _try(self, call: Callable[[memoryview], int], view: memoryview) -> int:
        try:
            with self._lock:
                return call(view)
        except ssl.SSLWantReadError:
            raise WouldBlock(select.POLLIN) from None
        except ssl.SSLWantWriteError:
            raise WouldBlock(select.POLLOUT) from None

    def _waiting(self, attempt: Callable[[T], R], argument: T, deadline: float | None) -> R:
        while True:
            try:
                return attempt(argument)
            except WouldBlock as block:
                wait_ready(self._sock, block.events, deadline)
