"""A policy that parks, resumes and starts steps at random."""

import random

from serving.plan import Phase
from serving.scheduling.policy import Choice, Fcfs


class Restless(Fcfs):
    """Chooses at random; answers have to be the same."""

    parks = True

    def __init__(self, seed=7):
        self.rng = random.Random(seed)

    def choose(self, view):
        options = [Choice.go_on(batch) for batch in view.under_way]
        options += [Choice(Phase.PREFILL), Choice(Phase.DECODE)]
        return self.rng.choice(options)
