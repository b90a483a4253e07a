"""Limit files to 20,000 bytes, as a full disk does: a checkpoint does not fit, but metrics.jsonl does."""
import resource

resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
