"""The soft limit of open files leaves room for 8 more, as 1,024 does for about 500 processes."""
import os
import resource

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 8, hard))
