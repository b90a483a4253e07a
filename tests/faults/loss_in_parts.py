"""Compute the loss from the logits of 50 positions at a time. The padded vocabulary has 128 rows."""
import model

assert model.MAX_LOGITS > 50 * 128
model.MAX_LOGITS = 50 * 128
