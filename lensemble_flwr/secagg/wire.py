"""The bytes of every message: one header, one body of a size that public numbers fix.

    header       version 1 || stage 1 || binding 32                   T0 up to ROSTER, T1 from SHARES on
    KEYS         cpk 32 || spk 32 || [vouch 1] || signature 64        member -> coordinator
    ROSTER       set(U1) || the body of KEYS of each of U1            coordinator -> member
    SHARES       commitment 32 || envelope 94 [126] for each of U1 but the sender || signature
    ENVELOPES    set(U2) || envelope 94 [126] from each of U2 but the reader
    MASKED       root 32 || [masked tag 8] || signature               beside the vector: raw lanes, ring.to_wire
    SURVIVORS    set(U3) || root 32 of each of U3
    CONSISTENCY  signature                                            only in rounds with the consistency stage
    CONFIRMED    set of signers || the CONSISTENCY signature of each  only in rounds with the consistency stage
    REVEAL       share 33 for each of U2 || signature

In brackets: only where members verify the sum (:mod:`.projection`). What a signature is over: :mod:`.signing`.
Everything goes by roster position, ascending. A set is a bitmap of the roster (position p is bit (p-1) mod 8 of byte
(p-1) div 8, spare bits zero), so a member cannot occur twice or out of order. The binding in the header is no
protection, anybody can write it: it only makes a mix-up between honest parties fail early and plainly.

Sizes are compared before a body is read and nothing is allocated that is larger than the message itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from lensemble_flwr.errors import SecureAggregationError
from lensemble_flwr.secagg.projection import NONCE_BYTES, TAG_BYTES
from lensemble_flwr.secagg.shamir import SHARE_BYTES
from lensemble_flwr.secagg.transcript import VERSION

HASH_BYTES = 32
KEY_PAIR_BYTES = 64
SIGNATURE_BYTES = 64
KEY_ENTRY_BYTES = KEY_PAIR_BYTES + SIGNATURE_BYTES
SHARE_PAIR_BYTES = 2 * SHARE_BYTES
ENVELOPE_BYTES = 12 + SHARE_PAIR_BYTES + 16
VOUCH_BYTES = 1
HEADER_BYTES = 2 + HASH_BYTES


def key_entry_bytes(verify: bool) -> int:
    """The body of KEYS: the keys, in verified rounds whether the sender vouches for the model, a signature."""
    return KEY_ENTRY_BYTES + VOUCH_BYTES * verify


def envelope_bytes(verify: bool) -> int:
    """A sealed pair of shares, in verified rounds with a nonce."""
    return ENVELOPE_BYTES + NONCE_BYTES * verify


class Stage(IntEnum):
    """Tags of messages, in the order they are sent."""

    KEYS = 0x10
    ROSTER = 0x20
    SHARES = 0x30
    ENVELOPES = 0x40
    MASKED = 0x50
    SURVIVORS = 0x60
    CONSISTENCY = 0x70
    CONFIRMED = 0x78
    REVEAL = 0x80


def malformed(message: str) -> SecureAggregationError:
    return SecureAggregationError(message, cause="malformed_message")


def message_size(stage: Stage, roster: int, members: int, verify: bool = False) -> int:
    """Exact bytes of a message.

    Args:
        stage: its tag.
        roster: n.
        members: size of the set that the message is about: U1 for ROSTER and SHARES, U2 for ENVELOPES and REVEAL,
            U3 for SURVIVORS, the signers for CONFIRMED, not used for KEYS, MASKED and CONSISTENCY. With members =
            roster: the largest size.
        verify: whether the round's members verify the sum.
    """
    bitmap, entry, envelope = -(-roster // 8), key_entry_bytes(verify), envelope_bytes(verify)
    body = {
        Stage.KEYS: entry,
        Stage.ROSTER: bitmap + entry * members,
        Stage.SHARES: HASH_BYTES + envelope * (members - 1) + SIGNATURE_BYTES,
        Stage.ENVELOPES: bitmap + envelope * (members - 1),
        Stage.MASKED: HASH_BYTES + TAG_BYTES * verify + SIGNATURE_BYTES,
        Stage.SURVIVORS: bitmap + HASH_BYTES * members,
        Stage.CONSISTENCY: SIGNATURE_BYTES,
        Stage.CONFIRMED: bitmap + SIGNATURE_BYTES * members,
        Stage.REVEAL: SHARE_BYTES * members + SIGNATURE_BYTES,
    }
    return HEADER_BYTES + body[stage]


def pack(stage: Stage, binding: bytes, *parts: bytes) -> bytes:
    return bytes([VERSION, stage]) + binding + b"".join(parts)


def unpack(data: object, stage: Stage, binding: bytes, roster: int, members: int, verify: bool = False) -> bytes:
    """Body of a message whose size is known. Raises SecureAggregationError, see :func:`_check_header`."""
    size = message_size(stage, roster, members, verify)
    raw = _buffer(data, size, size)
    _check_header(raw, stage, binding)
    return raw[HEADER_BYTES:]


def unpack_with_members(
    data: object, stage: Stage, binding: bytes, roster: int, verify: bool = False
) -> tuple[tuple[int, ...], bytes]:
    """(members, rest of the body) of a message that opens with a set, which fixes its size."""
    bitmap = -(-roster // 8)
    raw = _buffer(data, HEADER_BYTES + bitmap, message_size(stage, roster, roster, verify))
    _check_header(raw, stage, binding)
    members = parse_members(raw[HEADER_BYTES : HEADER_BYTES + bitmap], roster)
    if len(raw) != message_size(stage, roster, len(members), verify):
        raise malformed(f"A {stage.name} message for {len(members)} members cannot have {len(raw)} bytes.")
    return members, raw[HEADER_BYTES + bitmap :]


def _buffer(data: object, least: int, most: int) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise malformed(f"A message must be bytes, not {type(data).__name__}.")
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if not least <= size <= most:
        raise malformed(f"A message of {size} bytes; expected {least} to {most}.")
    return bytes(data)


def _check_header(raw: bytes, stage: Stage, binding: bytes) -> None:
    if raw[0] != VERSION:
        raise malformed(f"Protocol version {raw[0]}; this is version {VERSION}.")
    if raw[1] != stage:
        raise malformed(f"A message of stage {raw[1]:#04x}; expected {stage.name}.")
    if raw[2:HEADER_BYTES] != binding:
        raise SecureAggregationError(
            f"The {stage.name} message belongs to another round, attempt, roster or set of parameters.",
            cause="share_decrypt_failed" if stage is Stage.ENVELOPES else "inconsistent_roster",
        )


def unsigned(body: bytes) -> tuple[bytes, bytes]:
    """(what was signed, signature) of a body that ends in a signature."""
    return body[:-SIGNATURE_BYTES], body[-SIGNATURE_BYTES:]


def pack_members(members: Iterable[int], roster: int) -> bytes:
    bits = sum(1 << (position - 1) for position in members)
    return bits.to_bytes(-(-roster // 8), "little")


def parse_members(bitmap: bytes, roster: int) -> tuple[int, ...]:
    """Positions in a bitmap, ascending. Raises SecureAggregationError: malformed_message for one beyond the roster."""
    bits = int.from_bytes(bitmap, "little")
    if bits >> roster:
        raise malformed("A set names a position beyond the roster.")
    return tuple(position for position in range(1, roster + 1) if bits >> (position - 1) & 1)


def split_evenly(body: bytes, keys: Sequence[int], size: int) -> dict[int, bytes]:
    """{key: its `size` bytes}, in the order of `keys`; the size of `body` was checked when it was unpacked."""
    return {key: body[i * size : (i + 1) * size] for i, key in enumerate(keys)}
