"""Let all processes use the first GPU. Only gloo connects them: NCCL refuses two ranks on one GPU."""
import os

os.environ['LOCAL_RANK'] = '0'
