"""Pictures out of a video file at given times: seek to the keyframe before, decode on, keep what was asked for.

PyAV does the decoding. A file is opened by its handle and with the demuxer of its suffix, never by its name: a
"video" that is really a playlist could otherwise make the library open other files or addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.formats.pictures import MAX_PIXELS, check_size
from lensemble_flwr.data.formats.reader import need
from lensemble_flwr.errors import DataError

DEMUXERS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "matroska", ".avi": "avi"}
_SEEK_OVER_S = 2.0  # between two wanted pictures further apart than this, seeking beats decoding


class Video:
    """An open video file. One thread at a time.

    Args:
        path: the file. name: what it is called; its suffix says how it is read.

    Attributes:
        fps: float, average rate. count: pictures that the index of the file lists (0: unknown).
        height, width: pixels. decoded: pictures decoded so far (a test counts them).

    Raises:
        DataError: missing, no video, no index, or too large pictures. ConfigError: PyAV is missing.
    """

    def __init__(self, path: Path, name: str) -> None:
        av = need("av", "lerobot", "videos")
        self.name, self.decoded = Path(name).name, 0
        demuxer = DEMUXERS.get(Path(name).suffix.lower())
        if demuxer is None:
            raise DataError(f"{self.name} is no video file.", f"Videos end in {', '.join(DEMUXERS)}.")
        self._errors = (av.error.FFmpegError, EOFError, ValueError, OSError)
        try:
            self._file = open(path, "rb")
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror}.", "Restore the file.") from error
        try:
            self._container = av.open(self._file, format=demuxer, metadata_errors="replace")
            stream = self._container.streams.video[0]
            context = stream.codec_context
            check_size(context.height, context.width)
            context.thread_count = 1  # participants share a machine; the cache makes the speed
            context.options = {**context.options, "max_pixels": str(MAX_PIXELS)}
            rate = stream.average_rate or stream.guessed_rate
            if not rate or stream.time_base is None:
                raise DataError(f"{self.name} states no frame rate.", "Write the video again at a constant rate.")
            self._stream, self.fps = stream, float(rate)
            self.count = len(stream.index_entries) or int(stream.frames)
            self._zero = stream.start_time or 0
            self._tick = float(stream.time_base)
            self.height, self.width = context.height, context.width
        except DataError:
            self.close()
            raise
        except (*self._errors, IndexError, AttributeError) as error:
            self.close()
            raise DataError(f"{self.name} is no video that can be read: {_reason(error)}.", _AGAIN) from error

    def at(self, times: NDArray[np.float64], tolerance: float) -> Iterator[NDArray[np.uint8]]:
        """The picture nearest to each time.

        Args:
            times: ascending, seconds from the first picture of the file.
            tolerance: seconds; a picture further away is a missing one.

        Yields:
            uint8 [H, W, 3] RGB.

        Raises:
            DataError: damaged, or no picture within the tolerance.
        """
        flow: Iterator[Any] | None = None
        now, frame = -np.inf, None
        for time in times:
            if flow is None or time - now > _SEEK_OVER_S:
                flow, now, frame = self._flow_from(time), -np.inf, None
            while frame is None or now < time - tolerance:
                frame = self._next(flow, time)
                now = (frame.pts - self._zero) * self._tick
            if now > time + tolerance:
                raise DataError(
                    f"{self.name} has no picture at {time:.3f} s (the next is at {now:.3f} s).",
                    "Pictures are missing, the rate varies or fps is wrong: write the video again at a constant rate.",
                )
            try:
                picture = frame.to_ndarray(format="rgb24")
            except self._errors as error:
                raise DataError(f"{self.name}: {_reason(error)}.", _AGAIN) from error
            check_size(*picture.shape[:2])
            yield picture

    def _flow_from(self, time: float) -> Iterator[Any]:
        try:
            self._container.seek(self._zero + int(time / self._tick), stream=self._stream, backward=True)
            return self._container.decode(self._stream)
        except self._errors as error:
            raise DataError(f"{self.name} cannot be searched: {_reason(error)}.", _AGAIN) from error

    def _next(self, flow: Iterator[Any], time: float) -> Any:
        try:
            frame = next(flow)
        except StopIteration:
            text = f"{self.name} ends before {time:.3f} s."
            raise DataError(text, "The video is cut, or fps is wrong.") from None
        except self._errors as error:
            raise DataError(f"{self.name} is damaged near {time:.3f} s: {_reason(error)}.", _AGAIN) from error
        self.decoded += 1
        if frame.pts is None:
            raise DataError(f"{self.name} has a picture without a time.", "Write the video again.")
        return frame

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        with contextlib.suppress(Exception):
            self._container.close()
        self._file.close()


class Videos:
    """The last few videos that were used, kept open: reading a long file's index again costs more than a picture."""

    def __init__(self, keep: int = 4) -> None:
        self._keep, self._open = keep, dict[Path, Video]()
        self._decoded = 0

    def get(self, path: Path, name: str) -> Video:
        """The video at ``path``, opened now or before; ``name`` is what it is called (``path`` may be a link's end)."""
        video = self._open.pop(path, None) or Video(path, name)
        self._open[path] = video
        while len(self._open) > self._keep:
            old = self._open.pop(next(iter(self._open)))
            self._decoded += old.decoded
            old.close()
        return video

    @property
    def decoded(self) -> int:
        """Pictures decoded so far."""
        return self._decoded + sum(v.decoded for v in self._open.values())

    def close(self) -> None:
        """Close them all."""
        while self._open:
            self._open.popitem()[1].close()


_AGAIN = "Download, copy or encode the video again."


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0][:200]
