"""The keys of the model for parts that families after GPT-2 have, for experts, and for adapters.

`GPTConfig` in model.py has all of these fields, and train.py has them as keys. `kilogpt/weights/families.py` sets
them for the weights of each family. Any of them may be combined.
"""
from dataclasses import dataclass

from kilogpt.layers.rope import check_scaling

# What lora_targets may name besides single linears: groups of linears of a block.
GROUPS = dict(attention=('attn.c_q', 'attn.c_k', 'attn.c_v', 'attn.c_proj'),
              mlp=('mlp.c_fc', 'mlp.c_gate', 'mlp.c_proj'))
GROUPS['all'] = GROUPS['attention'] + GROUPS['mlp']
ADAPTER_KEYS = ('lora_rank', 'lora_alpha', 'lora_targets', 'lora_dropout', 'lora_rank_stabilised', 'lora_base_dtype')
BASE_DTYPES = ('float32', 'bfloat16', 'int8')


@dataclass
class BlockOptions:
    """Parts that fewer models have (docs/models.md)."""
    n_hidden: int = 0  # width of a dense MLP; 0 = 4 * n_embd (SwiGLU, GeGLU: 8/3 * n_embd, up to the next 64)
    norm_eps: float = 1e-5  # added to the mean square, or the variance, in each norm
    norm_place: str = 'before'  # 'before' attention and MLP, 'after' them (OLMo 2), or 'both' (Gemma 2)
    parallel_block: bool = False  # attention and MLP read the same input (GPT-NeoX)
    bias_of: str = ''  # linears with a bias, of qkv+proj+mlp (qkv: Qwen 2); '' = all or none, as bias says
    qk_norm_over: str = 'head'  # with qk_norm, the norm is over each 'head', or over 'all' (OLMo 2)
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_share: float = 1.0  # share of a head's features that are rotated; the rest have no position
    rope_scaling: str = ''  # longer contexts: 'linear factor=4', or dynamic, yarn, llama3 (docs/models.md)
    rope_pattern: str = 'R'  # for block after block, repeated: R = rotated, N = no positions (SmolLM3: RRRN)
    window: int = 0  # positions that a query of a windowed block sees, its own included; 0 = all before it
    window_pattern: str = 'S'  # with window, for block after block, repeated: S = windowed, L = not
    rope_theta_window: float = 0.0  # rope_theta of windowed blocks, without rope_scaling; 0 = as others
    attention_scale: float = 0.0  # factor of queries · keys; 0 = 1 / sqrt(head_width)
    attention_softcap: float = 0.0  # tanh cap on queries · keys (Gemma 2); 0 = none
    attention_sinks: bool = False  # each head has a learned score that takes attention and gives nothing (gpt-oss)
    attention_gate: bool = False  # a gate for what each head has attended to, from the block's input
    attention_gate_over: str = 'head'  # a gate for each 'head', from 0 to 2, or 'feature', from 0 to 1 (Qwen3-Next)
    attention_conv: int = 0  # width of a causal convolution of queries, keys and values (Primer: 3); 0 = none
    mlp_conv: int = 0  # width of a causal convolution before the MLP, or the experts; 0 = none
    value_pattern: str = 'N'  # for block after block, repeated: V = values get a vector of the token, N = not
    kv_latent: int = 0  # keys and values come from a vector of this width for each position (MLA); 0 = they do not
    q_latent: int = 0  # with kv_latent, so do queries, from another vector; 0 = they do not
    rope_width: int = 0  # with kv_latent, rotated features of a head, of a key that all share; 0 = half of the head
    value_width: int = 0  # with kv_latent, width of a head's values; 0 = head_width
    embedding_scale: float = 1.0  # factor of the token embeddings, which does not apply to a tied head
    mixer_pattern: str = 'A'  # for block after block, repeated: A = attention, D = Gated DeltaNet (hybrids: DDDA)
    residual_scale: float = 1.0  # factor of what attention and MLP add to the residual stream
    logit_scale: float = 1.0  # factor of the logits, before softcap

    CONVOLUTIONS = 'attention_conv', 'mlp_conv', 'delta_conv'  # keys whose parts read positions just before each

    def check_options(self):
        """Raise ValueError, with the key to change, if no model can have these options."""
        choices = dict(norm_place=('before', 'after', 'both'), qk_norm_over=('head', 'all'),
                       attention_gate_over=('head', 'feature'))
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f'{key} is {getattr(self, key)!r}: choose one of {", ".join(allowed)}')
        for key in ('head_width', 'n_hidden', 'norm_eps', 'window', 'rope_theta_window', 'attention_scale',
                    'attention_softcap', 'attention_conv', 'mlp_conv', 'softcap', 'kv_latent', 'q_latent', 'rope_width',
                    'value_width'):
            if getattr(self, key) < 0:
                raise ValueError(f'{key} is {getattr(self, key)}: it cannot be negative')
        for key in ('attention_conv', 'mlp_conv'):
            if getattr(self, key) == 1:
                raise ValueError(f'{key} is 1, which reads no other position: set it to 0, or to 2 or more')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout is {self.dropout}: it must be in [0, 1)')
        for key in ('rope_theta', 'embedding_scale', 'residual_scale', 'logit_scale'):
            if not getattr(self, key) > 0:
                raise ValueError(f'{key} is {getattr(self, key)}: it must be above 0')
        if self.bias_of and not set(self.bias_of.split('+')) <= {'qkv', 'proj', 'mlp'}:
            raise ValueError(f"bias_of is {self.bias_of!r}: join some of qkv, proj, mlp by +, or set '' to "
                             'follow bias')
        for key, letters in (('rope_pattern', 'RN'), ('window_pattern', 'SL'), ('value_pattern', 'VN'),
                             ('mixer_pattern', 'AD')):
            if not getattr(self, key) or set(getattr(self, key)) - set(letters):
                raise ValueError(f'{key} is {getattr(self, key)!r}: it must consist of the letters '
                                 f'{letters[0]} and {letters[1]}')
        self.check_latent()
        if self.pos != 'rope':
            for key in ('rope_scaling', 'rope_theta_window'):
                if getattr(self, key):
                    raise ValueError(f'{key} is {getattr(self, key)!r}, but pos is {self.pos!r}: '
                                     'set pos to rope')
        elif not 0 < self.rope_share <= 1 or self.rotary_width % 2 or not self.rotary_width:
            raise ValueError(f'rope_share={self.rope_share} rotates {self.rotary_width} of the '
                             f'{self.head_width} features of a head: it must be a positive even number')
        check_scaling(self.rope_scaling)

    def check_latent(self):
        """Raise ValueError unless kv_latent goes with the other keys; sets the widths that are 0."""
        if not self.kv_latent:
            for key in ('q_latent', 'rope_width', 'value_width'):
                if getattr(self, key):
                    raise ValueError(f'{key} is {getattr(self, key)}, but kv_latent is 0: set it too')
            return
        self.rope_width = self.rope_width or self.head_width // 4 * 2
        self.value_width = self.value_width or self.head_width
        needed = dict(pos='rope', n_kv_head=self.n_head, rope_share=1.0, qk_norm=False, attention_gate=False,
                      attention_conv=0, value_pattern='N')
        for key, value in needed.items():
            if getattr(self, key) != value:
                raise ValueError(f'{key} is {getattr(self, key)!r}, which does not go with kv_latent='
                                 f'{self.kv_latent}: set {key} to {value!r}, or kv_latent to 0')
        if self.rope_width % 2 or not 0 < self.rope_width < self.head_width:
            raise ValueError(f'rope_width is {self.rope_width}: it must be even, and less than head_width='
                             f'{self.head_width}')
        if self.value_width > self.head_width:
            raise ValueError(f'value_width is {self.value_width}: it must be at most head_width={self.head_width}')

    def mixer_of(self, layer):
        """What block number `layer` mixes positions by: 'A' or 'D', as in mixer_pattern."""
        return self.mixer_pattern[layer % len(self.mixer_pattern)]

    @property
    def rotary_width(self):
        """The number of features of a head that are rotated, the first ones."""
        return self.rope_width or int(self.head_width * self.rope_share)

    @property
    def gate_width(self):
        """How many gates a head has in attention, as `value_embedding.build_gate` takes it; 0 = one for all features."""
        return self.head_width if self.attention_gate_over == 'feature' else 0

    def n_layer_of(self, mixer):
        """How many blocks mix positions by that letter of mixer_pattern."""
        return sum(self.mixer_of(layer) == mixer for layer in range(self.n_layer))

    def norm_place_of(self, layer):
        """norm_place, or delta_norm_place in blocks that it is for."""
        return self.mixer_of(layer) == 'D' and self.delta_norm_place or self.norm_place

    def has_bias(self, linear):
        """Whether the linears of a kind ('qkv', 'proj' or 'mlp') have biases."""
        return linear in self.bias_of.split('+') if self.bias_of else self.bias

    def window_of(self, layer):
        """How many positions a query sees in block number `layer`; 0 if all before it."""
        return self.window if self.window_pattern[layer % len(self.window_pattern)] == 'S' else 0

    def windows_of(self, layers):
        """The different windows of those of these blocks that have attention."""
        return {self.window_of(layer) for layer in layers if self.mixer_of(layer) == 'A'}

    def n_before(self, key):
        """How many positions before each the convolution of that key reads, one of CONVOLUTIONS."""
        is_there = key != 'delta_conv' or 'D' in self.mixer_pattern
        return max(0, getattr(self, key) - 1) if is_there else 0

    def has_value_embedding(self, layer):
        """Whether block number `layer` adds an embedding of each token to its values."""
        return self.value_pattern[layer % len(self.value_pattern)] == 'V'

    def mean_seen(self, lengths):
        """How many positions attention sees from one: a mean over the tokens of all documents and over layers.

        A layer without attention sees none. From the tokens of a document it sees half of the document, or less with a window.
        lengths: [tokens of a document].
        """
        seen = 0
        for layer in range(self.n_layer):
            for length in lengths if self.mixer_of(layer) == 'A' else ():
                window = min(self.window_of(layer) or length, length)
                seen += window * (length - window / 2)
        return seen / self.n_layer / max(1, sum(lengths))

    def rope_of(self, layer):
        """Which of `rope.rope_tables` a block rotates by: 'whole', 'window', or 'none'."""
        if self.pos != 'rope' or self.rope_pattern[layer % len(self.rope_pattern)] == 'N':
            return 'none'
        return 'window' if self.rope_theta_window and self.window_of(layer) else 'whole'


@dataclass
class DeltaOptions:
    """Gated DeltaNet, in the blocks that mixer_pattern names (docs/models.md)."""
    delta_heads: int = 0  # heads with a state and values; 0 = n_head
    delta_key_heads: int = 0  # heads of queries and keys; 0 = delta_heads
    delta_key_width: int = 0  # width of a query and of a key; 0 = head_width
    delta_value_width: int = 0  # width of a value; 0 = delta_key_width
    delta_conv: int = 4  # positions that the convolution of queries, keys and values reads, its own included
    delta_negative: bool = False  # writes up to twice the correction, so that a state may turn values around
    delta_norm_eps: float = 0.0  # norm_eps of the norm of a head's output; 0 = norm_eps
    delta_norm_place: str = ''  # norm_place of the blocks with Gated DeltaNet (OLMo Hybrid: before); '' = as others

    def check_delta(self):
        """Fill in what is 0; raise ValueError, with the key to change, if these heads cannot exist."""
        for key in ('delta_heads', 'delta_key_heads', 'delta_key_width', 'delta_value_width', 'delta_norm_eps'):
            if getattr(self, key) < 0:
                raise ValueError(f'{key} is {getattr(self, key)}: it cannot be negative')
        if self.delta_conv < 2:
            raise ValueError(f'delta_conv is {self.delta_conv}: set it to 2 or more')
        if self.delta_norm_place not in ('', 'before', 'after', 'both'):
            raise ValueError(f"delta_norm_place is {self.delta_norm_place!r}: choose one of before, after, both, or ''")
        if 'D' not in self.mixer_pattern:
            return
        self.delta_heads = self.delta_heads or self.n_head
        self.delta_key_heads = self.delta_key_heads or self.delta_heads
        self.delta_key_width = self.delta_key_width or self.head_width
        self.delta_value_width = self.delta_value_width or self.delta_key_width
        if self.delta_heads % self.delta_key_heads:
            raise ValueError(f'delta_key_heads={self.delta_key_heads} does not divide delta_heads={self.delta_heads}: '
                             'set delta_key_heads to a divisor of delta_heads')

    def delta_shapes(self, tp=1):
        """What a block keeps of a text, of the heads of one of tp processes.

        ((F, n) for its convolution, (H, K, V) for its states).
        """
        key_heads, heads = self.delta_key_heads // tp, self.delta_heads // tp
        keys, values = key_heads * self.delta_key_width, heads * self.delta_value_width
        states = heads, self.delta_key_width, self.delta_value_width
        return (2 * keys + values, self.n_before('delta_conv')), states


@dataclass
class ExpertOptions:
    """A mixture of experts, with mlp='moe' (docs/models.md)."""
    n_experts: int = 8  # experts in a block
    n_active_experts: int = 2  # experts that a token goes to
    n_shared_experts: int = 0  # experts that every token goes to as well
    shared_gate: bool = False  # a gate for what the shared experts add, from 0 to 1 (Qwen3-Next)
    expert_hidden: int = 0  # width of an expert; 0 = that of a dense MLP
    expert_mlp: str = 'swiglu'  # form of each expert, and of the MLP in blocks without: as mlp
    expert_bias: bool = False  # biases in experts' linears, and in the router's logits (gpt-oss)
    moe_first_layer: int = 0  # first block with experts
    moe_every: int = 1  # from there on, each of this many blocks has experts
    router: str = 'softmax'  # affinity of a token and an expert: 'softmax' (Mixtral) or 'sigmoid' (DeepSeek-V3)
    router_groups: int = 1  # groups of neighbouring experts, of which a token's experts are in the best ones
    router_active_groups: int = 1  # how many groups these are
    router_balance: str = 'bias'  # what keeps experts equally busy: 'bias' (in the choice), 'loss' (Switch) or 'none'
    router_balance_rate: float = 1e-3  # step of the bias in an iteration, or weight of the loss
    router_z_loss: float = 0.0  # weight of the z-loss, which keeps the router's logits small (about 1e-3)
    router_norm: bool = True  # divide the weights of a token's experts by their sum, if it has more than one
    router_scale: float = 1.0  # factor of the weights of a token's experts

    CHOICES = dict(router=('softmax', 'sigmoid'), router_balance=('bias', 'loss', 'none'))

    def check_experts(self):
        """Raise ValueError, with the key to change, if these experts cannot exist."""
        for key in ('n_experts', 'n_active_experts', 'moe_every', 'router_groups', 'router_active_groups'):
            if getattr(self, key) < 1:
                raise ValueError(f'{key} is {getattr(self, key)}: it must be at least 1')
        for key in ('n_shared_experts', 'expert_hidden', 'moe_first_layer', 'router_balance_rate',
                    'router_z_loss'):
            if getattr(self, key) < 0:
                raise ValueError(f'{key} is {getattr(self, key)}: it cannot be negative')
        if self.shared_gate and not self.n_shared_experts:
            raise ValueError('shared_gate is True, but n_shared_experts is 0: set shared_gate to False, or '
                             'n_shared_experts to 1 or more')
        if not self.router_scale > 0:
            raise ValueError(f'router_scale is {self.router_scale}: it must be above 0')
        if self.n_active_experts > self.n_experts:
            raise ValueError(f'n_active_experts={self.n_active_experts} is more than n_experts='
                             f'{self.n_experts}: set n_active_experts to {self.n_experts} or less')
        if self.n_experts % self.router_groups or self.router_active_groups > self.router_groups:
            raise ValueError(f'router_groups={self.router_groups} must divide n_experts={self.n_experts}, and be at '
                             f'least router_active_groups={self.router_active_groups}: set router_groups to 1')
        within_groups = self.n_experts // self.router_groups * self.router_active_groups
        if self.n_active_experts > within_groups:
            raise ValueError(f'n_active_experts={self.n_active_experts} is more than the {within_groups} experts of '
                             f'router_active_groups={self.router_active_groups}: set router_active_groups higher')
        if self.moe_first_layer >= self.n_layer:
            raise ValueError(f'moe_first_layer={self.moe_first_layer} is beyond the last block of '
                             f'n_layer={self.n_layer}: set moe_first_layer to {self.n_layer - 1} or less')

    @property
    def mlp_form(self):
        """The form of dense MLPs and of experts, in PLAIN or GATED of model.py."""
        return self.expert_mlp if self.mlp == 'moe' else self.mlp

    def has_experts(self, layer):
        """Whether block number `layer` has experts instead of a dense MLP."""
        after_first = layer - self.moe_first_layer
        return self.mlp == 'moe' and after_first >= 0 and after_first % self.moe_every == 0


@dataclass
class AdapterOptions:
    """Adapters of low rank beside frozen weights (docs/finetune.md)."""
    lora_rank: int = 0  # train adapters of this rank alone; 0 = all weights
    lora_alpha: float = 16.0  # the adapters' products are multiplied by lora_alpha / lora_rank
    lora_targets: str = 'all'  # linears with adapters: attention, mlp, all, or names such as c_q,c_v
    lora_dropout: float = 0.0  # dropout of the adapters' inputs
    lora_rank_stabilised: bool = False  # multiply by lora_alpha / sqrt(lora_rank) instead
    lora_base_dtype: str = 'float32'  # of the frozen linears in blocks: 'float32', 'bfloat16' or 'int8'

    def check_adapters(self):
        """Raise ValueError, with the key to change, if the model cannot have adapters at these linears."""
        if self.lora_rank < 0:
            raise ValueError(f'lora_rank is {self.lora_rank}: it cannot be negative')
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f'lora_dropout is {self.lora_dropout}: it must be in [0, 1)')
        if not self.lora_alpha > 0:
            raise ValueError(f'lora_alpha is {self.lora_alpha}: it must be above 0')
        paths = find_targets(self.lora_targets)
        if self.lora_base_dtype not in BASE_DTYPES:
            raise ValueError(f'lora_base_dtype is {self.lora_base_dtype!r}: choose one of {", ".join(BASE_DTYPES)}')
        if self.lora_base_dtype != 'float32' and not self.lora_rank:
            raise ValueError(f'lora_base_dtype is {self.lora_base_dtype}, but only frozen weights can be narrow: '
                             'set lora_rank, or lora_base_dtype to float32')
        if self.lora_rank and self.mlp == 'moe' and not paths <= set(GROUPS['attention']):
            raise ValueError(f'lora_targets is {self.lora_targets!r}, but experts cannot have adapters: set '
                             'lora_targets to attention, or to some of its linears')


def find_targets(text):
    """The set of paths in a block that lora_targets names: groups, linears such as c_q, or paths of them."""
    paths = set()
    for name in text.split(','):
        found = GROUPS.get(name.strip()) or [
            path for path in GROUPS['all'] if path == name.strip() or path.endswith(f'.{name.strip()}')]
        if not found:
            linears = sorted({path.rpartition('.')[2] for path in GROUPS['all']})
            raise ValueError(f'lora_targets is {text!r}, but {name.strip()!r} is not a linear of a block: '
                             f'join some of {", ".join([*GROUPS, *linears])} by commas')
        paths |= set(found)
    return paths
