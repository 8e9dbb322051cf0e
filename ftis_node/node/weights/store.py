"""The store of complete versions on a generator's disk: each is served, or waits for its delay to pass.

    version-00000012/   model.safetensors, the signed offer; the file `served` once its proof is verified
    partial/            downloads in progress (download.py)

File names contain only version numbers and verified hashes, never a peer's text.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, NamedTuple

from ftis_node.files import read_file
from ftis_node.records.weights import open_offer
from ftis_node.workers.durable import complete_folder, remove_leftovers
from ftis_node.workers.weights.store import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    WEIGHTS_FILE,
    PublishedWeights,
    WeightProof,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.records.weights import WeightsOffer

PREFIX = "version-"
OFFER_FILE = "offer"
SERVED_MARK = "served"


class StoredVersion(NamedTuple):
    """A complete version in the store."""

    offer: WeightsOffer
    was_served: bool


class VersionStore:
    """Folder of versions with one writer. All methods block on the disk; `put` blocks until the file is synced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offers: dict[int, WeightsOffer] = {}

    @property
    def partial(self) -> Path:
        """Return the folder of downloads in progress."""
        return self._folder / "partial"

    def find(self) -> list[StoredVersion]:
        """Return the versions of earlier starts, oldest first; remove incomplete ones."""
        remove_leftovers(self._folder, PREFIX)
        found = []
        for folder in sorted(self._folder.glob(f"{PREFIX}*")):
            offer = open_offer(read_file(folder / OFFER_FILE))
            self._offers[offer.version] = offer
            found.append(StoredVersion(offer, (folder / SERVED_MARK).exists()))
        return found

    def put(self, file: Path, offer: WeightsOffer, signed: bytes) -> None:
        """Move a fetched file and its signed offer into the store. After a crash the version is complete or absent."""
        with complete_folder(self._path(offer.version)) as temporary:
            os.replace(file, temporary / _file_name(offer))
            (temporary / OFFER_FILE).write_bytes(signed)
            if offer.adapter_config:
                (temporary / ADAPTER_CONFIG_FILE).write_bytes(offer.adapter_config)
        self._offers[offer.version] = offer

    def offer(self, version: int) -> WeightsOffer:
        """Return the offer of a version."""
        return self._offers[version]

    def for_engine(self, version: int) -> tuple[PublishedWeights, WeightProof]:
        """Return a version in the generation worker's form."""
        offer = self._offers[version]
        path = self._path(version) / _file_name(offer)
        weights = PublishedWeights(version=version, path=str(path), num_bytes=offer.num_bytes)
        return weights, WeightProof(version=version, probe_ids=offer.probe_ids, logprobs=offer.probe_logprobs)

    def mark_served(self, version: int) -> None:
        """Mark a version as verified, and remove all earlier versions."""
        (self._path(version) / SERVED_MARK).touch()
        for older in [held for held in tuple(self._offers) if held < version]:
            self.remove(older)

    def remove(self, version: int) -> None:
        """Remove all files of a version."""
        del self._offers[version]
        shutil.rmtree(self._path(version))

    def clear_partial(self, *, but: bytes) -> None:
        """Remove partial files, except of the version with the hash `but`."""
        for path in self.partial.glob("*"):
            if path.stem != but.hex():
                path.unlink()

    def _path(self, version: int) -> Path:
        return self._folder / f"{PREFIX}{version:08d}"


def _file_name(offer: WeightsOffer) -> str:
    return ADAPTER_FILE if offer.adapter_config else WEIGHTS_FILE
