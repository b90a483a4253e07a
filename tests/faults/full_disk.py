"""Files may not grow beyond 20,000 bytes, as on a full disk: a checkpoint has no room, metrics.jsonl has."""
import resource

resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
