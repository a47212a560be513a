"""A runner whose tokens depend on everything that pages hold, to see which request read what
another wrote.
"""

from dataclasses import dataclass, field

from jmoe.packed_rows import EXEMPT, KV_LEN, Q_LEN, REFUSES, SLOT
from tests.serving.fake_runner import FakeRunner

VOCAB = 997


def mixed(value: int, more: int, percent: int = 100) -> int:
    """Returns a value that depends on both values and the percentage, and on nothing else."""
    return (value * 6_364_136_223_846_793_005 + more * 1_442_695_040_888_963_407 + percent) % 2**61


def written(model: int, prompt: list[int], count: int) -> list[int]:
    """Returns the tokens of a request whose every position is computed by the model's own
    experts.
    """
    value, tokens = model, []
    for token in prompt:
        value = mixed(value, mixed(value, token))
    while True:
        tokens.append(value % VOCAB)
        if len(tokens) == count:
            return tokens
        value = mixed(value, mixed(value, tokens[-1]))


@dataclass
class ReadingRunner(FakeRunner):
    """Under brownout some positions hold another value, and their rows say that they do."""

    vocab_size: int = VOCAB
    held: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By page and position in it: what is read there, and the threshold it was computed under."""
    begun: list[tuple[bool, int]] = field(default_factory=list)
    """Of rows that begin after others' pages: whether they refuse brownout, and the lowest
    threshold of what they read there.
    """

    def computed(self, plan, control, row, model, new, adopted):
        """See FakeRunner. Every position is read, as attention does."""
        slot, exempt = int(row[SLOT]), row[EXEMPT] > 0
        start, size = int(row[KV_LEN] - row[Q_LEN]), self.limits.page_size
        value, lowest = model, 100
        for position in range(start):
            own, percent = self.held[self._table[slot, position // size]][position % size]
            value, lowest = mixed(value, own), min(lowest, percent)
        if adopted and plan.first_layer == 0:
            self.begun.append((row[EXEMPT] == REFUSES, lowest))
        browned = control.strategy and not exempt and control.threshold_percent < 100
        degraded = 0
        for position, token in enumerate(new, start):
            changed = browned and (value + token) % 3 == 0
            percent = control.threshold_percent if changed else 100
            degraded += bool(changed)
            own = mixed(value, token, percent)
            if plan.is_last:
                page = self._table[slot, position // size]
                held = self.held.setdefault(page, [(-1, -1)] * size)
                held[position % size] = own, percent
            value = mixed(value, own)
        # Each part of a step says what its own layers did; here it was the last ones.
        return value % self.vocab_size, degraded if plan.is_last else 0
