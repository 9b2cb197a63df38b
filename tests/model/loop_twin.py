"""The published architecture written with loops, to compare the model with: slow, plain, and differentiable."""

from __future__ import annotations

import math

import torch

from laneformer.schedule import Own


class Twin:
    """The equations of the published architecture, one lane, head and position at a time."""

    def __init__(self, model):
        self.config, self.schedule = model.config, model.schedule
        self.w = dict(model.named_parameters())

    def norm(self, at, x, lane):
        weight = self.w[f"{at}.weight"] if f"{at}.weight" in self.w else self.w[f"{at}.scale"][lane]
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + self.config.norm_eps) * weight

    def turn(self, x, position):
        size = self.config.head_size
        out = []
        for i in range(size // 2):
            angle = position * self.config.rope_theta ** (-2 * i / size)
            c, s = math.cos(angle), math.sin(angle)
            out += [x[2 * i] * c - x[2 * i + 1] * s, x[2 * i] * s + x[2 * i + 1] * c]
        return torch.stack(out)

    def attention(self, layer, lane, x):
        c, at = self.config, f"model.layers.{layer}.attention"
        size, length = c.head_size, len(x)
        heads, groups = c.num_attention_heads // c.num_lanes, c.kv_heads // c.num_lanes
        q, k, v = ((x @ self.w[f"{at}.{m}.weight"][lane].T).view(length, -1, size) for m in ("wq", "wk", "wv"))
        if c.head_norms:
            q, k = self.norm(f"{at}.q_norm", q, lane), self.norm(f"{at}.k_norm", k, lane)
        q, k = ([[self.turn(x, i) for x in row] for i, row in enumerate(rows)] for rows in (q, k))
        rows = []
        for i in range(length):
            first = 0 if c.window(layer) is None else max(0, i - c.window(layer) + 1)
            row = []
            for h in range(heads):
                g = h * groups // heads
                scores = [q[i][h] @ k[j][g] / math.sqrt(size) for j in range(first, i + 1)]
                row.append(torch.stack(scores).softmax(0) @ v[first : i + 1, g])
            rows.append(torch.cat(row))
        return torch.stack(rows) @ self.w[f"{at}.wo.weight"][lane].T

    def feed_forward(self, layer, lane, x):
        w1, w2, w3 = (self.w[f"model.layers.{layer}.feed_forward.w{i}.weight"][lane] for i in (1, 2, 3))
        gate = x @ w1.T
        return (gate / (1 + torch.exp(-gate)) * (x @ w3.T)) @ w2.T

    def head(self, x):
        c, lanes = self.config, self.config.num_lanes
        table = self.w["model.tok_embeddings.weight"]
        if c.lm_head_type == "lane":
            return (
                torch.cat([self.norm("model.norm", x[i], i) for i in range(lanes)], -1)
                @ self.w["lm_head.linear.weight"].T
            )
        weight = table if c.tie_word_embeddings else self.w["lm_head.weight"]
        if c.lm_head_type == "vocab_parallel":
            parts = weight.reshape(lanes, -1, c.hidden_size)
            return torch.cat([self.norm("model.norm", x[i], i) @ parts[i].T for i in range(lanes)], -1)
        if c.pre_norm_lane_agg:
            return self.norm("model.norm", sum(x), 0) @ weight.T
        return sum(self.norm("model.norm", x[i], i) for i in range(lanes)) / lanes @ weight.T

    def __call__(self, tokens):
        lanes = range(self.config.num_lanes)
        x = [self.w["model.tok_embeddings.weight"][tokens] for _ in lanes]
        sent = []
        for n, step in enumerate(self.schedule.steps):
            at = f"model.layers.{n // 2}.{'ffn_norm' if n % 2 else 'attention_norm'}"
            run = self.feed_forward if n % 2 else self.attention
            sent.append([run(n // 2, lane, self.norm(at, x[lane], lane)) for lane in lanes])
            factor = {Own.NONE: 0.0, Own.ONE: 1.0, Own.SQRT_LANES: math.sqrt(len(lanes))}[step.own]
            x = [x[lane] + factor * sent[n][lane] for lane in lanes]
            for landing in step.lands:
                m = sent[landing.module]
                x = [x[i] + sum(m[j] for j in lanes if landing.with_own or j != i) for i in lanes]
        return self.head(x)
