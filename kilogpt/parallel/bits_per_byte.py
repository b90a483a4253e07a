"""Losses in bits per byte of text, which can be compared between tokenizers."""
import numpy as np
import torch

from data.tokens.tokenizer import bytes_of_tokens


class BitsPerByte:
    """Counts the bytes of text among the targets that a Parallel evaluates, and the nats of other targets.

    Tokens that stand for no text, such as the one that ends a document, have no bytes, and their losses do
    not count: bits per byte is Σ nats / (ln 2 · Σ bytes) over the other targets, as in nanochat.

    sources: of open_dataset. They have one tokenizer; if it is not known, or if they have pairs of answers, whose
    loss is another one, nothing is counted.
    """

    def __init__(self, parallel, sources):
        self.parallel, self.n_bytes, self.other_nats = parallel, 0, 0.0
        texts = [source for source in sources.values() if not source.meta.get('pairs')]
        known = [sizes for sizes in (bytes_of_tokens(*source) for source in texts) if sizes is not None]
        sizes = known[0] if known else None
        self.is_known = sizes is not None
        if not self.is_known:
            return
        some_stage = next(iter(parallel.stages.values()))
        sizes = np.pad(sizes, (0, max(0, some_stage.config.vocab_size - len(sizes))))
        self.sizes = torch.from_numpy(sizes).to(parallel.device)
        for stage in parallel.stages.values():
            stage.loss.register_forward_hook(self._note_other_nats)

    def evaluate(self, batch):
        """Parallel.evaluate of a micro-batch, whose bytes are counted."""
        if self.is_known:
            targets = batch[1]
            self.n_bytes = self.n_bytes + torch.where(targets >= 0, self.sizes[targets], 0).sum()
        return self.parallel.evaluate(batch)

    def _note_other_nats(self, loss, inputs, output):
        x, head, targets = inputs
        if loss.training:
            return
        others = torch.where((targets >= 0) & (self.sizes[targets] == 0), targets, -1)
        if (others >= 0).any():
            from kilogpt.parallel.scoring import Recorder
            self.other_nats = self.other_nats + Recorder(loss)(x, head, others)

    def take(self, nats, n_tokens):
        """(nats of the targets that are text, their bytes, tokens) since the last call; None if not known.

        nats, n_tokens: those of all targets. All are sums over all processes.
        """
        layout = self.parallel.layout
        n_bytes, self.n_bytes = self.n_bytes, 0
        other_nats, self.other_nats = self.other_nats, 0.0
        # Tensor-parallel and pipeline ranks count the same targets.
        n_bytes = self.parallel.processes.sum(int(n_bytes)) / (layout.tp * layout.pp)
        if not n_bytes:
            return None
        return nats - self.parallel.sum_losses(torch.as_tensor(other_nats)), n_bytes, n_tokens

