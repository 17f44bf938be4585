"""What a folder of recordings holds, as the library reads it, and everything that is wrong with it.

Nothing is repaired or written but a picture, if it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.actions import ActionSpec
from lensemble_flwr.data.episodes import Episode, episode_hash
from lensemble_flwr.data.formats.recordings import BadEpisode, Recordings
from lensemble_flwr.data.formats.spec import RecordingSpec, open_reader
from lensemble_flwr.durable import file_errors
from lensemble_flwr.errors import DataError

_ROWS, _ACROSS = 8, 8
_SHOWN = 20


@dataclass(frozen=True, eq=False)
class Inspection:
    """What was found.

    Attributes:
        path, format, body, fps, camera, cameras, columns: as the reader understands them.
        action: of one step after frameskip. side: pixels of the pictures that the model gets.
        episodes: in the files. examined: how many of them were decoded.
        lengths: int64, recorded pictures of each episode whose length is known.
        steps: steps after frameskip of the good ones that were examined.
        names, low, high, least, most: of each recorded action entry: bounds, and what was found. Empty for choices.
        chosen: counts of each option, for choices.
        state_width: entries of a state, or 0. problems: one for each bad episode, and for each pair of equal ones.
    """

    path: Path
    format: str
    body: str
    fps: float | None
    camera: str
    cameras: tuple[str, ...]
    columns: tuple[str, ...]
    action: ActionSpec
    side: int
    episodes: int
    examined: int
    lengths: NDArray[np.int64]
    steps: int
    names: tuple[str, ...]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    least: NDArray[np.float64]
    most: NDArray[np.float64]
    chosen: NDArray[np.int64]
    state_width: int
    problems: tuple[BadEpisode, ...]
    sheet: NDArray[np.uint8] | None

    def text(self) -> str:
        """For a terminal."""
        rate = f"{self.fps:g} fps" if self.fps else "rate not stated"
        lines = [
            f"{self.path}",
            f"  format    {self.format}",
            f"  episodes  {self.episodes}" + self._lengths_text(),
            f"  body      {self.body}, {rate}",
            f"  camera    {self.camera}"
            + (f" (of {', '.join(self.cameras)})" if len(self.cameras) > 1 else "")
            + f", read as {self.side}x{self.side}",
            f"  columns   {', '.join(self.columns) or 'none'}",
            f"  state     {f'{self.state_width} entries' if self.state_width else 'not read (state_keys)'}",
            f"  action    {self.action.describe()}, {self.action.width} wide",
        ]
        lines += self._ranges_text()
        if self.examined < self.episodes:
            lines.append(f"  {self.examined} of {self.episodes} episodes were decoded (--sample)")
        if not self.problems:
            return "\n".join([*lines, f"no problems; {self.steps} steps to train on"])
        lines.append(f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}:")
        for problem in self.problems:
            lines.append(f"  {problem}")
            lines.append(f"    {problem.remedy}")
        return "\n".join([*lines, f"{self.steps} steps in the episodes without a problem"])

    def _lengths_text(self) -> str:
        if not len(self.lengths):
            return ""
        low, middle, high = (int(f(self.lengths)) for f in (np.min, np.median, np.max))
        span = f"{low}" if low == high else f"{low}..{high} (median {middle})"
        return f" of {span} pictures, {int(self.lengths.sum())} in all"

    def _ranges_text(self) -> list[str]:
        if self.chosen.size:
            return ["  chosen    " + ", ".join(f"{i}: {n}" for i, n in enumerate(self.chosen))]
        lines = [f"  {'entry':<24} {'bounds':>22}   {'found':>22}"] if len(self.least) else []
        for i in range(min(len(self.least), _SHOWN)):
            bounds = f"{self.low[i]:.4g} .. {self.high[i]:.4g}"
            found = f"{self.least[i]:.4g} .. {self.most[i]:.4g}" if np.isfinite(self.least[i]) else "-"
            lines.append(f"  {self.names[i][:24]:<24} {bounds:>22}   {found:>22}")
        if len(self.least) > _SHOWN:
            lines.append(f"  and {len(self.least) - _SHOWN} more entries")
        return lines


def inspect(
    path: Path,
    spec: RecordingSpec,
    sample: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    sheet: bool = True,
) -> Inspection:
    """Read the recordings once, one episode in memory at a time.

    Args:
        sample: decode only so many episodes, evenly spread; of the others the lengths are checked. None: all.
        progress: called as progress(episodes done, episodes).

    Raises:
        DataError: the recordings cannot be opened at all.
    """
    reader = open_reader(path, spec)
    quiet = replace(spec, on_bad_episode="error", cache=False)
    source = Recordings(reader, quiet, Path(), lambda text: None)
    count = len(reader)
    decoded = np.unique(np.linspace(0, count - 1, min(sample or count, count)).astype(int))
    chosen_rows = set(decoded[np.unique(np.linspace(0, len(decoded) - 1, min(_ROWS, len(decoded))).astype(int))])
    problems: list[BadEpisode] = []
    seen: dict[bytes, str] = {}
    lengths: list[int] = []
    rows: list[tuple[str, NDArray[np.uint8]]] = []
    recorded = source.recorded_action
    least = np.full(recorded.raw_width, np.inf)
    most = -least
    counts = np.zeros(recorded.dim if recorded.kind in ("discrete", "multi_discrete") else 0, np.int64)
    steps, state_width, wanted = 0, 0, set(decoded.tolist())
    for number in range(count):
        label = reader.label(number)
        try:
            lengths.append(reader.size(number)[1])
        except DataError as error:
            problems.append(BadEpisode(label, error.message, error.remediation))
            continue
        if number in wanted:
            least, most = _widen(source, number, least, most)
            found = source.examine(number)
            if isinstance(found, BadEpisode):
                problems.append(found)
            else:
                key = episode_hash(found)
                if key in seen:
                    twice = f"the same recording as {seen[key]}."
                    problems.append(BadEpisode(label, twice, "Remove one; a copy counts twice in training."))
                seen.setdefault(key, label)
                steps += len(found)
                state_width = 0 if found.states is None else found.states.shape[1]
                if counts.size:
                    counts += found.actions.sum(axis=0).astype(np.int64).reshape(-1, counts.size).sum(axis=0)
                if number in chosen_rows:
                    rows.append((label, _spread(found)))
        else:
            short = source.check_length(number)
            problems += [short] if short is not None else []
        if progress:
            progress(number + 1, count)
    low, high = (np.asarray(b or [s] * len(least), np.float64) for b, s in ((recorded.low, -1), (recorded.high, 1)))
    return Inspection(
        path=reader.path,
        format=reader.format,
        body=source.embodiment,
        fps=reader.fps,
        camera=reader.camera,
        cameras=reader.cameras,
        columns=reader.columns,
        action=source.action_spec,
        side=spec.image_size,
        episodes=count,
        examined=len(decoded),
        lengths=np.array(lengths, np.int64),
        steps=steps,
        names=recorded.names or tuple(f"entry {i}" for i in range(len(least))),
        low=low,
        high=high,
        least=least,
        most=most,
        chosen=counts,
        state_width=state_width,
        problems=tuple(problems),
        sheet=contact_sheet(rows) if sheet and rows else None,
    )


def contact_sheet(rows: list[tuple[str, NDArray[np.uint8]]]) -> NDArray[np.uint8]:
    """A picture of pictures: one row an episode, its name above; uint8 [H, W, 3] RGB.

    Args:
        rows: (name, pictures uint8 [n, S, S, 3]).
    """
    side, gap, head = max(96, min(192, rows[0][1].shape[1])), 4, 20
    width = _ACROSS * (side + gap) + gap
    out = np.full((len(rows) * (side + gap + head) + gap, width, 3), 32, np.uint8)
    top = gap
    for name, pictures in rows:
        text = "".join(c if c.isascii() and c.isprintable() else "?" for c in name)[:80]
        place, white = (gap, top + head - 6), (230, 230, 230)
        cv2.putText(out, text, place, cv2.FONT_HERSHEY_SIMPLEX, 0.45, white, 1, cv2.LINE_AA)
        for column, picture in enumerate(pictures[:_ACROSS]):
            left = gap + column * (side + gap)
            how = cv2.INTER_NEAREST if picture.shape[0] < side else cv2.INTER_AREA
            cell = cv2.resize(picture, (side, side), interpolation=how)
            out[top + head : top + head + side, left : left + side] = cell
        top += side + gap + head
    return out


def write_png(path: Path, picture: NDArray[np.uint8]) -> None:
    """Write a picture that only its owner may read: it shows private recordings (ArtifactError if it cannot)."""
    import os

    ok, raw = cv2.imencode(".png", picture[:, :, ::-1])
    assert ok
    with file_errors(path, "write"):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(raw.tobytes())


def _spread(episode: Episode) -> NDArray[np.uint8]:
    at = np.linspace(0, len(episode.frames) - 1, min(_ACROSS, len(episode.frames))).astype(int)
    return np.array(episode.frames[at])


def _widen(
    source: Recordings, number: int, least: NDArray[np.float64], most: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The range of the raw actions with one more episode, good or bad, if its actions can be read at all."""
    raw = source.raw_actions(number)
    if raw is None or raw.shape[1] != len(least):
        return least, most
    return np.minimum(least, raw.min(axis=0)), np.maximum(most, raw.max(axis=0))
