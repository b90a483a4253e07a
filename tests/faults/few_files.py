"""The soft limit of open files allows 8 more files, like a limit of 1,024 in a run of about 500 processes."""
import os
import resource

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 8, hard))
