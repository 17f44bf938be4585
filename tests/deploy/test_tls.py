"""Certificates as OpenSSL and Python judge them."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
import time
from email.utils import formatdate
from pathlib import Path

import pytest
from cryptography import x509

from lensemble_flwr.deploy.keys import check_public_key, open_to_others, read_node_key, write_node_key
from lensemble_flwr.deploy.tls import (
    alternative_name,
    days_left,
    issue_server,
    make_authority,
    read_authority,
    split_address,
    visit,
)
from lensemble_flwr.errors import ConfigError, LaunchError


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    make_authority(tmp_path / "ca.key", tmp_path / "ca.crt", "lab.example.org")
    names = ["127.0.0.1", "lab.example.org", "::1"]
    issue_server((tmp_path / "ca.key", tmp_path / "ca.crt"), tmp_path / "s.key", tmp_path / "s.crt", names)
    return tmp_path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_verifies_chain_purpose_and_names(pki: Path) -> None:
    base = ["openssl", "verify", "-x509_strict", "-CAfile", str(pki / "ca.crt"), "-purpose", "sslserver"]
    for extra, good in (
        (["-verify_hostname", "lab.example.org"], True),
        (["-verify_ip", "127.0.0.1"], True),
        (["-verify_ip", "::1"], True),
        (["-verify_hostname", "other.example.org"], False),
        (["-verify_ip", "10.0.0.1"], False),
    ):
        done = subprocess.run([*base, *extra, str(pki / "s.crt")], capture_output=True)
        assert (done.returncode == 0) is good, done.stderr


def test_keys_are_for_their_owner_and_certificates_for_all(pki: Path) -> None:
    assert open_to_others(pki / "ca.key") is None
    assert open_to_others(pki / "s.key") is None
    assert "others" in str(open_to_others(pki / "ca.crt"))


def serve(pki: Path, date: str) -> int:
    """One TLS connection that answers like a SuperLink."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "s.crt", pki / "s.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listener, listener.accept()[0] as plain:
            try:
                with context.wrap_socket(plain, server_side=True) as channel:
                    channel.recv(1000)
                    channel.sendall(f"HTTP/1.1 200 OK\r\nDate: {date}\r\n\r\n".encode())
            except OSError:
                pass

    threading.Thread(target=answer, daemon=True).start()
    return int(listener.getsockname()[1])


def test_a_visit_verifies_and_reads_the_clock(pki: Path) -> None:
    port = serve(pki, formatdate(time.time() + 3600, usegmt=True))
    server = visit(f"127.0.0.1:{port}", pki / "ca.crt")
    assert server.clock_ahead_s == pytest.approx(3600, abs=3)
    assert 390 < days_left(server.certificate) < 400


@pytest.mark.parametrize("date", ["tomorrow", "Mon, 99 Nov 99999 99:99:99 GMT", ""])
def test_a_date_that_is_none_is_no_clock(pki: Path, date: str) -> None:
    server = visit(f"127.0.0.1:{serve(pki, date)}", pki / "ca.crt")
    assert server is not None
    assert server.clock_ahead_s is None


def test_another_authority_and_another_name_are_refused(pki: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "o.key", tmp_path / "o.crt", "lab.example.org")
    with pytest.raises(ConfigError, match="does not vouch"):
        visit(f"127.0.0.1:{serve(pki, '')}", tmp_path / "o.crt")
    issue_server((pki / "ca.key", pki / "ca.crt"), pki / "s.key", pki / "s.crt", ["10.0.0.1"])
    with pytest.raises(ConfigError, match="does not vouch"):
        visit(f"127.0.0.1:{serve(pki, '')}", pki / "ca.crt")
    for insecure in (False, True):
        with pytest.raises(LaunchError, match="does not answer"):
            visit("127.0.0.1:1", pki / "ca.crt", insecure=insecure)


def test_a_server_certificate_is_no_authority(pki: Path) -> None:
    assert read_authority(pki / "ca.crt")
    with pytest.raises(ConfigError, match="no authority"):
        read_authority(pki / "s.crt")
    (pki / "two.crt").write_bytes((pki / "ca.crt").read_bytes() * 2)
    with pytest.raises(ConfigError, match="one CA"):
        read_authority(pki / "two.crt")
    with pytest.raises(ConfigError, match=r"no\.crt cannot be read: No such file or directory\. Ask the coordinator"):
        read_authority(pki / "no.crt")


@pytest.mark.parametrize("name", ["", "a b", "lab.example.org:8000", "-a", "300.1.1.1", "a..b", "x" * 300, "*.a.org"])
def test_what_is_no_host(name: str) -> None:
    with pytest.raises(ConfigError):
        alternative_name(name)


def test_addresses() -> None:
    assert split_address("lab.example.org:8000") == ("lab.example.org", 8000)
    assert split_address("[::1]:80") == ("::1", 80)
    assert alternative_name("10.0.0.1") == x509.IPAddress(ipaddress.ip_address("10.0.0.1"))
    for wrong in ("lab", "lab:", "lab:0", "lab:99999", "lab:8x", "https://lab:8000"):
        with pytest.raises(ConfigError):
            split_address(wrong)


def test_node_keys_are_what_flower_reads(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve

    line = write_node_key(tmp_path / "k", tmp_path / "k.pub")
    private = load_ssh_private_key((tmp_path / "k").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "k.pub").read_bytes())
    assert uses_nist_ec_curve(public)  # type: ignore[arg-type]
    assert private.public_key() == public  # type: ignore[union-attr]
    assert read_node_key(tmp_path / "k") == line == check_public_key(line + " a comment")
    assert open_to_others(tmp_path / "k") is None
    with pytest.raises(ConfigError):
        check_public_key("ssh-ed25519 AAAA")
    (tmp_path / "k").write_text("nothing")
    with pytest.raises(ConfigError):
        read_node_key(tmp_path / "k")
