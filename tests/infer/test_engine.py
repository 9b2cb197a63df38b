"""One request from prompt to last token: the reference's tokens, the right end, and nothing served that cannot be."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict

import pytest
import torch
from test_forward import FLOAT32, eager, reference, share_of_largest, some_tokens

from laneformer import Laneformer, Schedule
from laneformer.infer.engine import all_logits, generate, prefill
from laneformer.infer.request import Request, RequestError, request_from
from laneformer.infer.sampling import Sampling

PROMPT = (5, 17, 99, 0, 3, 42, 8)


def tokens_of(runner, request, **options):
    return [token.id for token in generate(runner, request, **options)]


def argmax_of_the_reference(folder, schedule, count):
    """Greedy continuation of PROMPT by the reference model with its own cache."""
    model = Laneformer.from_pretrained(folder, schedule=schedule)
    cache, tokens = model.new_cache(len(PROMPT) + count), []
    logits = model(torch.tensor([PROMPT]), cache=cache)
    for _ in range(count):
        tokens.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([tokens[-1:]]), cache=cache)
    return tokens


@pytest.mark.parametrize("schedule", ["checkpoint", "tensor-parallel", "delayed:3:early", "ladder", "silent"])
@torch.inference_mode()
def test_greedy_decoding_takes_the_argmax_of_the_reference_model_step_by_step(schedule, checkpoint):
    folder = checkpoint(sliding_window=9, swa_layers=(1,))
    expected = argmax_of_the_reference(folder, schedule, 30)
    assert len(set(expected)) > 5
    got = list(generate(eager(folder, 64), Request(PROMPT, 30, schedule=schedule), chunk=3))
    assert [token.id for token in got] == expected
    assert [token.position for token in got] == list(range(7, 37))
    assert [token.finish for token in got] == [None] * 29 + ["length"]


def test_times_go_up_and_one_rank_waits_for_nobody(checkpoint):
    got = list(generate(eager(checkpoint(), 64), Request(PROMPT, 9)))
    assert all(0 < one.at_s < other.at_s for one, other in itertools.pairwise(got))
    assert {token.wait_s + token.head_wait_s for token in got} == {0.0}


def test_decoding_ends_with_a_stop_id_the_request_gave(checkpoint):
    runner = eager(checkpoint(), 64)
    whole = tokens_of(runner, Request(PROMPT, 20))
    stop = whole[6]
    got = list(generate(runner, Request(PROMPT, 20, stop_ids=(stop, 1000))))
    assert [token.id for token in got] == whole[: whole.index(stop) + 1]
    assert got[-1].finish == "stop_id"


def test_decoding_ends_with_the_end_ids_of_the_checkpoint_unless_they_are_to_be_ignored(checkpoint):
    whole = tokens_of(eager(checkpoint(), 64), Request(PROMPT, 20))
    runner = eager(checkpoint(eos_token_id=(100, whole[4])), 64)
    got = list(generate(runner, Request(PROMPT, 20)))
    assert [token.id for token in got] == whole[: whole.index(whole[4]) + 1] and got[-1].finish == "stop_id"
    assert tokens_of(runner, Request(PROMPT, 20, ignore_end=True, stop_ids=(whole[0],))) == whole


def test_decoding_ends_when_the_stop_test_says_that_a_text_is_complete(checkpoint):
    heard = []

    def third(token):
        heard.append(token)
        return len(heard) == 3

    got = list(generate(eager(checkpoint(), 64), Request(PROMPT, 20), third))
    assert [token.id for token in got] == heard and len(heard) == 3
    assert got[-1].finish == "stop_text"


@pytest.mark.parametrize(("capacity", "positions"), [(13, 160), (64, 13)])
def test_decoding_ends_when_cache_or_context_has_no_room_for_another_position(capacity, positions, checkpoint):
    folder = checkpoint(max_position_embeddings=positions)
    got = list(generate(eager(folder, capacity), Request(PROMPT, 40)))
    assert [token.position for token in got] == list(range(7, 13))
    assert got[-1].finish == "context"
    assert [token.id for token in got] == tokens_of(eager(checkpoint(), 64), Request(PROMPT, 6))


@pytest.mark.parametrize("chunk", [1, 2, 5, 36, 37, 64])
def test_a_prompt_in_chunks_of_any_size_gives_nearly_the_same_logits_and_the_same_tokens(chunk, checkpoint):
    folder = checkpoint(sliding_window=6, swa_layers=(0, 2))
    prompt = tuple(some_tokens(folder, 37))
    runner = eager(folder, 64)
    plan = Schedule.parse("checkpoint", runner.config)
    expected = reference(folder, prompt)
    assert share_of_largest(all_logits(runner, prompt, plan, 37, chunk), expected) < FLOAT32
    runner.reset()
    with torch.inference_mode():
        assert share_of_largest(prefill(runner, prompt, plan, chunk), expected[-1]) < FLOAT32
    assert tokens_of(runner, Request(prompt, 15), chunk=chunk) == tokens_of(runner, Request(prompt, 15))


def test_a_prompt_continued_in_two_parts_draws_what_one_request_draws(checkpoint):
    runner = eager(checkpoint(), 64)
    sampling = Sampling(1.3, top_k=40, top_p=0.95, repetition_penalty=1.2, seed=11)
    whole = tokens_of(runner, Request(PROMPT, 20, sampling))
    for cut in (1, 7, 19):
        first = tokens_of(runner, Request(PROMPT, cut, sampling))
        second = tokens_of(runner, Request((*PROMPT, *first), 20 - cut, sampling))
        assert first + second == whole
    assert whole != tokens_of(runner, Request(PROMPT, 20, Sampling(1.3, 40, 0.95, 1.2, seed=12)))


def test_a_request_leaves_nothing_for_the_next_one(checkpoint):
    runner = eager(checkpoint(sliding_window=6, swa_layers=(0, 2)), 64)
    first = tokens_of(runner, Request(PROMPT, 20))
    unfinished = generate(runner, Request(PROMPT[::-1], 20, schedule="ladder"))
    next(unfinished), next(unfinished)
    unfinished.close()
    assert tokens_of(runner, Request(PROMPT, 20)) == first


@pytest.mark.parametrize(("request_", "text"), [
    (Request(()), "the prompt is empty; give at least one token"),
    (Request((1, 101, -1)), "the prompt holds ids [101, -1] outside the vocabulary 0..100"),
    (Request((1,) * 20), "the prompt has 20 tokens, but at most 19 fit"),
    (Request((1,), 0), "max_tokens must be at least 1, got 0"),
    (Request((1,), link_latency_us=-1.0), "a link latency must be 0 us or above, got -1.0"),
    (Request((1,), link_latency_us=math.nan), "a link latency must be 0 us or above, got nan"),
    (Request((1,), link_latency_us=5.0), "a link latency needs at least 2 ranks"),
])  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused_with_what_fits(request_, text, checkpoint):
    with pytest.raises(RequestError) as error:
        list(generate(eager(checkpoint(), 20), request_))
    assert text in str(error.value)


def test_the_longest_prompt_that_leaves_room_for_a_token_is_served(checkpoint):
    (token,) = generate(eager(checkpoint(), 20), Request((1,) * 19, 5))
    assert (token.position, token.finish) == (19, "context")


def test_a_schedule_that_does_not_exist_is_refused(checkpoint):
    with pytest.raises(ValueError, match="no schedule 'delayed:x'"):
        list(generate(eager(checkpoint(), 20), Request((1,), schedule="delayed:x")))


def test_a_request_survives_its_json_form():
    request = Request(PROMPT, 9, Sampling(0.7, 5, 0.9, 1.1, 2**63 + 1), (4,), ("é", "\n"), "ladder", 20.0, True)
    assert request_from(json.loads(json.dumps(asdict(request)))) == request
