"""Which sources do folders of tokenised shards hold, and do the folders belong together?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from laneformer.data.shards import Manifest, Shard, ShardError, ShardInfo, file_sha256, open_shard, read_manifest
from laneformer.data.tokenizer import TOKENIZER, read_tokenizer


@dataclass(frozen=True, eq=False)
class ShardPlace:
    """A shard that a folder's manifest lists."""

    folder: Path
    manifest: Manifest
    info: ShardInfo

    def open(self, verify: bool = False) -> Shard:
        """Maps its files; raises ShardError where they are not what the manifest says."""
        return open_shard(self.folder, self.info, self.manifest, verify)


@dataclass(frozen=True)
class Folders:
    """Folders of shards that one tokenizer made."""

    paths: tuple[Path, ...]
    manifests: tuple[Manifest, ...]

    @property
    def manifest(self) -> Manifest:
        """The first manifest; in what concerns the tokenizer it speaks for all."""
        return self.manifests[0]

    def places(self, split: str) -> dict[str, list[ShardPlace]]:
        """The shards of a split that hold documents, by source: sources by name, shards in the manifests' order."""
        found: dict[str, list[ShardPlace]] = {}
        for path, manifest in zip(self.paths, self.manifests, strict=True):
            for info in manifest.shards:
                if info.split == split and info.num_documents:
                    found.setdefault(info.source, []).append(ShardPlace(path, manifest, info))
        return dict(sorted(found.items()))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the shards; raises ShardError where the folder now holds another."""
        path = self.paths[0] / TOKENIZER
        tokenizer, _ = read_tokenizer(path)
        if file_sha256(path) != self.manifest.tokenizer_sha256:
            raise ShardError(f"{path} did not make the shards beside it (its hash differs); restore the one that did")
        return tokenizer


def read_folders(paths: Sequence[Path]) -> Folders:
    """The folders' manifests; raises ShardError where there are none, one comes twice, or tokenizers differ."""
    if not paths:
        raise ShardError("no folder of shards is given; make one with laneformer data tokenize")
    resolved = [Path(path).expanduser().resolve() for path in paths]
    for path in resolved:
        if resolved.count(path) > 1:
            raise ShardError(f"{path} is given {resolved.count(path)} times; give each folder once")
    folders = Folders(tuple(resolved), tuple(read_manifest(path) for path in resolved))
    for path, manifest in zip(folders.paths, folders.manifests, strict=True):
        if manifest.tokenizer_sha256 != folders.manifest.tokenizer_sha256:
            raise ShardError(
                f"{path} was tokenised with another tokenizer than {folders.paths[0]}, so that its ids mean other "
                "text; tokenise both with one"
            )
    return folders


def shards_sha256(places: Sequence[ShardPlace]) -> str:
    """One hash over what shards hold, in their order, from the manifests; names and folders leave it alone."""
    parts = [f"{kind} {value}" for place in places for kind, value in sorted(place.info.sha256.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
