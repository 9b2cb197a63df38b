"""A model of any transformers folder: completions with generate(), likelihoods from logits. Needs laneformer[hf]."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laneformer.evaluation.completers import (
    END_TOKENS,
    MAX_WINDOW,
    Decoding,
    NotOffered,
    infilling_prompt,
    sample_seed,
    windowed_nats,
)


class TransformersCompleter:
    """Loads a folder with its tokenizer, offline and from safetensors only; no code of the folder runs.

    dtype: None for the folder's own. Raises ValueError for a folder that transformers cannot load so.
    """

    def __init__(self, folder: str | os.PathLike, dtype: str | None = None, window: int = MAX_WINDOW) -> None:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError:
            raise ValueError("this folder needs transformers; install laneformer[hf]") from None
        kept: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, **kept)
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                folder, use_safetensors=True, dtype=getattr(torch, dtype) if dtype else "auto", **kept
            ).eval()
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"transformers cannot load {folder}: {str(error)[:500]}") from None
        self.name = Path(folder).name
        self.context = min(window, getattr(self._model.config, "max_position_embeddings", None) or window)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model.to(self._device)

    def complete(self, prompts: Sequence[str], how: Decoding) -> list[list[str]]:
        """As Completer.complete; a prompt that does not fit loses its beginning."""
        return [self._answers(prompt, how, sample_seed(how.seed, i, 0)) for i, prompt in enumerate(prompts)]

    def _answers(self, prompt: str, how: Decoding, seed: int) -> list[str]:
        room = self.context - 1
        ids = self._encode(prompt, how.chat)[-max(1, room - how.max_tokens) :]
        drawn = {"do_sample": True, "temperature": how.temperature, "top_k": 0, "top_p": 1.0} if how.temperature else {}
        ends = self._tokenizer.eos_token_id
        copies = how.n if how.temperature else 1
        ids_1S = torch.tensor([ids], device=self._device)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed % 2**63)
            out_NS = self._model.generate(
                ids_1S,
                attention_mask=torch.ones_like(ids_1S),
                max_new_tokens=min(how.max_tokens, room - len(ids) + 1),
                num_return_sequences=copies,
                pad_token_id=ends if isinstance(ends, int) else 0,
                **{"do_sample": False, **drawn},
                **({"stop_strings": list(how.stop), "tokenizer": self._tokenizer} if how.stop else {}),
            )
        texts = [self._tokenizer.decode(row[len(ids) :], skip_special_tokens=True) for row in out_NS]
        return texts * (how.n // copies)

    def _encode(self, prompt: str, chat: bool) -> list[int]:
        if not chat:
            return self._tokenizer(prompt)["input_ids"]
        if not self._tokenizer.chat_template:
            raise ValueError(f"{self.name} has no chat template; leave out --chat")
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def infilling_prompt(self, prefix: str, suffix: str) -> str:
        """As Completer.infilling_prompt."""
        return infilling_prompt(self._tokenizer.get_vocab(), prefix, suffix)

    def nats(self, text: str) -> tuple[float, int]:
        """As Completer.nats."""
        vocabulary = self._tokenizer.get_vocab()
        ends = [self._tokenizer.eos_token_id, self._tokenizer.bos_token_id, *map(vocabulary.get, END_TOKENS)]
        first = next((end for end in ends if end is not None), None)
        if first is None:
            raise NotOffered("the tokenizer has no end token to predict the first token from")
        ids = [first, *self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        return windowed_nats(self._logits, ids, self.context), len(ids) - 1

    def _logits(self, ids: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            return self._model(torch.tensor([list(ids)], device=self._device)).logits[0].float().cpu().numpy()
