"""jmoe: a functional Mixture-of-Experts model with paged experts and brownout.

The notebook API: `load`, `load_family`, `forward`, `generate`, `save`, `brownout.plan`.
"""

from jmoe import brownout
from jmoe.api import Model, load, save
from jmoe.brownout import Brownout
from jmoe.checkpoint import CheckpointError
from jmoe.config import ConfigError, ModelConfig
from jmoe.family import Family, load_family
from jmoe.forward import ForwardStats, forward
from jmoe.generate import Generation, generate
from jmoe.parallel.home import make_mesh
from jmoe.sharing import Sharing, SharingError

__version__ = "0.1.0"

__all__ = [
    "Brownout",
    "CheckpointError",
    "ConfigError",
    "Family",
    "ForwardStats",
    "Generation",
    "Model",
    "ModelConfig",
    "Sharing",
    "SharingError",
    "brownout",
    "forward",
    "generate",
    "load",
    "load_family",
    "make_mesh",
    "save",
]
