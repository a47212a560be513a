"""Settings of a distillation."""

import dataclasses
import math
from typing import Any

OBJECTIVES = ("combined", "routed", "equation4")
STARTS = ("most_used", "mean", "aligned")
GROUPINGS = ("index", "similarity", "coactivation")
OPTIMIZERS = ("adam", "adamw", "lion", "sgd")
SCHEDULES = ("cosine", "linear", "constant")
ADDED_SETTINGS = {"optimizer": "adam", "schedule": "cosine", "sampled": 0}
"""Settings that runs of an older jmoe do not name, and the values that these had."""


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """What decides the united experts that come out; docs/distillation.md says what each does."""

    objective: str = "combined"
    start: str = "most_used"
    grouping: str = "index"
    rows: int = 65_536  # captured rows (token positions) a layer
    steps: int = 600  # optimizer steps a layer and way, at most
    batch: int = 4096  # rows a step
    decode_batch: int = 64  # rows among which brownout chooses, as a decode step would
    learning_rate: float = 0.0  # 0: 0.034 / sqrt(d_model)
    held_out: float = 0.05  # share of the rows that only measure
    patience: int = 4  # evaluations without gain before a layer stops; 0: never early
    eval_every: int = 100  # steps
    refine_steps: int = 600  # end-to-end steps a way after all layers; 0: none
    refine_rows: int = 32  # packed rows of `length` tokens a step
    refine_learning_rate: float = 0.0  # 0: two thirds of the layers'
    length: int = 128  # tokens a packed row; longer texts are cut
    dtype: str = "bfloat16"  # of the products; master weights are float32
    seed: int = 0
    optimizer: str = "adam"  # of layers and of the end-to-end stage, as Optax has it
    schedule: str = "cosine"  # of the learning rate after a warmup of 20 steps
    sampled: int | None = None  # texts that the model writes; None: 10,000 where a device holds it

    def __post_init__(self) -> None:
        """Raises ValueError, naming the setting, for a value that cannot be used."""
        for name, known in (
            ("objective", OBJECTIVES),
            ("start", STARTS),
            ("grouping", GROUPINGS),
            ("dtype", ("bfloat16", "float32")),
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        for name in ("rows", "steps", "batch", "decode_batch", "eval_every", "refine_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sampled is not None and self.sampled < 0:
            raise ValueError(f"sampled is {self.sampled}; it must be 0 or more")
        for name in ("learning_rate", "refine_learning_rate", "patience", "refine_steps"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.batch % self.decode_batch:
            raise ValueError(
                f"batch is {self.batch}; it must be a multiple of decode_batch, {self.decode_batch}"
            )
        if not 0 < self.held_out <= 0.5:
            raise ValueError(f"held_out is {self.held_out}; it must be above 0 and at most 0.5")
        if self.length < 2:
            raise ValueError(f"length is {self.length}; it must be at least 2")

    def stages(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the settings that the layers depend on, and those that only the end-to-end stage
        does.
        """
        settings = dataclasses.asdict(self)
        for name, value in ADDED_SETTINGS.items():  # runs from before there were others go on
            if settings[name] == value:
                del settings[name]
        if self.sampled:  # before, they were mixed with the data, and counted as answers
            settings["texts of its own"] = "prompts, in half of the rows"
        own = {name: settings.pop(name) for name in tuple(settings) if name.startswith("refine_")}
        return settings, own

    def check_devices(self, num_devices: int, d_model: int) -> None:
        """Raises ValueError where devices would not get equal parts of what a step reads."""
        if self.batch % num_devices:
            raise ValueError(
                f"batch is {self.batch}; with {num_devices} devices it must be a multiple of "
                f"{math.lcm(self.decode_batch, num_devices)}"
            )
        if not self.refine_steps:
            return
        tokens = self.refine_rows * self.length
        if self.refine_rows % num_devices or tokens % self.decode_batch:
            raise ValueError(
                f"refine_rows is {self.refine_rows}: over {num_devices} devices each must get "
                f"whole rows, and all together a multiple of decode_batch, {self.decode_batch}, "
                "tokens"
            )
        if d_model % num_devices:
            raise ValueError(
                f"d_model is {d_model} and does not divide by {num_devices} devices; use fewer, or "
                "refine_steps 0"
            )

    def rate(self, d_model: int) -> float:
        """Returns the peak learning rate of the layers: large models have small weights."""
        return self.learning_rate or 0.034 / math.sqrt(d_model)

    def refine_rate(self, d_model: int) -> float:
        """Returns the peak learning rate of the end-to-end stage."""
        return self.refine_learning_rate or 2 / 3 * self.rate(d_model)
