"""Forward passes that give the log-likelihood of single tokens, for a model in any layout.

`Scoring` puts a recorder in the place of the model's loss for a while. The recorder computes logits at the
positions that have a target and nowhere else, and needs them whole, so tensor-parallel ranks gather these few.
"""
import contextlib
import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from kilogpt.layers.precision import at_least_float32

MAX_LOGITS = 2 ** 24  # elements of logits at a time: 64 MB in float32


class Scores(NamedTuple):
    """What one process knows of the targets in some rows. Other processes may know of others in these rows."""
    row: torch.Tensor  # (N,), int64: the row of each target
    place: torch.Tensor  # (N,), int64: its position in the row
    nats: torch.Tensor  # (N,), float32: minus the logarithm of its probability
    is_likeliest: torch.Tensor  # (N,), bool: whether no token is likelier
    logits: torch.Tensor | None  # (N, vocabulary), if they were asked for


class Recorder(torch.nn.Module):
    """Stands in the place of a model's loss: notes `Scores` of each target."""

    def __init__(self, loss, wants_logits=False):
        super().__init__()
        self.loss, self.wants_logits = loss, wants_logits
        self.n_rows = 0  # of all passes so far
        self.first_position = 0  # of this process's part of each row
        self.found = []  # Scores of each part

    def forward(self, x, head, targets):
        """As Loss.forward in model.py: x (B, T, C), head, targets (B, T; -1 is ignored); returns the loss."""
        x = x.to_local() if hasattr(x, 'to_local') else x  # the same on all tensor-parallel ranks
        places = (targets.flatten() >= 0).nonzero()[:, 0]
        rows, targets_there = self.n_rows + places // targets.size(1), targets.flatten()[places]
        positions = places % targets.size(1) + self.first_position
        self.n_rows += targets.size(0)
        total = at_least_float32(x.new_zeros(()))
        size = max(1, MAX_LOGITS // head.out_features)
        for parts in zip(*(each.split(size) for each in (rows, positions, places, targets_there))):
            if len(parts[0]):
                total = total + self._record(*parts, x.flatten(0, 1), head)
        return total

    def _record(self, rows, positions, places, targets, x, head):
        logits = head(x[places])
        logits = logits.full_tensor() if hasattr(logits, 'full_tensor') else logits

        def cross_entropy(logits, targets, vocab_size, reduction='sum'):
            logits = at_least_float32(logits[:, :vocab_size])
            nats = F.cross_entropy(logits, targets, reduction='none')
            likeliest = logits.argmax(dim=-1) == targets
            self.found.append(Scores(rows, positions, nats, likeliest, logits if self.wants_logits else None))
            return nats.sum() if reduction == 'sum' else nats

        # The model's own of_logits may cap and scale. It calls the loss's cross_entropy.
        n_found = len(self.found)
        original, self.loss.cross_entropy = self.loss.cross_entropy, cross_entropy
        try:
            total = self.loss.of_logits(logits, targets)
        finally:
            self.loss.cross_entropy = original
        if len(self.found) == n_found:
            raise ValueError('the loss in model.py does not call self.cross_entropy in of_logits, so single '
                             'tokens have no log-likelihood: let it, or set eval_tasks to nothing')
        return total

    def take(self):
        """The Scores since the last call, or None if this process has computed none of the targets."""
        found, self.found, self.n_rows = self.found, [], 0
        if not found:
            return None
        return Scores(*(torch.cat(parts) if parts[0] is not None else None for parts in zip(*found)))


class Scoring:
    """A context in which a Parallel scores targets. All processes enter, call `run` alike, and leave.

    parallel: a Parallel that is laid out. config: the model's. dtype: that of the forward pass, as in Parallel.parallelize.
    wants_logits: whether Scores have logits.
    """

    def __init__(self, parallel, config, dtype, wants_logits=False):
        self.parallel, self.config, self.dtype, self.wants_logits = parallel, config, dtype, wants_logits
        layout = parallel.layout
        self.is_whole = layout.pp * layout.tp * layout.cp == 1  # texts then share what they begin with (Scorer)
        self.n_micro_batches = layout.n_stages if parallel.pipeline else 1
        self._pipeline = functools.lru_cache(8)(self._build_pipeline)
        self._contexts = contextlib.ExitStack()

    def __enter__(self):
        stages = self.parallel.stages.values()
        self.recorders = [Recorder(stage.loss, self.wants_logits) for stage in stages]
        self.parallel.train(False)
        self._contexts.callback(self.parallel.train, True)
        self._contexts.enter_context(torch.no_grad())
        if self.parallel.compiles:  # each new length of text would be compiled
            self._contexts.enter_context(torch.compiler.set_stance('force_eager'))
        for stage, recorder in zip(stages, self.recorders):
            for name in ('first_position', 'n_sequence_parts', 'loss'):
                self._contexts.callback(setattr, stage, name, getattr(stage, name))
            stage.loss = recorder
        return self

    def __exit__(self, *error):
        self._contexts.close()

    def length(self, length):
        """The length to which rows of `length` tokens are to be padded: what the processes can divide.

        A pipeline is built for each length, so its lengths are few.
        """
        layout = self.parallel.layout
        divisor = layout.tp * layout.cp
        n_before = max(map(self.config.n_before, self.config.CONVOLUTIONS))
        length = max(length, n_before * layout.cp)  # a part holds what the next one reads
        if not self.parallel.pipeline:
            return -(-length // divisor) * divisor
        padded = self.config.block_size
        while padded % (2 * divisor) == 0 and padded // 2 >= length:
            padded //= 2
        return padded

    def height(self, rows):
        """The number of rows, with padding, that are to be passed for that many rows of text."""
        return -(-rows // self.n_micro_batches) * self.n_micro_batches

    def run(self, x, y, starts=None, cache=None):
        """The Scores of the targets y (B, T; -1 is ignored) of inputs x (B, T), int64; None without any here.

        T is a `length`, and B a `height`. starts: as in GPT.forward.
        cache: a `new_cache`, which x continues: B is any then, T what tp divides, and cp ranks do the same.
        """
        layout, rank, device = self.parallel.layout, self.parallel.processes.rank, self.parallel.device
        part = layout.positions(rank, x.size(1)) if cache is None else slice(0, x.size(1))
        for stage in self.parallel.stages.values():
            stage.first_position = stage.loss.first_position = part.start
            stage.n_sequence_parts = layout.cp if cache is None else 1
        batch = [x[:, part].to(device), y[:, part].to(device)]
        batch += [] if starts is None else [starts.to(device)]
        if self.parallel.pipeline and cache is None:
            self._pipeline(*batch[0].shape).evaluate(batch)
        else:
            with self.parallel._autocast:
                self._pass(*batch, cache=cache)
        return next(filter(None, [recorder.take() for recorder in self.recorders]), None)

    def _pass(self, tokens, targets, *starts, cache):
        """Pass a batch through all stages, one after the other, without micro-batches."""
        layout, keys = self.parallel.layout, {} if cache is None else dict(cache=cache)
        group = self.parallel.mesh.get_group('pp') if self.parallel.pipeline else None
        here, _, _, _ = layout.coordinates(self.parallel.processes.rank)
        owners = {index: rank for rank in range(layout.pp) for index in layout.stages_of(rank)}
        x, lengths = tokens, cache and cache.lengths.clone()
        for index, stage in sorted(self.parallel.stages.items()):
            if index > 0:
                keys['tokens'] = tokens
                if owners[index - 1] != here:
                    shape = len(tokens), tokens.size(1) // layout.tp, self.config.n_embd
                    x = torch.empty(shape, dtype=self._torch_dtype(), device=tokens.device)
                    dist.recv(x, group=group, group_src=owners[index - 1])
            if cache is not None:
                cache.lengths.copy_(lengths)  # which each stage moves on
            x = stage(x, targets, *starts, **keys)
            if index + 1 < layout.n_stages and owners[index + 1] != here:
                dist.send(x.contiguous(), group=group, group_dst=owners[index + 1])

    def _torch_dtype(self):
        return torch.get_default_dtype() if self.dtype == 'float32' else getattr(torch, self.dtype)

    def new_cache(self, rows, length):
        """An empty Cache of rows of up to `length` tokens, for the layers and heads of this process."""
        from kilogpt.layers.cache import Cache
        like = torch.empty(0, dtype=self._torch_dtype(), device=self.parallel.device)
        layers = [int(name) for stage in self.parallel.stages.values() for name in stage.transformer.h]
        return Cache(self.config, rows, length, like, self.parallel.layout.tp, layers)

    def _build_pipeline(self, rows, length):
        from kilogpt.parallel.pipeline import Pipeline
        parallel, layout = self.parallel, self.parallel.layout
        return Pipeline(parallel.stages, layout, parallel.mesh, parallel.device,
                        micro_batch=rows // self.n_micro_batches, micro_steps=self.n_micro_batches,
                        block_size=length * layout.cp, n_embd=self.config.n_embd, dtype=self.dtype, tied={},
                        splits_backward=False)
