"""How fast machines are: a table of GPUs, the share of it that training reaches, and measured machines.

`python -m kilogpt.plan --calibrate` measures a machine into a JSON file, and `launch/bandwidth.py --save` several
machines and the network between them. `find_machine` reads the file.
"""
import dataclasses
import json
import re
from dataclasses import dataclass

# The maker's figures for each GPU: dense TFLOP/s in 16 bits with float32 accumulation, in float32 (TF32
# if the GPU has it) and in float8 (0 = none); memory in GB and its GB/s; GB/s that the GPU sends to others
# in its node (NVLink: half of the sum of both directions; otherwise PCIe with 16 lanes).
# Sources: NVIDIA's data sheets (B200, GH200, H200, H100, A100, A10, A40, L4, L40, L40S, V100, T4) and the
# white papers of the Ampere, Ada and Blackwell architectures (A6000, RTX).
GPUS = {
    'B200': (2250, 1125, 4500, 180, 8000, 900),
    'GH200': (989, 494, 1979, 96, 4000, 450),
    'H200': (989, 494, 1979, 141, 4800, 450),
    'H100 PCIe': (756, 378, 1513, 80, 2000, 64),
    'H100 NVL': (835, 417, 1671, 94, 3900, 64),
    'H100': (989, 494, 1979, 80, 3350, 450),
    'A100 40GB': (312, 156, 0, 40, 1555, 300),
    'A100': (312, 156, 0, 80, 2039, 300),
    'A10': (125, 62.5, 0, 24, 600, 32),
    'A40': (149.7, 74.8, 0, 48, 696, 32),
    'A6000': (154.8, 77.4, 0, 48, 768, 32),
    'L4': (121, 60.5, 242, 24, 300, 32),
    'L40S': (362, 183, 733, 48, 864, 32),
    'L40': (181, 90.5, 362, 48, 864, 32),
    'RTX 5090': (209.5, 104.8, 419, 32, 1792, 64),
    'RTX 4090': (165.2, 82.6, 330, 24, 1008, 32),
    'RTX 3090': (71, 35.6, 0, 24, 936, 32),
    'V100': (125, 15.7, 0, 32, 900, 150),
    'T4': (65, 8.1, 0, 16, 320, 16),
}
NO_BFLOAT16 = ('V100', 'T4')

# Shares of these figures that training reaches. Each is fitted to a published run (docs/layouts.md).
PRODUCT_SHARE = 0.52  # of the TFLOP/s, in large matrix products
ATTENTION_SHARE = 0.25  # of the TFLOP/s, in flash attention, forward and backward
FLOAT8_SHARE = 0.8  # of the float8 TFLOP/s, since inputs are scaled and cast
# Typical shares in measurements of NCCL and of copies
LINK_SHARE = 0.75
BANDWIDTH_SHARE = 0.8
LATENCY, HOP = 20e-6, 4e-6  # seconds of a collective, and of each further node


@dataclass
class Machine:
    """The speeds that a process (one GPU, or one CPU core) and its links reach: FLOP/s, bytes/s, seconds."""
    name: str
    device: str  # 'cuda' or 'cpu'
    memory: float  # bytes
    dtype: str  # the dtype that train.py chooses for --dtype=auto
    peak: float  # FLOP/s in this dtype; MFU is a share of it
    products: dict  # {dtype: [(smallest of a product's three sizes, FLOP/s), ...]}, in order of size
    attention: dict  # {dtype: FLOP/s}
    bandwidth: float  # bytes/s of memory
    node_link: float  # bytes/s that a process sends to others in its node
    network: float  # bytes/s that a process sends to other nodes
    per_node: int = 8  # processes in a node
    nodes: int = 1  # nodes that were measured together; of one alone the network is not known
    latency: float = LATENCY  # seconds of a collective
    hop: float = HOP  # seconds of each node that a collective passes
    launch: float = 5e-6  # host seconds of an operator in eager mode
    dtensor_launch: float = 60e-6  # host seconds of an operator on DTensors
    redistribute: float = 200e-6  # host seconds of a DTensor's change of placements, without the collective
    overlap: float = 1.0  # share of computation that communication can overlap with
    cores: int = 0  # more processes than this share cores; 0 = no limit
    # node_link, latency and redistribute with two processes on each core: gloo's threads need the cores, too
    shared: dict = dataclasses.field(default_factory=dict)

    def rate(self, dtype, size):
        """FLOP/s of a matrix product whose smallest size is `size`, interpolated."""
        points = self.products[dtype]
        if size <= points[0][0]:
            return points[0][1] * size / points[0][0]
        for (small, slow), (large, fast) in zip(points, points[1:]):
            if size <= large:
                return slow + (fast - slow) * (size - small) / (large - small)
        return points[-1][1]

    def with_processes(self, count):
        """The Machine that each of `count` processes sees. Slower if processes have to share cores."""
        per_core = count / self.cores if self.cores else 1
        if per_core <= 1:
            return self
        links, slowdown = self.shared, per_core / 2  # links were measured with two processes on each core
        if not links:
            links = dict(node_link=self.node_link, latency=self.latency, redistribute=self.redistribute)
            slowdown = per_core
        products = {}
        for dtype, points in self.products.items():
            products[dtype] = [(size, rate / per_core) for size, rate in points]
        return dataclasses.replace(
            self, bandwidth=self.bandwidth / per_core, node_link=links['node_link'] / slowdown,
            latency=links['latency'] * slowdown, redistribute=links['redistribute'] * slowdown,
            launch=self.launch * per_core, dtensor_launch=self.dtensor_launch * per_core, products=products,
            attention={dtype: rate / per_core for dtype, rate in self.attention.items()})

    def bandwidth_of(self, stride, ranks):
        """Bytes/s that each rank of a group sends in a ring. stride: distance between the group's ranks.

        A ring within a node uses the node's links. A ring through several nodes leaves each node once, over
        the network of all ranks that the group has in that node.
        """
        in_node = self.ranks_in_node(stride, ranks)
        if in_node == ranks:
            return self.node_link
        return min(self.node_link, self.network * in_node)

    def ranks_in_node(self, stride, ranks):
        return max(1, min(ranks, self.per_node // stride))

    def ring(self, byte_count, stride, ranks):
        """Seconds of an all-gather or a reduce-scatter. byte_count: bytes of the whole tensor."""
        if ranks == 1 or byte_count == 0:
            return 0.0
        nodes = ranks // self.ranks_in_node(stride, ranks)
        latency = self.latency + (nodes - 1) * self.hop
        return latency + byte_count * (ranks - 1) / ranks / self.bandwidth_of(stride, ranks)

    def all_to_all(self, byte_count, stride, ranks):
        """Seconds of an all-to-all. byte_count: bytes that each rank sends, in equal shares to every rank.

        Each rank uses its own network for the shares that go to other nodes.
        """
        if ranks == 1 or byte_count == 0:
            return 0.0
        in_node = self.ranks_in_node(stride, ranks)
        latency = self.latency + (ranks // in_node - 1) * self.hop
        return latency + byte_count / ranks * max((in_node - 1) / self.node_link,
                                                  (ranks - in_node) / self.network)


def _bare(name):
    return re.sub(r'[\W_]', '', name).lower()


def find_machine(name, link=None, per_node=8):
    """The Machine of a GPU in the table, or of a file written by --calibrate or launch/bandwidth.py --save.

    link: Gb/s of the network for each GPU; None = as the file has measured it, or 400. ValueError for other names.
    """
    network = 1e9 * LINK_SHARE * (link or 400) / 8
    if name.endswith('.json'):
        machine = read_machine(name)
        if link or machine.device == 'cuda' and machine.nodes == 1:
            machine.network = network
        return machine
    found = next((gpu for gpu in GPUS if _bare(gpu) == _bare(name)), None)  # RTX4090 is RTX 4090
    if found is None:
        raise ValueError(f'--gpu is {name!r}: choose one of {", ".join(GPUS)}, '
                         'or a file written by python -m kilogpt.plan --calibrate')
    half, single, float8, memory, bandwidth, node_link = GPUS[found]
    products = {'bfloat16': half, 'float16': half, 'float32': single}
    rates = {dtype: [(256, 1e12 * PRODUCT_SHARE * peak)] for dtype, peak in products.items()}
    rates['float8'] = [(256, 1e12 * PRODUCT_SHARE * max(half, FLOAT8_SHARE * float8))]
    return Machine(
        name=found, device='cuda', memory=1e9 * memory, peak=1e12 * half, products=rates,
        dtype='float16' if found in NO_BFLOAT16 else 'bfloat16',
        attention={dtype: 1e12 * ATTENTION_SHARE * peak for dtype, peak in products.items()},
        bandwidth=1e9 * BANDWIDTH_SHARE * bandwidth, node_link=1e9 * LINK_SHARE * node_link,
        network=network, per_node=per_node)


def read_machine(path):
    """The Machine in a file written by write_machine. ValueError if the file is missing or has no Machine."""
    try:
        with open(path, encoding='utf-8') as file:
            return Machine(**json.load(file))
    except OSError as error:
        raise ValueError(f'--gpu={path}: {error.strerror}; '
                         'kilogpt.plan --calibrate and launch/bandwidth.py --save write such a file') from None
    except (TypeError, ValueError) as error:
        raise ValueError(f'--gpu={path} is not a file written by python -m kilogpt.plan --calibrate: '
                         f'{error}') from None


def write_machine(machine, path):
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(dataclasses.asdict(machine), file, indent=1)
