"""Which experts fine-tuned models of one architecture share; see docs/consolidation.md."""

from training.consolidate.run import Consolidation, consolidate

__all__ = ["Consolidation", "consolidate"]
