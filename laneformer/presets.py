"""The named sizes: the published 2B, a small model that one CPU can time, and a demo that one CPU can train."""

from __future__ import annotations

from typing import Any

# 2,320,069,632 parameters. Rope theta and norm eps of the published weights are read from their config.json.
_2B: dict[str, Any] = {
    "hidden_size": 3072,
    "num_hidden_layers": 15,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "intermediate_size": 12288,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "num_lanes": 8,
    "broadcast_delay": 2,
    "sliding_window": 2048,
    "swa_layers": tuple(range(10)),
    "torch_dtype": "bfloat16",
}

# 151 M parameters in 16 bits: far more than a last-level cache, so that decoding streams memory as the 2B does. A lane
# for each of two cores.
_SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 12288,
    "max_position_embeddings": 4096,
    "num_lanes": 2,
    "broadcast_delay": 2,
    "torch_dtype": "float16",
}

# 1.5 M parameters.
_DEMO: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 320,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "num_lanes": 4,
    "broadcast_delay": 2,
    "torch_dtype": "float32",
}

PRESETS: dict[str, dict[str, Any]] = {"2b": _2B, "small": _SMALL, "demo": _DEMO}
