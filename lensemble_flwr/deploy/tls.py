"""The coordinator's certificate authority and server certificate (X.509, P-256), and a look at them from a site.

The authority signs server certificates only; sites are known by their SuperNode keys, not by certificates.
"""

from __future__ import annotations

import email.utils
import ipaddress
import re
import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lensemble_flwr.durable import atomic_write
from lensemble_flwr.errors import ConfigError, LaunchError

CA_DAYS, SERVER_DAYS = 3650, 397
_SKEW = timedelta(hours=1)
"""A new certificate is valid from an hour ago: machines' clocks differ."""
_HOST = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)


def alternative_name(text: str) -> x509.GeneralName:
    """A host name or an IP address as it stands in a certificate.

    Raises:
        ConfigError: neither.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        if not _HOST.fullmatch(text) or re.fullmatch(r"[0-9.]+", text):
            raise ConfigError(f"{text!r} is neither a host name nor an IP address.", "Give it without port.") from None
        return x509.DNSName(text)


def make_authority(key_file: Path, certificate_file: Path, name: str) -> None:
    """A new certificate authority. Raises ArtifactError when a file cannot be written."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"lensemble CA of {name}"[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(key_file, key)
    atomic_write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)


def issue_server(authority: tuple[Path, Path], key_file: Path, certificate_file: Path, names: list[str]) -> None:
    """A new server key and certificate for ``names`` (host names and addresses), signed by (key, certificate).

    Raises:
        ConfigError: a name is none, or the authority cannot be read.
    """
    try:
        ca_key = serialization.load_pem_private_key(authority[0].read_bytes(), password=None)
        ca = x509.load_pem_x509_certificate(authority[1].read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The certificate authority {authority[0]} cannot be read: {error}.") from error
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(min(now + timedelta(days=SERVER_DAYS), ca.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([alternative_name(n) for n in dict.fromkeys(names)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    _write_key(key_file, key)
    atomic_write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    atomic_write(path, key.private_bytes(encoding, form, serialization.NoEncryption()))


def read_authority(path: Path) -> x509.Certificate:
    """The one certificate of a CA file.

    Raises:
        ConfigError: unreadable, not exactly one, or no authority.
    """
    try:
        (certificate,) = x509.load_pem_x509_certificates(path.read_bytes())
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", "Ask the coordinator for its ca.crt.") from error
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(
            f"{path} does not hold one CA certificate: {error}.", "Ask the coordinator for its ca.crt."
        ) from error
    if not constraints.ca:
        raise ConfigError(f"{path} holds a certificate that is no authority.", "Ask the coordinator for its ca.crt.")
    return certificate


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the certificate, hex: what is compared over the telephone and pinned in a policy."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def days_left(certificate: x509.Certificate, now: datetime | None = None) -> float:
    """Days that the certificate is still valid; negative when it is over, or not yet valid."""
    now = now or datetime.now(UTC)
    if now < certificate.not_valid_before_utc:
        return -1.0
    return (certificate.not_valid_after_utc - now) / timedelta(days=1)


@dataclass(frozen=True)
class Server:
    """What a SuperLink showed: its certificate, and how far its clock is ahead of ours (seconds; None: not told)."""

    certificate: x509.Certificate
    clock_ahead_s: float | None


def visit(address: str, authority: Path | None, timeout_s: float = 10.0, *, insecure: bool = False) -> Server | None:
    """Connect to ``HOST:PORT`` as a SuperNode would, verifying name and chain, and read its clock.

    Args:
        authority: the certificates to trust; None: the system's.
        insecure: without TLS; then there is nothing to read, and None is returned once it answers.

    Raises:
        ConfigError: another authority, another name, or expired; in words.
        LaunchError: no answer.
    """
    host, port = split_address(address)
    try:
        context = ssl.create_default_context(cafile=str(authority) if authority else None)
    except OSError as error:
        raise ConfigError(f"{authority} holds no certificate that can be used: {error}.") from error
    try:
        if insecure:
            socket.create_connection((host, port), timeout=timeout_s).close()
            return None
        with (
            socket.create_connection((host, port), timeout=timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=host) as channel,
        ):
            der = channel.getpeercert(binary_form=True)
            asked = time.time()
            channel.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = channel.recv(4096).decode("latin-1")
            now = (asked + time.time()) / 2
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"The SuperLink at {address} shows a certificate that ca.crt does not vouch for: {error.verify_message}.",
            "Compare the fingerprint with the coordinator; a wrong name means that the address is not in its SANs.",
        ) from error
    except OSError as error:
        raise LaunchError(
            f"The SuperLink at {address} does not answer: {error.strerror or error}.",
            "Is it started (superlink.sh)? Else check the address, the network and the coordinator's firewall.",
        ) from error
    assert der is not None
    return Server(x509.load_der_x509_certificate(der), _clock_ahead(answer, now))


def _clock_ahead(answer: str, now: float) -> float | None:
    """Seconds that the ``Date`` of an HTTP answer is ahead of ``now``; None where it has none that can be read."""
    date = re.search(r"(?im)^date:\s*(.+?)\s*$", answer)
    try:
        return email.utils.parsedate_to_datetime(date[1]).timestamp() + 0.5 - now if date else None
    except (ValueError, TypeError, OverflowError):
        return None


def split_address(address: str) -> tuple[str, int]:
    """``HOST:PORT`` (an IPv6 address in brackets). Raises ConfigError for anything else."""
    if "://" in address:
        raise ConfigError(f"{address!r} names a protocol.", "Write only HOST:PORT.")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is not HOST:PORT.", "Write it as in superlink.example.org:8000.")
    alternative_name(host)
    return host.strip("[]"), int(port)
