"""The events of asynchronous expert parallelism: arrays and loops, compiled where numba is there.

Letters: W workers, attention workers first; L layers; G groups of experts, of which there is one
here; N sequences, which never end; K experts a row. A *visit* is a row on its way to or from an
expert: number token * K + k. Rows that wait in a queue, or travel together, are a chain: `after`
names the next one. In an attention worker's queue a token is there as its visit 0, once all K have
come.

A worker's host launches one stage at a time, early enough that it is ready when the device is; the
device runs one stage at a time. A batch of rows to one worker takes both ends of its link
`max(message_s, bytes / bandwidth)`, one after another, and `latency_s` between.
"""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from serving.scheduling.layers.compiled import decide, jit

ARRIVE, DONE, FREE, WAKE = range(4)
NONE, UNLIMITED = -1, 1 << 62
# Of `State.numbers` and `State.seconds`.
SEQUENCE, TURN, PRODUCED, STAGES, NUM_ITL = range(5)
NOW, ITL_SUM = range(2)


class State(NamedTuple):
    """All that changes, and the tables that events look at."""

    numbers: Int[np.ndarray, "5"]
    seconds: Float[np.ndarray, "2"]
    # A heap: time, order of entry, kind, worker, layer, head of a chain, its length.
    events: list[tuple[float, int, int, int, int, int, int]]
    # Queues of workers.
    counts: Int[np.ndarray, "W L G"]
    oldest: Float[np.ndarray, "W L G"]
    heads: Int[np.ndarray, "W L G"]
    tails: Int[np.ndarray, "W L G"]
    idle: Int[np.ndarray, "W"]  # 1: the host waits for rows; 2: it is about to choose
    epoch: Int[np.ndarray, "W"]  # times that it has waited: a WAKE of an earlier wait is void
    host_s: Float[np.ndarray, "W"]  # until which it is busy
    device_s: Float[np.ndarray, "W"]
    busy_s: Float[np.ndarray, "W"]  # of the device, in all
    out_s: Float[np.ndarray, "W"]  # until which a worker's link is busy sending
    in_s: Float[np.ndarray, "W"]
    # Rows.
    after: Int[np.ndarray, "visits"]
    came_s: Float[np.ndarray, "visits"]
    expert: Int[np.ndarray, "visits"]
    missing: Int[np.ndarray, "N"]  # of a token's K results
    home: Int[np.ndarray, "N"]
    last_s: Float[np.ndarray, "N"]  # of a sequence's newest token
    running: Int[np.ndarray, "W"]  # sequences of an attention worker
    stamp: Int[np.ndarray, "E"]  # of the last stage that an expert had rows in
    fragment: Int[np.ndarray, "W 3"]  # head, tail and length of what is sent to each
    # Tables.
    random: Int[np.ndarray, "draws"]
    sets: Int[np.ndarray, "L sets K"]
    hosts: Int[np.ndarray, "L E hosts"]
    num_hosts: Int[np.ndarray, "L E"]
    turns: Int[np.ndarray, "L E"]
    first_s: Float[np.ndarray, "rows"]
    attention_s: Float[np.ndarray, "rows"]
    products_s: Float[np.ndarray, "visits_1"]
    reads_s: Float[np.ndarray, "experts_1"]
    late: Float[np.ndarray, "stages"]  # the factors of stages, in turn


class Picker(NamedTuple):
    """A worker's rule and how long rows wait, as `serving.scheduling.layers` has them."""

    rule: int
    weights: Float[np.ndarray, "K"]
    min_batch: int
    max_wait_s: float
    max_age_s: float


class Costs(NamedTuple):
    """Seconds that are not a stage's own."""

    fixed_s: float
    attention_host_s: float  # of a launch
    expert_host_s: float
    latency_s: float
    message_s: float
    row_s: float  # of a row's bytes on a link
    num_attention: int


@jit
def push(s: State, at_s: float, kind: int, worker: int, layer: int, head: int, count: int) -> None:
    """Adds an event."""
    s.numbers[SEQUENCE] += 1
    heappush(s.events, (at_s, s.numbers[SEQUENCE], kind, worker, layer, head, count))


def no_events() -> list[tuple[float, int, int, int, int, int, int]]:
    """Returns an empty heap, of the type that these loops take, compiled or not."""
    if not hasattr(push, "py_func"):
        return []
    import numba
    from numba.typed import List

    return List.empty_list(numba.types.Tuple([numba.float64] + [numba.int64] * 6))


@jit
def _enqueue(s: State, worker: int, layer: int, group: int, row: int) -> None:
    now = s.seconds[NOW]
    s.after[row], s.came_s[row] = NONE, now
    if s.counts[worker, layer, group] == 0:
        s.heads[worker, layer, group] = row
        s.oldest[worker, layer, group] = now
    else:
        s.after[s.tails[worker, layer, group]] = row
    s.tails[worker, layer, group] = row
    s.counts[worker, layer, group] += 1


@jit
def enter(s: State, token: int) -> None:
    """Puts a sequence's next token before layer 0 of its home, whose host wakes up."""
    worker = s.home[token]
    _enqueue(s, worker, 0, 0, token * s.sets.shape[2])
    _wake(s, worker)


@jit
def _wake(s: State, worker: int) -> None:
    if s.idle[worker] == 1:
        s.idle[worker] = 2  # a choice is on its way
        push(s, max(s.seconds[NOW], s.host_s[worker]), FREE, worker, 0, NONE, 0)


@jit
def _arrive(s: State, c: Costs, worker: int, layer: int, head: int) -> None:
    """A chain of rows has come: into queues; at attention each once its K results are there."""
    top_k, row, any_ready = s.sets.shape[2], head, False
    while row != NONE:
        following = s.after[row]
        if worker >= c.num_attention:
            _enqueue(s, worker, layer, 0, row)
            any_ready = True
        else:
            token = row // top_k
            s.missing[token] -= 1
            if s.missing[token] == 0:
                _enqueue(s, worker, layer, 0, token * top_k)
                any_ready = True
        row = following
    if any_ready:
        _wake(s, worker)


@jit
def start(s: State, c: Costs, worker: int, layer: int, group: int, most: int) -> int:
    """Takes up to `most` rows off a queue and launches their stage; returns how many."""
    now = s.seconds[NOW]
    rows = min(s.counts[worker, layer, group], most)
    head = s.heads[worker, layer, group]
    s.numbers[STAGES] += 1
    tail, active = head, 0
    for i in range(rows):
        if i > 0:
            tail = s.after[tail]
        if worker >= c.num_attention and s.stamp[s.expert[tail]] != s.numbers[STAGES]:
            s.stamp[s.expert[tail]] = s.numbers[STAGES]
            active += 1
    rest = s.after[tail]
    s.after[tail] = NONE
    s.counts[worker, layer, group] -= rows
    s.heads[worker, layer, group] = rest
    s.oldest[worker, layer, group] = s.came_s[rest] if rest != NONE else np.inf
    if worker >= c.num_attention:
        host_s = c.expert_host_s
        stage_s = c.fixed_s + max(s.products_s[rows], s.reads_s[active])
    else:
        host_s = c.attention_host_s
        stage_s = s.first_s[rows] if layer == 0 else s.attention_s[rows]
    stage_s *= s.late[s.numbers[STAGES] % len(s.late)]
    ready_s = now + host_s
    end_s = max(ready_s, s.device_s[worker]) + stage_s
    s.device_s[worker] = end_s
    s.busy_s[worker] += stage_s
    s.idle[worker] = 0
    s.host_s[worker] = max(ready_s, end_s - host_s)
    push(s, end_s, DONE, worker, layer, head, rows)
    push(s, s.host_s[worker], FREE, worker, 0, NONE, 0)
    return rows


@jit
def wait(s: State, worker: int, wake_s: float) -> None:
    """The host waits for rows, or until `wake_s`."""
    s.idle[worker] = 1
    s.epoch[worker] += 1
    if wake_s < np.inf:
        push(s, max(wake_s, s.seconds[NOW]), WAKE, worker, 0, s.epoch[worker], 0)


@jit
def play(s: State, c: Costs, until_s: float, attention: Picker, experts: Picker, most: int) -> None:
    """Plays events up to `until_s`; an attention stage takes `most` rows.

    Every event of a moment is played before a worker's host chooses, so that rows which come
    together are seen together.
    """
    while len(s.events) > 0 and s.events[0][0] <= until_s:
        now, _, kind, worker, layer, head, count = heappop(s.events)
        s.seconds[NOW] = now
        if kind == ARRIVE:
            _arrive(s, c, worker, layer, head)
        elif kind == DONE:
            _done(s, c, worker, layer, head)
        elif kind == FREE or (s.idle[worker] == 1 and s.epoch[worker] == head):
            if layer == 0 and len(s.events) > 0 and s.events[0][0] == now:
                push(s, now, kind, worker, 1, head, count)  # whatever else happens now comes first
            elif worker >= c.num_attention:
                _choose(s, c, worker, experts, True, UNLIMITED)
            else:  # it knows its sequences: with all of them here, nothing else can come
                more = s.counts[worker].sum() < s.running[worker]
                _choose(s, c, worker, attention, more, most)


@jit
def _choose(s: State, c: Costs, worker: int, picker: Picker, more: bool, most: int) -> None:
    """A worker's host launches a stage, or waits for rows."""
    counts, oldest = s.counts[worker], s.oldest[worker]
    rule, weights, least, wait_s, age_s = picker
    now = s.seconds[NOW]
    least = least if more else 1
    flat = decide(rule, weights, counts, counts, False, oldest, now, least, wait_s, age_s)
    if flat >= 0:
        start(s, c, worker, flat, 0, most)
        return
    since = np.inf
    for layer in range(counts.shape[0]):
        if counts[layer, 0] > 0:
            since = min(since, oldest[layer, 0])
    wait(s, worker, since + min(wait_s, age_s))


@jit
def _done(s: State, c: Costs, worker: int, layer: int, head: int) -> None:
    """A stage has ended: its rows are sent on, those to one worker together."""
    top_k, num_layers = s.sets.shape[2], s.sets.shape[0]
    row, to_experts = head, worker < c.num_attention
    next_layer = layer if to_experts else (layer + 1) % num_layers
    s.fragment[:, 2] = 0
    while row != NONE:
        following = s.after[row]
        if not to_experts:
            _send_along(s, s.home[row // top_k], row)
        else:
            token = row // top_k
            if layer == 0:
                _token(s, token)
            draw = s.random[s.numbers[TURN] % len(s.random)]
            s.numbers[TURN] += 1
            s.missing[token] = top_k
            for k in range(top_k):
                visit, expert = token * top_k + k, s.sets[layer, draw, k]
                s.expert[visit] = expert
                turn = s.turns[layer, expert]
                s.turns[layer, expert] = (turn + 1) % s.num_hosts[layer, expert]
                _send_along(s, c.num_attention + s.hosts[layer, expert, turn], visit)
        row = following
    _send(s, c, worker, next_layer)


@jit
def _send_along(s: State, destination: int, row: int) -> None:
    s.after[row] = NONE
    if s.fragment[destination, 2] == 0:
        s.fragment[destination, 0] = row
    else:
        s.after[s.fragment[destination, 1]] = row
    s.fragment[destination, 1] = row
    s.fragment[destination, 2] += 1


@jit
def _send(s: State, c: Costs, worker: int, layer: int) -> None:
    """Sends what was put together, beginning after this worker, lest all begin with the same."""
    num_workers = len(s.idle)
    for step in range(num_workers):
        to = (worker + 1 + step) % num_workers
        count = s.fragment[to, 2]
        if count == 0:
            continue
        takes_s = max(c.message_s, count * c.row_s)
        s.out_s[worker] = max(s.out_s[worker], s.seconds[NOW]) + takes_s
        # The far end takes the rows as they come, unless it is behind with others.
        s.in_s[to] = max(s.in_s[to] + takes_s, s.out_s[worker] + c.latency_s)
        push(s, s.in_s[to], ARRIVE, to, layer, s.fragment[to, 0], count)


@jit
def _token(s: State, token: int) -> None:
    """A sequence has a new token."""
    now = s.seconds[NOW]
    s.numbers[PRODUCED] += 1
    if s.last_s[token] >= 0:
        s.seconds[ITL_SUM] += now - s.last_s[token]
        s.numbers[NUM_ITL] += 1
    s.last_s[token] = now
