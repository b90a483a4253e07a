"""Files cannot exceed 20,000 bytes, as on a full disk: enough for metrics.jsonl, not for a checkpoint."""
import resource

resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
