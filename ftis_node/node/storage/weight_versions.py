"""The store of complete versions of the weights on a generator's disk.

    version-00000012-<hash>/   model.safetensors, the signed offer; the file `served` once its proof is verified

A folder's hash is that of its offer. A learner that lost steps offers a version again, and the engine still needs the
file that it serves. File names contain only version numbers and verified hashes, never a peer's text.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

from ftis_node.errors import FileError, RecordError
from ftis_node.files import read_file
from ftis_node.models.adapter_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from ftis_node.records.peer_messages import WeightsOffer, open_offer
from ftis_node.workers.durable import complete_folder, remove_leftovers
from ftis_node.workers.weight_store import WEIGHTS_FILE, PublishedWeights, WeightProof

log = logging.getLogger(__name__)
PREFIX = "version-"
OFFER_FILE = "offer"
SERVED_MARK = "served"


class VersionStore:
    """Folder of versions with one writer. All methods block on the disk; `put` blocks until the file is synced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offers: dict[Path, WeightsOffer] = {}  # by folder, in the order in which they were stored

    @property
    def partial(self) -> Path:
        return self._folder / "partial"

    def find(self) -> list[tuple[WeightsOffer, bool]]:
        """Return the versions of earlier starts in the order of their offers, and whether each was served.

        Remove incomplete and damaged ones.
        """
        remove_leftovers(self._folder, PREFIX)
        found = {}
        for folder in self._folder.glob(f"{PREFIX}*"):
            try:
                offer = open_offer(read_file(folder / OFFER_FILE))
            except (OSError, FileError, RecordError) as error:
                log.warning("%s is damaged, and is removed: %s", folder, error)
                shutil.rmtree(folder)
                continue
            found[folder] = offer
        self._offers = dict(sorted(found.items(), key=lambda held: (held[1].created_at, held[1].version)))
        return [(offer, (folder / SERVED_MARK).exists()) for folder, offer in self._offers.items()]

    def put(self, file: Path, offer: WeightsOffer, signed: bytes) -> None:
        """Move a fetched file and its signed offer into the store. After a crash the version is complete or absent.

        It replaces an earlier version of this number, unless that one was served.
        """
        digest = hashlib.sha256(signed).hexdigest()[:16]
        folder = self._folder / f"{PREFIX}{offer.version:08d}-{digest}"
        with complete_folder(folder) as temporary:
            os.replace(file, temporary / _file_name(offer))
            (temporary / OFFER_FILE).write_bytes(signed)
            if offer.adapter_config:
                (temporary / ADAPTER_CONFIG_FILE).write_bytes(offer.adapter_config)
        self._offers.pop(folder, None)
        for held in [held for held in self._offers if self._offers[held].version == offer.version]:
            if not (held / SERVED_MARK).exists():
                self._remove(held)
        self._offers[folder] = offer

    def offer(self, version: int) -> WeightsOffer:
        """Return the last stored offer of this version."""
        return next(offer for offer in reversed(self._offers.values()) if offer.version == version)

    def for_engine(self, offer: WeightsOffer) -> tuple[PublishedWeights, WeightProof]:
        path = self._path(offer) / _file_name(offer)
        weights = PublishedWeights(version=offer.version, path=str(path), num_bytes=offer.num_bytes)
        return weights, WeightProof(version=offer.version, probe_ids=offer.probe_ids, logprobs=offer.probe_logprobs)

    def mark_served(self, offer: WeightsOffer) -> None:
        """Mark a version as verified, and remove all that were stored before it."""
        (path := self._path(offer)).joinpath(SERVED_MARK).touch()
        held = list(self._offers)
        for older in held[: held.index(path)]:
            self._remove(older)

    def remove(self, offer: WeightsOffer) -> None:
        self._remove(self._path(offer))

    def _remove(self, folder: Path) -> None:
        del self._offers[folder]
        shutil.rmtree(folder)

    def clear_partial(self, *, but: bytes) -> None:
        """Remove partial files, except of the version with the hash `but`."""
        for path in self.partial.glob("*"):
            if path.stem != but.hex():
                path.unlink()

    def _path(self, offer: WeightsOffer) -> Path:
        return next(folder for folder, held in self._offers.items() if held == offer)


def _file_name(offer: WeightsOffer) -> str:
    return ADAPTER_FILE if offer.adapter_config else WEIGHTS_FILE
