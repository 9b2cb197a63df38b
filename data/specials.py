"""The special tokens: what they are for, how they are spelt, which ids they have, and the chat template they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from tokenizers import Tokenizer

# ChatML (OpenAI 2023). transformers marks what lies inside `generation` in its assistant mask; it renders as nothing.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, made or used as asked."""


@dataclass(frozen=True)
class SpecialTokens:
    """How each special token is spelt; an adopted tokenizer may spell some in its own way."""

    end: str = "<|endoftext|>"
    pad: str = "<|pad|>"
    fim_prefix: str = "<|fim_prefix|>"
    fim_suffix: str = "<|fim_suffix|>"
    fim_middle: str = "<|fim_middle|>"
    im_start: str = "<|im_start|>"
    im_end: str = "<|im_end|>"

    @classmethod
    def of(cls, names: Mapping[str, str]) -> SpecialTokens:
        """The usual spellings but for those that `names` gives by role; raises TokenizerError for an unknown role."""
        roles = [field.name for field in fields(cls)]
        for role, name in names.items():
            if role not in roles:
                raise TokenizerError(f"{role!r} is no special token's role; expected one of {', '.join(roles)}")
            if not name:
                raise TokenizerError(f"the spelling of special token {role} is empty; give one, or leave {role} out")
        chosen = cls(**names)
        # A pad token is never learnt, so it may be the end token; two others that agree could not be told apart.
        distinct = {role: name for role, name in asdict(chosen).items() if role != "pad"}
        if len(set(distinct.values())) < len(distinct):
            raise TokenizerError(f"two special tokens have one spelling: {distinct}; give each its own")
        return chosen

    def chat_template(self) -> str:
        """The chat template in these spellings."""
        spelt = CHAT_TEMPLATE
        for usual, own in ((USUAL.im_start, self.im_start), (USUAL.im_end, self.im_end)):
            spelt = spelt.replace(usual, own.replace("\\", "\\\\").replace("'", "\\'"))
        return spelt


USUAL = SpecialTokens()


@dataclass(frozen=True)
class Specials:
    """The ids of the special tokens in one tokenizer, by role; the manifest of a folder of shards lists the same."""

    end: int
    pad: int
    fim_prefix: int
    fim_suffix: int
    fim_middle: int
    im_start: int
    im_end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, names: SpecialTokens = USUAL) -> Specials:
        """The ids in `tokenizer`; raises TokenizerError naming what it lacks."""
        ids = {role: tokenizer.token_to_id(name) for role, name in asdict(names).items()}
        missing = [f"{role} ({getattr(names, role)})" for role, number in ids.items() if number is None]
        if missing:
            raise TokenizerError(
                f"the tokenizer lacks the special tokens {', '.join(missing)}; "
                "add them with laneformer data adopt-tokenizer, or name its own with --special ROLE=TOKEN"
            )
        return cls(**{role: int(number) for role, number in ids.items() if number is not None})
