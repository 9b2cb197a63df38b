"""Which sequences make the batch at a position of a run? The same ones for every number of ranks and after any resume.

Shape suffixes: B batch, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laneformer.config_json import ConfigError
from laneformer.data.shards import ShardError
from laneformer.train.folders import ShardPlace, read_folders, shards_sha256
from laneformer.train.infilling import Infiller
from laneformer.train.mixture import SLOTS, Mixture, Phase, described
from laneformer.train.packing import Row, SourceWindows, Stream
from laneformer.train.shuffle import derived_seed, permuted

# Raised whenever the same shards and settings give other batches, so that no run goes on with another order.
ORDER = 1
# Mapped shards at once: each holds up to three files open, and systems often allow a process 1,024.
OPEN_SHARDS = 128


@dataclass(frozen=True)
class Batch:
    """Some sequences, int64 [B, S] each: a target that is not learnt is IGNORED, `sources` names each row's source."""

    inputs_BS: Tensor
    targets_BS: Tensor
    documents_BS: Tensor | None
    sources: list[str]


class Loader:
    """The batches of a run over folders of shards; its whole state is the position of the next sample.

    A source's windows come in a new random order every epoch; each source has epochs of its own, which go on where a
    phase ends. Without phases every window of all sources has one weight. Raises ValueError (ShardError, ConfigError)
    for folders that do not belong together, a shard that was changed (by hash with `verify`), and wrong phases.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        sequence_length: int,
        seed: int,
        phases: Sequence[Phase],
        total_samples: int,
        infilling: float = 0.0,
        infilling_spm: float = 0.5,
        document_mask: bool = True,
        verify: bool = True,
    ) -> None:
        found = read_folders(folders)
        places = found.places("train")
        if not places:
            raise ShardError(f"{', '.join(map(str, found.paths))}: no shard has text to learn; tokenise some")
        for place in (place for of_source in places.values() for place in of_source):
            place.open(verify)
        self.length, self.document_mask, self.pad = sequence_length, document_mask, found.manifest.end_id
        self.sources = list(places)
        self.windows = [SourceWindows(of_source, sequence_length) for of_source in places.values()]
        self._counts = np.array([windows.count for windows in self.windows])
        self._seeds = [derived_seed(seed, source) for source in self.sources]
        self._seed_array = np.array(self._seeds, np.uint64)
        phases, slots = (phases, SLOTS) if phases else self._by_windows()
        self.mixture = Mixture(phases, self.sources, total_samples, derived_seed(seed, ""), slots)
        self.infiller = Infiller(found.tokenizer(), found.manifest, infilling, infilling_spm) if infilling else None
        # Opened when needed and forgotten when others are: there may be more shards than a process may open.
        self._stream = lru_cache(OPEN_SHARDS)(self._open)
        # What decides the batches, as JSON: loaders of one identity give the same.
        self.identity: dict[str, object] = {
            "order": ORDER,
            "tokenizer": found.manifest.tokenizer_sha256,
            "sources": {source: shards_sha256(of_source) for source, of_source in places.items()},
            "sequence_length": sequence_length,
            "seed": seed,
            "phases": described(phases, self.mixture),
            "document_mask": document_mask,
            "infilling": infilling,
            "infilling_spm": infilling_spm,
        }

    def _by_windows(self) -> tuple[list[Phase], int]:
        """One phase in which each window weighs the same; where a table can hold them, all end their epoch together."""
        weights = {source: float(count) for source, count in zip(self.sources, self._counts, strict=True)}
        return [Phase(1.0, weights)], min(SLOTS, int(self._counts.sum()))

    def _open(self, place: ShardPlace) -> Stream:
        return Stream(place.open(), self.pad)

    def epochs(self, position: int) -> dict[str, float]:
        """How often each source has been gone through before this position."""
        taken = self.mixture.taken(position) / self._counts
        return dict(zip(self.sources, taken.tolist(), strict=True))

    def batch(self, position: int, count: int) -> Batch:
        """The `count` samples from position `position` of the run on."""
        source_B, index_B = self.mixture.locate(np.arange(position, position + count))
        epoch_B, place_B = np.divmod(index_B, self._counts[source_B])
        window_B = permuted(place_B, self._counts[source_B], self._seed_array[source_B], epoch_B)
        order = list(zip(source_B.tolist(), epoch_B.tolist(), window_B.tolist(), strict=True))
        rows = [self._row(source, window) for source, _, window in order]
        if self.infiller is not None:
            rows = self.infiller.rows(rows, [(self._seeds[source], epoch, window) for source, epoch, window in order])
        return Batch(
            torch.from_numpy(np.stack([row.inputs_S for row in rows])),
            torch.from_numpy(np.stack([row.targets_S for row in rows])),
            torch.from_numpy(np.stack([row.documents_S for row in rows])) if self.document_mask else None,
            [self.sources[source] for source, _, _ in order],
        )

    def _row(self, source: int, window: int) -> Row:
        place, number = self.windows[source].find(window)
        return self._stream(place).row(number, self.length)


def rank_positions(step_start: int, batch: int, micro_batch: int, ranks: int, rank: int) -> list[range]:
    """The positions of each micro-batch of one data-parallel rank, for the global batch that starts at `step_start`.

    Micro-batch a of rank r starts at (a ranks + r) micro_batch; over all ranks each position comes once. Raises
    ConfigError for a batch that does not divide.
    """
    together = ranks * micro_batch
    if batch % together:
        near = max(1, round(batch / together)) * together
        raise ConfigError(
            f"data.batch {batch} is not a multiple of {ranks} ranks x data.micro_batch {micro_batch}; "
            f"the nearest that is, is {near}"
        )
    starts = range(step_start + rank * micro_batch, step_start + batch, together)
    return [range(start, start + micro_batch) for start in starts]
