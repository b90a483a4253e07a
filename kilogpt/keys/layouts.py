"""Layout: data parallelism (DDP or FSDP2) takes the processes that tp, cp and pp leave."""
zero_stage = 0  # 0 = DDP; 1 = DDP, optimizer sharded; 2 = FSDP2; 3 = FSDP2, parameters freed after forward
dp_replicate = 1  # with zero_stage 2 or 3: groups of processes that each hold one replica (HSDP)
tp = 1  # tensor (and sequence) parallel degree
async_tp = False  # overlap tp's collectives with matrix products; needs compile and NVLink
cp = 1  # context parallel degree: processes that share each sequence
ep = 1  # expert parallel degree: processes among which the experts are divided, within a replica
pp = 1  # pipeline parallel degree
pp_schedule = '1f1b'  # 'gpipe', '1f1b', 'interleaved1f1b', 'interleavedzb', 'zbv' or 'dualpipev'
activation_checkpoint = 'none'  # recompute in backward: 'selective' (all but matmuls and attention), 'full'
cpu_offload = False  # keep parameters, gradients and optimizer state in host memory (zero_stage 2 or 3)
grad_compress = 'none'  # DDP's all-reduce: 'none', 'bf16' or 'powersgd' (matrices of low rank)
