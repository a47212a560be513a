"""The machine: clusters, blocks and warps, and what goes on beside them.

Clusters run one after another, the warps of a cluster in random order. A warp's 32 lanes go
together; where they part, those furthest behind go first. What is asynchronous on a GPU (copies by
TMA, products) happens by the policy as soon as it is asked for, as late as something waits for it,
or anywhere between. The outcome has to be the same. Besides results this finds registers touched
while products have them, shared memory written by ordinary stores and read by TMA or products with
no fence between, memory that one block wrote and another touches, barriers that never come, and
addresses out of bounds or not aligned.

Not modelled: time, caches, and the order of ordinary loads and stores among threads.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from sm90 import products
from sm90.memory import Box, Global, check
from sm90.operands import LANES, SHARED, Blocked, Lanes

SHARED_LIMIT = 227 * 1024  # bytes that a block may have


class Policy(NamedTuple):
    """How warps and asynchronous work are interleaved."""

    when: str = "any"  # asynchronous work happens: "early", "late" or at "any" time
    seed: int = 0


class Fault(Exception):
    """Something at which a GPU would trap, hang or compute a wrong result."""


def run(code: Any, buffers: list[np.ndarray], policy: Policy) -> Global:
    """Runs a kernel (`execute.Code`) on its arguments, in place; returns them. Raises Fault."""
    launch = code.launch
    if launch.shared_bytes > SHARED_LIMIT:
        raise Fault(
            f"{launch.shared_bytes} bytes of shared memory; a block may have {SHARED_LIMIT}"
        )
    if any(n % c for n, c in zip(launch.grid, launch.cluster, strict=True)):
        raise Fault(f"a grid of {launch.grid} in clusters of {launch.cluster}")
    clusters = [n // c for n, c in zip(launch.grid, launch.cluster, strict=True)]
    memory, random = Global(buffers), np.random.default_rng(policy.seed)
    for number in random.permutation(int(np.prod(clusters))):
        at = np.unravel_index(number, clusters[::-1])[::-1]
        Cluster(code, memory, tuple(int(i) for i in at), policy, random).run()
    return memory


class MBarrier:
    """A barrier in shared memory."""

    def __init__(self, arrivals: int) -> None:
        self.expected = self.pending = arrivals
        self.bytes = 0  # that were announced and have not come
        self.phase = 0

    def arrive(self, count: int) -> None:
        if count > self.pending:
            raise Fault("more arrive at a barrier than it expects")
        self.pending -= count
        self._turn()

    def complete(self, count: int) -> None:
        self.bytes -= count
        self._turn()

    def _turn(self) -> None:
        if not self.pending and not self.bytes:
            self.phase += 1
            self.pending = self.expected


class Task:
    """Asynchronous work in steps, each at any time after the one before."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        self.steps, self.done = steps, 0

    @property
    def is_ready(self) -> bool:
        return True

    @property
    def is_over(self) -> bool:
        return self.done == len(self.steps)

    def step(self) -> None:
        try:
            self.steps[self.done]()
        except ValueError as error:
            raise Fault(str(error)) from error
        self.done += 1


class Cluster:
    """Blocks that run together."""

    def __init__(
        self, code: Any, memory: Global, at: tuple[int, ...], policy: Policy, random: Any
    ) -> None:
        self.code, self.memory, self.policy, self.random = code, memory, policy, random
        self.tasks: list[Task] = []
        self.arrived = self.generation = 0
        shape = code.launch.cluster
        self.blocks = []
        for rank in range(int(np.prod(shape))):
            inside = np.unravel_index(rank, shape[::-1])[::-1]
            place = tuple(int(a * s + r) for a, s, r in zip(at, shape, inside, strict=True))
            self.blocks.append(Block(self, rank, place))

    def run(self) -> None:
        live = [warp for block in self.blocks for warp in block.warps]
        runnable = list(live)
        while live:
            if self.policy.when == "any" and self.random.random() < 0.3 and self.advance():
                runnable = list(live)
            if not runnable:
                if not self.advance():
                    places = sorted({f"warp {w.index} at {w.where()}" for w in live})
                    raise Fault("nothing can go on: " + "; ".join(places))
                runnable = list(live)
            warp = runnable[self.random.integers(len(runnable))]
            before = self.events()
            warp.run(int(self.random.integers(1, 200)))
            if warp.is_over:
                live.remove(warp)
            if self.events() != before:
                runnable = list(live)
            elif warp.is_blocked or warp.is_over:
                runnable.remove(warp)
        while self.advance():
            pass

    def events(self) -> int:
        """Returns a number that changes when something happened that a warp may wait for."""
        return self.generation + sum(block.events for block in self.blocks)

    def launch(self, task: Task) -> None:
        """Begins asynchronous work."""
        if self.policy.when == "early":
            while not task.is_over:
                task.step()
        else:
            self.tasks.append(task)

    def advance(self) -> bool:
        """Runs a step of some asynchronous work; returns whether there was any."""
        ready = [task for task in self.tasks if task.is_ready]
        if not ready:
            return False
        task = ready[self.random.integers(len(ready))]
        task.step()
        if task.is_over:
            self.tasks.remove(task)
        self.blocks[0].events += 1
        return True

    def meet(self, warp: "Warp") -> None:
        """Notes that a warp comes to the cluster's barrier."""
        warp.generation = self.generation
        self.arrived += 1
        if self.arrived == sum(len(block.warps) for block in self.blocks):
            self.arrived = 0
            self.generation += 1
            self.memory.settle([block.number for block in self.blocks])


class Block:
    """A thread block."""

    def __init__(self, cluster: Cluster, rank: int, at: tuple[int, ...]) -> None:
        self.cluster, self.rank, self.at = cluster, rank, at
        grid = cluster.code.launch.grid
        self.number = 1 + at[0] + grid[0] * (at[1] + grid[1] * at[2])
        size = SHARED + cluster.code.launch.shared_bytes
        self.shared = np.full(size, 0xFF, np.uint8)
        self.writers = np.zeros(
            size, np.uint8
        )  # a warp, plus one: it wrote, and had no fence since
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, tuple[int, set[int]]] = {}  # who is at each `bar.sync`
        self.events = 0
        self.warps = [Warp(self, i) for i in range(cluster.code.launch.threads // LANES)]
        groups = [self.warps[i : i + 4] for i in range(0, len(self.warps), 4)]
        self.groups = [Warpgroup(self, group) for group in groups]

    @property
    def is_over(self) -> bool:
        return all(warp.is_over for warp in self.warps)

    def inside(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """Returns checked addresses of shared memory."""
        at = addresses.astype(np.int64)
        check(at, width, len(self.shared), "shared memory")
        if np.any(at < SHARED):
            raise IndexError(f"{at.min()} is the system's part of shared memory")
        return at

    def peer(self, number: int) -> "Block":
        """Returns a block of the cluster, from 1 on; 0 is this one."""
        block = self.cluster.blocks[number - 1] if number else self
        if block.is_over:
            raise ValueError("reaches into a block that is over")
        return block

    def mbarrier(self, at: int) -> MBarrier:
        if at not in self.mbarriers:
            raise ValueError(f"no barrier at {at} in shared memory")
        return self.mbarriers[at]

    def meet(self, barrier: int, threads: int, warp: int) -> None:
        """Notes that a warp comes to `bar.sync`."""
        expected, there = self.named.setdefault(barrier, (threads, set()))
        if expected != threads or warp in there:
            raise ValueError(f"bar.sync {barrier}: {threads} threads where {expected} are expected")
        there.add(warp)
        if len(there) * LANES == threads:
            del self.named[barrier]
            for index in there:
                self.warps[index].is_released = True
            self.events += 1

    def receive(self, box: Box, barrier: int, sender: int) -> None:
        """Brings a box by TMA that a block asked for, and signals a barrier."""
        if self.is_over:
            raise Fault("TMA writes to a block that is over")
        self.inside(box.shared[[0, -1], 0], 1)
        self.shared[box.shared] = box.read(self.cluster.memory, sender)
        self.writers[box.shared] = 0
        self.mbarrier(barrier).complete(box.bytes)
        self.events += 1

    def read(self, at: np.ndarray) -> np.ndarray:
        """Returns what TMA or a product sees."""
        if self.is_over:
            raise Fault("TMA reads from a block that is over")
        if np.any(self.writers[at]):
            raise Fault("TMA or a product reads what a store wrote, with no fence between")
        return self.shared[at]


class Product(NamedTuple):
    """One wgmma of a warpgroup."""

    width: int
    descriptors: tuple[int, ...]  # of A, if it is in shared memory, and of B
    is_transposed: tuple[bool, bool]
    result: tuple[str, ...]
    left: tuple[str, ...]  # A's registers, if it is there
    accumulates: bool


class Warpgroup:
    """Four warps, and their products in order."""

    def __init__(self, block: Block, warps: list["Warp"]) -> None:
        self.block, self.warps = block, warps
        self.products: list[Product] = []
        self.issued = [0] * len(warps)
        self.performed = 0

    def issue(self, warp: int, product: Product) -> int:
        """Notes that a warp comes to its next product, the same as the others'; returns its
        number.
        """
        number = self.issued[warp]
        if number == len(self.products):
            self.products.append(product)
        elif self.products[number] != product:
            raise ValueError(f"warps of a group differ: {self.products[number]}, {product}")
        self.issued[warp] += 1
        if min(self.issued) > number:  # the last of the four
            self.block.cluster.launch(_Next(self, number))
        return number

    def perform(self) -> None:
        """Performs the first product that was not performed yet."""
        product = self.products[self.performed]
        b = self.matrix(product.descriptors[-1], product.width, product.is_transposed[1])
        if product.left:
            a = products.left(np.stack([self.registers(name) for name in product.left]))
        else:
            a = self.matrix(product.descriptors[0], products.M, product.is_transposed[0])
        with np.errstate(all="ignore"):
            total = (a @ b.T).astype(np.float32)
            for index, name in enumerate(product.result):
                part = total[products.accumulator(index)]
                if product.accumulates:
                    part = part + self.registers(name).view(np.float32)
                for warp, values in zip(self.warps, part.reshape(4, LANES), strict=True):
                    warp.values[name] = values.view(np.uint32)
        self.performed += 1
        self.block.events += 1

    def registers(self, name: str) -> np.ndarray:
        return np.concatenate([warp.values[name] for warp in self.warps])

    def matrix(self, bits: int, size: int, is_transposed: bool) -> np.ndarray:
        at = products.addresses(products.descriptor(bits), size, is_transposed)
        return products.widen(self.block.read(at[..., None] + np.arange(2)))


class _Next(Task):
    """A product, after those before it."""

    def __init__(self, group: Warpgroup, number: int) -> None:
        super().__init__(group.perform)
        self.group, self.number = group, number

    @property
    def is_ready(self) -> bool:
        return self.number == self.group.performed


class Stores:
    """A lane's stores by TMA: groups that are committed, and what is not yet."""

    def __init__(self) -> None:
        self.committed: list[list[Task]] = []
        self.open: list[Task] = []

    def settled(self, count: int, reads_only: bool) -> bool:
        """Returns whether all groups but the last `count` have been done, or at least read."""
        groups = self.committed[: max(0, len(self.committed) - count)]
        return all(task.is_over or (reads_only and task.done) for group in groups for task in group)


class Warp:
    """32 lanes. `parts` are those at one instruction each."""

    def __init__(self, block: Block, index: int) -> None:
        self.block, self.index = block, index
        self.values: dict[str, np.ndarray] = {}
        self.parts: dict[int, Lanes] = {0: np.ones(LANES, bool)}
        self.is_blocked = False
        self.is_waiting = self.is_released = False  # at and by a `bar.sync`
        self.generation = -1  # of the cluster's barrier when it came there
        self.stores = [Stores() for _ in range(LANES)]
        self.commits: list[int] = []  # products up to each commit
        self.results: dict[str, int] = {}  # accumulators, and the last product that has each
        self.lent: dict[str, int] = {}  # A's registers: may be read

    @property
    def group(self) -> Warpgroup:
        return self.block.groups[self.index // 4]

    @property
    def is_over(self) -> bool:
        return not self.parts

    def where(self) -> str:
        return ", ".join(f"line {self.block.cluster.code.line(at)}" for at in self.parts)

    def run(self, count: int) -> None:
        """Runs up to `count` instructions, fewer if the warp is blocked or has ended."""
        code = self.block.cluster.code
        self.is_blocked = False
        for _ in range(count):
            for at in sorted(self.parts):
                try:
                    after = code.step(self, at, self.parts[at])
                except Blocked:
                    continue
                except Exception as error:
                    place = f"block {self.block.at}, warp {self.index}, line {code.line(at)}"
                    raise Fault(f"{place}: {error}") from error
                self._move(at, after)
                break
            else:
                self.is_blocked = not self.is_over
                return

    def _move(self, at: int, after: Iterable[tuple[int, Lanes]]) -> None:
        del self.parts[at]
        for place, lanes in after:
            if lanes.any():
                self.parts[place] = self.parts[place] | lanes if place in self.parts else lanes

    def start_store(
        self, lane: int, shared: np.ndarray, write: Callable[[np.ndarray], None]
    ) -> None:
        """Starts a store by TMA, which reads at one time and writes at another."""
        held: list[np.ndarray] = []
        block = self.block
        task = Task(lambda: held.append(block.read(shared).copy()), lambda: write(held[0]))
        self.stores[lane].open.append(task)
        block.cluster.launch(task)

    def multiply(self, product: Product) -> None:
        """Issues a product."""
        if any(name in self.lent for name in product.result):
            raise ValueError("accumulates in a register that a product takes from")
        if any(name in self.results for name in product.left):
            raise ValueError("takes from a register that a product accumulates in")
        number = self.group.issue(self.index % 4, product)
        self.results |= dict.fromkeys(product.result, number)
        self.lent |= dict.fromkeys(product.left, number)

    def settle(self, performed: int) -> None:
        """Notes that products before that one have been waited for."""
        self.results = {name: n for name, n in self.results.items() if n >= performed}
        self.lent = {name: n for name, n in self.lent.items() if n >= performed}

    def check_registers(self, named: frozenset[str], written: frozenset[str]) -> None:
        """Checks that an instruction other than a product does not touch registers of pending
        products.
        """
        if self.results and not named.isdisjoint(self.results):
            raise ValueError("touches an accumulator of a product that was not waited for")
        if self.lent and not written.isdisjoint(self.lent):
            raise ValueError("writes a register that a product takes from")
