"""The pinned roster: a strict file, a hash that operators compare, and the command that edits it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble_flwr.cli import main
from lensemble_flwr.errors import ConfigError
from lensemble_flwr.federation.policy import Policy
from lensemble_flwr.federation.roster import (
    MAX_BYTES,
    Roster,
    load_roster,
    parse_key,
    parse_roster,
    save_roster,
    simulated_roster,
)
from lensemble_flwr.federation.site import Site


def key(i: int) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32).public_key().public_bytes_raw()


ROSTER = Roster({"b": key(2), "a": key(1), "Hospital-3.x": key(3)})


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    assert load_roster(path) is None
    save_roster(path, ROSTER)
    assert path.stat().st_mode & 0o777 == 0o644
    assert load_roster(path) == ROSTER
    assert parse_roster(ROSTER.encode()).encode() == ROSTER.encode()


def test_the_hash_is_of_the_keys_alone() -> None:
    renamed = Roster({"x": key(1), "y": key(3), "z": key(2)})
    assert renamed.digest == ROSTER.digest
    others = [Roster({"a": key(1)}), Roster({}), Roster({"a": key(1), "b": key(2)}), Roster({"a": key(4)})]
    assert len({ROSTER.digest, *(other.digest for other in others)}) == 5


def test_strangers() -> None:
    assert ROSTER.strangers([key(2), key(1)]) == []
    assert ROSTER.strangers([key(1), key(9), key(8)]) == [key(9), key(8)]


A, B = key(1).hex(), key(2).hex()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'{"version": 1}',
        b'{"members": {}}',
        b'{"version": 2, "members": {}}',
        b'{"version": true, "members": {}}',
        b'{"version": 1, "members": []}',
        b'{"version": 1, "members": {}, "more": 1}',
        f'{{"version": 1, "members": {{"a": "{A}", "a": "{B}"}}}}'.encode(),
        f'{{"version": 1, "version": 1, "members": {{"a": "{A}"}}}}'.encode(),
        f'{{"version": 1, "members": {{"a": "{A}", "b": "{A}"}}}}'.encode(),
        f'{{"version": 1, "members": {{"": "{A}"}}}}'.encode(),
        f'{{"version": 1, "members": {{"a b": "{A}"}}}}'.encode(),
        f'{{"version": 1, "members": {{"{"a" * 65}": "{A}"}}}}'.encode(),
        f'{{"version": 1, "members": {{"a\\n": "{A}"}}}}'.encode(),
        f'{{"version": 1, "members": {{"a": "{A.upper()}"}}}}'.encode(),
        f'{{"version": 1, "members": {{"a": "{A[:-1]}"}}}}'.encode(),
        f'{{"version": 1, "members": {{"a": "0x{A}"}}}}'.encode(),
        f'{{"version": 1, "members": {{"a": "{"0" * 64}"}}}}'.encode(),  # a point of small order
        f'{{"version": 1, "members": {{"a": "{"f" * 64}"}}}}'.encode(),  # no point
        b'{"version": 1, "members": {"a": 7}}',
        b'{"version": 1, "members": {"a": null}}',
        b"[" * 100_000,
        b"\xff",
        b" " * (MAX_BYTES + 1),
        json.dumps({"version": 1, "members": {f"m{i}": f"{i + 2:064x}" for i in range(1025)}}).encode(),
    ],
    ids=lambda content: content[:60].decode("latin-1"),
)
def test_an_odd_roster_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "roster.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError):
        load_roster(path)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just(A) | st.floats(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["version", "members", "a", ""]), inner, max_size=3)
            ),
            max_leaves=6,
        ).map(lambda tree: json.dumps(tree).encode()),
        st.tuples(st.integers(0, 8 * len(ROSTER.encode()) - 1)).map(
            lambda bit: bytes(b ^ (1 << bit[0] % 8) * (i == bit[0] // 8) for i, b in enumerate(ROSTER.encode()))
        ),
    )
)
def test_whatever_bytes_come_in(content: bytes) -> None:
    """A typed error, or a roster whose bytes give it back."""
    try:
        roster = parse_roster(content)
    except ConfigError:
        return
    assert parse_roster(roster.encode()) == roster


@pytest.mark.parametrize("text", [None, 7, "", "ab", A + "0", A.replace("a", "g", 1) + "", " " + A[1:], A + "\n"])
def test_an_odd_key_is_refused(text: object) -> None:
    if text == A:
        text = A[:-1] + "g"
    with pytest.raises(ConfigError):
        parse_key(text)


def test_a_roster_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    save_roster(path, ROSTER)
    for mode in (0o664, 0o646, 0o666):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="written by others"):
            load_roster(path)
    path.chmod(0o600)
    assert load_roster(path) == ROSTER


def test_the_sites_of_a_simulation(tmp_path: Path) -> None:
    assert simulated_roster(tmp_path).members == {}
    sites = [Site.create(tmp_path / f"site-{i:04d}", Policy(unlimited=True)) for i in range(3)]
    assert simulated_roster(tmp_path).strangers([site.identity for site in sites]) == []
    assert list(simulated_roster(tmp_path).members) == ["site-0000", "site-0001", "site-0002"]
    (tmp_path / "site-0001/identity.pub").write_bytes(b"\xff")
    with pytest.raises(ConfigError):
        simulated_roster(tmp_path)


# ---------------------------------------------------------------- the command


def test_the_command_pins_shows_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site.create(tmp_path / "site", Policy(unlimited=True))
    folder, me = str(site.folder), site.identity.hex()
    assert main(["site", "roster", folder]) == 0
    assert "no roster is pinned" in capsys.readouterr().out
    assert not (site.folder / "roster.json").exists()
    assert main(["site", "roster", folder, "--add", f"a={A}", f"b={B}"]) == 0
    assert "(this site)" in capsys.readouterr().out  # whoever adds others is not forgotten
    assert main(["site", "roster", folder, "--remove", "site"]) == 1
    assert "missing in its own roster" in capsys.readouterr().out
    assert main(["site", "roster", folder, "--add", f"a={A}"]) == 0
    assert main(["site", "roster", folder, "--add", f"me={me}", "--remove", "b"]) == 0
    shown = capsys.readouterr().out
    assert site.roster is not None
    assert site.roster.members == {"a": key(1), "me": site.identity}
    assert f"2 members, hash {site.roster.digest}" in shown
    assert "(this site)" in shown
    assert "missing" not in shown
    assert main(["site", "roster", folder, "--add", f"a={A}"]) == 0  # again: nothing changes
    assert site.roster.members == {"a": key(1), "me": site.identity}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--add", "a"],
        ["--add", "a=xyz"],
        ["--add", f"a={B}"],  # another key under a known name
        ["--add", f"c={A}"],  # a known key under another name
        ["--add", f"a b={B}"],
        ["--remove", "nobody"],
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    site = Site.create(tmp_path / "site", Policy(unlimited=True))
    main(["site", "roster", str(site.folder), "--add", f"a={A}"])
    before = (site.folder / "roster.json").read_bytes()
    capsys.readouterr()
    assert main(["site", "roster", str(site.folder), *arguments]) == 2
    err = capsys.readouterr().err
    assert err
    assert "Traceback" not in err
    assert (site.folder / "roster.json").read_bytes() == before
    assert main(["site", "roster", str(tmp_path / "nowhere")]) == 2
