"""The loader: one order of samples for any number of ranks and any resume, over shards that have not changed."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from shard_folders import END, TEXTS, counting, finish, small_tokenizer, text_folder, write_shard

import laneformer.train.loader as loader_module
from laneformer.differences import differences
from laneformer.train.loader import Loader, rank_positions
from laneformer.train.loss import IGNORED
from laneformer.train.mixture import Phase

LENGTH = 7
PHASES = (Phase(0.5, {"code": 0.75, "prose": 0.25}), Phase(1.0, {"code": 0.3, "prose": 0.5, "chat": 0.2}))


def lengths(seed, count):
    return np.random.default_rng(seed).integers(1, 23, count).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three sources, one of two shards, one with a learn mask; every token of theirs is a different one."""
    path = tmp_path_factory.mktemp("shards")
    chat = counting(40_000, [5, 9, 20])
    shards = [
        write_shard(path, "code-0", "code", counting(100, lengths(0, 19))),
        write_shard(path, "prose", "prose", counting(20_000, lengths(1, 11))),
        write_shard(path, "code-1", "code", counting(10_000, lengths(2, 8))),
        write_shard(path, "chat", "chat", chat, learn=[[n % 3 != 0 for n in range(len(ids) + 1)] for ids in chat]),
        write_shard(path, "held-out", "code", counting(50_000, lengths(3, 8)), split="valid"),
    ]
    return finish(path, shards)


def load(*folders, **changes):
    keys = {"sequence_length": LENGTH, "seed": 5, "phases": PHASES, "total_samples": 480, **changes}
    return Loader(list(folders), **keys)


def same(one, two):
    for name in ("inputs_BS", "targets_BS", "documents_BS"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert one.sources == two.sources


def joined(batches):
    return (
        torch.cat([batch.targets_BS for batch in batches]),
        torch.cat([batch.inputs_BS for batch in batches]),
        torch.cat([batch.documents_BS for batch in batches]),
        list(chain.from_iterable(batch.sources for batch in batches)),
    )


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one[:3], two[:3], strict=True)) and one[3] == two[3]


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 8), (2, 4), (8, 1), (4, 1), (1, 2), (2, 1)])
def test_ranks_and_accumulation_together_take_the_batch_in_its_order(folder, ranks, micro_batch):
    whole = load(folder)
    loaders = [load(folder, verify=False) for _ in range(ranks)]
    for step in range(0, 480, 8):
        shares = [rank_positions(step, 8, micro_batch, ranks, rank) for rank in range(ranks)]
        # Micro-batch by micro-batch over the ranks, as they lie in the step.
        taken = [
            loaders[rank].batch(shares[rank][a].start, len(shares[rank][a]))
            for a in range(len(shares[0]))
            for rank in range(ranks)
        ]
        assert equal(joined(taken), joined([whole.batch(step, 8)]))


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_over_the_ranks_each_position_comes_exactly_once(ranks):
    shares = [rank_positions(60, 30, 2, ranks, rank) for rank in range(ranks)]
    positions = [position for share in shares for micro in share for position in micro]
    assert sorted(positions) == list(range(60, 90))
    assert len({len(share) for share in shares}) == 1


def test_a_batch_that_does_not_divide_names_one_that_does():
    with pytest.raises(ValueError, match=r"data.batch 10 .* 3 ranks x data.micro_batch 2; the nearest that is, is 12"):
        rank_positions(0, 10, 2, 3, 0)
    with pytest.raises(ValueError, match="is, is 8"):
        rank_positions(0, 2, 4, 2, 0)


def test_one_epoch_without_phases_is_every_target_of_every_source_once_and_nothing_held_out(folder):
    loader = load(folder, phases=())
    total = sum(windows.count for windows in loader.windows)
    targets = loader.batch(0, total).targets_BS.flatten()
    documents = [*counting(100, lengths(0, 19)), *counting(20_000, lengths(1, 11)), *counting(10_000, lengths(2, 8))]
    chat = [[*ids, END] for ids in counting(40_000, [5, 9, 20])]
    expected = Counter(chain.from_iterable(documents)) + Counter({END: len(documents)})
    expected += Counter(ids[n] for ids in chat for n in range(len(ids)) if n % 3 != 0)
    assert Counter(targets[targets != IGNORED].tolist()) == expected
    # Not to within a sample: all end each epoch together.
    for epoch in (1, 2, 29, 10_007):
        assert set(loader.epochs(epoch * total).values()) == {epoch}


def test_rows_are_text_as_it_stands_and_documents_start_behind_end_tokens(folder):
    batch = load(folder).batch(0, 300)
    rows = zip(batch.inputs_BS, batch.targets_BS, batch.documents_BS, batch.sources, strict=True)
    for inputs, targets, documents, source in rows:
        kept = targets != IGNORED
        inside = kept & (targets != END) & (inputs != END)
        assert torch.equal(targets[inside], inputs[inside] + 1)
        if source != "chat":
            starts = torch.nonzero(documents.diff()).flatten() + 1
            ends = torch.nonzero((inputs == END) & kept).flatten().tolist()
            # Where there is padding, it is one more document.
            assert starts.tolist() == [end for end in ends if end] + [int(kept.sum())] * (not kept.all())


def test_a_batch_does_not_depend_on_what_was_loaded_before(folder):
    whole = load(folder).batch(0, 480)
    for position, count in [(0, 3), (3, 1), (239, 5), (413, 67)]:
        resumed = load(folder).batch(position, count)
        for name in ("inputs_BS", "targets_BS", "documents_BS"):
            assert torch.equal(getattr(resumed, name), getattr(whole, name)[position : position + count])
        assert resumed.sources == whole.sources[position : position + count]


def test_no_window_comes_twice_before_its_source_is_through_also_over_a_switch(folder):
    loader = load(folder)
    batch = loader.batch(0, 480)
    counts = dict(zip(loader.sources, (windows.count for windows in loader.windows), strict=True))
    epochs = {source: [] for source in counts}
    for source, row in zip(batch.sources, batch.targets_BS.tolist(), strict=True):
        epochs[source].append(tuple(row))
    for source, rows in epochs.items():
        assert len(rows) > counts[source] + 1, "the test goes through each source more than once"
        parts = [rows[start : start + counts[source]] for start in range(0, len(rows), counts[source])]
        assert all(len(set(part)) == len(part) for part in parts)
        assert set(parts[0]) >= set(parts[-1])
        assert parts[0][: len(parts[1])] != parts[1], "the second epoch repeats the first"
    # The switch lies within an epoch of the source that goes on.
    assert loader.epochs(240)["code"] % 1 and loader.epochs(240)["chat"] == 0


def test_the_batches_are_the_same_in_every_version(folder):
    batch = load(folder).batch(238, 4)
    assert batch.sources == ["code", "code", "prose", "code"]
    assert batch.inputs_BS[:, 1].tolist() == [10000, 114, 20130, 195]


def test_without_a_document_mask_the_rows_are_the_same_and_have_no_numbers(folder):
    masked, plain = load(folder).batch(5, 9), load(folder, document_mask=False).batch(5, 9)
    assert plain.documents_BS is None and torch.equal(plain.inputs_BS, masked.inputs_BS)


def test_more_shards_than_may_be_open_give_the_same_batches(folder, monkeypatch):
    expected = load(folder).batch(0, 60)
    monkeypatch.setattr(loader_module, "OPEN_SHARDS", 1)
    same(load(folder).batch(0, 60), expected)


@pytest.mark.parametrize("kind", ["tokens", "documents", "learn"])
def test_a_changed_shard_is_refused(tmp_path, kind):
    shard = write_shard(tmp_path, "one", "code", counting(100, [9, 9]), learn=[[1] * 10, [0] * 10])
    finish(tmp_path, [shard])
    path = tmp_path / f"one.{kind}.bin"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"one.{kind}.bin was changed"):
        load(tmp_path, phases=())
    load(tmp_path, phases=(), verify=False)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"one.{kind}.bin has"):
        load(tmp_path, phases=(), verify=False)


def test_a_source_in_two_folders_is_one(tmp_path):
    for name, first in (("one", 100), ("two", 500)):
        finish(tmp_path / name, [write_shard(tmp_path / name, "s", "code", counting(first, [30, 40]))])
    loader = load(tmp_path / "one", tmp_path / "two", phases=())
    assert loader.sources == ["code"]
    targets = loader.batch(0, loader.windows[0].count).targets_BS.flatten().tolist()
    expected = [*range(100, 170), *range(500, 570), *[END] * 4]
    assert sorted(target for target in targets if target != IGNORED) == sorted(expected)


def test_folders_that_do_not_belong_together_are_refused(tmp_path, folder):
    shard = write_shard(tmp_path / "other", "s", "other", counting(100, [30]))
    finish(tmp_path / "other", [shard], tokenizer_hash="1" * 64)
    with pytest.raises(ValueError, match="another tokenizer than"):
        load(folder, tmp_path / "other")
    with pytest.raises(ValueError, match="is given 2 times"):
        load(folder, folder)
    with pytest.raises(ValueError, match="no folder of shards is given"):
        load()
    with pytest.raises(ValueError, match="holds no manifest"):
        load(tmp_path)
    valid = write_shard(tmp_path / "valid", "s", "code", counting(100, [30]), split="valid")
    empty = write_shard(tmp_path / "valid", "e", "code", [])
    with pytest.raises(ValueError, match="no shard has text to learn"):
        load(finish(tmp_path / "valid", [valid, empty]))
    with pytest.raises(ValueError, match=r"'proze', only chat, code, prose; did you mean prose\?"):
        load(folder, phases=[Phase(1.0, {"proze": 1.0})])


def test_the_identity_says_what_changed(folder, tmp_path):
    first = load(folder)
    stored = json.loads(json.dumps(first.identity))
    assert stored == load(folder).identity
    changed = load(folder, seed=6, sequence_length=9, infilling_spm=0.25, document_mask=False)
    assert differences(stored, changed.identity) == [
        "sequence_length was 7, is 9",
        "seed was 5, is 6",
        "document_mask was true, is false",
        "infilling_spm was 0.5, is 0.25",
    ]
    (line,) = differences(stored, load(folder, total_samples=482).identity)
    assert line.startswith("phases was ")
    assert [phase["from"] for phase in load(folder, total_samples=482).identity["phases"]] == [0, 241]
    # The end of the last phase changes nothing before it.
    one = [Phase(1.0, {"code": 1.0})]
    assert load(folder, phases=one).identity == load(folder, phases=one, total_samples=999).identity
    more = finish(tmp_path, [write_shard(tmp_path, "x", "code", counting(100, [8])),
                             write_shard(tmp_path, "y", "extra", counting(100, [8]))])  # fmt: skip
    lines = differences(stored, load(folder, more).identity)
    assert [line.partition(" was ")[0] for line in lines] == ["sources.code", "sources.extra"]
    assert "was null" in lines[1] and differences(load(folder, more).identity, stored)[1].endswith("is null")


def test_the_order_of_folders_and_their_place_change_nothing_for_other_sources(folder, tmp_path):
    extra = finish(tmp_path, [write_shard(tmp_path, "y", "extra", counting(100, [8]))])
    one, two = load(folder, extra), load(extra, folder)
    assert one.identity == two.identity
    same(one.batch(0, 40), two.batch(0, 40))


def test_infilled_batches_do_not_depend_on_how_they_are_divided(tmp_path):
    text_folder(tmp_path, small_tokenizer(), TEXTS * 9)
    keys = {"sequence_length": 61, "phases": (), "infilling": 0.6}
    loader, plain = load(tmp_path, **keys), load(tmp_path, **{**keys, "infilling": 0.0})
    count = loader.windows[0].count
    whole, unchanged = loader.batch(0, 2 * count), plain.batch(0, 2 * count)
    parts = [load(tmp_path, **keys).batch(start, 1) for start in range(0, 2 * count, 5)]
    for part, start in zip(parts, range(0, 2 * count, 5), strict=True):
        assert torch.equal(part.inputs_BS[0], whole.inputs_BS[start])
        assert torch.equal(part.targets_BS[0], whole.targets_BS[start])
    changed = (whole.targets_BS != unchanged.targets_BS).any(1)
    assert 0.3 < changed.float().mean() < 0.95
    # A window is cut in other places in its second epoch.
    pairs = list(zip(map(tuple, unchanged.targets_BS.tolist()), whole.targets_BS.tolist(), strict=True))
    first = dict(pairs[:count])
    again = [first[window] == new for window, new in pairs[count:]]
    assert sum(again) < 0.6 * count


def test_another_tokenizer_beside_the_shards_is_refused(tmp_path):
    text_folder(tmp_path, small_tokenizer(), TEXTS)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"dropout": null', '"dropout": 0.1'))
    load(tmp_path, phases=())
    with pytest.raises(ValueError, match="did not make the shards"):
        load(tmp_path, phases=(), infilling=0.5)
