"""The brownout plan in plain loops, written from the rules and not from the code it judges."""

import numpy as np


def plan(ids, groups, threshold, strategy, valid, exempt, weights=None):
    """With `weights`, as many experts are kept, but those of most weight in units of 2^-15.

    Returns the expert id of each visit (-1: dropped or padding), whether it is degraded, and
    S1.
    """
    num_experts = len(groups)
    count, pinned = [0] * num_experts, set()
    for row, is_valid, is_exempt in zip(ids, valid, exempt, strict=True):
        for expert in row if is_valid else ():
            if is_exempt:
                pinned.add(expert)
            else:
                count[expert] += 1
    total = sum(count)
    s1 = set(pinned)
    for expert in sorted(set(range(num_experts)) - pinned, key=lambda e: (-count[e], e)):
        if 100 * sum(count[e] for e in s1) >= threshold * total:
            break
        s1.add(expert)
    if weights is not None and strategy != "zero":
        shares = [0] * num_experts
        for row, given, is_valid, is_exempt in zip(ids, weights, valid, exempt, strict=True):
            for expert, weight in zip(row, given, strict=True):
                if is_valid and not is_exempt:
                    shares[expert] += int(np.float32(weight) * np.float32(32768) + np.float32(0.5))
        visited = [e for e in range(num_experts) if count[e] and e not in pinned]
        visited.sort(key=lambda e: (-shares[e], e))
        s1 = pinned | set(visited[: len(s1) - len(pinned)])
    visited_s2 = [e for e in range(num_experts) if e not in s1 and count[e] > 0]

    def served_by(expert):
        if expert in s1 or strategy == "zero":
            return expert
        if strategy == "full":
            return -1
        group = groups[expert]
        if group == -1 or sum(groups[e] == group for e in visited_s2) == 1:
            return expert
        return num_experts + group

    moved = {e: served_by(e) for e in visited_s2}
    planned, degraded = [], []
    for row, is_valid, is_exempt in zip(ids, valid, exempt, strict=True):
        if not is_valid:
            new = [-1] * len(row)
        elif is_exempt:
            new = list(row)
        else:
            new = [moved.get(e, e) for e in row]
        planned.append(new)
        degraded.append([is_valid and n != e for n, e in zip(new, row, strict=True)])
    return planned, degraded, s1
