"""The `compiled` runner: a lane's decode modules as kernels of torch.compile's compiler over a static cache.

A matrix-vector product is written as four sums over row blocks: the compiler makes four streams of them, which reads
memory faster than one (experiments/001). Vectors stay in float32 between the kernels, whatever the weights' type.
Each module is compiled once for one lane and called for every lane, so all ranks run the same machine code.

Shape suffixes: C a lane's share of the vocabulary, D hidden, O and I a matrix's output and input, H query heads of a
lane, K key-value heads of a lane, G query heads per key-value head, T cached positions, E head size, F feed-forward
width of a lane, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch._inductor
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch.fx.experimental.proxy_tensor import make_fx

from laneformer import ops
from laneformer.cache import ring_positions
from laneformer.infer.exchange import RankExchange
from laneformer.infer.runners import EagerRunner
from laneformer.infer.token_loop import LaneSteps, TokenLoop
from laneformer.infer.weights import RankWeights
from laneformer.schedule import Schedule

# What a machine without a working C++ compiler raises.
COMPILER_ERRORS = (TorchDynamoException, CppCompileError, InvalidCxxCompiler)
ROW_BLOCKS = 4
OPTIONS: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast", "size_asserts": False}


def in_memory(x: Tensor) -> Tensor:
    """x [I] as the compiler must hold it: computed once, not again in the loop of every row that reads it."""
    half = x.shape[0] // 2
    return torch.cat((x[:half], x[half:]))


def matvec(x_I: Tensor, weight_OI: Tensor) -> Tensor:
    """weight times x in float32, [O], as sums over four blocks of rows (and the rows left over)."""
    block = weight_OI.shape[0] // ROW_BLOCKS
    rows = [weight_OI[i * block : (i + 1) * block] for i in range(ROW_BLOCKS if block else 0)]
    rows.append(weight_OI[ROW_BLOCKS * block :])
    return torch.cat([(part.float() * x_I).sum(-1) for part in rows if part.shape[0]])


def norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32."""
    return in_memory(x_D * torch.rsqrt(x_D.square().mean() + eps) * weight_D.float())


def rotate(x_HE: Tensor, cos_E: Tensor, sin_E: Tensor) -> Tensor:
    """Neighbouring pairs turned by this position's angles."""
    even, odd = x_HE.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos_E - odd * sin_E, even * sin_E + odd * cos_E), -1).flatten(-2)


def attention(
    x_D: Tensor, cos_E: Tensor, sin_E: Tensor, norm_D: Tensor, qkv_OI: Tensor, out_OI: Tensor,
    q_norm_E: Tensor | None, k_norm_E: Tensor | None, keys_KTE: Tensor, values_KTE: Tensor, position_1: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """A lane's attention partial [D] for one token; its key and value are stored at the position's ring slot."""
    kv_heads, size, head = keys_KTE.shape
    heads = qkv_OI.shape[0] // head - 2 * kv_heads
    rows = matvec(norm(x_D, norm_D, eps), qkv_OI).view(-1, head)
    q_HE, k_KE, v_KE = rows.split((heads, kv_heads, kv_heads))
    if q_norm_E is not None and k_norm_E is not None:
        q_HE, k_KE = ops.rms_norm(q_HE, q_norm_E, eps), ops.rms_norm(k_KE, k_norm_E, eps)
    q_HE, k_KE = rotate(q_HE, cos_E, sin_E), rotate(k_KE, cos_E, sin_E)
    slot_1 = position_1 % size
    keys_KTE.index_copy_(1, slot_1, k_KE[:, None].to(keys_KTE.dtype))
    values_KTE.index_copy_(1, slot_1, v_KE[:, None].to(values_KTE.dtype))
    seen_T = ring_positions(position_1, size) >= 0
    q_KGE = q_HE.view(kv_heads, -1, head) * head**-0.5
    scores_KGT = (q_KGE[:, :, None] * keys_KTE[:, None].float()).sum(-1).masked_fill(~seen_T, -torch.inf)
    weights_KGT = scores_KGT.softmax(-1)
    out_KGE = (weights_KGT[..., None] * values_KTE[:, None].float()).sum(2)
    return matvec(in_memory(out_KGE.flatten()), out_OI)


def feed_forward(
    x_D: Tensor, cos_E: Tensor, sin_E: Tensor, norm_D: Tensor, gate_up_OI: Tensor, down_OI: Tensor, eps: float
) -> Tensor:
    """A lane's feed-forward partial [D] for one token; the angles are attention's and go unused."""
    gate_F, up_F = matvec(norm(x_D, norm_D, eps), gate_up_OI).chunk(2)
    return matvec(in_memory(F.silu(gate_F) * up_F), down_OI)


def compile_function(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any] = OPTIONS
) -> Callable[..., Any]:
    """`function` compiled for exactly these shapes and these numbers; it is then called with the tensors of `args`.

    The graph is traced and compiled without torch.compile's front end, whose guards and frames would run before every
    kernel: every call comes with the shapes it was compiled for.
    """
    is_tensor = [isinstance(arg, Tensor) for arg in args]

    def of_tensors(*tensors: Tensor) -> Any:
        given = iter(tensors)
        return function(*(next(given) if wanted else arg for wanted, arg in zip(is_tensor, args, strict=True)))

    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    graph = make_fx(of_tensors)(*tensors)
    return cast(Callable[..., Any], torch._inductor.compile(graph, list[Any](tensors), options=options))


class CompiledRunner(EagerRunner):
    """Prefill as the eager runner does it; each decode step through compiled kernels, one a module and lane.

    Nothing is compiled after construction: all shapes of a decode step are known.
    """

    name = "compiled"

    def __init__(self, weights: RankWeights, exchange: RankExchange, capacity: int) -> None:
        super().__init__(weights, exchange, capacity)
        self._compiled: dict[Any, Callable[..., Tensor]] = {}
        self._position_1 = torch.zeros(1, dtype=torch.int64)
        self._loops: dict[Schedule, TokenLoop] = {}
        with torch.inference_mode():
            layers, lanes = range(self.config.num_hidden_layers), range(len(weights.lanes))
            modules = [
                [make(i, lane) for lane in lanes] for i in layers for make in (self._attention, self._feed_forward)
            ]
            final = weights.norm_LD[:1] if self.config.pre_norm_lane_agg else weights.norm_LD
            norms = [self._bind(norm, (self._x_D,), weight_D, self.config.norm_eps) for weight_D in final]
            products = [self._bind(matvec, (self._x_D,), weight_CD) for weight_CD in weights.head_L]
        self._steps = LaneSteps(modules, norms, products)
        self.reset()

    def _bind(self, function: Callable[..., Tensor], given: tuple[Tensor, ...], *fixed: Any) -> Callable[..., Tensor]:
        """`function` of what is `given` at every call, compiled for these shapes, its other arguments fixed."""
        args = (*given, *fixed)
        key = (function, *((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in args))
        if key not in self._compiled:
            self._compiled[key] = compile_function(function, args)
        kernel = self._compiled[key]
        tensors = [arg for arg in fixed if isinstance(arg, Tensor)]
        return lambda *given: kernel(*given, *tensors)

    @property
    def _x_D(self) -> Tensor:
        return torch.zeros(self.config.hidden_size)

    @property
    def _given(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._x_D, self.forward.cos_TE[0], self.forward.sin_TE[0]

    def _attention(self, layer: int, lane: int) -> Callable[..., Tensor]:
        weights, cache = self.forward.weights.layers[layer], self.forward.cache
        return self._bind(
            attention, self._given, weights.attention_norm_LD[lane], weights.qkv_LOI[lane], weights.out_LOI[lane],
            weights.q_norm_E, weights.k_norm_E, cache.k[layer][lane, 0], cache.v[layer][lane, 0], self._position_1,
            self.config.norm_eps,
        )  # fmt: skip

    def _feed_forward(self, layer: int, lane: int) -> Callable[..., Tensor]:
        weights = self.forward.weights.layers[layer]
        matrices = weights.gate_up_LOI[lane], weights.down_LOI[lane]
        return self._bind(feed_forward, self._given, weights.ffn_norm_LD[lane], *matrices, self.config.norm_eps)

    def step(self, token: int, schedule: Schedule) -> Tensor:
        """Takes one token; logits [V] of the next."""
        forward, cache = self.forward, self.forward.cache
        cache.room_for(1)
        position = cache.length
        self._position_1.fill_(position)
        if schedule not in self._loops:
            self._loops[schedule] = TokenLoop(schedule, self.config, len(forward.weights.lanes), self.exchange)
        loop = self._loops[schedule]
        loop.start(forward.weights.embedding_VD[token])
        logits_V = loop.run(self._steps, forward.cos_TE[position], forward.sin_TE[position])
        cache.advance(1)
        return torch.from_numpy(logits_V)
