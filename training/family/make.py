"""Fine-tuned variants of the bundled model, each a Hugging Face directory.

`python -m training.family --out DIR` teaches them; `--restore DIR` writes those that come with
jmoe, kept as low-rank differences, in seconds.
"""

import argparse
import dataclasses
import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

import jmoe
from jmoe.api import resolve
from jmoe.checkpoint import load_united, weights_digest
from jmoe.experts import UnitedExperts
from jmoe.packed import unpacked
from training.distill.united import narrow, write_united
from training.export import export_hf
from training.family.calls import CALLER, CHAT_TEMPLATE
from training.family.differences import read_differences, write_differences
from training.family.skills import VARIANTS, skill_tasks
from training.family.tune import TuneConfig, read_params, tune, unite
from training.geometry import BUNDLED as MODEL
from training.geometry import HF_CONFIG
from training.network import Params
from training.packing import eval_tasks, task_batch
from training.progress import Progress, bars
from training.remake import restart_with_allocator
from training.tasks import tasks, write_items
from training.train import family_accuracy

BUNDLED = resolve("bundled")
STORED = Path(jmoe.__file__).parent / "bundled_family"
BASE, WAY = "base", 8
ITEMS = 512
"""Held-out items of a skill that say how well it was learned."""

HELD_OUT = 1000
"""Held-out chats that are written beside `caller`."""

TEXTS = 1000
"""Training items that are written beside each model."""


def make(
    out: Path, config: TuneConfig, progress: Progress, skills: Sequence[str] = VARIANTS
) -> Mapping[str, Mapping[str, float]]:
    """Teaches skills and writes `out/{skill}` and, as differences, `out/{skill}.safetensors`;
    with united experts of one way, which begin as the bundled model's.

    `out/base` is the bundled model. Returns each variant's share of right answers, by task family.
    """
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    base, united, found = read_params(BUNDLED), bundled_united(), {}
    write_base(out)
    write_texts(out, config.seed)
    for skill in skills:
        own_config = _config_of(skill, config)
        variant = tune(base, tokenizer, skill, own_config, progress)
        found[skill] = accuracy(variant, tokenizer, skill, own_config)
        _export(variant, out / skill)
        model = jmoe.load(out / skill, "bfloat16", ways=())
        own = unite(model, skill, united, own_config, progress)
        write_way(out / skill, own, united.groups)
        both = united.experts.arrays, own
        write_differences(out / f"{skill}.safetensors", base, variant, both)
    return found


def restore(out: Path, stored: Path | None = None) -> None:
    """Writes `out/base` and `out/{skill}` of the variants that come with jmoe, all with their
    united experts.

    Raises ValueError for a file that holds no variant of the bundled model.
    """
    base, united = read_params(BUNDLED), bundled_united()
    stored = unpacked(STORED) if stored is None else stored
    write_base(out)
    write_texts(out, TuneConfig.seed)
    for skill in VARIANTS:
        file = stored / f"{skill}.safetensors"
        variant, own = read_differences(file, base, united.experts.arrays)
        _export(variant, out / skill)
        write_way(out / skill, own, united.groups)


def _config_of(skill: str, config: TuneConfig) -> TuneConfig:
    """Returns a variant's settings. Calls take longer to learn than a skill of single characters,
    in more and smaller steps.
    """
    if skill != CALLER:
        return config
    rows, united_steps = max(1, config.rows // 2), max(1, config.united_steps // 2)
    return dataclasses.replace(config, rows=rows, steps=3 * config.steps, united_steps=united_steps)


def _export(variant: Params, directory: Path) -> None:
    """Writes a variant's directory without its united experts, which know its weights."""
    export_hf(HF_CONFIG, variant, BUNDLED, directory)
    if directory.name == CALLER:
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_base(out: Path) -> None:
    """Writes the bundled model as `out/base`."""
    (out / BASE).mkdir(parents=True, exist_ok=True)
    for path in (*BUNDLED.glob("*.json"), *BUNDLED.glob("*.safetensors")):
        shutil.copyfile(path, out / BASE / path.name)


def bundled_united() -> UnitedExperts:
    """Returns the bundled model's united experts of the way that its variants have, float32."""
    found = load_united(BUNDLED, MODEL)[WAY]
    weights = {key: leaf.astype(np.float32) for key, leaf in found.experts.arrays.items()}
    return dataclasses.replace(found, **weights)


def write_way(
    directory: Path, united: Mapping[str, np.ndarray | jax.Array], groups: np.ndarray
) -> None:
    """Writes a variant's united experts beside its weights."""
    weights = {key: np.asarray(leaf) for key, leaf in united.items()}
    stored = narrow({**weights, "groups": groups})
    write_united(directory, {WAY: stored}, weights_digest(directory))


def write_texts(out: Path, seed: int) -> None:
    """Writes `out/{name}.jsonl` for `jmoe consolidate --data`: training items as quality.py
    measures on, half of a variant's skill and half of what the bundled model knows; for that one
    all. `out/caller-held-out.jsonl` is for `jmoe evaluate`.
    """
    held_out = itertools.islice(skill_tasks(CALLER, "eval", seed), HELD_OUT)
    write_items(out / f"{CALLER}-held-out.jsonl", held_out)
    for name in (BASE, *VARIANTS):
        old = tasks("train", seed + 1000)
        items = itertools.islice(old, TEXTS if name == BASE else TEXTS // 2)
        if name != BASE:
            items = [*items, *itertools.islice(skill_tasks(name, "train", seed + 1000), TEXTS // 2)]
        write_items(out / f"{name}.jsonl", items)


def accuracy(
    params: Params, tokenizer: Tokenizer, skill: str, config: TuneConfig
) -> dict[str, float]:
    """Returns the share of right answers: of the skill's held-out items, and of the bundled
    model's.
    """
    items = itertools.islice(skill_tasks(skill, "eval", config.seed), ITEMS)
    train = config.train
    batches = [
        task_batch(tokenizer, own, train.length) for own in (items, eval_tasks(ITEMS, config.seed))
    ]
    return {k: v for batch in batches for k, v in family_accuracy(params, batch, train).items()}


def main() -> None:
    """Runs the command line; restarts itself once with the allocator settings of
    `training.remake`.
    """
    parser = argparse.ArgumentParser(prog="python -m training.family", description=__doc__)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="teach the variants and write them here")
    target.add_argument("--restore", type=Path, help="write those that come with jmoe here")
    parser.add_argument("--only", choices=VARIANTS, help="teach this one alone")
    for name in ("seed", "steps", "rows"):
        parser.add_argument(f"--{name}", type=int, default=getattr(TuneConfig, name))
    args = parser.parse_args()
    if args.restore:
        if args.only:
            parser.error("--only goes with --out; --restore writes all")
        restore(args.restore)
        print(f"{BASE}, {', '.join(VARIANTS)} in {args.restore}")
        return
    restart_with_allocator("training.family")
    config = TuneConfig(seed=args.seed, steps=args.steps, rows=args.rows)
    with bars() as progress:
        found = make(args.out, config, progress, [args.only] if args.only else VARIANTS)
    for skill, shares in found.items():
        told = ", ".join(f"{family} {100 * share:.1f}" for family, share in shares.items())
        print(f"{skill}, % right: {told}")


if __name__ == "__main__":
    main()
