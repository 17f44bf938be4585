"""``lensemble data inspect``: what it prints and how it ends."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import cv2
import numpy as np
import pytest

from lensemble_flwr.cli import main
from tests.data.formats.conftest import FIXTURES, need, write_npz


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LENSEMBLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main(["data", "inspect", *map(str, words)])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_a_good_data_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    need("lerobot")
    sheet = tmp_path / "sheet.png"
    status, out, _ = run(capsys, FIXTURES / "lerobot-v3", "frameskip=2", "--sheet", sheet)
    assert status == 0
    for text in (
        "3 of 9..15 (median 12) pictures, 36 in all",
        "so100, 10 fps",
        "6 continuous, 5 Hz",
        "shoulder                            -0.5 .. 0.9",
        "no problems; 16 steps",
    ):
        assert text in out
    picture = cv2.imread(str(sheet))
    assert picture is not None
    assert picture.shape[1] == 8 * 100 + 4
    assert picture.shape[0] == 3 * 120 + 4
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 15  # pictures, not one colour
    assert stat.S_IMODE(sheet.stat().st_mode) == 0o600


def test_each_problem_names_its_episode(capsys: pytest.CaptureFixture[str], tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "mine"
    for e in range(5):
        write_npz(folder / f"{e}.npz", e)
    write_npz(folder / "1.npz", 1, actions=np.full((5, 2), np.nan))
    write_npz(folder / "3.npz", 3, actions=np.zeros((3, 2)))
    shutil.copy(folder / "0.npz", folder / "9.npz")
    status, out, _ = run(capsys, folder, "image_size=16")
    assert status == 1
    assert "3 problems" in out
    assert "1.npz: actions: step 0 is not finite" in out
    assert "3.npz: 3 actions and 6 pictures" in out
    assert "9.npz: the same recording as 0.npz." in out
    assert not home.exists()  # looking leaves no pictures behind


def test_a_sample_decodes_less_but_sees_every_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for e in range(9):
        write_npz(folder / f"{e}.npz", e % 4, steps=5 + e)
    write_npz(folder / "5.npz", 1, actions=np.zeros((2, 2)))
    status, out, _ = run(capsys, folder, "image_size=16", "--sample", 3)
    assert status == 1
    assert "3 of 9 episodes were decoded" in out
    assert "5.npz: 2 actions" in out


def test_choices_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    need("minari")
    status, out, _ = run(capsys, FIXTURES / "minari/lab/choice-v0", "frameskip=2")
    assert status == 0
    assert "chosen    0: 12, 1: 12, 2: 10" in out  # of 12 + 8 + 14 actions; the third episode's last is left over


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["/nowhere"], "There are no recordings"),
        (["PATH", "frameskip"], "not KEY=VALUE"),
        (["PATH", "speed=3"], "'speed' is unknown"),
        (["PATH", "frameskip=[1"], "not understood"),
        (["PATH", "--sheet", "sheet.jpg"], ".png"),
        (["EMPTY"], "no recordings of a known format"),
    ],
)
def test_bad_input_ends_with_2(words: list, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_npz(tmp_path / "mine/a.npz")
    names = {"PATH": tmp_path / "mine", "EMPTY": tmp_path / "empty"}
    status, out, err = run(capsys, *(names.get(w, w) for w in words))
    assert status == 2
    assert text in err
    assert not out


def test_recordings_that_cannot_be_opened_are_one_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    need("lerobot")
    path = shutil.copytree(FIXTURES / "lerobot-v3", tmp_path / "cut")
    (path / "meta/info.json").write_text("{")
    status, out, _ = run(capsys, path)
    assert status == 1
    assert "info.json is no JSON" in out
