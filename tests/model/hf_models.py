"""What the tests of transformers' interface share: a little model with every oddity, and its folder."""

from __future__ import annotations

import torch

from laneformer import LaneConfig, Laneformer


def tiny_config(**changes):
    """An odd little config: 3 lanes, scaled rope, a window."""
    return LaneConfig.from_dict(
        {
            "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3,
            "head_dim": 6, "intermediate_size": 33, "vocab_size": 51, "max_position_embeddings": 99, "num_lanes": 3,
            "broadcast_delay": 1, "use_early_comm": True, "lm_head_type": "replicate", "norm_eps": 1e-4,
            "rope_theta": 500.0, "swa_layers": [1], "sliding_window": 4, "bos_token_id": 1, "eos_token_id": [2, 7],
            "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
                             "original_max_position_embeddings": 20}, **changes,
        }
    )  # fmt: skip


def save_tiny(folder, dtype=torch.float64, **changes):
    """Saves a random tiny model to the folder and returns both."""
    torch.manual_seed(3)
    model = Laneformer(tiny_config(**changes), dtype=dtype)
    model.save_pretrained(folder)
    return model, folder
