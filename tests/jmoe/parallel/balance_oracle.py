"""Libra's Algorithms 1 and 2 in plain loops, from the paper's listings; and exhaustive optima."""

import itertools
import math
from fractions import Fraction


def homes(hosts):
    """Returns the lowest-numbered host of each expert."""
    return [row.index(True) for row in hosts]


def start(counts, held, home):
    """Returns local and remote visits [G][E] before anything is moved: at a row's device, or at
    home.
    """
    devices, experts = len(counts), len(held)
    local = [[0] * experts for _ in range(devices)]
    remote = [[0] * experts for _ in range(devices)]
    for g in range(devices):
        for e in range(experts):
            if held[e][g]:
                local[g][e] += counts[g][e]
            else:
                remote[home[e]][e] += counts[g][e]
    return local, remote


def algorithm_1(counts, hosts, n, alpha, per_pair=None):
    """Returns replicas [E][G] beside the hosts, as the paper's listing chooses them."""
    devices, experts = len(counts), len(hosts)
    home, num_local = homes(hosts), int(alpha * n)
    held = [list(row) for row in hosts]
    sent = [[0] * devices for _ in range(devices)]

    def replicas(g):
        return sum(held[e][g] and not hosts[e][g] for e in range(experts))

    def may(e, g):
        bound_left = per_pair is None or sent[home[e]][g] < per_pair
        return not held[e][g] and replicas(g) < n and bound_left

    def add(e, g):
        held[e][g] = True
        sent[home[e]][g] += 1

    for g in range(devices):
        for e in sorted(range(experts), key=lambda e: (-counts[g][e], e)):
            if counts[g][e] > 0 and replicas(g) < num_local and may(e, g):
                add(e, g)

    mean = Fraction(sum(map(sum, counts)), devices)
    for _ in range((n - num_local) * devices):
        local, remote = start(counts, held, home)
        load = [sum(local[g]) + sum(remote[g]) for g in range(devices)]
        source = min(range(devices), key=lambda g: (-load[g], g))
        if load[source] <= mean:
            break
        e = min(range(experts), key=lambda e: (-remote[source][e], e))
        candidates = [g for g in range(devices) if may(e, g)]
        if remote[source][e] == 0 or not candidates:
            continue
        target = min(candidates, key=lambda g: (load[g], g))
        if load[target] + counts[target][e] <= mean:
            add(e, target)
    return [[held[e][g] and not hosts[e][g] for g in range(devices)] for e in range(experts)]


def algorithm_2(counts, held, home, move_local=False):
    """Returns the visits [G][E] that each device computes; whole visits, the mean rounded up.

    With `move_local`: all visits may move, no more than the giver's excess; and a device that finds
    no host below the mean passes half of a difference on, a 256th of the mean or more.
    """
    devices, experts = len(counts), len(held)
    local, remote = start(counts, held, home)
    if move_local:
        movable = [
            [x + y for x, y in zip(*rows, strict=True)] for rows in zip(local, remote, strict=True)
        ]
        fixed = [0] * devices
    else:
        movable, fixed = remote, [sum(row) for row in local]
    mean = math.ceil(Fraction(sum(map(sum, counts)), devices))

    def load(g):
        return fixed[g] + sum(movable[g])

    def transfer():
        for source in sorted(range(devices), key=lambda g: (-load(g), g)):
            if load(source) <= mean:
                return None
            for e in sorted(range(experts), key=lambda e: (-movable[source][e], e)):
                others = [g for g in range(devices) if held[e][g] and g != source]
                if movable[source][e] == 0 or not others:
                    continue
                target = min(others, key=lambda g: (load(g), g))
                amount = min(movable[source][e], mean - load(target))
                if move_local:
                    amount = min(amount, load(source) - mean)
                if amount > 0:
                    return source, target, e, amount
            if move_local and (found := passed_on(source)):
                return found
        return None

    def passed_on(source):
        found = []
        for e in range(experts):
            others = [g for g in range(devices) if held[e][g] and g != source]
            for target in sorted(others, key=lambda g: (load(g), g))[:1]:
                half = (load(source) - load(target)) // 2
                found.append((min(movable[source][e], half), -e, target))
        amount, e, target = max(found, default=(0, 0, 0))
        return (source, target, -e, amount) if amount >= max(1, mean // 256) else None

    while max(map(load, range(devices))) > mean:
        if (found := transfer()) is None:
            break
        source, target, e, amount = found
        movable[source][e] -= amount
        movable[target][e] += amount
    if move_local:
        return movable
    return [
        [x + y for x, y in zip(*rows, strict=True)] for rows in zip(local, movable, strict=True)
    ]


def least_maximum(totals, held):
    """Returns the least load of the fullest device that any division of `totals` [E] among hosts
    has.

    Hall's theorem: visits that have no host outside a set of devices must fit into that set.
    """
    devices, best = len(held[0]), 0
    for size in range(1, devices + 1):
        for group in itertools.combinations(range(devices), size):
            inside = sum(
                total
                for total, row in zip(totals, held, strict=True)
                if not any(row[g] for g in range(devices) if g not in group)
            )
            best = max(best, math.ceil(Fraction(inside, size)))
    return best


def best_replicas(totals, hosts, n, per_pair=None):
    """Returns the least `least_maximum` that any choice of replicas reaches, by trying them all."""
    devices, experts, home = len(hosts[0]), len(hosts), homes(hosts)
    choices = []
    for g in range(devices):
        away = [e for e in range(experts) if not hosts[e][g]]
        taken = [c for size in range(n + 1) for c in itertools.combinations(away, size)]
        if per_pair is not None:
            taken = [
                c
                for c in taken
                if all([home[e] for e in c].count(s) <= per_pair for s in range(devices))
            ]
        choices.append(taken)
    best = None
    for chosen in itertools.product(*choices):
        held = [[hosts[e][g] or e in chosen[g] for g in range(devices)] for e in range(experts)]
        found = least_maximum(totals, held)
        best = found if best is None else min(best, found)
    return best


def device_of_visits(ids, rank_of_row, valid, kept, remote, held):
    """Returns the device of each visit by the order of the queue; -1 where it is not valid."""
    devices, experts = len(kept), len(held)
    out = [[-1] * len(row) for row in ids]
    visited = [{i for i, v in zip(*row, strict=True) if v} for row in zip(ids, valid, strict=True)]
    for e in range(experts):
        rows = [
            r
            for g in range(devices)
            for r in range(len(ids))
            if rank_of_row[r] == g and e in visited[r]
        ]
        left = [remote[g][e] for g in range(devices)]
        stays = [kept[g][e] for g in range(devices)]
        for r in rows:
            if stays[rank_of_row[r]] > 0:
                stays[rank_of_row[r]] -= 1
                device = rank_of_row[r]
            else:
                device = next((g for g in range(devices) if left[g] > 0), None)
                if device is None:
                    device = held[e].index(True)
                else:
                    left[device] -= 1
            for k, (i, v) in enumerate(zip(ids[r], valid[r], strict=True)):
                if v and i == e:
                    out[r][k] = device
    return out
