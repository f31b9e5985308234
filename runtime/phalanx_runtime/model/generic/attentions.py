"""Paged attention in model code of `transformers` that does not use AttentionInterface.

Each function takes an attention module and returns a replacement for one of its methods. The replacement computes queries, keys
and values with the module's own projections.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from phalanx_runtime.model.generic.indexed import Chooser, Indexer
from phalanx_runtime.model.generic.layers import SLOPES, running_handler

Method = Callable[..., Any]


def replace_attention(model: Any, class_name: str, method: str, replacement: Callable[[Any], Method]) -> None:
    """Replaces a method of all attention modules of this class. Without a handler, they run their own code."""
    for module in model.modules():
        if type(module).__name__ == class_name:
            setattr(module, method, _within_steps(getattr(module, method), replacement(module)))


def _within_steps(own: Method, paged: Method) -> Method:
    def call(*args: Any, **options: Any) -> Any:
        return (own if running_handler() is None else paged)(*args, **options)

    return call


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Computes attention of [1, heads, tokens, dim]. Returns [1, tokens, heads, dim]."""
    handler = running_handler()
    assert handler is not None, "the replacement runs within a step"
    return handler(module, q.to(v.dtype), k.to(v.dtype), v=v, mask=None, options=options)


def _heads(x: Tensor, dim: int) -> Tensor:
    """Splits [1, tokens, heads * dim] to [1, heads, tokens, dim]."""
    return x.view(*x.shape[:2], -1, dim).transpose(1, 2)


def inner(module: Any) -> Method:
    """A method that receives queries, keys and values as [1, heads, tokens, dim]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return _attend(module, q, k, v).transpose(1, 2), None

    return attend


def gpt(module: Any) -> Method:
    """OpenAI GPT's: keys are [1, heads, dim, tokens]."""
    scale = None if module.scale else 1.0

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        return [_attend(module, q, k.transpose(-1, -2), v, scaling=scale).transpose(1, 2)]

    return attend


def gpt_neo(module: Any) -> Method:
    """GPT-Neo's: unscaled, with a sliding window in local layers."""
    window = module.config.window_size if module.attention_type == "local" else None

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return _attend(module, q, k, v, scaling=1.0, sliding_window=window).transpose(1, 2), None

    return attend


def bert(module: Any) -> Method:
    """BERT's, without the output projection."""
    dim = module.attention_head_size

    def forward(hidden_states: Tensor, *_: Any, sinusoidal_pos: Tensor | None = None, **__: Any) -> tuple[Tensor, None]:
        q, k, v = (_heads(project(hidden_states), dim) for project in (module.query, module.key, module.value))
        if sinusoidal_pos is not None:
            rotate = module.apply_rotary_position_embeddings
            q, k, *value = rotate(sinusoidal_pos, q, k, *([v] if module.rotary_value else []))
            v = value[0] if value else v
        return _attend(module, q, k, v).flatten(2), None

    return forward


def bart(module: Any) -> Method:
    """Self-attention of BART's."""

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        projections = (module.q_proj, module.k_proj, module.v_proj)
        q, k, v = (_heads(project(hidden_states), module.head_dim) for project in projections)
        return module.out_proj(_attend(module, q, k, v, scaling=module.scaling).flatten(2)), None

    return forward


def bloom(module: Any) -> Method:
    """BLOOM's, with slopes; its output projection adds the residual."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = _slopes(build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32))

    def forward(hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        q, k, v = _heads(module.query_key_value(hidden_states), 3 * module.head_dim).chunk(3, -1)
        out = _attend(module, q, k, v, **{SLOPES: slopes.to(q.device)}).flatten(2)
        return module.dense(out) + residual, None

    return forward


def mpt(module: Any) -> Method:
    """MPT's, with slopes."""
    from transformers.models.mpt import modeling_mpt

    own: Any = modeling_mpt
    slopes, clip = _slopes(own.build_mpt_alibi_tensor(module.n_heads, 2)), module.clip_qkv

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        qkv = module.Wqkv(hidden_states)
        qkv = qkv.clamp(-clip, clip) if clip else qkv
        q, k, v = (_heads(part, module.head_dim) for part in qkv.chunk(3, -1))
        out = _attend(module, q, k, v, scaling=module.softmax_scale, **{SLOPES: slopes.to(q.device)})
        return module.out_proj(out.flatten(2)), None

    return forward


def falcon(module: Any) -> Method:
    """Falcon's, rotary or with slopes. KV heads stay shared, which the module expands."""
    from transformers.models.falcon import modeling_falcon

    own: Any = modeling_falcon
    is_multi_query = module.multi_query and not module.new_decoder_architecture
    kv_heads = module.num_kv_heads if module.new_decoder_architecture else 1 if is_multi_query else module.num_heads
    slopes = None
    if module.config.alibi:  # scaled with the logits
        bias = own.build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), module.num_heads, torch.float32)
        slopes = _slopes(bias) * module.inv_norm_factor

    def forward(hidden_states: Tensor, *_: Any, position_embeddings: Any = None, **__: Any) -> tuple[Tensor, None]:
        groups = module.query_key_value(hidden_states).unflatten(-1, (kv_heads, -1, module.head_dim))
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in groups.split([groups.shape[3] - 2, 1, 1], 3))
        if slopes is None:
            q, k = own.apply_rotary_pos_emb(q, k, *position_embeddings)
        out = _attend(module, q, k, v, **({} if slopes is None else {SLOPES: slopes.to(q.device)}))
        return module.dense(out.flatten(2)), None

    return forward


def doge(module: Any) -> Method:
    """Doge's, with a bias of each key: one more dimension, where queries are 1."""
    from transformers.models.doge import modeling_doge

    own: Any = modeling_doge

    def forward(hidden_states: Tensor, position_embeddings: Any, *_: Any, **__: Any) -> tuple[Tensor, None]:
        dim = module.head_dim
        q, k, v = (_heads(project(hidden_states), dim) for project in (module.q_proj, module.k_proj, module.v_proj))
        q, k = own.apply_rotary_pos_emb(module.q_norm(q), module.k_norm(k), *position_embeddings)
        bias = torch.exp(module.A * softplus(module.dt_proj(v.transpose(1, 2).flatten(2))))
        k = torch.cat((k, bias.transpose(1, 2).unsqueeze(-1) / module.scaling), -1)
        q = torch.cat((q, torch.ones_like(q[..., :1])), -1)
        out = _attend(module, q, k, v, scaling=module.scaling, sliding_window=module.config.sliding_window)
        return module.o_proj(out.flatten(2)), None

    return forward


def index(module: Any) -> Method:
    """Of an indexer: the choice of the running handler, or all keys if that ranks none. Layers without one share its choice."""
    indexer = Indexer(module, module.forward)

    def choose(hidden: Tensor, residual: Tensor, rotation: Any, *_: Any, **__: Any) -> Any:
        handler = running_handler()
        return handler.choose(indexer, (hidden, residual, rotation)) if isinstance(handler, Chooser) else "all keys"

    return choose


def index_all(_: Any) -> Method:
    """Of an indexer whose queries select all keys, in requests of the supported length: a mask that is true for each key."""
    return lambda *_, **__: True


def _slopes(bias: Tensor) -> Tensor:
    """Returns the slopes of a bias [heads, 1, 2] that grows with the position."""
    return bias[:, 0, 1] - bias[:, 0, 0]
