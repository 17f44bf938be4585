"""The episode in a report: what is on the pictures, what is said of them, and nothing that acts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from lensemble_flwr.errors import ArtifactError
from lensemble_flwr.federation.readings import from_json, to_json
from lensemble_flwr.reporting.readings import png
from lensemble_flwr.reporting.report import write_report
from tests.federation.test_readings import made
from tests.reporting.test_report import HOSTILE, Page, squeezed

Own = Callable[[str], Path]


def page_of(folder: Path, data: bytes) -> Page:
    (folder / "readings.json").write_bytes(data)
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_frames_with_marks(own: Own) -> None:
    folder = own("private")
    readings = made()
    page = page_of(folder, to_json(readings, 10))
    text = squeezed(page.text)
    assert "One episode, as the models see it" in text
    assert "never a participant's" in text
    # Two strips of six frames, each picture inline, each frame told in words.
    pictures = [attributes for tag, attributes in page.tags if tag == "image"]
    assert len(pictures) == 12
    assert all(str(a["href"]).startswith("data:image/png;base64,") for a in pictures)
    assert len(re.findall(r"Frame \d+, from the frame: true column 0", text)) == 6
    assert len(re.findall(r"Frame \d+, from the prediction made 5 steps before: true", text)) == 6
    classes = page.values("class")
    assert classes.count("ring") == 12 + 1  # and the legend
    assert classes.count("disc") == 12 + 1
    assert classes.count("cross") == 12 + 1
    assert (folder / "report.html").stat().st_size < 700_000


def test_nothing_is_loaded(own: Own) -> None:
    folder = own("private")
    page_of(folder, to_json(made(), 10))
    markup = (folder / "report.html").read_text(encoding="utf-8")
    bare = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", markup)
    assert re.search(r"https?:|//[a-z]|@import|url\((?!#)", bare) is None
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:;" in bare.replace("&#x27;", "'")


def test_marks_lie_where_the_state_says(own: Own) -> None:
    readings = made()
    readings.truth[6] = (0.2, 0.4)
    readings.models[1].seen[6] = (1e300, -1e300)  # far outside: at the edge
    readings.models[0].seen[6] = (np.nan, 0.0)  # nowhere
    folder = own("private")
    page_of(folder, to_json(readings, 10))
    markup = (folder / "report.html").read_text(encoding="utf-8")
    frame = markup[markup.index("Frame 6, from the frame") :].split("</svg>")[0]
    assert '<circle cx="60.0" cy="50.0" r="6" class="ring">' in frame  # .5 + .5 * .2, .7 - .5 * .4
    assert '<circle cx="98.0" cy="98.0" r="3.2" class="disc">' in frame
    assert "cross" not in frame


def test_distances_are_in_sides_of_the_picture(own: Own) -> None:
    readings = made()
    for model in readings.models:
        model.seen[:] = readings.truth + np.array([0.6, 0.0])  # .5 of a side for each unit
    page = page_of(own("private"), to_json(readings, 10))
    assert "sides of the picture" in page.text
    assert "0.300" in page.text
    assert "Both models read the frames themselves alike" in squeezed(page.text)


def test_columns_without_a_place_are_curves(own: Own) -> None:
    page = page_of(own("private"), to_json(made(columns=3, pictures=False), 10))
    assert not [tag for tag, _ in page.tags if tag == "image"]
    assert {"episode-0-desc", "episode-1-desc", "episode-2-desc"} <= set(page.values("id"))


def test_an_older_model_is_said_to_be_one(own: Own) -> None:
    assert "the model after 4 of the 10 finished rounds" in squeezed(page_of(own("private"), to_json(made(), 4)).text)


def test_a_run_without_the_file_has_no_such_section(own: Own) -> None:
    assert "One episode" not in Page(write_report(own("private")).read_text(encoding="utf-8")).text


@pytest.mark.parametrize("pictures", [True, False])
def test_hostile_content_is_shown_not_run(own: Own, pictures: bool) -> None:
    tree = json.loads(to_json(made(pictures=pictures), 10))
    tree["body"], tree["names"] = HOSTILE[:64], [HOSTILE[:60], HOSTILE[3:60]]
    tree["models"][0]["model"] = HOSTILE[:64]
    tree["truth"][7] = [1e308, -1e308]
    tree["models"][1]["seen"][8] = [1e308, None]
    tree["models"][1]["predicted"] = [[None, None]] * 12
    folder = own("private")
    page = page_of(folder, json.dumps(tree).encode())
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in page.text
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert not re.search(r"\b(nan|inf)\b", (folder / "report.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("content", ["", "{}", "[]", "not json", '{"schema_version": 1}'])
def test_a_damaged_file_is_named(own: Own, content: str) -> None:
    folder = own("private")
    (folder / "readings.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"readings\.json"):
        write_report(folder)


def test_png_is_a_png() -> None:
    from PIL import Image

    picture = from_json(to_json(made(), 1))[0].pictures
    assert picture is not None
    assert np.array_equal(np.asarray(Image.open(BytesIO(png(picture[0]))).convert("RGB")), picture[0])


def test_a_name_that_no_font_knows(own: Own) -> None:
    """Curves, which matplotlib writes on."""
    readings = json.loads(to_json(made(), 10))
    readings["in_picture"], readings["shown"], readings["pictures"] = None, [], []
    for model in readings["models"]:
        model["model"] += "\ud800\x1b[2J"
    assert "\x1b" not in str(page_of(own("private"), json.dumps(readings).encode()).text)
