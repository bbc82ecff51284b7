"""What is taken as a person's certificate, and how it lies in memory."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from raftlog.console.certificate import MOST_BYTES, read_certificate
from raftlog.errors import InvalidRequestError
from raftlog.testing.certificates import CertificateAuthority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pem(authority: CertificateAuthority) -> str:
    return authority.issue("ada", hosts=()).read_text()


def parts(pem: str) -> tuple[str, str]:
    """Return the certificates and the key of a file."""
    blocks = re.findall(r"-----BEGIN [^-]+-----.*?-----END [^-]+-----\n", pem, re.DOTALL)
    certificates = "".join(each for each in blocks if "CERTIFICATE" in each)
    return certificates, "".join(each for each in blocks if "PRIVATE KEY" in each)


def encrypted(pem: str, passphrase: str) -> str:
    certificates, key = parts(pem)
    private = serialization.load_pem_private_key(key.encode(), None)
    sealed = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase.encode()),
    )
    return certificates + sealed.decode()


def test_a_certificate_with_its_key_in_any_order_with_text_around(pem: str) -> None:
    certificates, key = parts(pem)
    for text in (pem, key + certificates, f"Bag Attributes\n  friendlyName: ada\n{certificates}\n\n{key}\n"):
        found = read_certificate(text.replace("\n", "\r\n"), "")
        assert found.name == "ada"
        assert found == read_certificate(pem, "")
        assert "PRIVATE" not in repr(found)


def test_clients_read_it_as_a_file_that_is_gone_afterwards(pem: str) -> None:
    found = read_certificate(pem, "")
    with found.lent() as path:
        for _ in range(2):  # with each connection
            assert Path(path).read_bytes() == found.pem
    assert not Path(path).exists()


def test_an_encrypted_key_opens_with_its_passphrase(pem: str) -> None:
    sealed = encrypted(pem, "correct horse")
    assert read_certificate(sealed, "correct horse").pem == read_certificate(pem, "").pem
    for passphrase, said in (("", "is encrypted; give its passphrase"), ("wrong", "the passphrase is wrong")):
        with pytest.raises(InvalidRequestError, match=said):
            read_certificate(sealed, passphrase)
    with pytest.raises(InvalidRequestError, match="leave that field empty"):
        read_certificate(pem, "correct horse")


def test_what_is_missing_or_does_not_fit_is_named(authority: CertificateAuthority, pem: str) -> None:
    certificates, key = parts(pem)
    other = parts(authority.issue("bob", hosts=()).read_text())[1]
    node = authority.issue("node-1", node_ids=[1]).read_text()
    for text, said in (
        ("", "there is no certificate"),
        (key, "there is no certificate"),
        (certificates, "the private key is missing"),
        (certificates + other, "belongs to another certificate"),
        (certificates.replace("M", "N") + key, "the certificate is damaged"),
        (certificates + key.replace("\nM", "\nN", 1), "the private key is damaged"),
        (node, "the certificate of a node"),
        (pem + "x" * MOST_BYTES, "at most 64 KB"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            read_certificate(text, "")


def test_one_that_is_not_valid_now_is_refused_with_the_date(pem: str) -> None:
    now = datetime.now(UTC)
    with pytest.raises(InvalidRequestError, match=r"expired on \d{4}-\d\d-\d\d; renew it"):
        read_certificate(pem, "", now + timedelta(days=36_500))
    with pytest.raises(InvalidRequestError, match=r"not valid before \d{4}-\d\d-\d\d"):
        read_certificate(pem, "", now - timedelta(days=30))
