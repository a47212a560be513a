"""How many random traces a deep test plays: few in CI, as many as `JMOE_TRACES` says elsewhere."""

import os


def num_traces(in_ci: int) -> int:
    """Returns `JMOE_TRACES`, or as many as CI has time for."""
    return int(os.environ.get("JMOE_TRACES", in_ci))
