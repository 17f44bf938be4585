"""report.html: one page that tells a person what a run did, what is claimed, and what is not known.

The page is complete in itself (no scripts, no other files), so it can be mailed, printed and kept with the run.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lensemble_flwr.durable import atomic_write
from lensemble_flwr.reporting.drawing import Plot
from lensemble_flwr.reporting.metrics import primary
from lensemble_flwr.reporting.page import Child, Markup, document, el, figure_of, parted, scrollable, unbroken
from lensemble_flwr.reporting.plots import all_plots
from lensemble_flwr.reporting.readings import episode_section
from lensemble_flwr.reporting.run_data import Claim, RunData, load_run
from lensemble_flwr.reporting.summary import closing_sentence, comparison, rounds_rows
from lensemble_flwr.reporting.wording import delta, epsilon, figure, listed, observer

_STATUS = {
    "completed": ("completed", "yes"),
    "running": ("running or interrupted", "meh"),
    "BUDGET": ("stopped by the privacy budget", "no"),
    "STOPPED": ("stopped", "meh"),
}


def write_report(folder: Path | str) -> Path:
    """Write ``report.html`` into a run's folder, from what the run left there; again at any time.

    Returns:
        Its path.

    Raises:
        ArtifactError: the run cannot be read or the report cannot be written.
    """
    run = load_run(folder)
    path = run.folder / "report.html"
    atomic_write(path, render(run).encode(), mode=0o644)
    return path


def render(run: RunData) -> str:
    """The page's text."""
    plots = all_plots(run)
    return document(
        f"{run.experiment}: run report",
        _header(run),
        _banner(run),
        el("p", unbroken(closing_sentence(run)), class_="lede"),
        _notice(run),
        _tiles(run),
        _results(run, plots),
        _claims(run),
        episode_section(run),
        _course(plots),
        _rounds(run),
        _configuration(run),
        _provenance(run),
        _limits(run),
        el("footer", f"Federation {run.manifest.federation_id[:16]}. Figures are those in the run's own files."),
    )


# ------------------------------------------------------------------------------------------------ the top


def _header(run: RunData) -> Markup:
    manifest = run.manifest
    word, kind = _STATUS.get(manifest.status, (f"failed: {manifest.status}", "no"))
    date = manifest.created_utc.replace("T", " ").replace("Z", " UTC")
    facts = [
        el("span", word, class_=f"badge {kind}"),
        f"Started {date}",
        f"{_participants(run)} participants, {manifest.runtime}",
        f"Model: {manifest.config.get('task', '')}".replace("_", " "),
    ]
    return el(
        "header",
        el("p", "Federated training: run report", class_="eyebrow"),
        el("h1", run.experiment),
        el("ul", [el("li", fact) for fact in facts], class_="facts"),
    )


def _participants(run: RunData) -> int:
    if run.rounds:
        return max(r.roster for r in run.rounds)
    return len(run.manifest.dataset_roots) or int(run.setting("federation.participants", int))


def _banner(run: RunData) -> Markup | None:
    if run.private:
        return None
    if run.replay:
        why = (
            "Its noise comes from a seed, so whoever knows the seed can subtract it. Epsilon is infinite (no "
            "guarantee). The run shows how the machinery works and protects nobody."
        )
    else:
        why = (
            "Differential privacy was off: no update was clipped or noised. Epsilon is infinite (no guarantee). "
            "Secure aggregation hides single updates from the coordinator, and the sums may still give away what "
            "they were trained on."
        )
    return el("div", el("strong", "NON-PRIVATE RUN"), el("p", why), class_="banner", role="note")


def _notice(run: RunData) -> Markup | None:
    manifest = run.manifest
    if manifest.status == "completed" or not (manifest.detail or manifest.status == "running"):
        return None
    if manifest.status == "running":
        where = "" if manifest.runtime.startswith("simulation") else "--superlink NAME "
        return el(
            "p",
            "The run has not ended: either it is still going on, or it was interrupted. An interrupted run goes on "
            "from its last finished round with ",
            el(
                "code",
                f"lensemble run {where}--resume",
            ),
            " and this folder.",
            class_="notice calm",
        )
    return el("p", unbroken(manifest.detail), class_="notice")


def _tiles(run: RunData) -> Markup:
    tiles = [_metric_tile(run), _epsilon_tile(run)]
    rounds = f"{run.committed} of {run.planned_rounds}"
    burnt = f"{run.burnt} burnt" if run.burnt else "none burnt"
    tiles.append(_tile("Rounds committed", rounds, burnt if run.rounds else "none finished"))
    sums = [r.participants for r in run.rounds if r.committed]
    if sums:
        low, high = min(sums), max(sums)
        least = run.manifest.plan.get("min_survivors")
        under = f"roster of {_participants(run)}" + (f", at least {least} needed" if least is not None else "")
        tiles.append(_tile("Participants in each sum", f"{low}" if low == high else f"{low} to {high}", under))
    else:
        tiles.append(_tile("Participants in each sum", "-", f"{_participants(run)} expected"))
    return el("dl", tiles, class_="tiles")


def _metric_tile(run: RunData) -> Markup:
    metric = primary(run)
    if metric is None:
        return _tile("Held-out metric", "-", "nothing was evaluated")
    before, after = run.start.get(metric.name, math.nan), run.final.get(metric.name, math.nan)
    label = f"{metric.label[:1].upper()}{metric.label[1:]}"
    if not run.rounds:
        return _tile(label, figure(before) if math.isfinite(before) else "-", "at the start")
    under = metric.change(before, after) or metric.direction
    if not math.isfinite(before):
        return _tile(label, figure(after), under)
    return _tile(
        label,
        f"{figure(before)} \u2192 {figure(after)}",
        f"{under} than at the start" if under.endswith("er") else under,
    )


def _epsilon_tile(run: RunData) -> Markup:
    view = run.guarantee
    if not run.private:
        return _tile("Privacy spent", "\u03b5 infinite", "no guarantee")
    spent = run.epsilon(view)
    if not spent < math.inf:
        return _tile(f"Privacy spent, {view} view", "\u03b5 infinite", "no guarantee")
    under = f"of {run.target_epsilon:g} at \u03b4 = {delta(run.target_delta)}"
    return _tile(f"Privacy spent, {view} view", f"\u03b5 = {epsilon(spent)}", under)


def _tile(label: str, value: str, under: str) -> Markup:
    size = "value" if len(value) <= 13 else "value word"
    return el(
        "div", el("dt", label), el("dd", el("div", value, class_=size), el("div", under, class_="under")), class_="tile"
    )


# ------------------------------------------------------------------------------------------------ claims


def _claims(run: RunData) -> Markup:
    manifest = run.manifest
    asked = run.manifest.config.get("privacy", {}).get("claim") or []
    words = [observer(str(name)) for name in asked]
    if words:
        grade = "Every claim that was asked for holds" if manifest.claim_grade else "Not every claim asked for holds"
        intro = f"Asked for: protection against {listed(words)}. {grade}."
    else:
        intro = "No claim was asked for."
    why_not = manifest.claim_grade_why_not if words else []  # without a wish there is nothing that is not met
    reasons = el("ul", [el("li", str(why)) for why in why_not], class_="plain")
    heads = ("Against", "Holds", "\u03b5", "\u03b4", "View", "Remark")
    head = el("thead", el("tr", [el("th", h, scope="col") for h in heads]))
    common = _unit(run.claims)
    table = el("table", head, [_claim(c, common is None) for c in run.claims], class_="claims")
    return el(
        "section",
        el("h2", "What is claimed, and what is not"),
        el("p", intro),
        reasons if why_not else None,
        common,
        el(
            "p",
            "This table is the manifest's, row for row. Nothing beyond it is claimed anywhere. A figure in grey "
            "belongs to a row that is not claimed: it promises nothing.",
            class_="soft",
        ),
        table if run.claims else el("p", "The manifest holds no claims."),
    )


def _unit(claims: tuple[Claim, ...]) -> Markup | None:
    """What is protected and which runs are neighbours, if all rows say the same."""
    said = {(claim.unit, claim.neighbours) for claim in claims}
    if len(said) != 1:
        return None
    unit, neighbours = said.pop()
    if not unit or not neighbours:
        return None
    meaning = ", that is, all clipped updates in one such unit are zero; its noise and its messages stay"
    return el(
        "p",
        "What is protected: ",
        el("b", unit),
        ". Neighbouring runs: ",
        el("b", neighbours),
        meaning if neighbours == "zero-out" else "",
        ".",
    )


def _claim(claim: Claim, unit: bool) -> Markup:
    """A row for the claim itself and one, in small type, for its terms."""
    badge = (
        el("span", "\u2713 holds", class_="badge yes")
        if claim.holds
        else el("span", "\u2715 not claimed", class_="badge no")
    )
    name = observer(claim.observer)
    bound = el("b", epsilon(claim.epsilon)) if claim.holds else el("span", epsilon(claim.epsilon), class_="meh")
    main = el(
        "tr",
        el("th", f"{name[:1].upper()}{name[1:]}", scope="row"),
        el("td", badge, class_="holds"),
        el("td", bound, class_="eps", data_label="\u03b5"),
        el("td", delta(claim.delta), class_="eps", data_label="\u03b4"),
        el("td", claim.guarantee, class_="view"),
        el("td", claim.why_not, class_="says"),
        class_="main",
    )
    return el("tbody", main, el("tr", el("td", el("p", _terms(claim, unit)), colspan="6"), class_="fine"))


def _terms(claim: Claim, unit: bool) -> str:
    """The small print of a claim; ``unit``: with what is protected, which else stands above the table."""
    views = [
        f"{words} {epsilon(value)}"
        for words, value in (
            ("one round", claim.epsilon_per_round),
            ("all rounds in the local view", claim.epsilon_local),
            ("in the central view", claim.epsilon_central),
        )
        if not math.isnan(value)
    ]
    parts = []
    if unit and claim.unit:
        parts.append(f"Unit: {claim.unit}" + (f"; neighbours: {claim.neighbours}" if claim.neighbours else ""))
    if views and claim.epsilon < math.inf:
        parts.append(f"\u03b5 of {', '.join(views)}")
    if claim.theorem:
        parts.append(claim.theorem)
    if claim.assumptions:
        parts.append(f"Assumes: {'; '.join(claim.assumptions)}")
    return ". ".join(parts) + "." if parts else ""


# ------------------------------------------------------------------------------------------------ results


def _results(run: RunData, plots: list[Plot]) -> Markup:
    if not plots:
        return el("section", el("h2", "Result"), el("p", "No round is finished, so there is nothing to plot yet."))
    first = [figure_of(p) for p in plots if p.wide]
    return el("section", el("h2", "Result"), first, _comparison(run))


def _course(plots: list[Plot]) -> Markup | None:
    rest = [figure_of(p) for p in plots if not p.wide]
    return el("section", el("h2", "Course of the run"), el("div", rest, class_="grid")) if rest else None


def _comparison(run: RunData) -> Markup | None:
    metrics, rows = comparison(run)
    if not rows or not metrics:
        return None
    head = [
        el("th", "Model", scope="col"),
        [el("th", m.short[:1].upper() + m.short[1:], scope="col", class_="num") for m in metrics],
        el("th", f"{metrics[0].short[:1].upper()}{metrics[0].short[1:]} against start", scope="col", class_="num"),
        el("th", "Note", scope="col"),
    ]
    body = [
        el(
            "tr",
            el("th", row.name[:1].upper() + row.name[1:], scope="row"),
            [el("td", figure(row.metrics.get(m.name)), class_="num") for m in metrics],
            el("td", row.against_start or "-", class_="num"),
            el("td", row.note),
            class_="mine" if row.is_run else None,
        )
        for row in rows
    ]
    directions = sorted({m.direction for m in metrics if m.direction})
    says = [f"{_sentence_case(d)}: {', '.join(m.short for m in metrics if m.direction == d)}" for d in directions]
    about = [f"{'. '.join(says)}." if says else "", _baseline_note(run)]
    return el(
        "div",
        scrollable(el("table", el("thead", el("tr", head)), el("tbody", body)), "Comparison with other models"),
        el("p", " ".join(a for a in about if a), class_="under-table"),
        class_="compare",
    )


def _baseline_note(run: RunData) -> str:
    if not run.baselines:
        return ""
    return (
        "Rows other than the start and this run were computed outside the federation, from generated data; a real "
        "federation cannot have them."
    )


def _rounds(run: RunData) -> Markup:
    if not run.rounds:
        return el("section", el("h2", "Rounds"), el("p", "No round is finished."))
    head, body = rounds_rows(run)
    greek = {"eps central": "\u03b5 central", "eps local": "\u03b5 local"}
    left = (1, len(head) - 1)
    heads = [
        el("th", greek.get(h) or _sentence_case(h), scope="col", class_=None if i in left or i == 0 else "num")
        for i, h in enumerate(head)
    ]
    rows = []
    for cells in body:
        kind = "start" if cells[0] == "start" else "burnt" if cells[1] == "burnt" else None
        rows.append(
            el(
                "tr",
                el("th", _sentence_case(cells[0]), scope="row"),
                [el("td", c, class_=None if i in left else "num") for i, c in enumerate(cells[1:], 1)],
                class_=kind,
            )
        )
    table = el("table", el("thead", el("tr", heads)), el("tbody", rows), class_="rounds")
    note = (
        "Epsilon is what all rounds up to this one cost together, rounded up, at the run's target delta"
        + (" (infinite: no guarantee)" if not all(r.epsilon_central < math.inf for r in run.rounds) else "")
        + ". Metrics are those of the model after the round. Bytes are payload to and from all participants."
    )
    return el("section", el("h2", "Rounds"), scrollable(table, "Rounds"), el("p", note, class_="under-table"))


def _sentence_case(words: str) -> str:
    return words[:1].upper() + words[1:]


# ------------------------------------------------------------------------------------------------ configuration


def _configuration(run: RunData) -> Markup:
    manifest = run.manifest
    # What the launcher adds names folders of this machine, and nobody set it.
    shown = [str(o) for o in manifest.overrides if not str(o).startswith(("output_dir=", "federation.sites_dir="))]
    given = {o.partition("=")[0] for o in shown}
    top: dict[str, Any] = {}
    groups: list[tuple[str, dict[str, Any]]] = []
    for key, value in manifest.config.items():
        if isinstance(value, dict):
            groups.append((key, value))
        elif key != "output_dir":
            top[key] = value
    sections = [_settings("Run", top, given, "")]
    sections += [
        _settings(name, {k: v for k, v in values.items() if k != "sites_dir"}, given, f"{name}.")
        for name, values in groups
    ]
    sections.append(_settings("Derived for each round", _flattened(manifest.plan), set(), ""))
    if shown:
        intro: Child = ["Set for this run, in bold below: ", el("code", " ".join(shown))]
    else:
        intro = "Nothing was overridden: every value is the experiment's default."
    return el("section", el("h2", "Configuration"), el("p", intro), el("div", sections, class_="settings"))


def _settings(name: str, values: dict[str, Any], given: set[str], prefix: str) -> Markup:
    rows = [
        el(
            "div",
            el("dt", key.replace("_", " ") if not prefix and name != "Run" else parted(key)),
            el("dd", _plain(value)),
            class_="set" if prefix + key in given else None,
        )
        for key, value in values.items()
    ]
    return el("section", el("h3", name), el("dl", rows))


def _flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flattened(value, f"{prefix}{key} ")
        else:
            found[prefix + key] = value
    return found


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return delta(float(f"{value:.4g}"))
    if isinstance(value, list):
        return ", ".join(_plain(v) for v in value) or "-"
    return str(value)


def _provenance(run: RunData) -> Markup:
    manifest = run.manifest
    entropy = {
        "csprng": "each participant's operating system; named here, never shown",
        "replay": "a seed (replay): non-private",
    }.get(manifest.entropy, manifest.entropy)
    last = run.rounds[-1] if run.rounds else None
    sums = "yes" if manifest.secure_sum_is_only_input else "NO"
    probe = "-" if set(manifest.probe_hash) <= {"0"} else manifest.probe_hash
    rows: list[tuple[str, Child]] = [
        ("Federation id", el("code", manifest.federation_id)),
        ("Configuration hash", el("code", manifest.config_hash)),
        (
            f"Model after round {last.index}" if last else "Model",
            el("code", last.theta_hash) if last else "no round is finished",
        ),
        ("Public base (warm start)", el("code", manifest.base_hash)),
        ("Public probe", el("code", probe)),
        ("Latent frame", manifest.frame),
        ("Seed", f"{manifest.seed} (generated data, warm start, shuffling, sketches; never noise, masks or keys)"),
        ("Noise", entropy),
        ("Optimizer's only input is the secure sum", sums),
        ("Data sets", f"{len(manifest.dataset_roots)} committed roots, listed in manifest.json"),
        ("Source revision", el("code", manifest.git)),
        ("Python and platform", f"{manifest.python}, {manifest.platform}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]
    if manifest.notes:
        rows.append(("Notes", el("ul", [el("li", str(n)) for n in manifest.notes], class_="plain")))
    return el(
        "section",
        el("h2", "Provenance"),
        el("dl", [[el("dt", name), el("dd", value)] for name, value in rows], class_="facts-table"),
    )


def _limits(run: RunData) -> Markup:
    """What a reader may look for here and not find, or read into it and be wrong."""
    items = [
        "Single updates, losses, norms, clip rates and example counts: they never leave a participant. Only sums do.",
        "What participants have spent in earlier federations: their ledgers stay with them. Epsilon here counts this "
        "run's public rounds.",
        "How the model does on each participant's own data. All metrics are on public held-out data, computed by the "
        "coordinator from the released model.",
        "Whether participants were honest: others' noise and clipping cannot be verified from a sum, and who took "
        "part or dropped out is public and not protected.",
        "Timing: when messages arrived is seen by the network and by the coordinator, and no epsilon covers it.",
        "Chance: this is one run with one seed. One run has no error bars, and a difference as small as the spread "
        "between seeds means nothing.",
    ]
    if run.manifest.runtime.startswith("simulation"):
        items.append(
            "Separation: all parties ran on one machine, so nothing is shown about a coordinator or peers that try "
            "to learn more."
        )
    if run.surface == "full" and run.task == "world_model":
        items.append(
            "A common scale for prediction errors: the encoder moved with the run, and relative errors are in each "
            "model's own latent units."
        )
    return el(
        "section", el("h2", "What this report does not show"), el("ul", [el("li", i) for i in items], class_="plain")
    )
