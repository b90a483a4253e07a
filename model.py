"""The GPT, all of it. Knows nothing of devices, processes, files or config keys.

The defaults are GPT-2 (Radford et al. 2019) to the letter, under its own parameter names; the modern blocks (RoPE, RMSNorm,
ReLU², SwiGLU, grouped-query heads, QK-norm, untied head, logit softcap) are options of the same few classes.
Shapes in comments: B batch, T positions, C n_embd, H heads, D head width, V vocabulary rows.
"""
import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50257    # tokens that exist; the table has padded_vocab_size rows
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0         # key/value heads (grouped-query attention); 0 = n_head
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True          # biases in linears and LayerNorms, as GPT-2 has them
    pos: str = 'learned'       # 'learned' or 'rope'
    norm: str = 'layernorm'    # 'layernorm' or 'rmsnorm'
    mlp: str = 'gelu'          # 'gelu', 'gelu_tanh' (GPT-2's own weights), 'relu2' or 'swiglu'
    qk_norm: bool = False      # RMSNorm on queries and keys, per head
    tie_weights: bool = True   # the output head is the token embedding
    softcap: float = 0.0       # tanh cap on the logits; 0 = none
    zero_init: bool = False    # projections into the residual stream start at zero: each block as the identity
    # what weights trained elsewhere may have otherwise; no keys of train.py
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    n_hidden: int = 0          # the MLP's width; 0 = 4 * n_embd, for SwiGLU 8/3 of it in 64s
    head_width: int = 0        # of a head; 0 = n_embd / n_head

    def __post_init__(self):
        choices = dict(pos=('learned', 'rope'), norm=('layernorm', 'rmsnorm'),
                       mlp=('gelu', 'gelu_tanh', 'relu2', 'swiglu'))
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
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout is {self.dropout}: it must be in [0, 1)')
        if self.softcap < 0:
            raise ValueError(f'softcap is {self.softcap}: it must be positive, or 0 for none')
        # SwiGLU has three matrices; 8/3 of the width keeps the parameters of the other forms (Shazeer 2020)
        self.n_hidden = self.n_hidden or (-(-8 * self.n_embd // 3 // 64) * 64 if self.mlp == 'swiglu' else 4 * self.n_embd)

    @property
    def padded_vocab_size(self):
        """Rows of the embedding: a multiple of 64, for the matmul's sake and so that tensor parallelism divides it."""
        return -(-self.vocab_size // 64) * 64


def build_norm(width, config):
    eps = config.norm_eps
    return nn.LayerNorm(width, eps=eps, bias=config.bias) if config.norm == 'layernorm' else nn.RMSNorm(width, eps=eps)


def rotate(x, cos, sin):
    """Rotary position embedding (Su et al. 2021) of x (B, H, T, D) in float32; cos, sin (T, D). Pairs are (i, i + D/2)."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


def cast_once(x):
    """x as the linears take it under autocast, where each of them would cast it anew."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


class Dropout(nn.Dropout):
    """PyTorch's, but on a CPU with masks by `kept`."""

    def forward(self, x):
        if not (self.training and self.p) or x.device.type != 'cpu' or hasattr(x, 'placements'):
            return super().forward(x)
        # of x rather than of its shape: the compiler makes one call of equal ones
        return x * kept(x.detach(), self.p).type_as(x) * (1 / (1 - self.p))


@torch.library.custom_op('kilogpt::kept', mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def kept(x: torch.Tensor, p: float) -> torch.Tensor:
    """1 where dropout keeps an element of x, else 0; of 16 random bits each. PyTorch's own draw takes a CPU ten times as long."""
    generator = np.random.Generator(np.random.SFC64(int(torch.randint(2 ** 63 - 1, ()))))
    bits = generator.integers(2 ** 64, size=-(-x.numel() // 4), dtype=np.uint64).view(np.uint16)[:x.numel()]
    return torch.from_numpy((bits >= round(p * 2 ** 16)).view(np.uint8)).view(x.shape)


@kept.register_fake
def _(x, p):
    return torch.empty(x.shape, dtype=torch.uint8)


PLAIN_ATTENTION = 1024  # positions up to which two products and a softmax beat a CPU's fused attention in bfloat16 or with dropout, and fit in memory


class DotProductAttention(nn.Module):
    """softmax(q kᵀ / √D) v, causal. No parameters: a module so that context parallelism can trade sequence for heads around it."""

    def __init__(self, config):
        super().__init__()
        self.dropout = Dropout(config.dropout)

    def forward(self, q, k, v, mask=None):  # q (B, H, T, D), k and v (B, n_kv_head, S, D); without a mask (T, S) of what q sees, T = S
        T, S = q.size(2), k.size(2)
        dropout = self.dropout.p if self.training else 0.0
        if q.device.type == 'cpu' and (dropout or q.dtype == torch.bfloat16) and mask is None and T == S <= PLAIN_ATTENTION:
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
            future = q.new_full((T, T), -torch.inf).triu(1)
            scores = torch.baddbmm(future, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=1 / math.sqrt(q.size(-1)))
            return (self.dropout(scores.softmax(dim=-1)) @ v.flatten(0, 1)).view_as(q)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.size(1) != q.size(1),
                                              dropout_p=dropout)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        width, kv_width = config.n_head * config.head_width, config.n_kv_head * config.head_width
        self.c_q = nn.Linear(config.n_embd, width, bias=config.bias)
        self.c_k = nn.Linear(config.n_embd, kv_width, bias=config.bias)
        self.c_v = nn.Linear(config.n_embd, kv_width, bias=config.bias)
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias)
        self.q_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.dot_product = DotProductAttention(config)
        self.resid_dropout = Dropout(config.dropout)

    def forward(self, x, rope=None, cache=None):  # x (B, T, C)
        B, T, _ = x.shape
        x = cast_once(x)
        q, k, v = (y.view(B, T, -1, self.config.head_width).transpose(1, 2) for y in (self.c_q(x), self.c_k(x), self.c_v(x)))
        if rope is not None:  # in float32, and what comes before it
            q, k = (rotate(norm(y.float()), *rope).type_as(v) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        else:
            q, k = self.q_norm(q), self.k_norm(k)
        mask = None
        if cache is not None:
            keys, values, positions, mask = cache
            keys[:, :, positions], values[:, :, positions] = k.type_as(keys), v.type_as(values)  # one row's go to all
            if mask is not None:
                k, v = keys[:B, :, :mask.size(1)], values[:B, :, :mask.size(1)]
        y = self.dot_product(q, k, v, mask=mask)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, -1)))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kind = config.mlp
        self.c_fc = nn.Linear(config.n_embd, config.n_hidden, bias=config.bias)
        if self.kind == 'swiglu':
            self.c_gate = nn.Linear(config.n_embd, config.n_hidden, bias=config.bias)
        self.c_proj = nn.Linear(config.n_hidden, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x):
        x = cast_once(x)
        h = self.c_fc(x)
        if self.kind == 'swiglu':
            h = F.silu(self.c_gate(x)) * h
        elif self.kind == 'relu2':  # Primer (So et al. 2021)
            h = F.relu(h).square()
        else:
            h = F.gelu(h, approximate='tanh' if self.kind == 'gelu_tanh' else 'none')
        return self.dropout(self.c_proj(h))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = build_norm(config.n_embd, config)
        self.attn = Attention(config)
        self.ln_2 = build_norm(config.n_embd, config)
        self.mlp = MLP(config)

    def forward(self, x, rope=None, cache=None):
        x = x + self.attn(self.ln_1(x), rope, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    # How the model may be split, as plain data that parallel.py carries out: names within a block unless a path is given.
    split_plan = dict(
        # a pipeline cuts between any two blocks; all before them is the first stage's, all after them the last one's
        first=('transformer.wte', 'transformer.wpe', 'transformer.drop'), blocks='transformer.h', last=('transformer.ln_f', 'lm_head'),
        colwise=('attn.c_q', 'attn.c_k', 'attn.c_v', 'mlp.c_fc', 'mlp.c_gate'),  # output features (heads) over ranks
        rowwise=('attn.c_proj', 'mlp.c_proj'),                                    # input features over ranks, then a sum
        sequence=('ln_1', 'ln_2', 'transformer.ln_f'),                            # each rank its part of the sequence
        positions=('transformer.wpe',),                                           # the same, of the positions
        heads=('attn.q_norm', 'attn.k_norm'),                                     # each rank its heads
        embedding=('transformer.wte',), head=('lm_head',),                        # vocabulary rows over ranks
        exchange=('attn.dot_product',),                                           # needs the whole sequence, of some heads
    )

    def __init__(self, config, seed=1337):
        """seed: of the weights; None leaves them unset, for a checkpoint to fill. Built on torch's default device."""
        super().__init__()
        self.config = config
        with torch.device('meta'):  # shapes only: no time is spent on values that init_weights replaces
            self.transformer = nn.ModuleDict(dict(
                wte=nn.Embedding(config.padded_vocab_size, config.n_embd),
                drop=Dropout(config.dropout),
                h=nn.ModuleDict({str(i): Block(config) for i in range(config.n_layer)}),  # names stay when a pipeline takes some
                ln_f=build_norm(config.n_embd, config),
            ))
            if config.pos == 'learned':
                self.transformer['wpe'] = nn.Embedding(config.block_size, config.n_embd)
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.to_empty(device=torch.get_default_device())
        self.tied = {'lm_head.weight': 'transformer.wte.weight'} if config.tie_weights else {}
        self.first_position = 0  # of the sequences seen here, where processes share them
        self.loss_in_parts = True  # where there are too many logits
        self.tie()
        if seed is not None:
            self.init_weights(seed)

    def tie(self):
        if self.tied and self.transformer.wte is not None and self.lm_head is not None:
            self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def init_weights(self, seed):
        """GPT-2's initialisation, each parameter from a generator of its own that depends on (seed, name) alone."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, parameter.shape, seed))

    def initial_value(self, name, shape, seed):
        """The value parameter `name` starts from: a float32 CPU tensor of that shape."""
        if name.endswith('bias'):
            return torch.zeros(shape)
        if len(shape) == 1:  # a norm's weight
            return torch.ones(shape)
        if self.config.zero_init and name.endswith('c_proj.weight'):
            return torch.zeros(shape)
        digest = hashlib.blake2b(f'{seed} {name}'.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, 'little') >> 1)
        # residual projections are scaled down by the number of residual layers (Radford et al. 2019, 2.3)
        std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith('c_proj.weight') else 0.02
        return torch.empty(shape, device='cpu').normal_(0.0, std, generator=generator)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) token ids -> logits (B, T, vocab_size).

        With targets (B, T; -1 is left out): the cross-entropy in nats, summed over the valid targets. The caller divides by
        their number in the global batch, which only the caller knows. With a cache (new_cache), idx continues what it holds, and
        the logits are of the last position alone, (B, 1, vocab_size). A stage of a pipeline lacks parts: without the embedding idx is the
        stage before's x (B, T, C), without the head x returns.
        """
        T = (idx if targets is None else targets).size(1)
        if cache is None:
            start, end = self.first_position, self.first_position + T
        else:  # a compiled step is the same at each position: it reads what is not filled too, and the mask leaves that out
            start, end = cache.length, self.config.block_size if torch.compiler.is_compiling() else int(cache.length) + T
        if end > self.config.block_size:
            raise ValueError(f'{end} positions, but block_size is {self.config.block_size}')
        positions = start + torch.arange(T, device=idx.device)
        mask = torch.arange(end, device=idx.device) <= positions[:, None] if T < end and cache is not None else None
        x = idx
        if self.transformer.wte is not None:
            x = self.transformer.wte(idx)
            if self.config.pos == 'learned':
                x = x + self.transformer.wpe(positions)
            x = self.transformer.drop(x)
        rope = self.rope(positions) if self.config.pos == 'rope' else None
        for i, block in self.transformer.h.items():
            x = block(x, rope, None if cache is None else (*cache.layers[int(i)], positions, mask))
        if cache is not None:
            cache.length += T
            x = x[:, -1:]
        if self.lm_head is None:
            return x
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.capped(self.lm_head(x))[..., :self.config.vocab_size]
        weight, targets = self.lm_head.weight, targets.flatten()
        if hasattr(weight, 'placements'):  # tensor parallelism splits the logits already
            return self.cross_entropy(self.lm_head(x).flatten(0, 1), targets)
        arguments = x.flatten(0, 1), weight, targets
        return sum_of_losses(self.loss, *arguments) if self.loss_in_parts else self.loss(*arguments)

    def capped(self, logits):
        return self.config.softcap * torch.tanh(logits.float() / self.config.softcap) if self.config.softcap else logits

    def cross_entropy(self, logits, targets):
        """The sum over targets (N,) of logits (N, V)'s cross-entropy in nats, in float32; padding rows are no tokens."""
        logits = self.capped(logits).float()
        if logits.size(-1) > self.config.vocab_size:
            logits = logits.masked_fill(torch.arange(logits.size(-1), device=logits.device) >= self.config.vocab_size, -torch.inf)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum')

    def loss(self, x, weight, targets):
        return self.cross_entropy(F.linear(x, weight), targets)

    def rope(self, positions):
        """Cosines and signed sines (T, D) of the rotary embedding's angles at positions (T,), for `rotate`."""
        D = self.config.head_width
        frequency = self.config.rope_theta ** (-torch.arange(0, D, 2, device=positions.device) / D)
        angle = positions[:, None] * frequency
        return angle.cos().repeat(1, 2), torch.cat((-angle.sin(), angle.sin()), dim=-1)

    def new_cache(self, batch_size):
        """An empty Cache for `forward`, of batch_size rows."""
        shape = batch_size, self.config.n_kv_head, self.config.block_size, self.config.head_width
        return Cache(self.config.n_layer, shape, self.transformer.wte.weight)

    def num_params(self):
        """Parameters, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T):
        """Floating-point operations of forward and backward per token, in sequences of T, counted from the structure.

        Each matrix element takes one multiply and one add forward and twice that backward: 6. Attention adds, per layer, 6
        for each of the two T × H D products, halved because a causal token sees half of the sequence on average. (PaLM,
        Chowdhery et al. 2022, B, and nanoGPT do not halve, and so report a somewhat higher MFU.)
        """
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * matrices + 6 * self.config.n_layer * T * self.config.n_head * self.config.head_width

    @torch.no_grad()
    def generate_tokens(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop_token=None, generator=None,
                        cache=None):
        """Continue idx (B, T): yields the next token of each row, (B,), max_new_tokens times or until all rows stopped.

        temperature 0 takes the likeliest token; top_k keeps the k likeliest; top_p the fewest that reach that probability
        (nucleus sampling, Holtzman et al. 2020). A row that has drawn stop_token repeats it. Past block_size the model
        sees the last block_size tokens, read anew for each token, since their positions shift.
        cache: of new_cache(B), to be filled anew. With one of more rows, an idx (1, T) is read once and continued in all of them.
        """
        cache = cache or self.new_cache(idx.size(0))
        rows = cache.layers[0][0].size(0)
        stopped = torch.zeros(rows, dtype=torch.bool, device=idx.device)
        filled, window = self.config.block_size, idx[:, -self.config.block_size:]
        for _ in range(max_new_tokens):
            if filled == self.config.block_size:
                cache.length.zero_()
                logits, filled = self.forward(window, cache=cache), window.size(1)
            else:  # the step that compile() compiles, always of one shape
                logits, filled = self(token[:, None], cache=cache), filled + 1
            token = _draw(logits[:, -1].float().expand(rows, -1), temperature, top_k, top_p, generator)
            if stop_token is not None:
                token = token.masked_fill(stopped, stop_token)
                stopped |= token == stop_token
            yield token
            if stop_token is not None and stopped.all():
                return
            window = torch.cat((window.expand(rows, -1), token[:, None]), dim=1)[:, -self.config.block_size:]

    def generate(self, idx, max_new_tokens, **sampling):
        """idx (B, T) with up to max_new_tokens tokens appended; the arguments of generate_tokens."""
        return torch.cat((idx, *(token[:, None] for token in self.generate_tokens(idx, max_new_tokens, **sampling))), dim=1)


LOGITS = 2 ** 27  # elements of the logits that exist at a time: 0.5 GB in float32


def sum_of_losses(loss, x, weight, targets):
    """loss(x, weight, targets) of x (N, C), weight (V, C), targets (N,), taken from parts of the N if there are too many logits."""
    parts = -(-x.size(0) * weight.size(0) // LOGITS)
    if parts <= 1:
        return loss(x, weight, targets)
    # of one size where that is near: what is compiled is compiled for a size
    size = next((x.size(0) // n for n in range(parts, 2 * parts) if x.size(0) % n == 0), -(-x.size(0) // parts))
    if torch.is_grad_enabled():
        return SumOfLosses.apply(x, weight, targets, loss, size)
    return sum(loss(part, weight, its_targets) for part, its_targets in zip(x.split(size), targets.split(size)))


class SumOfLosses(torch.autograd.Function):
    """Of parts of `size` rows. Their gradients are made at once, in the forward pass, so that no logits need be kept or made again."""

    @staticmethod
    def forward(ctx, x, weight, targets, loss, size):
        total, grad_x, grad_weight = 0, [], torch.zeros_like(weight, dtype=torch.float32)
        for part, its_targets in zip(x.split(size), targets.split(size)):
            inputs = part.detach().requires_grad_(), weight.detach().requires_grad_()
            with torch.enable_grad():
                its_loss = loss(*inputs, its_targets)
            its_grad_x, its_grad_weight = torch.autograd.grad(its_loss, inputs)
            grad_x.append(its_grad_x)
            grad_weight += its_grad_weight
            total = total + its_loss.detach()
        ctx.save_for_backward(torch.cat(grad_x), grad_weight.type_as(weight))
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight = ctx.saved_tensors
        return grad * grad_x, grad * grad_weight, None, None, None


def _draw(logits, temperature, top_k, top_p, generator):
    """A token (B,) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    tokens, nucleus = None, top_p and top_p < 1
    if top_k or nucleus:  # the likeliest first, and none but those: each further step is as much shorter
        logits, tokens = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
    probabilities = (logits / temperature).softmax(dim=-1)
    if nucleus:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)  # the likeliest always stays
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return (drawn if tokens is None else tokens.gather(-1, drawn))[:, 0]


class Cache:
    """What attention has seen so far: per layer keys and values (B, n_kv_head, block_size, D), of which `length` positions are filled.

    Nothing of it grows or moves, and length is a tensor: the step from one token to the next is the same work on the same memory
    each time, which compiles once and makes one CUDA graph.
    """

    def __init__(self, n_layer, shape, like):
        # zeros: what a mask leaves out is still multiplied, by 0, and must be no NaN
        self.layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(n_layer)]
        self.length = torch.zeros((), dtype=torch.long, device=like.device)
