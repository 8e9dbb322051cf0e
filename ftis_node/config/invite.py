"""An invitation to a run as one string: addresses, run, secret, expiry. A friend types it after `ftis-node join`.

    ftis1-BASE64URL(MessagePack || first 6 bytes of its SHA-256)

It is untrusted text, so each part has a bound. The run id is the fingerprint of the run: a manifest with
another one is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from typing import Annotated

import msgspec
from msgspec import Meta

from ftis_node.config.manifest import PRESETS, RunManifest, load_manifest, parse_canonical
from ftis_node.errors import ConfigError
from ftis_node.records.addresses import AddressError, parse_address
from ftis_node.telemetry.secrets import MIN_SECRET_BYTES

PREFIX = "ftis1-"
ANY_PREFIX = re.compile(r"ftis\d+-")  # of all versions
CHECK_BYTES = 6
MAX_CHARS = 8192
MAX_ADDRESSES = 4
MAX_RUN_BYTES = 4096
MAX_CANONICAL_BYTES = 1 << 16
MAX_SECRET_BYTES = 1024  # so that the line stays short enough to send
AGAIN = "ask for a new one: ftis-node invite"

AddressText = Annotated[str, Meta(min_length=1, max_length=512)]


class Invite(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An invitation. `run` is the name of a preset; for another run, a colon and the canonical JSON follow.

    It is deflated with the preset's JSON as dictionary. The preset is the one that gives the fewest bytes.
    `secret` is b"" for an open run. `expires_at` is in Unix seconds. The secret itself does not expire.
    """

    run_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
    run: Annotated[bytes, Meta(min_length=2, max_length=MAX_RUN_BYTES)]
    addresses: Annotated[list[AddressText], Meta(min_length=1, max_length=MAX_ADDRESSES)]
    expires_at: Annotated[int, Meta(ge=0, le=1 << 40)]
    secret: Annotated[bytes, Meta(max_length=MAX_SECRET_BYTES)] = b""

    def text(self) -> str:
        body = msgspec.msgpack.encode(self)
        return PREFIX + base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")

    def manifest(self) -> RunManifest:
        """Return the run. Raises ConfigError if this version reads it in another way than the sender's."""
        name, _, packed = self.run.partition(b":")
        preset = name.decode(errors="replace")
        try:
            if preset not in PRESETS:
                raise ValueError
            known = load_manifest(preset).canonical()
            unpacker = zlib.decompressobj(zdict=known)
            canonical = unpacker.decompress(packed, MAX_CANONICAL_BYTES) if packed else known
            if packed and not unpacker.eof:  # cut, or longer
                raise ValueError
        except (ValueError, zlib.error):
            raise ConfigError(
                "the run of the invitation is of another version of ftis-node: use the version of the sender"
            ) from None
        manifest = parse_canonical(canonical, source="the run of the invitation")
        if manifest.run_id != self.run_id:
            raise ConfigError(
                f"the run of the invitation is {self.run_id[:12]} and this version of ftis-node reads it as "
                f"{manifest.run_id[:12]}: use the version of the sender"
            )
        return manifest


def invite_to(manifest: RunManifest, *, addresses: list[str], secret: bytes, expires_at: int) -> Invite:
    """Return an invitation. Raises ConfigError for a run or a secret that is too large for one."""
    run = min((_packed(manifest, preset) for preset in PRESETS), key=len)
    if len(run) > MAX_RUN_BYTES:
        raise ConfigError(f"an invitation holds {MAX_RUN_BYTES} bytes of a run, this one has {len(run)}: send run.toml")
    if len(secret) > MAX_SECRET_BYTES:
        raise ConfigError(
            f"an invitation holds a secret of {MAX_SECRET_BYTES} bytes, this one has {len(secret)}: send the file"
        )
    return Invite(manifest.run_id, run, addresses[:MAX_ADDRESSES], expires_at, secret)


def _packed(manifest: RunManifest, preset: str) -> bytes:
    canonical, known = manifest.canonical(), load_manifest(preset).canonical()
    if canonical == known:
        return preset.encode()
    packer = zlib.compressobj(9, zdict=known)
    return preset.encode() + b":" + packer.compress(canonical) + packer.flush()


def read_invite(text: str, *, now: float) -> Invite:
    """Return the invitation in `text`, which may be the whole line that `ftis-node invite` prints.

    Raises ConfigError in one line for a damaged, expired or newer one.
    """
    words = filter(ANY_PREFIX.match, text.split())
    text = max(words, key=lambda word: word.startswith(PREFIX), default="")  # the first one of this version, or of any
    if len(text) > MAX_CHARS or not text:
        raise ConfigError(f"this is no invitation: one begins with {PREFIX}")
    if not text.startswith(PREFIX):
        raise ConfigError("this invitation is of another version of ftis-node: use the version of the sender")
    encoded = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise _damaged() from None
    body, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
    if check != _check(body):
        raise _damaged()
    try:
        invite = msgspec.msgpack.decode(body, type=Invite)
        addresses = [parse_address(address) for address in invite.addresses]
    except (msgspec.MsgspecError, AddressError) as error:
        raise ConfigError(f"this invitation cannot be used ({error}): {AGAIN}") from None
    if 0 < len(invite.secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"this invitation has a secret of {len(invite.secret)} bytes: {AGAIN}")
    if any(address.peer_id is None for address in addresses):
        raise ConfigError(f"this invitation has an address without a peer: {AGAIN}")
    if now > invite.expires_at:
        raise ConfigError(f"this invitation has expired: {AGAIN}")
    return invite


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:CHECK_BYTES]


def _damaged() -> ConfigError:
    return ConfigError("this invitation is damaged: copy the whole line again")
