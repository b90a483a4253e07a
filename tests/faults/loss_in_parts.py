"""The loss is computed from 50 positions' logits at a time, where the vocabulary has 128 padded rows."""
import model

model.LOGITS = 50 * 128
