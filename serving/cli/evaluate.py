"""`jmoe evaluate`: flags for `training.evaluation`."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.cli import options
from serving.cli.options import of_fields
from serving.settings.plugins import own_strategy
from serving.telemetry.progress import progress_bar

if TYPE_CHECKING:
    from jmoe.brownout import Brownout
    from jmoe.family import Family
    from training.evaluation.run import EvaluateConfig
    from training.evaluation.tables import Score

OF_LEFT_OUT = "--sources", "--distill-rows", "--distill-steps", "--sampled", "--refine-steps"
OF_ONE_MODEL = "--leave-one-out", "--sensitivity", "--quantize", "--against"
WITHOUT = {
    "--leave-one-out": (
        "--sensitivity",
        "--levels",
        "--only",
        "--strategies",
        "--text",
        "--against",
    ),
    "--sensitivity": ("--only", "--thresholds", "--strategies", "--against"),
    "--only": ("--ways", "--thresholds", "--strategies"),
}
"""What each flag leaves without effect."""


def evaluate(
    ctx: typer.Context,
    model: list[str] | None = None,
    family: Path | None = None,
    borrow_united: Annotated[float | None, typer.Option(metavar="PERCENT")] = None,
    dtype: str = "bfloat16",
    quantize: options.Quantize = "auto",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    against: Path | None = None,
    data: Path | None = None,
    num: int | None = None,
    generate_tasks: int | None = None,
    ways: str = "2,4,8",
    thresholds: str = "100,90,80,70,60,50,40,30,20,10,0",
    strategies: str = "partial,full",
    keep: str = "visits",
    levels: bool = False,
    sensitivity: bool = False,
    search_items: int = 256,
    only: str | None = None,
    leave_one_out: bool = False,
    sources: str | None = None,
    distill_rows: int = 65_536,
    distill_steps: int = 600,
    refine_steps: int = 600,
    sampled: int | None = None,
    text: list[Path] | None = None,
    text_window: int = 128,
    batch: int = 64,
    chunk: int = 256,
    error_steps: int = 32,
    seed: int = 0,
    out: Path = Path("out/evaluate"),
    allow_unknown_config: options.AllowUnknownConfig = None,
) -> None:
    """Measures accuracy and perplexity under brownout.

    Output error as well, by strategy, way and threshold (docs/evaluation.md).

    Args:
        model: Model directory. NAME=DIR, repeated, for each model of a family. [default: bundled]
        family: family.json of `jmoe consolidate`: score each --model NAME=DIR as one of a family,
            in a folder of its own of --out.
        borrow_united: With --family: score the others with the first model's united experts, and
            write a map, family.json in --out, by which those use them that lose at most this share
            of right answers, by the 95 % interval's upper end and in each setting.
        dtype: Data type: bfloat16, float16 or float32.
        against: --out of another run of the same items: print what zero brownout and the settings
            of both lose of its zero brownout.
        data: JSON lines with prompt, answer and family.
        num: Number of items of --data. Default: all.
        generate_tasks: Make this many held-out items instead of reading --data.
        ways: Ways, separated by commas.
        thresholds: Thresholds in percent, separated by commas.
        strategies: Strategies, with commas: partial, full, module:Class or file.py:Class.
        keep: Which experts stay exact: visits, weight, or both with a comma.
        levels: Thresholds are levels of the model's levels.json, by layer.
        sensitivity: Search the levels of each way instead (with --levels: take the model's), and
            compare them with the paper's plan, on tasks or on --text.
        search_items: With --sensitivity: items to search on; the others are scored.
        only: Settings (WAY:PERCENT) instead of the grid, such as 2:0,4:20,full:40.
        leave_one_out: Distil united experts without each source (family), and score its items:
            partial brownout by --ways, --thresholds and --keep.
        sources: With --leave-one-out: sources to leave out, by comma. Default: all.
        distill_rows: With --leave-one-out: --rows of `jmoe distill`.
        distill_steps: With --leave-one-out: its --steps.
        refine_steps: With --leave-one-out: its --refine-steps.
        sampled: With --leave-one-out: its --sampled.
        text: Text files for perplexity. May be repeated.
        text_window: Most tokens of context.
        batch: Number of sequences in a decode step.
        chunk: Number of tokens in a prefill step.
        error_steps: Number of steps that measure output error.
        seed: Seed of the items that are made, and of their order.
        out: Folder for the results. A run that was ended continues there.
    """
    directories = options.family_flag(model or ["bundled"], family)
    flags = locals() | {"model": directories.get("", "")}
    from jmoe.api import resolve
    from jmoe.expected_loss import FILE
    from training.evaluation.items import ZERO, grid, integers, parse_only, with_levels
    from training.evaluation.run import EvaluateConfig, label, losses_against, right_answers
    from training.evaluation.run import evaluate as run

    config = of_fields(EvaluateConfig, flags)
    short = {
        "rows": distill_rows,
        "steps": distill_steps,
        "refine_steps": refine_steps,
        "sampled": sampled,
    }
    given = options.given_flags(ctx)
    if not leave_one_out and not given.isdisjoint(OF_LEFT_OUT):
        raise ValueError(
            "--sources, --distill-rows, --distill-steps, --sampled and --refine-steps need "
            "--leave-one-out"
        )
    if family is not None and (single := [name for name in OF_ONE_MODEL if name in given]):
        raise ValueError(f"{single[0]} is of a single model; leave out --family")
    if borrow_united is not None and family is None:
        raise ValueError("--borrow-united needs --family, and --model NAME=DIR for each model")
    for flag, others in WITHOUT.items():
        if flag in given and (beside := [other for other in others if other in given]):
            raise ValueError(f"{beside[0]} does not go with {flag}; leave one of them out")
    if leave_one_out:
        numbers = integers("ways", ways), integers("thresholds", thresholds)
        settings = grid(*numbers, ["partial"], keep.split(","))
        _leave_one_out(config, settings, short, sources.split(",") if sources else [])
        return
    if sensitivity:
        _sensitivity(config, integers("ways", ways), keep, search_items, stored=levels)
        return
    if only is not None:
        settings = parse_only(only, keep.split(","))
    else:
        settings = grid(
            integers("ways", ways),
            integers("thresholds", thresholds),
            [own_strategy(name) or name for name in strategies.split(",")],
            keep.split(","),
        )
    settings = with_levels(settings) if levels else settings
    if family is not None:
        _family(config, directories, settings, borrow_united)
        return
    if against is not None:
        right_answers(config, against)  # before minutes of work
    with progress_bar() as progress:
        found = run(config, settings, progress)
    _say(found)
    if against is not None:
        for setting, (lost, low, high, beyond, margin) in losses_against(config, against).items():
            name, more = "zero brownout", ""
            if setting != ZERO:
                name, more = (
                    label(setting),
                    f", {beyond:+.2f} ± {margin:.2f} beyond the sum of both",
                )
            print(f"of {against}, {name} loses {lost:.2f} % ({low:.2f} to {high:.2f}){more}")
    print(f"tables and picture in {out}")
    if (out / FILE).exists():
        print("to have servers know what brownout costs:")
        print(shlex.join(["cp", str(out / FILE), str(resolve(config.model))]))


def _family(
    config: "EvaluateConfig",
    directories: dict[str, str],
    settings: Sequence["Brownout"],
    borrow_united: float | None,
) -> None:
    """Scores each model of a family over its pool; with a bound, the others borrow the first one's
    united experts.
    """
    from jmoe.beside import digest_in_family
    from jmoe.expected_loss import FILE, file_of
    from jmoe.family import check_family, load_family
    from jmoe.sharing import read_sharing
    from training.evaluation.run import check_bound, evaluate, uses_united

    family, allowed = config.family, config.allow_unknown_config
    assert family is not None
    if borrow_united is not None:
        check_bound(config, borrow_united)
        if not any(map(uses_united, settings)):
            raise ValueError("--borrow-united needs partial brownout at a threshold below 100 %")
    paths, cfgs, _ = check_family(directories, allowed)
    (cfg, *_) = cfgs.values()
    sharing = read_sharing(family, paths, (cfg.num_moe_layers, cfg.num_experts))
    if borrow_united is not None:
        ways = {setting.way for setting in settings if setting.way and uses_united(setting)}
        own = (0,) * len(paths)
        sharing = dataclasses.replace(sharing, united=own, united_ways=tuple(sorted(ways)))
    loaded, found = load_family(paths, sharing, config.dtype, allow_unknown_config=allowed), {}
    lenders, tables = sharing.lenders, []
    is_whole = loaded.offloaded is None  # no expert stands in for one that may be fetched
    for model, lender in zip(loaded, sharing.lenders, strict=True):
        model = model.with_kv_cache_dtype(config.kv_cache_dtype)
        own = dataclasses.replace(config, model=str(model.path), out=config.out / model.name)
        if borrow_united is not None and lender != len(found):
            own = dataclasses.replace(
                own, out=own.out / "borrowed", united_of=sharing.fingerprints[lender]
            )
        of = digest_in_family(sharing, len(found), loaded[lender].path) if is_whole else ""
        with progress_bar() as progress:
            found[model.name] = evaluate(own, settings, progress, model, of)
        print(f"{model.name}: ", end="")
        _say(found[model.name])
        print(f"tables and picture in {own.out}")
        tables.append((own.out / FILE, family.parent / file_of(model.name)))
    if borrow_united is not None:
        lenders = _lend(loaded, found, borrow_united, config)
    copies = [
        shlex.join(["cp", str(table), str(beside)])
        for (table, beside), scored, served in zip(tables, sharing.lenders, lenders, strict=True)
        if table.exists() and scored == served  # with the united experts of one model
    ]
    if copies:
        print("to have servers know what brownout costs:", *copies, sep="\n")


def _lend(
    family: "Family",
    found: dict[str, list["Score"]],
    bound_percent: float,
    config: "EvaluateConfig",
) -> Sequence[int]:
    """Writes the map of those whose loss is within the bound, and says what that saves. Returns its
    lenders.
    """
    from jmoe.display import size
    from jmoe.sharing import write_sharing
    from training.evaluation.run import borrowing_within

    (lender, *others) = family
    sharing = borrowing_within(family.sharing, found, bound_percent)
    in_pool = lender.config.num_moe_layers * lender.num_united_slots * lender.pool.slot_bytes
    on_host = sum(united.num_bytes for united in lender.united.values())
    for number, model in enumerate(others, 1):
        losses = sharing.facts["united"]["loss_percent"][model.name].values()
        lost = f"loses up to {max(high for *_, high in losses):.2f} % (bound {bound_percent:g} %)"
        if sharing.lenders[number]:
            print(f"{model.name} keeps its own united experts: {lost} with those of {lender.name}")
            continue
        print(
            f"{model.name} uses the united experts of {lender.name}: {lost}; {size(in_pool)} of "
            f"the pool and {size(on_host)} of host memory less"
        )
    path = config.out / "family.json"
    write_sharing(path, sharing)
    print("to have it served:")
    print(shlex.join(["cp", str(path), str(config.family)]))
    return sharing.lenders


def _say(found: Sequence["Score"]) -> None:
    from training.evaluation.run import label
    from training.evaluation.tables import loss

    print(f"zero brownout: {100 * found[0].accuracy:.2f} % right")
    for score in found[1:]:
        print(
            f"{label(score.setting)}: {100 * score.accuracy:.2f} % right, loss {loss(score, ' %')}"
        )


def _leave_one_out(
    config: "EvaluateConfig",
    settings: Sequence["Brownout"],
    short: dict[str, Any],
    sources: Sequence[str],
) -> None:
    from training.distill import DistillConfig, DistillError
    from training.evaluation.left_out import leave_one_out

    distillation = DistillConfig(dtype=config.dtype, seed=config.seed, **short)
    try:
        with progress_bar() as progress:
            found = leave_one_out(config, settings, distillation, sources, progress)
    except DistillError as error:
        raise ValueError(str(error)) from error
    for one in found:
        seen, unseen, full, lowest = (
            f"{100 * score.accuracy:.1f}"
            for score in (one.seen, one.unseen, one.full, one.lowest_gate)
        )
        print(
            f"{one.source}, way {one.setting.way}, t {one.setting.threshold_percent} %: right "
            f"{seen} % distilled with it, {unseen} % without; full brownout {full} %, lowest gates "
            f"{lowest} %"
        )
    print(f"tables: {config.out / 'leave_one_out.md'}")


def _sensitivity(
    config: "EvaluateConfig", ways: Sequence[int], keep: str, search_items: int, *, stored: bool
) -> None:
    from jmoe.api import resolve
    from jmoe.levels import FILE
    from training.evaluation.sensitivity import evaluate_levels

    with progress_bar() as progress:
        found = evaluate_levels(config, ways, keep, search_items, progress, stored=stored)
    for way, ratios in found.items():
        for one in ratios:
            print(
                f"way {way}, {one.phase}, saving {one.saving_percent} %, {one.choice}: divergence "
                f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f}) of the paper's plan"
            )
    print(f"tables: {config.out / 'sensitivity.md'}")
    if stored:
        return
    print("to have them served:")
    print(shlex.join(["cp", str(config.out / FILE), str(resolve(config.model))]))
