"""Networks of a process before it can join others: gloo's interface, the store."""
import contextlib
import ipaddress
import os
import socket
import struct
import sys
import time
import uuid

import torch.distributed as dist

from data.storage import is_url

SIOCGIFADDR = 0x8915  # Linux: the request for an interface's IPv4 address (linux/sockios.h)


def spans_nodes():
    """Whether the processes of this run are on several nodes."""
    world_size = os.environ.get('WORLD_SIZE', '1')
    return os.environ.get('LOCAL_WORLD_SIZE', world_size) != world_size


def describe_nodes(out_dir, data_dir):
    """Lines about the folders of a run on several nodes: which the nodes share, and which each has."""
    if not spans_nodes():
        return []
    shared = out_dir if is_url(out_dir) else os.path.abspath(out_dir)
    data = 'all read the dataset in' if is_url(data_dir) else 'each has the whole dataset in'
    return [f'nodes       all share {shared}; {data} {data_dir}']


def choose_gloo_interface(meeting_point=None):
    """On several nodes, set GLOO_SOCKET_IFNAME to the interface that other nodes reach, unless it is set.

    meeting_point: a host that other nodes reach, if not only the nodes of this torchrun take part.

    By default gloo listens at the address of the host's name, which on Debian is 127.0.1.1. The interface
    that is chosen is the one whose route leads to the first node (MASTER_ADDR), or to the meeting point. On the first node itself,
    whose name may have a loopback address, the default route's interface is chosen. If neither is known,
    nothing is set.
    """
    if not (spans_nodes() or meeting_point) or 'GLOO_SOCKET_IFNAME' in os.environ:
        return
    # The second address is reserved for documentation (RFC 5737): only the default route leads there.
    for host in (meeting_point or os.environ.get('MASTER_ADDR'), '192.0.2.1'):
        name = interface_to(host)
        if name:
            os.environ['GLOO_SOCKET_IFNAME'] = name
            return


def interface_to(host):
    """The network interface whose route leads to a host; None if it is unknown or the loopback interface."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing, but chooses the address that packets would be sent from
            source = ipaddress.ip_address(probe.getsockname()[0])
        if source.is_loopback:
            return None
        for name, addresses in find_interfaces().items():
            if source in addresses:
                return name
    except OSError:  # the host does not exist, or a route to it
        pass
    return None


def find_interfaces():
    """{name of a network interface: its IP addresses}; {} on systems other than Linux."""
    if sys.platform != 'linux':
        return {}
    import fcntl
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack('256s', name.encode()))
                found.setdefault(name, []).append(ipaddress.ip_address(reply[20:24]))
    with contextlib.suppress(FileNotFoundError), open('/proc/net/if_inet6') as file:
        for line in file:
            address, *_, name = line.split()
            found.setdefault(name, []).append(ipaddress.ip_address(bytes.fromhex(address)))
    return found


def fresh_store():
    """The store that torchrun announces, under a prefix that only the processes of this start have.

    torchrun keeps one store over restarts, which still has the addresses of processes that have ended
    (pytorch#135712). Therefore each process says hello under a random name, the main process answers with the
    prefix of this start, and all confirm that they have read the answer.
    """
    store, rank, world_size = next(dist.rendezvous('env://'))
    name = uuid.uuid4().hex
    if rank:
        store.set(f'hello/{rank}', name)
        prefix = store.get(f'welcome/{name}').decode()
        store.set(f'{prefix}/{rank}', '')
        return dist.PrefixStore(prefix, store)
    others = range(1, world_size)
    while missing := [r for r in others if not store.check([f'{name}/{r}'])]:
        for r in missing:
            if store.check([f'hello/{r}']):
                store.set(f'welcome/{store.get(f"hello/{r}").decode()}', name)
        time.sleep(0.01)
    return dist.PrefixStore(name, store)
