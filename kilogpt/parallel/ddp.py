"""DDP, and the forms of its buckets of gradients: rows of them (ZeRO-1), or fewer bytes (PowerSGD)."""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kilogpt.layers.precision import at_least_float32
from kilogpt.parallel.whole_matrices import all_gather

BUCKET_BYTES = 25 * 2 ** 20  # parameters are gathered in buckets of about the size of DDP's


def replicate(model, device, zero_mesh, grad_compress):
    """Wrap a model in DDP; returns (network, its Zero1 or None, its PowerSGD or None).

    Weights are not sent, since every rank fills in the same, and the model does not have buffers.
    zero_mesh: for ZeRO-1, the mesh of the processes that divide the parameters, or None.
    grad_compress: 'none', 'bf16' or 'powersgd'.
    """
    zero1 = powersgd = None
    if grad_compress == 'powersgd':
        powersgd = PowerSGD()
    if zero_mesh is not None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        zero1 = Zero1(trained, zero_mesh, powersgd or grad_compress)
    device_ids = [device] if device.type == 'cuda' else None
    network = DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True, init_sync=False)
    if zero1:
        network.register_comm_hook(None, zero1.reduce_bucket)
    elif powersgd:
        network.register_comm_hook(None, powersgd.average_bucket)
    elif grad_compress == 'bf16':
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        # On gloo DDP refuses this hook by name, but runs it under another name.
        network.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return network, zero1, powersgd


def note_gradients(network, parameter, processes):
    """A list that gets the device's time whenever a parameter has the gradient of an iteration."""
    times = []

    def note_time(parameter):
        if network.require_backward_grad_sync:
            times.append(processes.device_time())

    parameter.register_post_accumulate_grad_hook(note_time)
    return times


class Zero1:
    """ZeRO stage 1 (Rajbhandari et al. 2020): each process updates its rows of every parameter.

    One reduce-scatter averages each of DDP's buckets of gradients. A process receives its rows of them and
    does not use its other rows from then on. After the update the parameters are gathered in buckets, too.
    Messages are flat: rank 0's rows of each parameter, then rank 1's, all padded to the same length.

    named_rows: [(name, a DTensor of this process's rows in the parameter's memory)], for the optimizer.
    mesh: of one dimension, over the processes that divide the rows. grad_compress: 'none', 'bf16' or a
    PowerSGD, which averages whole gradients.
    """

    def __init__(self, named_parameters, mesh, grad_compress='none'):
        self.mesh, self.grad_compress = mesh, grad_compress
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self.named_rows, self._rows_of = [], {}
        # DDP's first backward pass has all gradients in one bucket, and decides the buckets of later passes.
        self.is_first_pass = True
        self._gradient_views = {}  # {index of a bucket: the result of _views_of}
        self._under_way = None  # (work, sums, rows, sizes) of the bucket that was sent last
        buckets, room = [], 0
        for name, parameter in named_parameters:
            rows = torch.nn.Parameter(self._as_dtensor(parameter))
            self.named_rows.append((name, rows))
            self._rows_of[parameter] = rows
            if parameter.nbytes > room:
                buckets.append([])
                room = BUCKET_BYTES
            buckets[-1].append(parameter.detach())
            room -= parameter.nbytes
        self._parameter_views = [self._views_to_gather(parameters) for parameters in buckets]

    def _own_rows(self, tensor):
        """This process's rows of a parameter or gradient, a view."""
        chunks = tensor.detach().chunk(self.world_size)
        return chunks[self.rank] if self.rank < len(chunks) else tensor.detach()[:0]

    def _as_dtensor(self, tensor):
        """A DTensor of this process's rows of a parameter or gradient, in the same memory."""
        from torch.distributed.tensor import DTensor, Shard
        return DTensor.from_local(self._own_rows(tensor), self.mesh, [Shard(0)], run_check=False,
                                  shape=tensor.shape, stride=tensor.stride())

    def _padded_size(self, tensor):
        """The largest number of elements that a process's rows of a parameter or gradient have."""
        return -(-tensor.size(0) // self.world_size) * tensor[0].numel()

    # --- gradients ------------------------------------------------------------------------------------------

    def reduce_bucket(self, state, bucket):
        """Average this process's rows of a bucket's gradients: the communication hook of DDP."""
        done = torch.futures.Future()  # DDP itself has nothing to wait for
        done.set_result(bucket.buffer())
        if self.is_first_pass:
            return done
        gradients, rows, sizes = self._views_of(bucket)
        if isinstance(self.grad_compress, PowerSGD):
            return self.grad_compress.average_bucket(state, bucket)
        self.finish_reducing()  # of the previous bucket: only one at a time has buffers besides DDP's own
        arranged = torch._chunk_cat(gradients, dim=0, num_chunks=self.world_size)  # (processes, elements)
        if self.grad_compress == 'bf16':
            arranged = arranged.bfloat16()
        sums = arranged.new_empty(arranged.size(1))
        reduce_scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor
        work = reduce_scatter(sums, arranged.view(-1), group=self.mesh.get_group(), async_op=True)
        self._under_way = work, sums, rows, sizes
        return done

    def finish_reducing(self):
        """Wait for the last bucket, and write this process's rows to the gradients of `named_rows`."""
        if self._under_way:
            work, sums, rows, sizes = self._under_way
            self._under_way = None
            work.wait()
            means = at_least_float32(sums).div_(self.world_size).split(sizes)
            torch._foreach_copy_(rows, [mean[:len(own)] for mean, own in zip(means, rows)])

    def _views_of(self, bucket):
        """(gradients, this process's rows of each as a vector, their padded sizes) of a bucket.

        The rows become the gradients of `named_rows`. All views are made once, which takes longer than a copy
        of the gradients of small layers.
        """
        index = bucket.index()
        if index not in self._gradient_views:
            gradients = bucket.gradients()
            for parameter, gradient in zip(bucket.parameters(), gradients):
                self._rows_of[parameter].grad = self._as_dtensor(gradient)
            rows = [self._own_rows(gradient).flatten() for gradient in gradients]
            sizes = [self._padded_size(gradient) for gradient in gradients]
            self._gradient_views[index] = gradients, rows, sizes
        return self._gradient_views[index]

    # --- parameters -----------------------------------------------------------------------------------------

    def _views_to_gather(self, parameters):
        """(vectors that this process sends, their padded sizes, places of the rows of all) of a bucket."""
        sent, sizes, places = [], [], []
        for parameter in parameters:
            own, size = self._own_rows(parameter).flatten(), self._padded_size(parameter)
            sent += [own, own.new_zeros(size - len(own))]
            sizes.append(size)
            is_even = parameter.numel() == self.world_size * size
            places.append(parameter.view(self.world_size, size) if is_even else parameter.view(-1))
        return sent, sizes, places

    @torch.no_grad()
    def gather_parameters(self, *_):
        """Give every process all rows of the parameters: the optimizer's hook after a step."""
        for sent, sizes, places in self._parameter_views:
            own = torch.cat(sent)
            gathered = own.new_empty(self.world_size, len(own))
            all_gather(gathered.view(-1), own, group=self.mesh.get_group())
            rows_of_all = []
            for rows, place in zip(gathered.split(sizes, dim=1), places):
                rows_of_all.append(rows if place.dim() == 2 else rows.reshape(-1)[:len(place)])
            torch._foreach_copy_(places, rows_of_all)


class PowerSGD:
    """Gradients of low rank with error feedback (Vogels et al. 2019), from the tenth iteration on."""

    def __init__(self):
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
        self.state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        self._hook = powerSGD_hook
        self._previous = {}  # {index of a bucket: the factor Q of its gradients at the last finite update}

    def average_bucket(self, state, bucket):
        """DDP's communication hook."""
        return self._hook(self.state, bucket)

    def recover(self, is_finite):
        """Remove from the state what gradients that are not finite left. is_finite: a tensor, on the device.

        A NaN would stay in the errors, which are added to the next gradients, and in the factors, with which
        the next iteration begins.
        """
        for error in self.state.error_dict.values():
            error.masked_fill_(~is_finite, 0)
        for index, factor in self.state.q_memory_dict.items():
            if index not in self._previous:  # random numbers, but the same on all processes
                random = torch.randn(len(factor), generator=torch.Generator().manual_seed(index))
                self._previous[index] = random.to(factor)
            factor.copy_(torch.where(is_finite, factor, self._previous[index]))
            self._previous[index].copy_(factor)
