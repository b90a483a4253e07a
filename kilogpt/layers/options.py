"""The keys of the model for parts that families after GPT-2 have: norms, biases, rotary angles, scales.

Imports rope.py and lora.py alone. `model.py` reads these fields of its config, and
`kilogpt/convert/families.py` sets them for the weights of each family. Any of them may be combined.
"""
from dataclasses import dataclass

from kilogpt.layers.lora import check_adapters
from kilogpt.layers.rope import check_scaling


@dataclass
class ModelOptions:
    """Parts that fewer models have (kilogpt/layers/options.py)."""
    # Fields of GPTConfig, and keys of train.py.
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
    attention_gate: bool = False  # a gate for what each head has attended to, from the block's input
    attention_conv: int = 0  # width of a causal convolution of queries, keys and values (Primer: 3); 0 = none
    mlp_conv: int = 0  # width of a causal convolution before the MLP, or the experts; 0 = none
    value_pattern: str = 'N'  # for block after block, repeated: V = values get a vector of the token, N = not
    embedding_scale: float = 1.0  # factor of the token embeddings, which does not apply to a tied head
    residual_scale: float = 1.0  # factor of what attention and MLP add to the residual stream
    logit_scale: float = 1.0  # factor of the logits, before softcap
    router_norm: bool = True  # divide the weights of a token's experts by their sum, if it has more than one
    router_scale: float = 1.0  # factor of the weights of a token's experts
    lora_rank: int = 0  # train adapters of this rank beside frozen weights (docs/lora.md); 0 = all weights
    lora_alpha: float = 16.0  # the adapters' products are multiplied by lora_alpha / lora_rank
    lora_targets: str = 'all'  # linears with adapters: attention, mlp, all, or names such as c_q,c_v
    lora_dropout: float = 0.0  # dropout of the adapters' inputs
    lora_rank_stabilised: bool = False  # multiply by lora_alpha / sqrt(lora_rank) instead
    lora_base_dtype: str = 'float32'  # of the frozen linears in blocks: 'float32', 'bfloat16' or 'int8'

    def check_options(self):
        """Raise ValueError, with the key to change, if no model can have these options."""
        choices = dict(norm_place=('before', 'after', 'both'), qk_norm_over=('head', 'all'))
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f'{key} is {getattr(self, key)!r}: choose one of {", ".join(allowed)}')
        for key in ('head_width', 'n_hidden', 'norm_eps', 'window', 'rope_theta_window', 'attention_scale',
                    'attention_softcap', 'attention_conv', 'mlp_conv', 'softcap', 'lora_rank'):
            if getattr(self, key) < 0:
                raise ValueError(f'{key} is {getattr(self, key)}: it cannot be negative')
        for key in ('attention_conv', 'mlp_conv'):
            if getattr(self, key) == 1:
                raise ValueError(f'{key} is 1, which reads no other position: set it to 0, or to 2 or more')
        for key in ('dropout', 'lora_dropout'):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f'{key} is {getattr(self, key)}: it must be in [0, 1)')
        for key in ('rope_theta', 'embedding_scale', 'residual_scale', 'logit_scale', 'router_scale',
                    'lora_alpha'):
            if not getattr(self, key) > 0:
                raise ValueError(f'{key} is {getattr(self, key)}: it must be above 0')
        if self.bias_of and not set(self.bias_of.split('+')) <= {'qkv', 'proj', 'mlp'}:
            raise ValueError(f"bias_of is {self.bias_of!r}: join some of qkv, proj, mlp by +, or set '' to "
                             'follow bias')
        for key, letters in (('rope_pattern', 'RN'), ('window_pattern', 'SL'), ('value_pattern', 'VN')):
            if not getattr(self, key) or set(getattr(self, key)) - set(letters):
                raise ValueError(f'{key} is {getattr(self, key)!r}: it must consist of the letters '
                                 f'{letters[0]} and {letters[1]}')
        if self.pos != 'rope':
            for key in ('rope_scaling', 'rope_theta_window'):
                if getattr(self, key):
                    raise ValueError(f'{key} is {getattr(self, key)!r}, but pos is {self.pos!r}: '
                                     'set pos to rope')
        elif not 0 < self.rope_share <= 1 or self.rotary_width % 2 or not self.rotary_width:
            raise ValueError(f'rope_share={self.rope_share} rotates {self.rotary_width} of the '
                             f'{self.head_width} features of a head: it must be a positive even number')
        check_scaling(self.rope_scaling)
        check_adapters(self)

    @property
    def rotary_width(self):
        """The number of features of a head that are rotated, the first ones."""
        return int(self.head_width * self.rope_share)

    def has_bias(self, linear):
        """Whether the linears of a kind ('qkv', 'proj' or 'mlp') have biases."""
        return linear in self.bias_of.split('+') if self.bias_of else self.bias

    def window_of(self, layer):
        """How many positions a query sees in block number `layer`; 0 if all before it."""
        return self.window if self.window_pattern[layer % len(self.window_pattern)] == 'S' else 0

    def n_before(self, key):
        """How many positions before each the convolution of that key reads, attention_conv or mlp_conv."""
        return max(0, getattr(self, key) - 1)

    def has_value_embedding(self, layer):
        """Whether block number `layer` adds an embedding of each token to its values."""
        return self.value_pattern[layer % len(self.value_pattern)] == 'V'

    def mean_seen(self, lengths):
        """How many positions attention sees from one: a mean over the tokens of all documents and over layers.

        From the tokens of a document it sees half of the document, or less with a window.
        lengths: [tokens of a document].
        """
        seen = 0
        for layer in range(self.n_layer):
            for length in lengths:
                window = min(self.window_of(layer) or length, length)
                seen += window * (length - window / 2)
        return seen / self.n_layer / max(1, sum(lengths))

    def rope_of(self, layer):
        """Which of `rope.rope_tables` a block rotates by: 'whole', 'window', or 'none'."""
        if self.pos != 'rope' or self.rope_pattern[layer % len(self.rope_pattern)] == 'N':
            return 'none'
        return 'window' if self.rope_theta_window and self.window_of(layer) else 'whole'
