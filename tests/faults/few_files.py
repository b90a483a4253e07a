"""The soft limit of open files leaves room for 8 more, like the limit 1,024 with about 500 processes."""
import os
import resource

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 8, hard))
