"""The GPT, and how its parts may be split over processes or replaced on a device; others carry that out.

The defaults are GPT-2 (Radford et al. 2019) to the letter, under its own parameter names; the modern blocks
(RoPE, RMSNorm, ReLU², SwiGLU, grouped-query heads, QK-norm, untied head, logit softcap) are options of the
same few classes. What fewer models have is in `kilogpt/layers/`: options.py has the keys, mixture.py experts.

Shapes in comments: B batch, T positions, C n_embd, H heads, G key/value heads, D head width, V vocabulary
rows, S positions that a query may see, N tokens (B * T).
"""
import math
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kilogpt.layers.attention import NormOverHeads, build_mask, choose_dot_product, first_seen
from kilogpt.layers.options import AdapterOptions, BlockOptions, DeltaOptions, ExpertOptions
from kilogpt.layers.precision import at_least_float32, cast_for_linears, draw_normal
from kilogpt.layers.rope import rope_tables, rotate
from kilogpt.layers.value_embedding import ValueEmbedding, build_embedding, build_gate, head_strengths


@dataclass
class GPTConfig(BlockOptions, DeltaOptions, ExpertOptions, AdapterOptions):
    """The shape of the model. Each field with a plain default is a key of train.py."""
    block_size: int = 1024  # tokens in a sequence
    vocab_size: int = field(default=50257)  # tokens that exist, as the dataset says; the table has more rows
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads
    n_kv_head: int = 0  # key/value heads (grouped-query attention); 0 = n_head
    n_embd: int = 768  # width of the residual stream
    head_width: int = 0  # width of a head; 0 = n_embd / n_head
    dropout: float = 0.0  # for pretraining 0 is good, for finetuning try 0.1
    bias: bool = True  # biases in linears and LayerNorms, as GPT-2 has them
    pos: str = 'learned'  # positions: 'learned' or 'rope'
    norm: str = 'layernorm'  # 'layernorm' or 'rmsnorm'
    mlp: str = 'gelu'  # 'gelu', 'gelu_tanh' (GPT-2's own), 'relu2', 'swiglu', 'swiglu_clamped', 'geglu', 'moe'
    qk_norm: bool = False  # normalise queries and keys per head
    tie_weights: bool = True  # the output head shares the token embedding
    softcap: float = 0.0  # tanh cap on the logits; 0 = none
    zero_init: bool = False  # start each block as the identity: projections into the residual stream are zero
    is_gated = property(lambda self: self.mlp_form in GATED)  # whether MLPs and experts have a c_gate

    def __post_init__(self):
        choices = dict(pos=('learned', 'rope'), norm=('layernorm', 'rmsnorm'), **self.CHOICES,
                       mlp=(*PLAIN, *GATED, 'moe'), expert_mlp=(*PLAIN, *GATED))
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f'{key} is {getattr(self, key)!r}: choose one of {", ".join(allowed)}')
        for key in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd'):
            if getattr(self, key) < 1:
                raise ValueError(f'{key} is {getattr(self, key)}: it must be at least 1')
        if not self.head_width and self.n_embd % self.n_head:
            raise ValueError(f'n_embd={self.n_embd} is not divisible by n_head={self.n_head}: '
                             f'n_embd={-(-self.n_embd // self.n_head) * self.n_head} would do')
        self.n_kv_head = self.n_kv_head or self.n_head
        if self.n_kv_head < 0 or self.n_head % self.n_kv_head:
            raise ValueError(f'n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}: '
                             'set n_kv_head to a divisor of n_head')
        self.head_width = self.head_width or self.n_embd // self.n_head
        if self.pos == 'rope' and self.head_width % 2:
            raise ValueError(f'pos=rope rotates pairs, but a head is {self.head_width} wide: '
                             'choose n_embd and n_head so that n_embd / n_head is even')
        self.check_options()
        self.check_delta()
        self.check_adapters()
        if not self.n_hidden:  # a gated MLP's three matrices of 8/3 are as large as two of 4 (Shazeer 2020)
            gated_hidden = -(-8 * self.n_embd // 3 // 64) * 64
            self.n_hidden = gated_hidden if self.is_gated else 4 * self.n_embd
        if self.mlp == 'moe':
            self.check_experts()
            self.expert_hidden = self.expert_hidden or self.n_hidden

    @property
    def padded_vocab_size(self):
        """Rows of the embedding: a multiple of 64, for fast matrix products and for tensor parallelism."""
        return -(-self.vocab_size // 64) * 64

    def check_length(self, length):
        if length > self.block_size:
            raise ValueError(f'{length} positions, but block_size is {self.block_size}')


def build_norm(width, config, place=None, layer=0):
    """The norm of a config, or nothing at a place ('before', 'after') where that block does not have norms."""
    if place and config.norm_place_of(layer) not in (place, 'both'):
        return nn.Identity()
    if config.norm == 'layernorm':
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
    return nn.RMSNorm(width, eps=config.norm_eps)


class DotProductAttention(nn.Module):
    """softmax(q kᵀ / √D) v, causal."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout
        self.first_head = 0  # the number of the first head that this process computes (tp, cp)

    def forward(self, q, k, v, mask=None):
        """q (B, H, T, D), k, v (B, G, S, D) -> (B, H, T, D).

        mask (B or 1, 1, T, S) or (T, S): which keys each query sees; None means causal, with T = S.
        """
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.size(1) != q.size(1),
            dropout_p=self.dropout if self.training else 0.0)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.head_width, self.gate_width = config.head_width, config.gate_width
        width, kv_width = (heads * config.head_width for heads in (config.n_head, config.n_kv_head))
        self.c_q = nn.Linear(config.n_embd, width, bias=config.has_bias('qkv'))
        self.c_k = nn.Linear(config.n_embd, kv_width, bias=config.has_bias('qkv'))
        self.c_v = nn.Linear(config.n_embd, kv_width, bias=config.has_bias('qkv'))
        self.convolution = None
        if config.attention_conv:
            from kilogpt.layers.convolution import Convolution
            self.convolution = Convolution(config.attention_conv, q=width, k=kv_width, v=kv_width)
        self.value_embedding = ValueEmbedding(config) if config.has_value_embedding(layer) else None
        self.gate = build_gate(config, config.n_head, config.gate_width) if config.attention_gate else None
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.has_bias('proj'))
        self.q_norm, self.k_norm, self.q_norm_all, self.k_norm_all = (nn.Identity() for _ in range(4))
        if config.qk_norm and config.qk_norm_over == 'head':
            self.q_norm, self.k_norm = (nn.RMSNorm(config.head_width, eps=config.norm_eps) for _ in range(2))
        elif config.qk_norm:
            self.q_norm_all, self.k_norm_all = (NormOverHeads(size, config.norm_eps) for size in (width, kv_width))
        self.q_scale = config.attention_scale * math.sqrt(config.head_width) or 1.0
        self.dot_product, self.sinks = choose_dot_product(config, DotProductAttention(config.dropout))
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, mask=None, cache=None, tokens=None, positions=None):
        """x (B, T, C) -> (B, T, C).

        rope: one of `rope_tables`. mask: as in DotProductAttention. cache: the CacheView of this layer.
        tokens (B, T): the token ids, which a value embedding looks up. positions (B or 1, T): those of the
        tokens in their documents, which a convolution needs.
        """
        B, T, _ = x.shape
        x = cast_for_linears(x)
        q, k, v = self.c_q(x), self.c_k(x), self.c_v(x)
        if self.convolution is not None:
            q, k, v = self.convolution(q, k, v, positions=positions, cache=cache)
        q = self.q_norm_all(q).view(B, T, -1, self.head_width)  # (B, T, H, D)
        k = self.k_norm_all(k).view(B, T, -1, self.head_width)  # (B, T, G, D)
        v = v.view(B, T, -1, self.head_width)  # (B, T, G, D)
        if self.value_embedding is not None:
            v = self.value_embedding(v, x, tokens)
        if rope is None:
            q, k = self.q_norm(q), self.k_norm(k)
        else:  # norms and rotation in float32
            q = rotate(self.q_norm(at_least_float32(q)), *rope).type_as(v)
            k = rotate(self.k_norm(at_least_float32(k)), *rope).type_as(v)
        if self.q_scale != 1:  # attention itself divides by the root of the head width
            q = q * self.q_scale
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, D) and (B, G, T, D)
        if cache is not None:
            k, v = cache.extend(k, v)  # (B, G, S, D)
        y = self.dot_product(q, k, v, mask=mask, **self.sinks())  # (B, H, T, D)
        y = y.transpose(1, 2)  # (B, T, H, D)
        if self.gate is not None:
            y = y * head_strengths(self.gate, x, self.gate_width)
        return self.resid_dropout(self.c_proj(y.reshape(B, T, -1)))


PLAIN = dict(gelu=F.gelu, gelu_tanh=lambda h: F.gelu(h, approximate='tanh'),
             relu2=lambda h: F.relu(h).square())  # Primer (So et al. 2021)
# Of c_gate's output and that of c_fc (Shazeer 2020; the last one: gpt-oss)
GATED = dict(swiglu=lambda gate, h: F.silu(gate) * h, geglu=lambda gate, h: PLAIN['gelu_tanh'](gate) * h,
             swiglu_clamped=lambda gate, h: F.silu(1.702 * gate.clamp(max=7)) / 1.702 * (h.clamp(-7, 7) + 1))


def activate(form, h, gate):
    """The activation of an MLP of that form. h: the output of c_fc; gate: the output of c_gate, or None."""
    return PLAIN[form](h) if gate is None else GATED[form](gate, h)


class MLP(nn.Module):
    def __init__(self, config, n_hidden):
        super().__init__()
        self.form, self.is_gated = config.mlp_form, config.is_gated
        bias = config.has_bias('mlp')
        self.c_fc = nn.Linear(config.n_embd, n_hidden, bias=bias)
        if self.is_gated:
            self.c_gate = nn.Linear(config.n_embd, n_hidden, bias=bias)
        self.c_proj = nn.Linear(n_hidden, config.n_embd, bias=bias)
        self.dropout = nn.Dropout(config.dropout)
        self.activate = activate

    def forward(self, x):
        x = cast_for_linears(x)
        gate = self.c_gate(x) if self.is_gated else None
        return self.dropout(self.c_proj(self.activate(self.form, self.c_fc(x), gate)))


def build_mixer(config, layer):
    """The part of a block that lets positions read others, by mixer_pattern; all kinds are called as Attention."""
    if config.mixer_of(layer) == 'D':
        from kilogpt.layers.delta import GatedDeltaNet
        return GatedDeltaNet(config)
    if config.kv_latent:
        from kilogpt.layers.latent import LatentAttention
        return LatentAttention(config, DotProductAttention(config.dropout))
    return Attention(config, layer)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = build_norm(config.n_embd, config, 'before', layer)
        self.attn = build_mixer(config, layer)
        self.ln_1_after = build_norm(config.n_embd, config, 'after', layer)
        self.ln_2 = build_norm(config.n_embd, config, 'before', layer)
        self.convolution = None
        if config.mlp_conv:
            from kilogpt.layers.convolution import Convolution
            self.convolution = Convolution(config.mlp_conv, x=config.n_embd)
        self.has_experts = config.has_experts(layer)
        if self.has_experts:
            from kilogpt.layers.mixture import MixtureOfExperts
            self.mlp = MixtureOfExperts(config, MLP, activate)
        else:
            self.mlp = MLP(config, config.n_hidden)
        self.ln_2_after = build_norm(config.n_embd, config, 'after', layer)
        self.is_parallel, self.residual_scale = config.parallel_block, config.residual_scale

    def forward(self, x, rope=None, mask=None, cache=None, is_counted=None, tokens=None, positions=None):
        """x (B, T, C) -> (B, T, C). is_counted: as in Router. The others: as in Attention."""
        inputs = x
        x = x + self.scaled(self.ln_1_after(self.attn(self.ln_1(x), rope, mask, cache, tokens, positions)))
        h = self.ln_2(inputs if self.is_parallel else x)
        if self.convolution is not None:
            h = self.convolution(h, positions=positions, cache=cache, is_of_mlp=True)
        h = self.mlp(h, is_counted) if self.has_experts else self.mlp(h)
        return x + self.scaled(self.ln_2_after(h))

    def scaled(self, x):
        return x if self.residual_scale == 1 else x * self.residual_scale


class GPT(nn.Module):
    # How `kilogpt/parallel/apply.py` may split the model. Names are paths in the model or in a block.
    split_plan = dict(
        # A pipeline cuts between blocks. The first stage has the parts before them, the last the parts after.
        before_blocks=('transformer.wte', 'transformer.wpe', 'transformer.drop'),
        blocks='transformer.h',
        after_blocks=('transformer.ln_f', 'lm_head'),
        colwise=('attn.c_q', 'attn.c_k', 'attn.c_v', 'attn.value_embedding.gate', 'attn.gate', 'attn.output_gate',
                 'attn.write_gate', 'attn.decay_gate', 'mlp.c_fc', 'mlp.c_gate', 'mlp.shared.c_fc',
                 'mlp.shared.c_gate'),  # output features over ranks
        rowwise=('attn.c_proj', 'mlp.c_proj', 'mlp.shared.c_proj', 'mlp.shared_gate'),  # input features, then a sum
        experts='mlp.routed',                          # whole experts over ranks (ep), or each expert (tp)
        checkpointed=('attn', 'mlp.shared', 'mlp.routed.experts'),  # by 'selective', in blocks with experts
        sequence=('ln_1', 'ln_2', 'transformer.ln_f'),  # norms of a rank's positions; linears then read all
        across=('attn.q_norm_all', 'attn.k_norm_all'),  # norms over output features, which stay split
        features=('attn.convolution', 'attn.decay', 'attn.sinks'),  # vectors: output features or heads over ranks
        shared=('attn.c_q_latent', 'attn.q_latent_norm', 'attn.c_kv_latent', 'attn.kv_latent_norm'),  # all heads read
        whole=('convolution',),                        # each rank has all of these, and reads whole sequences
        positions=('transformer.wpe',),                # each rank has the positions of its part
        local=('attn.q_norm', 'attn.k_norm', 'attn.norm', 'ln_1_after', 'ln_2_after'),  # of values that stay split
        embedding=('transformer.wte',), head=('lm_head',),  # vocabulary rows over ranks
        tables=('attn.value_embedding.table',),        # embeddings in blocks: features over ranks
    )
    # Functions, and modules without parameters, that a layout or a device may replace by another form.
    replaceable = dict(
        attention=('attn.dot_product',),               # needs the whole sequence, of any heads
        recurrence=('attn.delta_rule',),               # likewise
        positions_before=('attn.convolution.positions_before', 'convolution.positions_before'),  # of another rank
        factors=('attn.convolution.factors', 'convolution.factors', 'attn.decay.factors', 'attn.sinks.factors'),
        to_heads=('attn.to_heads',),                   # what the heads of all ranks read
        mask=('build_mask',),                          # of what queries see, in the form that attention takes
        activation=('mlp.activate', 'mlp.shared.activate'),
        loss=('loss',),
        loss_of_hidden=('loss.of_hidden',),            # what is compiled of the loss
        whole_rows=('preferences.whole_rows',),        # gathers the losses of a row's tokens
        cross_entropy=('loss.cross_entropy',),
        dispatch=('mlp.routed.dispatch',),             # sends tokens to the ranks of their experts
        products=('mlp.routed.experts.products',),
        matrices=('mlp.routed.experts.matrices', 'mlp.routed.experts.biases'),  # of all experts, or a rank's part
        router_matrix=('mlp.routed.router.matrix', 'mlp.routed.router.logit_biases'),
    )

    def __init__(self, config, seed=1337):
        """Build the model on torch's default device. seed: of the weights; None leaves them undefined."""
        super().__init__()
        self.config = config
        with torch.device('meta'):  # shapes alone, since initial_value gives the values
            self.transformer = nn.ModuleDict(dict(
                wte=build_embedding(config.padded_vocab_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                # Blocks keep their names in a pipeline stage, which has only some of them.
                h=nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layer)}),
                ln_f=build_norm(config.n_embd, config),
            ))
            if config.pos == 'learned':
                self.transformer['wpe'] = build_embedding(config.block_size, config.n_embd)
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
            if config.lora_rank:
                from kilogpt.layers.lora import add_adapters
                add_adapters(self, self.transformer.h.values(), config)
        self._apply(lambda x: torch.empty(x.shape, dtype=x.dtype))  # to_empty imports sympy, which takes 0.3 s
        self.loss = Loss(config)
        self.preferences = None  # a PreferenceLoss or RewardLoss, which take the losses of single tokens
        self.build_mask = build_mask
        self.tied = {'lm_head.weight': 'transformer.wte.weight'} if config.tie_weights else {}
        self.sums = {}  # {name: sum over tokens} of what is logged beside the loss, as a mean per token
        # Context parallelism: the start of this rank's part of each sequence, and the number of parts.
        self.first_position, self.n_sequence_parts = 0, 1
        self.tie()
        if seed is not None:
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    parameter.copy_(self.initial_value(name, parameter.shape, seed))

    def tie(self):
        """Let the head share the embedding's weight if the config says so and this stage has both."""
        if self.tied and self.transformer.wte is not None and self.lm_head is not None:
            self.lm_head.weight = self.transformer.wte.weight

    def initial_value(self, name, shape, seed, rows=slice(None)):
        """The `rows` of a parameter's first value, as in GPT-2, by seed, name and row alone: float32, on the CPU."""
        start, stop, _ = rows.indices(shape[0])
        if len(shape) == 1:  # norms start at 1, biases at 0
            if 'attn.decay.' in name:
                from kilogpt.layers.delta import initial_decay
                return initial_decay(name, seed, shape, rows)
            return torch.full((stop - start,), float(name.endswith('weight')))
        std = 0.02
        if 'lora_' in name:
            from kilogpt.layers.lora import initial_std
            std = initial_std(name, shape)
        if 'attn.value_embedding' in name or 'attn.gate' in name or name.endswith('_bias'):  # as without these
            std = 0.0
        if 'c_proj' in name and 'lora_' not in name:  # scaled by residual layers (Radford et al. 2019, 2.3)
            std = 0.0 if self.config.zero_init else std / math.sqrt(2 * self.config.n_layer)
        if std == 0:  # without drawing a number for each of millions of zeros
            return torch.zeros(stop - start, *shape[1:], device='cpu')
        return draw_normal(std, name, seed, shape, rows)

    def forward(self, idx, targets=None, starts=None, pairs=None, reference=None, cache=None, tokens=None):
        """idx (B, T) token ids -> logits (B, T, vocab_size).

        With targets (B, T; -1 is ignored), the result is the sum of their cross-entropies in nats. The caller
        divides by the number of targets in the global batch, which only the caller knows.
        starts (B, T): the position in its row at which each token's document begins. Attention and positions
        restart there, so that a row gives what its documents give alone. None: a row is one document.
        pairs, reference: as in PreferenceLoss or RewardLoss, whose loss is then the result.
        With a cache (new_cache), each row of idx continues the text in its row of the cache, or in one of a
        Cache.part; the logits (B, 1, vocab_size) are those of the last position. Targets go with a cache too.
        A pipeline stage without the embedding takes x (B, T, C) for idx, and the ids as `tokens` (B, T); one
        without the head returns x.
        Under context parallelism idx and targets are this rank's part, and the others are of whole sequences.
        """
        # Sequence parallelism splits x between pipeline stages, but never the targets.
        T = idx.size(1) if targets is None else targets.size(1)
        if cache is None:
            length = T * self.n_sequence_parts
            self.config.check_length(length)
            positions = torch.arange(length, device=idx.device)[None]
            views, masks = dict.fromkeys(self.transformer.h), {}
            for window in self.config.windows_of(map(int, views)):  # once for all blocks
                first = first_seen(length, window, starts, idx.device)
                masks[window] = None if first is None else self.build_mask(first)
        else:
            positions, lengths, masks, views = cache.next_step(len(idx), T, self.config, starts)
            length = lengths[:, None, None, None]
        positions = positions if starts is None else positions - starts  # (B or 1, positions)
        begins = None if starts is None and cache is None else positions == 0
        positions = positions[:, self.first_position:self.first_position + T]
        x, tokens = idx, idx if tokens is None else tokens
        if self.transformer.wte is not None:
            x = self.transformer.wte(idx)  # (B, T, C)
            if self.config.embedding_scale != 1:
                x = x * self.config.embedding_scale
            if self.config.pos == 'learned':
                x = x + self.transformer.wpe(positions)
            x = self.transformer.drop(x)
        rope = rope_tables(self.config, positions, length)
        counts = targets is not None and self.config.mlp == 'moe'
        is_counted = targets.view(*targets.shape[:2], -1)[..., 0].flatten() >= 0 if counts else None
        for name, block in self.transformer.h.items():
            mask = begins if self.config.mixer_of(int(name)) == 'D' else masks[self.config.window_of(int(name))]
            rope_of_block = rope.get(self.config.rope_of(int(name)))
            x = block(x, rope_of_block, mask, views[name], is_counted, tokens, positions)
        if cache is not None:
            cache.advance(lengths)
            x = x if targets is not None else cache.last_of(x)
        if self.lm_head is None:
            return x
        x = self.transformer.ln_f(x)
        if targets is not None and self.preferences is not None:
            return self.preferences(self.loss(x, self.lm_head, targets), pairs, reference)
        if targets is not None:
            return self.loss(x, self.lm_head, targets)
        return cap(self.lm_head(x), self.config)[..., :self.config.vocab_size]

    def new_cache(self, batch_size, length=math.inf):
        """An empty Cache for `forward`, with batch_size rows of min(length, block_size) tokens."""
        from kilogpt.layers.cache import Cache
        return Cache(self.config, batch_size, min(length, self.config.block_size), self.transformer.wte.weight)

    def num_params(self):
        """Parameters, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())


def cap(logits, config):
    """Logits times logit_scale, and within ±softcap by a tanh, if the config has these."""
    if config.logit_scale != 1:
        logits = logits * config.logit_scale
    return torch.tanh(at_least_float32(logits) / config.softcap) * config.softcap if config.softcap else logits


MAX_LOGITS = 2 ** 28  # elements of logits at a time: 0.5 GB in 16 bits


class Loss(nn.Module):
    """The cross-entropy in nats, summed over the valid targets, in float32. Many logits come in parts."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.cross_entropy = cross_entropy
        self.distillation = None  # a Distillation, for targets (B, T, 2 k + 2) that have a teacher's numbers
        self.is_summed = True  # False: the result is the loss of each target (N,), 0 where it is ignored
        self.max_logits = math.inf  # what a device sets if it prefers fewer than MAX_LOGITS

    def forward(self, x, head, targets):
        """x (B, T, C), head: the linear that gives logits, targets (B, T; -1 is ignored)."""
        x, weight, targets = x.flatten(0, 1), head.weight, targets.flatten(0, 1)
        size = self.part_size(x.size(0), weight.size(0))
        if size == x.size(0):
            return self.of_hidden(x, weight, targets)
        parts = zip(x.split(size), targets.split(size))
        if not self.is_summed:  # the backward pass computes the logits of each part again
            return torch.cat([checkpoint(self.of_hidden, part, weight, y, use_reentrant=False)
                              for part, y in parts])
        if torch.is_grad_enabled():
            from kilogpt.layers.loss_in_parts import LossInParts
            return LossInParts.apply(x, weight, targets, self.of_hidden, size)
        return sum(self.of_hidden(part, weight, y) for part, y in parts)

    def part_size(self, N, V, max_logits=math.inf):
        """How many of N rows of V logits to compute at a time: all, or a divisor of N if one is near."""
        parts = max(1, -(-N * V // min(MAX_LOGITS, self.max_logits, max_logits)))
        divisors = (number for number in range(parts, 2 * parts) if N % number == 0)  # equal parts compile once
        return -(-N // next(divisors, parts))

    def of_hidden(self, x, weight, targets):
        """The loss of x (N, C) through the head's weight (V, C) for targets (N,)."""
        return self.of_logits(F.linear(x, weight), targets)

    def of_logits(self, logits, targets):
        """The loss of logits (N, V) for targets (N,). V includes rows of padding, which are not tokens."""
        loss = self.cross_entropy if targets.dim() == 1 else self.distillation
        return loss(cap(logits, self.config), targets, self.config.vocab_size)


def cross_entropy(logits, targets, vocab_size, reduction='sum'):
    """The sum (or with 'none' each) of the losses of logits (N, :vocab_size) for targets (N; -1 is ignored)."""
    logits = at_least_float32(logits)
    if logits.size(-1) > vocab_size:
        is_padding = torch.arange(logits.size(-1), device=logits.device) >= vocab_size
        logits = logits.masked_fill(is_padding, -torch.inf)
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)
