"""The loss is computed from 50 positions' logits at a time, where the vocabulary has 128 padded rows."""
import model

model.MAX_LOGITS = 50 * 128
