"""The page: complete in itself, harmless whatever the run's files hold, and true to the manifest."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble_flwr.errors import ArtifactError
from lensemble_flwr.reporting.drawing import embeddable, spread
from lensemble_flwr.reporting.page import Markup, el
from lensemble_flwr.reporting.plots import all_plots
from lensemble_flwr.reporting.report import write_report
from lensemble_flwr.reporting.run_data import load_run
from lensemble_flwr.reporting.summary import closing_sentence
from lensemble_flwr.reporting.wording import epsilon
from tests.reporting.conftest import KINDS
from tests.reporting.runs import decay, make_run
from tests.reporting.test_run_data import edit

Own = Callable[[str], Path]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp; $x_$ ${y} \x00\x1b\u202e]]>--> \ud83d\ude00"


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that are not closed in order."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(markup)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "hr"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data

    def values(self, name: str) -> list[str]:
        return [str(a[name]) for _, a in self.tags if name in a]


def read(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_gives_a_self_contained_page(own: Own, kind: str) -> None:
    folder = own(kind)
    path = write_report(folder)
    markup = path.read_text(encoding="utf-8")
    page = Page(markup)
    assert path == folder / "report.html"
    # Nothing is loaded from anywhere: no address at all, no script, no import, and a policy that says so.
    assert re.search(r"https?:|//[a-z]|@import|url\((?!#)", markup) is None
    assert not {"script", "img", "link", "iframe", "object", "embed", "form"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert all(value.startswith("#") for value in page.values("href"))
    assert "default-src 'none'" in page.values("content")[0]
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {v[1:] for v in page.values("href")} | set(re.findall(r"url\(#([^)]+)\)", markup)) <= set(ids)
    assert {i for v in page.values("aria-labelledby") for i in v.split()} <= set(ids)
    run = load_run(folder)
    assert closing_sentence(run) in squeezed(page.text)
    assert run.manifest.federation_id in page.text
    assert run.manifest.config_hash in page.text
    assert "What this report does not show" in page.text
    assert ("NON-PRIVATE RUN" in page.text) == (kind in ("replay", "silos"))
    assert "/a/path/that/no/report/shows" not in markup
    assert (folder / "report.html").stat().st_size < 600_000


def test_the_report_is_reproducible(own: Own) -> None:
    folder = own("budget")
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_claims_are_the_manifests(own: Own) -> None:
    folder = own("private")
    page = read(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for row in manifest["claims"]:
        for text in (row["why_not"], row["unit"], row["neighbours"], row["theorem"], *row["assumptions"]):
            assert text in page.text
    assert page.text.count("\u2713 holds") == 1
    assert page.text.count("\u2715 no") == 3


def test_a_manifest_that_is_not_private_has_the_banner_whatever_it_claims(own: Own) -> None:
    folder = own("private")
    edit(folder / "manifest.json", lambda m: m.update(private=False))
    page = read(folder)
    assert "NON-PRIVATE RUN" in page.text
    assert "\u03b5 infinite" in page.text
    assert "infinite (no guarantee)" in page.text


def test_replayed_noise_shows_no_finite_epsilon(own: Own) -> None:
    folder = own("replay")
    markup = write_report(folder).read_text()
    for record in (json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()):
        for view in ("epsilon_central", "epsilon_local"):
            assert f">{epsilon(record[view])}<" not in markup


def test_an_unavailable_reason_is_shown(own: Own) -> None:
    folder = own("budget")
    text = squeezed(read(folder).text)
    assert json.loads((folder / "manifest.json").read_text())["detail"] in text
    assert "stopped by the privacy budget" in text
    assert "not run" in text


def test_hostile_names_are_shown_not_run(own: Own) -> None:
    folder = own("private")

    def poison(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {k: poison(v) for k, v in tree.items()}
        if isinstance(tree, list):
            return [poison(v) for v in tree]
        return HOSTILE if isinstance(tree, str) else tree

    kept = {"privacy": {"guarantee": "central", "entropy": "csprng"}, "federation": {"surface": "adapter"}}
    manifest = json.loads((folder / "manifest.json").read_text())
    evil = poison(manifest)
    for group, values in kept.items():
        evil["config"][group] |= values
    evil["overrides"] = [f"{HOSTILE}={HOSTILE}"]
    evil["versions"] = {HOSTILE: HOSTILE}
    evil["plan"][HOSTILE] = HOSTILE
    evil["config"][HOSTILE] = {HOSTILE: HOSTILE}
    (folder / "manifest.json").write_text(json.dumps(evil))
    rows = [{"name": HOSTILE, "metrics": {HOSTILE: 0.3, "r5": 0.4}, "note": HOSTILE}]
    (folder / "baselines.json").write_text(json.dumps({"rows": rows}))
    edit(folder / "rounds.jsonl", lambda rs: [r.update(cause=HOSTILE) or r["metrics"].update({HOSTILE: 1}) for r in rs])
    edit(folder / "rounds.jsonl", lambda rs: rs[2]["metrics"].update({HOSTILE: 2}))
    markup = write_report(folder).read_text(encoding="utf-8")
    page = Page(markup)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "\x00" not in markup
    assert "\x1b" not in markup
    assert "\u202e" not in markup
    assert "<script>alert(1)</script>" in page.text
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[\w.-]+", i) for i in ids)


def test_a_model_that_diverged(own: Own) -> None:
    folder = own("private")
    edit(folder / "rounds.jsonl", lambda rs: [r["metrics"].update(r5=None) for r in rs])
    assert "no longer finite" in read(folder).text


def test_a_long_run(tmp_path: Path) -> None:
    rounds = 400
    metrics: list[dict[str, float | None]] = [{"heldout_error": v} for v in decay(1.0, 0.2, rounds, 0.01)]
    folder = make_run(
        tmp_path / "long", ["experiment=linear", f"diloco.rounds={rounds}"], metrics, dimension=17, sigma=60.0
    )
    page = read(folder)
    assert sum(tag == "tr" for tag, _ in page.tags) > rounds
    assert (folder / "report.html").stat().st_size < 1_500_000


def test_a_single_round(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", ["experiment=linear", "diloco.rounds=1"], [{"r5": 1.0}, {"r5": 0.5}])
    assert "After the only round, the 5-step" in read(folder).text


def test_an_unwritable_folder(own: Own) -> None:
    folder = own("empty")
    (folder / "report.html").mkdir()
    with pytest.raises(ArtifactError, match=r"report\.html"):
        write_report(folder)


# ------------------------------------------------------------------------------------------------ parts


def test_plots_name_their_data(made: dict[str, Path]) -> None:
    plots = {p.name: p for p in all_plots(load_run(made["private"]))}
    assert set(plots) == {
        "evaluation-r5",
        "epsilon",
        "participants",
        "evaluation-r1",
        next(n for n in plots if n.startswith("evaluation-altitude")),
        next(n for n in plots if n.startswith("evaluation-r5-nominal")),
        next(n for n in plots if n.startswith("evaluation-action-sensitivity")),
        "latent",
        "bytes",
        "seconds",
    }
    hero = plots["evaluation-r5"]
    assert hero.wide
    for text in ("warm start 0.593", "local only 0.423", "pooled 0.217", "this run 0.281", ">Round<", ">start<"):
        assert text in hero.svg
    assert "budget 8" in plots["epsilon"].svg
    assert "needed 52" in plots["participants"].svg
    assert "burnt" in next(p for p in all_plots(load_run(made["burnt"])) if p.name == "participants").svg
    assert "infinite (no guarantee)" in next(p for p in all_plots(load_run(made["silos"])) if p.name == "epsilon").svg
    assert all_plots(load_run(made["empty"])) == []


def test_plotting_leaves_matplotlibs_settings_alone(made: dict[str, Path]) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    all_plots(load_run(made["budget"]))
    assert dict(matplotlib.rcParams) == before


@given(st.lists(st.floats(min_value=-0.2, max_value=1.2), min_size=1, max_size=6), st.floats(0.01, 0.15))
def test_labels_never_overlap(wanted: list[float], gap: float) -> None:
    wanted.sort()
    placed = spread(wanted, gap)
    assert len(placed) == len(wanted)
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(placed))


def test_labels_with_room_stay_where_they_belong() -> None:
    assert spread([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]


def test_both_font_forms_of_matplotlib_inherit_the_pages_font() -> None:
    for style in (
        "font: bold 12px 'DejaVu Sans', sans-serif; text-anchor: middle",
        "font-size: 12px; font-family: 'DejaVu Sans'; font-weight: bold; text-anchor: middle",
    ):
        document = f'<svg xmlns="http://www.w3.org/2000/svg"><text style="{style}">a</text></svg>'
        markup = embeddable(document, "n", "t", "c")
        assert "DejaVu" not in markup
        for part in ("font-size: 12px", "font-weight: bold", "text-anchor: middle"):
            assert part in markup


def test_escaping_is_the_default() -> None:
    assert el("p", "<b>", Markup("<i></i>"), None, ["&"], class_='"x"') == (
        '<p class="&quot;x&quot;">&lt;b&gt;<i></i>&amp;</p>'
    )


@pytest.mark.parametrize(
    ("runtime", "command"),
    [
        ("simulation on one machine", "lensemble run --resume"),
        ("deployment", "lensemble run --superlink NAME --resume"),
    ],
)
def test_a_run_that_has_not_ended_says_how_to_go_on(own: Own, runtime: str, command: str) -> None:
    folder = own("empty")
    edit(folder / "manifest.json", lambda m: m.update(runtime=runtime))
    text = Page(write_report(folder).read_text(encoding="utf-8")).text
    assert "The run has not ended" in text
    assert f"with {command} and this folder." in text
    edit(folder / "manifest.json", lambda m: m.update(status="completed"))
    assert "The run has not ended" not in write_report(folder).read_text(encoding="utf-8")
