"""TLS 1.3 between the members of one run: a small authority, credentials, and a stream on top.

The coordinator makes an `Authority` when a run starts, in memory, and issues each member
`Credentials`: the authority's certificate, the member's own, and its private key (EC P-256). Both
sides of every link must show a certificate of that authority: whoever has none, or one of another
run, is refused in the handshake. The launcher hands credentials over; they are never on a command
line, and a private key is never in a file that has a name. Where processes are started by somebody
else, each makes the same authority from a secret that all were given.

Hostnames are not checked: members move between hosts and are known by several addresses, so a
name in the network says nothing. What counts is the authority, which knows this run's members only.

Cost: about a millisecond a certificate and a handshake; bulk data runs at the speed of AES-GCM on
one core.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import math
import os
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING

from manyhands.errors import ProtocolError, UsageError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CLOCK_SKEW = datetime.timedelta(days=1)
"""How far the clock of another host may lag before a new certificate is "not yet valid" there."""
MAX_NAME = 64
"""X.509 allows no longer common name."""
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of the curve's base point: private keys are the numbers below it."""
RECORD_BYTES = 16 * 1024
"""The most that one TLS record carries."""
HANDSHAKE_RECORD = b"\x16"
"""The first byte of every TLS connection."""

Handshake = Generator[int, None, str]
"""A handshake on a socket that does not block: yields the selectors event that it waits for, and
returns the other side's name. Whoever drives it may serve others in between."""


@dataclass(frozen=True)
class Credentials:
    """What one member shows and trusts, as PEM text. The key is a secret: it is not in the repr."""

    authority: str
    certificate: str
    key: str = field(repr=False)

    def to_dict(self) -> dict[str, str]:
        """For the launcher to hand over. It holds the key: never log it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, str]) -> Credentials:
        names = [f.name for f in fields(cls)]
        missing = [name for name in names if not isinstance(values.get(name), str)]
        if missing:
            raise UsageError(
                f"Credentials need {', '.join(names)} as PEM text, and {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not there."
            )
        return cls(**{name: values[name] for name in names})

    def server_context(self) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # Links are never resumed. And a client that only sends would leave the tickets unread, so
        # that its close becomes a reset, which can take its last frames with it.
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
                # Without an own answer OpenSSL asks the terminal for the password of a locked key.
                context.load_cert_chain(path, password="")
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"The credentials are not a certificate and its key in PEM: {error}. Take them "
                "from the run's Authority.issue()."
            ) from error
        return context


@contextlib.contextmanager
def _nameless_file(text: str) -> Iterator[str]:
    """A path to `text` that lives in memory and has no name on any disk.

    ssl loads keys from files only. This one is gone when its descriptor is, also after SIGKILL.
    """
    descriptor = os.memfd_create("manyhands", os.MFD_CLOEXEC)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


@dataclass(frozen=True)
class Authority:
    """The certificate authority of one run. Its key never leaves the process that made it."""

    name: str
    certificate: x509.Certificate = field(repr=False)
    _key: ec.EllipticCurvePrivateKey = field(repr=False)
    _until: datetime.datetime = field(repr=False)

    @classmethod
    def create(cls, name: str, *, valid_days: float = 365) -> Authority:
        """A new authority; its certificates hold for `valid_days`, which no run may outlast."""
        from cryptography.hazmat.primitives.asymmetric import ec

        return cls._with_key(name, ec.generate_private_key(ec.SECP256R1()), valid_days)

    @classmethod
    def from_secret(cls, name: str, secret: str, *, valid_days: float = 365) -> Authority:
        """The authority of all who know a secret: each makes it for itself, and trusts the others'.

        The private key comes from the secret alone (HKDF, RFC 5869), so the secret must be one that
        can't be guessed. Two authorities of one secret have other certificates with the same key and
        name, which is what a signature is checked against.
        """
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        if not secret:
            raise ValueError("The secret is empty. Give one such as secrets.token_hex(32).")
        # 16 bytes more than the order of the curve: what the remainder favours can't be noticed.
        kdf = HKDF(hashes.SHA256(), length=48, salt=None, info=b"manyhands authority 1")
        number = int.from_bytes(kdf.derive(secret.encode("utf-8", "surrogatepass")))
        key = ec.derive_private_key(1 + number % (P256_ORDER - 1), ec.SECP256R1())
        return cls._with_key(name, key, valid_days)

    @classmethod
    def _with_key(cls, name: str, key: ec.EllipticCurvePrivateKey, valid_days: float) -> Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=valid_days)
        subject = _subject(name)
        builder = _builder(subject, subject, key.public_key(), until)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        return cls(name, builder.sign(key, hashes.SHA256()), key, until)

    def issue(
        self,
        member_name: str,
        *,
        hosts: Iterable[str] = ("localhost", "127.0.0.1"),
        trusts: Iterable[Authority] = (),
    ) -> Credentials:
        """Credentials for a member; its links show `member_name` as the peer on the other side. `trusts`:
        others whose certificates it takes, too."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(member_name)
        builder = _builder(subject, self.certificate.subject, key.public_key(), self._until)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        # Every member both listens and connects.
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        names = [_general_name(host) for host in hosts]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pem = serialization.Encoding.PEM
        return Credentials(
            authority="".join(
                each.certificate.public_bytes(pem).decode() for each in (self, *trusts)
            ),
            certificate=builder.sign(self._key, hashes.SHA256()).public_bytes(pem).decode(),
            key=key.private_bytes(
                pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ).decode(),
        )


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise UsageError(
            f"{name!r} can't be the name in a certificate: it takes 1 to {MAX_NAME} printable "
            "characters, such as worker0."
        )
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime.datetime
) -> x509.CertificateBuilder:
    from cryptography import x509

    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=datetime.datetime.now(datetime.UTC) - CLOCK_SKEW,
        not_valid_after=until,
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def certificate_name(sock: ssl.SSLSocket) -> str:
    """The common name that the other side's certificate was issued for."""
    certificate = sock.getpeercert() or {}
    subject: Iterable[tuple[tuple[str, str], ...]] = certificate.get("subject", ())  # type: ignore[assignment]
    return next((value for rdn in subject for key, value in rdn if key == "commonName"), "unnamed")


def listening_side(sock: ssl.SSLSocket) -> Handshake:
    """The listener's side of TLS; returns the name in the other side's certificate."""
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
    """Not a TimeoutError: the kernel raises that for a connection it has given up."""


def wait_ready(sock: socket.socket, events: int, deadline: float | None) -> None:
    """Wait until poll() reports one of `events` or an error; or DeadlinePassed."""
    poller = select.poll()
    poller.register(sock, events)
    left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not poller.poll(None if left_s is None else math.ceil(left_s * 1000)):
        raise DeadlinePassed


class WouldBlock(Exception):
    """Nothing can be read or written now, until poll() reports one of `events`."""

    def __init__(self, events: int) -> None:
        super().__init__(events)
        self.events = events


class TlsStream:
    """The bytes of one TLS connection, read by one thread and written by another at the same time.

    OpenSSL forbids two calls on one connection at once, and CPython 3.11 does not guard it. So the
    socket never blocks: each SSL_read and SSL_write is a short call under one lock, and all the
    waiting is done outside of it. Reading is tried before waiting: bytes that OpenSSL has decrypted
    already are never waited for.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()

    @property
    def has_pending(self) -> bool:
        """If true, bytes were decrypted that nobody has read: poll() knows nothing of them."""
        with self._lock:
            return self._sock.pending() > 0

    def recv_into(self, view: memoryview, deadline: float | None) -> int:
        """Fill some of `view`; 0 when the other side closed."""
        while True:
            try:
                return self.try_recv_into(view)
            except WouldBlock as block:
                wait_ready(self._sock, block.events, deadline)

    def try_recv_into(self, view: memoryview) -> int:
        try:
            with self._lock:
                return self._sock.recv_into(view)
        except ssl.SSLWantReadError:
            raise WouldBlock(select.POLLIN) from None
        except ssl.SSLWantWriteError:
            raise WouldBlock(select.POLLOUT) from None

    def send(self, parts: list[memoryview]) -> None:
        while True:
            try:
                return self.try_send(parts)
            except WouldBlock as block:
                # OpenSSL wants the same bytes again after this: `parts` begins with them.
                wait_ready(self._sock, block.events, None)

    def try_send(self, parts: list[memoryview]) -> None:
        """Send and remove what can be sent now; WouldBlock if something is left."""
        if len(parts) > 1 and sum(map(len, parts)) <= RECORD_BYTES:
            parts[:] = [memoryview(b"".join(parts))]  # one record, one packet
        while parts:
            try:
                with self._lock:
                    sent = self._sock.send(parts[0])
            except ssl.SSLWantWriteError:
                raise WouldBlock(select.POLLOUT) from None
            except ssl.SSLWantReadError:
                raise WouldBlock(select.POLLIN) from None
            parts[0] = parts[0][sent:]
            if not parts[0]:
                del parts[0]
