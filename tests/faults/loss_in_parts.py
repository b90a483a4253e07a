"""The loss is computed from 50 positions' logits at a time, where the vocabulary has 128 padded rows."""
import model

assert model.MAX_LOGITS > 50 * 128
model.MAX_LOGITS = 50 * 128
