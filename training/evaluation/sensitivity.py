"""Thresholds by layer: what each layer's degradation costs and saves, and a table of levels.

The frontier is a greedy descent over whole rows, so that what layers do to each other counts: from
exact, the layer whose next notch costs least for what it saves, measured on the whole model. A
measurement that is older than the row is made again only where it would be the best.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jmoe.beside import digest_of
from jmoe.brownout import Brownout
from jmoe.levels import FILE, Levels, by_code, read, write
from training import markdown
from training.evaluation.divergence import Cost, Divergence
from training.evaluation.run import EvaluateConfig, Work, check_ways
from training.evaluation.tables import RESAMPLES
from training.progress import Progress, counted

NOTCH = 10  # percent
SAVINGS = (25, 50, 65, 80, 90)
"""Percent of what threshold 0 saves of active experts."""
Row = tuple[int, ...]


class Point(NamedTuple):
    """Thresholds by layer, and what they cost and save."""

    row: Row
    divergence: float  # rooted (`Cost`), all items together
    active: float  # experts, all layers together


class Search:
    """Measures rows of thresholds for one way of partial brownout, each once."""

    def __init__(self, measure: Divergence, way: int, keep: Any, num_layers: int) -> None:
        self.measure, self.way, self.keep, self.num_layers = measure, way, keep, num_layers
        self._setting = Brownout("partial", 0, way, keep)
        self._found: dict[Row, Cost] = {}

    def cost(self, row: Row) -> Cost:
        """Returns the cost of decode steps under these thresholds."""
        if row not in self._found:
            levels = by_code([Levels(self.way, self.keep, (row,) * 101)], self.num_layers)
            self._found[row] = self.measure.decode(self._setting, levels)
        return self._found[row]

    def point(self, row: Row) -> Point:
        """Returns the same, of all items and layers together."""
        found = self.cost(row)
        return Point(row, float(found.rooted.sum()), float(found.active.sum()))

    def alone(self, layer: int, threshold: int) -> tuple[float, float]:
        """Returns what a layer costs and saves by itself, the others exact: the mean divergence of
        an answer token, and the layer's active experts.
        """
        cost = self.cost(self._with(self._uniform(100), layer, threshold))
        return float(cost.divergence.sum() / self.measure.num_tokens.sum()), cost.active[layer]

    def path(self, advance: Callable[[int], None]) -> list[Point]:
        """Returns the frontier from all exact to all degraded, a notch of one layer a point."""
        here = self.point(self._uniform(100))
        found, queue, fresh = [here], [], dict.fromkeys(range(self.num_layers), -1)
        for layer in range(self.num_layers):
            heapq.heappush(queue, (-np.inf, layer))
        while queue:
            _, layer = heapq.heappop(queue)
            lower = self.point(self._with(here.row, layer, here.row[layer] - NOTCH))
            price = (lower.divergence - here.divergence) / max(here.active - lower.active, 1e-9)
            if fresh[layer] < len(found) and queue and price > queue[0][0]:
                fresh[layer] = len(found)
                heapq.heappush(queue, (price, layer))
                continue
            here = lower
            found.append(here)
            advance(1)
            if here.row[layer]:
                heapq.heappush(queue, (price, layer))
        return found

    def levels(self, path: Sequence[Point]) -> Levels:
        """Returns the table: of each level, thresholds on the path under which as many experts are
        active as under the level in every layer.
        """
        uniform = [self.point(self._uniform(t)).active for t in range(0, 101, NOTCH)]
        wanted = np.interp(np.arange(101), np.arange(0, 101, NOTCH), uniform)
        return Levels(self.way, self.keep, tuple(_between(path, active) for active in wanted))

    def _uniform(self, threshold: int) -> Row:
        return (threshold,) * self.num_layers

    def _with(self, row: Row, layer: int, threshold: int) -> Row:
        return (*row[:layer], threshold, *row[layer + 1 :])


def _between(path: Sequence[Point], active: float) -> Row:
    """Returns thresholds on the path under which so many experts are active, of neighbours between
    which one layer moves.
    """
    for above, below in pairwise(path):
        if below.active <= active:
            share = (above.active - active) / max(above.active - below.active, 1e-9)
            steps = np.subtract(below.row, above.row)
            return tuple(map(int, np.round(above.row + np.clip(share, 0, 1) * steps)))
    return path[-1].row


class Compared(NamedTuple):
    """The divergence of one choice over that of the paper's plan, at equal saving."""

    phase: str
    saving_percent: int
    choice: str
    ratio: float
    low: float
    high: float


def evaluate_levels(
    config: EvaluateConfig,
    ways: Sequence[int],
    keep: str,
    searched: int,
    progress: Progress = lambda *args: None,
    *,
    stored: bool = False,
) -> dict[int, list[Compared]]:
    """Searches levels of each way on the first `searched` items, and compares them with the paper's
    plan on the others; writes `levels.json` and `sensitivity.md` into `config.out`.

    Items are tasks, or windows of `config.text`. `stored`: compares the model's own levels instead
    of a search. Raises ValueError as `evaluate`, for too few items, and as `jmoe.levels.read`.
    """
    tasks = config.data is not None or config.generate_tasks is not None
    if tasks and config.text:
        raise ValueError("--sensitivity has tasks and --text; give one of them")
    items = [] if config.text else config.items()
    model = config.load()
    check_ways(model, [Brownout("partial", 0, way) for way in ways])
    layers, digest = model.config.num_moe_layers, digest_of(model.path)
    own = read(model.path, layers, digest) if stored else {}
    if missing := [way for way in ways if stored and (way, keep) not in own]:
        raise ValueError(f"way is {missing[0]}; {model.path / FILE} has no levels of it by {keep}")
    work = Work(model, items, config)
    count = len(work.prompts)
    if not (0 if stored else 1) <= searched < count:
        raise ValueError(
            f"--search-items is {searched}; it must be less than the {count} items there are: "
            "levels are scored on the others"
        )
    found: dict[int, list[Compared]] = {}
    tables, parts = [], [f"# Levels of {model.name}, kept by {keep}\n"]
    total = len(ways) * ((0 if stored else 100 // NOTCH * layers) + 60)
    advance = counted(partial(progress, "levels"), total)
    config.out.mkdir(parents=True, exist_ok=True)
    for way in ways:
        if stored:
            tables.append(own[way, keep])
            parts.append(f"## Way {way}\n")
        else:
            search = Search(work.divergence(slice(searched)), way, keep, layers)
            tables.append(search.levels(search.path(advance)))
            parts.append(_described(search, tables[-1]))
            del search  # and the logits that it holds
        scored = work.divergence(slice(searched, None))
        found[way] = [
            one
            for phase in ("decode", "prefill")
            for one in compare(phase, scored, tables[-1], advance)
        ]
        parts.append(_table(found[way]))
        if not stored:
            write(config.out / FILE, tables, digest)  # what is done is there
        (config.out / "sensitivity.md").write_text("\n".join(parts), encoding="utf-8")
    return found


def compare(
    phase: str, scored: Divergence, table: Levels, advance: Callable[[int], None]
) -> list[Compared]:
    """Returns ratios at equal saving, with 95 % intervals (bootstrap over items)."""
    run = scored.decode if phase == "decode" else scored.prefill
    levels, exact = by_code([table], len(table.rows[0])), run(None)

    def curve(keep: Any, given: np.ndarray | None = None) -> list[Cost]:
        costs = [exact]
        for threshold in range(100 - NOTCH, -1, -NOTCH):
            costs.append(run(Brownout("partial", threshold, table.way, keep), given))
            advance(1)
        return costs

    papers = curve("visits")
    curves = {table.keep: curve(table.keep), "levels": curve(table.keep, levels)}
    count, rng = len(scored.num_tokens), np.random.default_rng(0)
    weights = rng.multinomial(count, np.full(count, 1 / count), RESAMPLES)  # of items, by resample
    found = []
    for saving in SAVINGS:
        below = at_saving(papers, saving / 100)
        for kind, costs in curves.items():
            above = at_saving(costs, saving / 100)
            resampled = (weights @ above) / (weights @ below)
            low, high = np.percentile(resampled, (2.5, 97.5))
            ratio = float(above.sum() / below.sum())
            found.append(Compared(phase, saving, kind, ratio, float(low), float(high)))
    return found


def at_saving(costs: Sequence[Cost], saving: float) -> np.ndarray:
    """Returns each item's divergence where so much is saved of what threshold 0 saves, from costs
    by falling threshold.
    """
    active = np.array([cost.active.sum() for cost in costs])
    saved = (active[0] - active) / (active[0] - active[-1])
    after = int(np.searchsorted(saved, saving).clip(1, len(costs) - 1))
    share = (saving - saved[after - 1]) / max(saved[after] - saved[after - 1], 1e-9)
    before, behind = costs[after - 1].divergence, costs[after].divergence
    return before + share * (behind - before)


def _described(search: Search, table: Levels) -> str:
    """Returns what each layer costs and saves by itself, and thresholds by level, as Markdown."""
    thresholds = (60, 20, 0)
    alone = []
    for layer in range(search.num_layers):
        costs = (search.alone(layer, threshold) for threshold in thresholds)
        alone.append([str(layer), *(f"{1000 * nats:.3f}, {active:.1f}" for nats, active in costs)])
    by_level = [
        [str(level), ", ".join(map(str, table.rows[level]))] for level in range(100, -1, -NOTCH)
    ]
    parts = [
        f"## Way {table.way}\n",
        "Each MoE layer alone, the others exact: divergence of an answer token in thousandths, and "
        "its active experts.\n",
        markdown.table(["layer", *(f"t {t} %" for t in thresholds)], alone, "r") + "\n",
        markdown.table(["level", "thresholds by layer"], by_level, "rl") + "\n",
    ]
    return "\n".join(parts)


def _table(found: Sequence[Compared]) -> str:
    rows = []
    for alike, levels in zip(found[::2], found[1::2], strict=True):
        cells = (f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})" for one in (alike, levels))
        rows.append([alike.phase, f"{alike.saving_percent} %", *cells])
    head = ["phase", "saving", "thresholds alike", "levels"]
    return (
        "Divergence over that of the paper's plan at equal saving, on items that were not searched "
        f"on; 95 % intervals.\n\n{markdown.table(head, rows, 'lrl')}\n"
    )
