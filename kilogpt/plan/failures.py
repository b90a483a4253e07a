"""What failures of nodes cost: the best interval between saves, and the share of time that is lost.

Failures are independent and equally likely at any time (a Poisson process), as in both sources:
Young 1974, A first order approximation to the optimum checkpoint interval;
Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps.
All times are in seconds. mtbf: the mean time between failures of any node of the run.
"""
import math

RECOVERY = 1.1  # until the other replicas go on: a heartbeat that is missed (kilogpt/replicas/launcher.py), and connecting


def young_interval(mtbf, save):
    """The best time between saves that each hold training for `save`, to first order."""
    return math.sqrt(2 * save * mtbf)


def daly_interval(mtbf, save):
    """The best time between saves (Daly 2006, equation 37)."""
    if save >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(save / (2 * mtbf))
    return young_interval(mtbf, save) * (1 + ratio / 3 + ratio ** 2 / 9) - save


def lost_with_restarts(mtbf, interval, save, restart):
    """The share of the time that saves, restarts and work done again take (Daly 2006, equation 20).

    interval: between saves. restart: from a failure until training continues from the last checkpoint.
    """
    exponent = (interval + save) / mtbf
    if exponent > 500:  # the share is 1 in all digits
        return 1.0
    return 1 - interval / (mtbf * math.exp(restart / mtbf) * math.expm1(exponent))


def lost_with_replicas(mtbf, replicas, restart, step):
    """The share of the time that is lost if only the replica of a failed node restarts; to first order.

    Each failure costs half an iteration of `step` seconds, which is made again, RECOVERY, and during a restart the
    work of one replica of several.
    """
    return min(1.0, (step / 2 + RECOVERY + restart / replicas) / mtbf)


def describe(row, gpus, per_node, options):
    """Lines about failures for a layout's row of the planner.

    options: mtbf (hours of one node), save_seconds, restart_seconds and price (of a GPU for an hour, or 0).
    """
    nodes = -(-gpus // per_node)
    mtbf, save, restart = 3600 * options.mtbf / nodes, options.save_seconds, options.restart_seconds
    keys, days = row['keys'], row['days']
    replicas = nodes // max(1, -(-keys['tp'] * keys['cp'] * keys['pp'] // per_node))
    interval = daly_interval(mtbf, save)

    def cost(lost):
        if lost >= 1:
            return 'no progress'
        price = f', price {options.price * row["gpu_hours"] / (1 - lost):,.0f}' if options.price else ''
        return f'{100 * lost:.2f}% of the time lost, {days / (1 - lost):,.1f} days{price}'

    lines = [f'failures: one of {nodes} node(s) every {mtbf / 3600:,.1f} hours; a save holds training for {save:g} s, a '
             f'restart takes {restart:g} s',
             f'  restarts: --save_minutes={interval / 60:.3g} is best (Daly 2006; Young 1974: '
             f'{young_interval(mtbf, save) / 60:.3g}): {cost(lost_with_restarts(mtbf, interval, save, restart))}']
    if replicas > 1:
        lost = lost_with_replicas(mtbf, replicas, restart, row['ms'] / 1000)
        lines.append(f'  {replicas} replicas (--fault_tolerance=replicas): {cost(lost)}')
    return lines
