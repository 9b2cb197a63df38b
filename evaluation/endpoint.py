"""A model behind an OpenAI-compatible endpoint: completions and chat over HTTP, with retries."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from laneformer.evaluation.completers import Decoding, NotOffered

# The interface takes at most four stop strings; suites cut at all of theirs anyway.
MAX_STOPS, BODY_BYTES = 4, 64 << 20
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


class EndpointError(ConnectionError):
    """An endpoint that does not answer, or answers with something else."""


class EndpointCompleter:
    """Completes through URL/v1/completions, or URL/v1/chat/completions; the key comes from an environment variable.

    Raises ValueError for a URL that is none, EndpointError when requests fail for good.
    """

    def __init__(
        self, url: str, model: str, key_variable: str = "OPENAI_API_KEY", timeout_s: float = 300.0, tries: int = 4
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--endpoint is {url!r}, expected a URL such as http://localhost:8000")
        self.base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.name, self.timeout_s, self.tries, self.pause_s = model, timeout_s, tries, 1.0
        self._key = os.environ.get(key_variable, "")

    def complete(self, prompts: Sequence[str], how: Decoding) -> list[list[str]]:
        """As Completer.complete; a server that gives fewer than `how.n` at once is asked again."""
        return [self._answers(prompt, how, how.seed + at) for at, prompt in enumerate(prompts)]

    def _answers(self, prompt: str, how: Decoding, seed: int) -> list[str]:
        asked: dict[str, Any] = {
            "model": self.name, "max_tokens": how.max_tokens, "temperature": how.temperature,
            **({"stop": list(how.stop)[:MAX_STOPS]} if how.stop else {}),
            **({"messages": [{"role": "user", "content": prompt}]} if how.chat else {"prompt": prompt}),
        }  # fmt: skip
        path = "/chat/completions" if how.chat else "/completions"
        found: list[str] = []
        while len(found) < how.n:
            reply = self._post(path, {**asked, "n": how.n - len(found), "seed": seed + 1000 * len(found)})
            try:
                texts = [c["message"]["content"] or "" if how.chat else c["text"] for c in reply["choices"]]
            except (KeyError, TypeError):
                raise EndpointError(f"{self.base}{path} answered without choices: {str(reply)[:200]}") from None
            if not texts:
                raise EndpointError(f"{self.base}{path} answered with no choice")
            found += texts
        return found[: how.n]

    def _post(self, path: str, document: dict[str, Any]) -> Any:
        """One request, tried again after what may pass."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.base + path, json.dumps(document).encode(), headers)
        for attempt in range(1, self.tries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    return json.loads(reply.read(BODY_BYTES))
            except urllib.error.HTTPError as error:
                text = error.read(500).decode(errors="replace")
                reason, lasting = f"{error.code} {text}", error.code not in AGAIN
            except (OSError, http.client.HTTPException) as error:
                reason, lasting = str(error), False
            except ValueError as error:
                reason, lasting = f"no JSON: {error}", True
            if lasting or attempt == self.tries:
                break
            time.sleep(self.pause_s * 2 ** (attempt - 1))
        raise EndpointError(f"{self.base}{path} failed: {reason}")

    def infilling_prompt(self, prefix: str, suffix: str) -> str:
        """Raises NotOffered: the interface has no infilling tokens."""
        raise NotOffered("an endpoint does not tell its infilling tokens")

    def nats(self, text: str) -> tuple[float, int]:
        """Raises NotOffered: the interface gives no likelihood of a given text."""
        raise NotOffered("an endpoint gives no likelihoods of a given text")
