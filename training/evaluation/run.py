"""`jmoe evaluate`: every setting on the same items, kept setting by setting in a folder."""

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmoe import expected_loss
from jmoe.api import Model, load, resolve
from jmoe.beside import digest_of
from jmoe.brownout import Brownout
from jmoe.experts import UnitedExperts
from jmoe.sharing import Sharing
from jmoe.weights import ResidentWeights
from training.evaluation import items as sources
from training.evaluation.answers import answer
from training.evaluation.divergence import Divergence
from training.evaluation.items import ZERO, kind_of
from training.evaluation.picture import draw
from training.evaluation.quality import OutputError, losses, perplexity, sample_inputs, windows
from training.evaluation.store import INPUTS, Result, Store, digest, model_digest
from training.evaluation.tables import (
    Score,
    by_families,
    expected_losses,
    paired_loss,
    scores,
    write_csv,
    write_markdown,
)
from training.progress import Progress, counted
from training.tasks import Task


@dataclass(frozen=True)
class EvaluateConfig:
    """What `evaluate` runs on. Counts are of items, tokens, sequences and steps."""

    model: str = "bundled"
    dtype: str = "bfloat16"
    data: Path | None = None  # task file; or
    generate_tasks: int | None = None  # so many fresh held-out items
    num: int | None = None  # items of `data`; None: all
    text: tuple[Path, ...] = ()
    text_window: int = 128
    batch: int = 64
    chunk: int = 256
    error_steps: int = 32
    seed: int = 0
    out: Path = Path("out/evaluate")
    allow_unknown_config: tuple[str, ...] = ()  # as of `jmoe.load`
    quantize: str = "auto"  # likewise
    family: Path | None = None  # the map by which `model` shares its siblings' experts
    kv_cache_dtype: str = "auto"  # likewise
    united_of: str = ""  # fingerprint of the sibling whose united experts `model` uses

    def __post_init__(self) -> None:
        """Raises ValueError for a number out of range."""
        least = {"text_window": 2, "batch": 1, "chunk": 1, "error_steps": 1, "seed": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")

    def items(self) -> list[Task]:
        """Returns the items. Raises as `training.evaluation.items.choose`."""
        return sources.choose(self.data, self.num, self.generate_tasks, self.seed)

    def load(self) -> Model:
        """Loads the model. Raises as `jmoe.load`."""
        return load(
            self.model,
            self.dtype,
            allow_unknown_config=self.allow_unknown_config,
            quantize=self.quantize,
            kv_cache_dtype=self.kv_cache_dtype,
        )


def evaluate(
    config: EvaluateConfig,
    settings: Sequence[Brownout],
    progress: Progress = lambda *args: None,
    model: Model | None = None,
    belongs_to: str = "",
) -> list[Score]:
    """Runs zero brownout and every setting that the folder has no result of, then writes tables.

    `config.out` gets `inputs.json`, `results.jsonl` (a line a setting, as it is done),
    `evaluate.csv`, `evaluate.md`, `evaluate.png`, and `expected_loss.json`, a table for the model's
    directory, of ways and the like whose threshold 0 is among the settings. Returns zero brownout's
    score, then one for each setting. `model` is that of `config.model`, where it is loaded already;
    of one of a family, `belongs_to` is what the table does (`jmoe.beside.digest_in_family`), empty:
    there is none.

    Raises ValueError for inputs that do not fit the model or each other, and for a folder that
    belongs to other inputs.
    """
    items = config.items()
    model = model or config.load()
    check_ways(model, settings)
    work = Work(model, items, config)
    inputs = work.inputs()
    store = Store(config.out, inputs, settings)
    todo = [s for s in dict.fromkeys([ZERO, *settings]) if s == ZERO or s.threshold_percent < 100]
    todo = [setting for setting in todo if setting not in store.results]
    advance = counted(partial(progress, "evaluate"), len(todo) * work.units)
    for setting in todo:
        store.add(work.run(setting, advance))
    found = scores(settings, store.results, [item.family for item in items])
    (config.out / "evaluate.csv").write_text(write_csv(found), encoding="utf-8")
    (config.out / "evaluate.md").write_text(write_markdown(found, inputs), encoding="utf-8")
    belongs_to = belongs_to if config.family else digest_of(model.path)
    if belongs_to and (tables := expected_losses(found)):
        expected_loss.write(config.out / expected_loss.FILE, tables, belongs_to)
    title = f"{model.name}: accuracy under brownout, {len(items):,} items, batch {config.batch}"
    draw(found, config.out / "evaluate.png", title)
    return found


class Compared(NamedTuple):
    """What a setting of another format of weights or of the cache loses, in percent of zero
    brownout in the format that it is compared with; and the interval of that (`paired_loss`).
    """

    loss_percent: float
    low_percent: float
    high_percent: float
    beyond: float = 0.0
    """Points above what format and brownout lose by themselves; 0 of zero brownout."""
    margin: float = 0.0  # half of the 95 % interval of `beyond`, by family


def right_answers(config: EvaluateConfig, folder: Path) -> dict[Brownout, list[bool]]:
    """Returns which of the items were answered right under each setting in a folder.

    Raises ValueError for a folder without zero brownout, and for one of other items.
    """
    if not (folder / INPUTS).exists():
        raise ValueError(f"{folder} has no {INPUTS}; name the --out of another run")
    inputs = json.loads((folder / INPUTS).read_text(encoding="utf-8"))
    results, items = Store(folder, inputs).results, config.items()
    if ZERO not in results or inputs.get("items_digest") != _digest(items):
        raise ValueError(f"{folder} has no zero brownout of these {len(items)} items")
    return {setting: result.right for setting, result in results.items()}


def losses_against(config: EvaluateConfig, folder: Path) -> dict[Brownout, Compared]:
    """Returns what zero brownout of `config.out` loses, and each setting that another folder has
    too, against zero brownout of that folder.

    Raises ValueError as `right_answers`.
    """
    items = config.items()
    families = [item.family for item in items]
    family = np.array(families)
    exact, other = (right_answers(config, each) for each in (folder, config.out))

    def compared(setting: Brownout) -> Compared:
        rights = exact[ZERO], exact[setting], other[ZERO], other[setting]
        zero, by_brownout, by_format, both = (np.array(right, int) for right in rights)
        beyond = by_brownout + by_format - zero - both
        own = [family == name for name in np.unique(family)]
        right = np.mean([zero[at].mean() for at in own])
        mean = np.mean([beyond[at].mean() for at in own])
        error = math.sqrt(sum(beyond[at].var() / at.sum() for at in own)) / len(own)
        share = 100 / right if right else math.nan
        loss = paired_loss(by_families(rights[0], rights[3], families))
        return Compared(*loss, float(share * mean), float(share * 1.96 * error))

    return {setting: compared(setting) for setting in other if setting in exact}


def uses_united(setting: Brownout) -> bool:
    """Returns whether united experts may serve under a setting."""
    return setting.name not in ("zero", "full") and setting.threshold_percent < 100


def check_bound(config: EvaluateConfig, bound_percent: float) -> None:
    """Raises ValueError for a bound of a loss that these items are too few to show: of n items of
    which none changed, up to 300 / n percent may yet do (the rule of three).
    """
    items = config.items()
    if not 0 < bound_percent <= 100:
        raise ValueError(
            f"--borrow-united is {bound_percent}; it must be above 0 and at most 100 %"
        )
    if 300 / len(items) > bound_percent:
        raise ValueError(
            f"--borrow-united is {bound_percent} %, and {len(items)} items show no loss below "
            f"{300 / len(items):.3g} %; give {math.ceil(300 / bound_percent)} or more"
        )


def borrowing_within(
    sharing: Sharing, found: Mapping[str, Sequence[Score]], bound_percent: float
) -> Sharing:
    """Returns the map in which siblings use the first model's united experts: those that may lose
    at most `bound_percent` by each setting that `found` has of them, with these united experts.

    What may be lost is the upper end of `Score.loss_percent`'s interval. The facts have the bound
    and every loss. Raises ValueError for a model that has nothing right without brownout.
    """
    lenders, losses = [0], {}
    for number, name in enumerate(sharing.names[1:], 1):
        scores = [score for score in found[name] if uses_united(score.setting)]
        if not found[name][0].accuracy:
            raise ValueError(
                f"{name} has nothing right without brownout, of which a share could be lost; give "
                "items that it is for with --data"
            )
        worst = max(score.high_percent for score in scores)
        lenders.append(0 if worst <= bound_percent else number)
        losses[name] = {
            label(score.setting): [
                round(value, 3)
                for value in (score.loss_percent, score.low_percent, score.high_percent)
            ]
            for score in scores
        }
    facts = {"of": sharing.names[0], "bound_percent": bound_percent, "loss_percent": losses}
    united = tuple(lenders) if lenders != list(range(len(lenders))) else ()
    return replace(
        sharing,
        united=united,
        united_ways=sharing.united_ways if united else (),
        facts={**sharing.facts, "united": facts},
    )


def _digest(items: Sequence[Task]) -> str:
    return digest(part for item in items for part in item)


def check_ways(model: Model, settings: Sequence[Brownout]) -> None:
    """Raises ValueError for a way that the model does not have."""
    wanted = {setting.way for setting in settings if setting.way is not None}
    lacking = sorted(wanted - set(model.united))
    if lacking:
        have = ", ".join(map(str, sorted(model.united))) or "none"
        raise ValueError(
            f"way is {lacking[0]}; {model.name} has united experts for: {have}. Choose among them, "
            f"or make others with `jmoe distill --ways {lacking[0]}`"
        )


def _in_floats(model: Model) -> Model:
    """Returns a model whose experts have the values of their format in its dtype: on a CPU the same
    answers in less time, as steps do not dequantize them again. Elsewhere it is the model itself.
    """
    pool = model.pool
    if pool.format == "none" or jax.default_backend() != "cpu":
        return model
    kept = jax.jit(type(pool).kept)  # compiled, as when a way is loaded

    def rounded(united: UnitedExperts) -> UnitedExperts:
        cast = partial(jnp.asarray, dtype=pool.dtype)
        layers = [
            kept(pool, jax.tree.map(cast, united.layer(layer))).plain()
            for layer in range(len(united.groups))
        ]
        return replace(united, **jax.tree.map(lambda *parts: np.stack(parts), *layers).arrays)

    weights = model.weights._replace(pool=pool.plain())
    united = {way: rounded(each) for way, each in model.united.items()}
    return replace(model, resident=ResidentWeights(weights, united, model.name))


class Work:
    """What every setting is run on, tokenized once."""

    def __init__(self, model: Model, items: Sequence[Task], config: EvaluateConfig) -> None:
        """Without items, the texts' windows are items. Raises ValueError for items or texts the
        model has no room for, or no tokenizer, and over a mesh.
        """
        if model.home is not None:
            raise ValueError(
                f"{model.name} is spread over a mesh; load it without one to evaluate it"
            )
        if model.tokenizer is None:
            raise ValueError(
                f"{model.name} has no tokenizer.json; its answers cannot be read. Add the file to "
                "the model's directory"
            )
        encode = model.tokenizer.encode
        self.kept = model.pool.format
        self.model, self.items, self.config = _in_floats(model), items, config
        self.prompts = [encode(item.prompt) for item in items]
        self.answers = [encode(item.answer) for item in items]
        self.limits = [len(tokens) + 1 for tokens in self.answers]  # and its end token
        whole = [p + a for p, a in zip(self.prompts, self.answers, strict=True)]
        longest = max(whole, key=len, default=[])
        room = model.config.max_position
        if len(longest) + 1 > room:
            prompt = items[whole.index(longest)].prompt
            raise ValueError(
                f"the item {prompt[:40]!r}... has {len(longest) + 1} positions; {model.name} has "
                f"{room}. Leave it out"
            )
        if config.text and config.text_window > room:
            raise ValueError(
                f"text_window is {config.text_window}; {model.name} has {room} positions"
            )
        per_step = max(1, config.chunk // config.text_window)
        self.texts = {}
        for path in config.text:
            tokens = encode(sources.read_text(path))
            if len(tokens) < 2:
                raise ValueError(f"{path} has {len(tokens)} tokens; perplexity needs at least 2")
            if path.name in self.texts:
                raise ValueError(f"two --text files are named {path.name}; rename one")
            self.texts[path.name] = windows(tokens, config.text_window, per_step)
        if not items:
            self.prompts, self.answers = self._halves()
        self.whole = whole
        self.units = len(items) + sum(len(r) for steps in self.texts.values() for r, _ in steps)

    def _halves(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns windows of the texts as items, in random order: the second half of each is the
        answer to the first.
        """
        steps = [step for steps in self.texts.values() for step in steps]
        rows = [row.tolist() for step in steps for row, new in zip(*step, strict=True) if new]
        random.Random(self.config.seed).shuffle(rows)
        half = len(rows[0]) // 2 if rows else 0
        return [row[:half] for row in rows], [row[half:] for row in rows]

    @cached_property
    def error(self) -> OutputError:
        """Output error on inputs of the MoE layers, captured once a setting is run."""
        config = self.config
        # Enough sequences for the steps, as an item has a few dozen positions.
        sequences = self.whole[: max(64, config.error_steps * config.batch // 8)]
        inputs = sample_inputs(self.model, sequences, config.error_steps, config.batch, config.seed)
        return OutputError(self.model, inputs)

    def divergence(self, items: slice) -> Divergence:
        """Returns what measures settings on some of the items."""
        chunks = self.prompts[items], self.answers[items]
        return Divergence(self.model, *chunks, batch=self.config.batch, chunk=self.config.chunk)

    def inputs(self) -> dict[str, Any]:
        """Returns what a folder's results belong to, by content and not by path."""
        config, family = self.config, self.config.family
        source = "fresh held-out tasks" if config.data is None else config.data.name
        others = {
            "quantize": "" if self.kept == "none" else self.kept,
            "family": "" if family is None else digest([family.read_text("utf-8")]),
            "kv_cache_dtype": "" if config.kv_cache_dtype == "auto" else "fp8",
            "united_of": config.united_of,
        }
        return {
            "model": self.model.name,
            "model_digest": model_digest(resolve(config.model)),
            "dtype": config.dtype,
            "items": source,
            "num": len(self.items),
            "items_digest": _digest(self.items),
            "text_digest": {
                name: digest(str(rows.tolist()) for rows, _ in steps)
                for name, steps in self.texts.items()
            },
            "batch": config.batch,
            "chunk": config.chunk,
            "error_steps": config.error_steps,
            **{name: value for name, value in others.items() if value},
        }

    def run(self, setting: Brownout, advance: Callable[[int], None]) -> Result:
        """Scores one setting."""
        began, config, tokenizer = time.monotonic(), self.config, self.model.tokenizer
        assert tokenizer is not None
        answers = answer(
            self.model,
            self.prompts,
            self.limits,
            setting,
            batch=config.batch,
            chunk=config.chunk,
            progress=advance,
        )
        right = [
            tokenizer.decode(tokens).strip() == item.answer.strip()
            for tokens, item in zip(answers.tokens, self.items, strict=True)
        ]
        return Result(
            setting,
            right,
            answers.degraded_visits / answers.expert_visits,
            self.error.of(setting),
            {name: perplexity(self.model, t, setting, advance) for name, t in self.texts.items()},
            round(time.monotonic() - began, 2),
            list(map(len, answers.tokens)),
            *losses(self.model, self.prompts, answers.tokens, answers.logprobs),
        )


def label(setting: Brownout) -> str:
    """Returns a setting in a few words, as `way 4, t 20 %`."""
    return f"{kind_of(setting)}, t {setting.threshold_percent} %"
