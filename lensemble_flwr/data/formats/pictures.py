"""One recorded picture of any size and type -> uint8 [S, S, 3] RGB. Pure."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from lensemble_flwr.data.formats.spec import RecordingSpec
from lensemble_flwr.errors import DataError

MAX_PIXELS = 1 << 25
"""Largest picture that is decoded (5793 x 5793)."""

MAX_ENCODED = 1 << 27


def check_size(height: int, width: int) -> None:
    """Raise DataError unless a picture of this size may be allocated."""
    if min(height, width) < 1 or height * width > MAX_PIXELS:
        raise DataError(
            f"a picture is {height}x{width}; at most {MAX_PIXELS >> 20} megapixels are read.",
            "Resize the recording first.",
        )


def check_picture(shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise DataError unless arrays of this shape and type are colour (or grey) pictures."""
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[-1] not in (1, 3, 4)):
        raise DataError(f"a picture has shape {shape}.", "Pictures are height x width x 3 (or 1, or 4).")
    check_size(shape[0], shape[1])
    single = len(shape) == 2 or shape[2] == 1
    if single and dtype != np.uint8:
        raise DataError(f"a picture is one channel of {dtype}: depth, not colour.", "Choose a colour camera.")
    if dtype.kind not in "uif" or (dtype.kind == "i" and dtype.itemsize < 2):
        raise DataError(f"a picture is of type {dtype}.", "Pictures are uint8, or numbers up to 'white'.")


def square(picture: NDArray, spec: RecordingSpec) -> NDArray[np.uint8]:
    """Crop, make square, resize (area average when shrinking) and order the channels.

    Args:
        picture: [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] (alpha is dropped), uint8 or numbers in [0, spec.white].

    Raises:
        DataError: no picture, too large, a value out of range, or the crop leaves it.
    """
    check_picture(picture.shape, picture.dtype)
    picture = picture[:, :, None] if picture.ndim == 2 else picture
    if spec.crop is not None:
        top, left, height, width = spec.crop
        if top + height > picture.shape[0] or left + width > picture.shape[1]:
            size = f"{picture.shape[0]}x{picture.shape[1]}"
            raise DataError(f"crop={list(spec.crop)} leaves a picture of {size}.", "Choose a smaller crop.")
        picture = picture[top : top + height, left : left + width]
    height, width = picture.shape[:2]
    if spec.fit == "crop" and height != width:
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        picture = picture[top : top + side, left : left + side]
    picture = _uint8(picture, spec.white)
    if picture.shape[2] == 1:
        picture = np.repeat(picture, 3, axis=2)
    picture = picture[:, :, 2::-1] if spec.colour == "bgr" else picture[:, :, :3]
    side = spec.image_size
    if spec.fit != "pad" or height == width:
        return _resize(picture, side, side)
    scale = side / max(height, width)
    inner = _resize(picture, max(1, round(height * scale)), max(1, round(width * scale)))
    out = np.zeros((side, side, 3), np.uint8)
    top, left = (side - inner.shape[0]) // 2, (side - inner.shape[1]) // 2
    out[top : top + inner.shape[0], left : left + inner.shape[1]] = inner
    return out


def decode_image(raw: bytes) -> NDArray:
    """A PNG or JPEG file in memory -> [H, W, 3] RGB uint8 (a grey or 16-bit one keeps its form).

    Raises:
        DataError: none, damaged, or too large (its header is read before anything is allocated).
    """
    if len(raw) > MAX_ENCODED:
        raise DataError(f"an encoded picture has {len(raw)} bytes.", "It is no picture of this format.")
    size = _encoded_size(raw)
    if size is None:
        raise DataError("an encoded picture is neither PNG nor JPEG.", "Write pictures as PNG or JPEG.")
    check_size(*size)
    try:
        found = cv2.imdecode(np.frombuffer(raw, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise DataError("an encoded picture is damaged.", "Download or record it again.") from error
    if found is None:
        raise DataError("an encoded picture is damaged.", "Download or record it again.")
    return found[:, :, 2::-1] if found.ndim == 3 else found


def _uint8(picture: NDArray, white: float) -> NDArray[np.uint8]:
    if picture.dtype == np.uint8:
        return picture
    values = picture.astype(np.float32) * (255.0 / white)
    low, high = float(values.min()), float(values.max())
    if not (low >= -0.5 and high <= 255.5):  # a NaN fails too
        raise DataError(
            f"a picture's values reach from {low * white / 255:.4g} to {high * white / 255:.4g}, not 0 to {white:g}.",
            "Set 'white' to the value that white has in these files.",
        )
    return np.rint(values).clip(0, 255).astype(np.uint8)


def _resize(picture: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    if picture.shape[:2] == (height, width):
        return np.ascontiguousarray(picture)
    smaller = height <= picture.shape[0] and width <= picture.shape[1]
    how = cv2.INTER_AREA if smaller else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(np.ascontiguousarray(picture), (width, height), interpolation=how), np.uint8)


def _encoded_size(raw: bytes) -> tuple[int, int] | None:
    """(height, width) from the header of a PNG or JPEG file, or None."""
    if raw[:8] == b"\x89PNG\r\n\x1a\n" and raw[12:16] == b"IHDR":
        return int.from_bytes(raw[20:24], "big"), int.from_bytes(raw[16:20], "big")
    if raw[:2] != b"\xff\xd8":
        return None
    at = 2
    while at + 9 <= len(raw) and raw[at] == 0xFF:
        marker = raw[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(raw[at + 5 : at + 7], "big"), int.from_bytes(raw[at + 7 : at + 9], "big")
        at += 2 if marker in range(0xD0, 0xD9) else 2 + int.from_bytes(raw[at + 2 : at + 4], "big")
    return None
