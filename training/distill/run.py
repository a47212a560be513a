"""`distill`: united experts of a model, layer by layer, then end to end."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jmoe.api import Model, load, resolve
from jmoe.checkpoint import UNITED_FILE, weights_digest
from jmoe.config import ModelConfig
from jmoe.digests import file_digests
from jmoe.experts import ExpertPool
from jmoe.host_memory import on_the_host
from jmoe.layers import Layers
from jmoe.model_files import regular
from jmoe.tokenizer import TOKENIZER_FILES
from training.distill.config import DistillConfig
from training.distill.data import Corpus, digest
from training.distill.expert import Experts
from training.distill.fit import DistillError, Fit, fit_layer
from training.distill.grouping import make_groups
from training.distill.parallel import is_first, wait_for_all
from training.distill.prepare import DEFAULT_WAYS, prepare
from training.distill.refine import Progressing, begin, freeze, held_out_by_file, refine
from training.distill.report import REPORT_FILES, LayerResult, RefineResult, write_report
from training.distill.room import room_here
from training.distill.sampled import as_begun, sampled_texts, with_num_texts
from training.distill.sizes import SAVE_EVERY
from training.distill.start import make_start
from training.distill.store import Store, check_began, finished
from training.distill.stream import LayerRows, before_layers, layers_dtype, run_layer
from training.distill.united import United, check_united, narrow, write_united
from training.log import LossLog, text_of
from training.progress import Progress

_Note = Callable[[str, int, int, dict[str, float]], None]
"""`(what is being done, units done, units in all, losses by name)`."""

_PROBE = 512  # rows that experts are compared on, for grouping by similarity


def distill(
    model_dir: Path,
    ways: Sequence[int] | None,
    data: Sequence[Path],
    out: Path,
    config: DistillConfig | None = None,
    progress: Progress = lambda what, done, total, text: None,
    allow_unknown_config: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
    log_dir: Path | None = None,
) -> tuple[list[LayerResult], list[RefineResult]]:
    """Distils united experts of every way and writes `out/united.safetensors` (bfloat16).

    Ways that the file has besides stay in it.

    Where a device holds the whole model, it first writes texts to train on beside the data, unless
    the settings say otherwise. Then the device holds one layer's weights and captured rows at a
    time. What is finished is kept in `out`: a run that was killed goes on where it was and ends in
    the same bits, and one with other ways or another end-to-end stage takes the layers that are
    there. Of a run that is finished nothing is done again: no weights are read, no file is written.

    Args:
        model_dir: model directory, as `jmoe.load` takes it.
        ways: experts a group, one set of united experts each; None for those of 2, 4 and 8 that
            this machine has room for.
        data: files of texts (see `training.distill.data.read_texts`); united experts imitate the
            model on them.
        out: directory, made if absent; may be `model_dir`. Also gets a report and its picture.
        config: settings; None for the defaults.
        progress: called with what is done, how much of it, and the loss.
        allow_unknown_config: as of `jmoe.load`.
        say: called with each line of the plan, with warnings, and where nothing is left to do.
        log_dir: folder for the losses (see `LossLog`), made if absent; None for none.

    Raises ValueError for ways, data and settings that cannot be used or do not fit this machine and
    for an `out` with another run in it, DistillError where training cannot go on, and what
    `jmoe.load` raises.
    """
    if not is_first():
        say, progress = (lambda line: None), (lambda *args: None)
    config, directory = as_begun(config or DistillConfig(), out), resolve(model_dir)
    is_given = config.sampled is not None
    config = with_num_texts(config, directory, room_here(out), allow_unknown_config)
    writes_none = "no device holds the whole model: it writes no texts of its own to train on"
    if not (is_given or config.sampled):
        say(writes_none)
    settings, end_to_end = config.stages()
    fingerprint: dict[str, Any] = {"settings": settings}
    if all(path.is_file() for path in data):  # else packing says what is wrong
        fingerprint |= {"data": digest(data), **_digests(directory)}

    def begun(ways: Sequence[int]) -> dict[str, Any]:
        return {**fingerprint, "end_to_end": end_to_end, "ways": sorted(ways)}

    def over(ways: Sequence[int]) -> dict[str, Any] | None:
        if "data" not in fingerprint:
            return None
        if record := finished(out, begun(ways)):
            say(f"nothing left to do: {out / UNITED_FILE} is finished")
        return record

    if record := over(DEFAULT_WAYS if ways is None else ways):
        return _results(record, ways)
    fingerprint["devices"] = f"{jax.device_count()} {jax.default_backend()}"
    if "data" in fingerprint:
        check_began(out, fingerprint, model_dir)
    written: list[Path] = []
    known = out, config, allow_unknown_config

    def own_texts() -> list[Path]:
        written.extend(sampled_texts(directory, *known, progress, need=is_given))
        return written

    # What cannot be is said before anything is written.
    if config.sampled:
        _, plan = prepare(model_dir, ways, (), *known, need_data=False)
        if plan.refusal:
            raise ValueError(plan.refusal)
    packed, plan = prepare(model_dir, ways, data, *known, more=own_texts)
    if config.sampled and not written:
        say(writes_none)
        none, same = dataclasses.replace(config, sampled=0), (allow_unknown_config, say)
        return distill(model_dir, ways, data, out, none, progress, *same, log_dir)
    data, own = [*data, *written], plan.ways
    assert packed is not None
    if record := over(own):
        return _results(record, own)
    for line in plan.lines():
        say(line)
    if plan.refusal:
        raise ValueError(plan.refusal)
    check_united(out / UNITED_FILE, own, model_dir, fingerprint["model"])
    allowed: dict[str, Any] = {"allow_unknown_config": allow_unknown_config}
    layers = Layers(model_dir, layers_dtype(config.dtype), **allowed)
    out.mkdir(parents=True, exist_ok=True)
    store = Store(out, fingerprint, end_to_end, model_dir)
    if store.devices != fingerprint["devices"]:
        say(
            f"this run is on {store.devices}: what comes out differs from a run on one number of "
            "devices by rounding"
        )
    fingerprint["devices"] = store.devices
    refined = []
    with LossLog(log_dir if is_first() else None) as log:

        def note(what: str, done: int, total: int, losses: dict[str, float]) -> None:
            progress(what, done, total, text_of(losses))
            log.write(what, done, losses)

        run = _Run(layers, packed, store, config, note)
        results = run.train(own)
        if config.refine_steps:
            whole = partial(load, model_dir, config.dtype, ways=(), **allowed)
            refined = [run.refined(way, whole, len(data)) for way in own]
    united = {way: run.united(way) for way in own}
    if weights_digest(directory) != fingerprint["model"]:
        raise DistillError(
            f"the weights of {model_dir} changed during the run; put back those that it began with "
            f"({fingerprint['model'][:19]}) and run the same command again, or remove "
            f"{store.folder}, which may hold layers of both"
        )
    if is_first():
        write_united(out, united, fingerprint["model"])
        write_report(out, results, refined, [path.name for path in data], f"Settings: {config}")
    store.close()
    if is_first():
        found = {
            "layers": [dataclasses.asdict(result) for result in results],
            "refined": [dataclasses.asdict(result) for result in refined],
        }
        store.save_finished(begun(own) | found, (UNITED_FILE, *REPORT_FILES))
    wait_for_all("a distillation is finished")
    return results, refined


def _results(
    record: dict[str, Any], ways: Sequence[int] | None
) -> tuple[list[LayerResult], list[RefineResult]]:
    """Returns the results that a finished run returned, in the order of `ways`."""
    refined = {
        one["way"]: RefineResult(**one | {"by_file": tuple(one.get("by_file", ()))})
        for one in record["refined"]
    }
    order = [way for way in ways or refined if way in refined]
    return [LayerResult(**result) for result in record["layers"]], [refined[way] for way in order]


@dataclasses.dataclass(frozen=True)
class _Run:
    """What the stages of a distillation read, and where they keep what they make."""

    layers: Layers
    corpus: Corpus
    store: Store
    config: DistillConfig
    note: _Note

    @property
    def cfg(self) -> ModelConfig:
        return self.layers.cfg

    def train(self, ways: Sequence[int]) -> list[LayerResult]:
        """Trains what is not in the store yet. Only one layer's united experts are in memory."""
        cfg, store, data = self.cfg, self.store, self.corpus.first(self.config.rows)
        found = {
            (way, at): _result(way, at, kept[0])
            for way in ways
            for at in range(cfg.num_moe_layers)
            if (kept := store.layer(way, at)) is not None
        }
        needed = [
            index
            for at, index in enumerate(np.flatnonzero(cfg.moe_layers).tolist())
            if not all((way, at) in found for way in ways)
        ]
        in_order = range(0)
        if needed:
            stored = store.load_stream(needed[0])
            first, x = stored or (0, before_layers(cfg, self.layers.top(), data))
            in_order = range(first, needed[-1] + 1)
        for index in in_order:
            at = sum(cfg.moe_layers[:index])
            params, experts = self.layers.layer(index)

            def told(done: int, total: int, what: str = f"layer {index}: capture") -> None:
                self.note(what, done, total, {})

            rows = run_layer(cfg, index, params, experts, x, data, progress=told)
            if rows is not None:
                assert experts is not None
                for way in ways:
                    if (way, at) not in found:
                        fit, groups = self._fit(way, at, rows, experts)
                        store.save_layer(way, at, fit, groups)
                        found[way, at] = _result(way, at, fit)
            store.save_stream(index + 1, x)
        return [result for _, result in sorted(found.items())]

    def _fit(
        self, way: int, at: int, rows: LayerRows, experts: ExpertPool
    ) -> tuple[Fit, np.ndarray]:
        config, activation = self.config, self.cfg.activation
        members = {key: np.asarray(leaf) for key, leaf in experts.arrays.items()}
        visits = np.bincount(rows.ids.reshape(-1), minlength=len(members["down"]))
        answers, name = np.zeros((len(visits), 0, 0), np.float32), f"way {way}, layer {at}"
        with _room_for(name, f"lower rows ({config.rows} now)"):
            on_device = {key: jnp.asarray(leaf) for key, leaf in members.items()}
            if config.grouping == "similarity":
                probe = jnp.asarray(rows.h[:: max(1, len(rows.h) // _PROBE)], jnp.float32)
                answers = np.asarray(Experts(on_device, activation).on_all(probe))
            groups = make_groups(config.grouping, way, rows, answers)
            start = make_start(config.start, members, groups, visits)
            note, key = partial(self.note, name), self._key(way, at)
            fit = fit_layer(start, on_device, groups, rows, key, config, note, activation)
        return fit, groups

    def _key(self, way: int, at: int) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.seed), way), at)

    def _stacked(self, way: int) -> United:
        """Returns a way's finished layers, stacked, in float32."""
        own = [self.store.layer(way, at) for at in range(self.cfg.num_moe_layers)]
        kept = [one for one in own if one is not None]
        united = {key: np.stack([fit.params[key] for fit, _ in kept]) for key in kept[0][0].params}
        return united | {"groups": np.stack([groups for _, groups in kept])}

    def united(self, way: int) -> United:
        """Returns a way's united experts as they are written."""
        if self.config.refine_steps and (done := self.store.refined(way)) is not None:
            return done[0]
        return narrow(self._stacked(way))

    def refined(self, way: int, load_model: Callable[[], Model], num_files: int) -> RefineResult:
        """Trains a way end to end and keeps it in the store, or takes it from there."""
        cfg, config, store = self.cfg, self.config, self.store
        if (done := store.refined(way)) is not None:
            before, after, *by_file = done[1]
            return RefineResult(way, before, after, tuple(by_file))
        united = self._stacked(way)
        weights = {key: leaf for key, leaf in united.items() if key != "groups"}
        advice = f"lower refine_rows ({config.refine_rows} now), leave this stage out"
        with _room_for(f"way {way}, end to end,", f"{advice} (refine_steps 0)"):
            with on_the_host():  # of which each device gets its part; one could not hold it all
                model = load_model()
            frozen = freeze(model, united["groups"])
            del model
            at = begin(weights, config, cfg.d_model)
            kept = store.refinement(way, at._asdict())
            if kept is not None:
                numbers = {"step": int(kept["step"]), "before": float(kept["before"])}
                at = Progressing(**kept | numbers)
            key = self._key(way, 1_000_000)
            trained, before, after = refine(
                cfg,
                frozen,
                at,
                self.corpus,
                key,
                config,
                save=lambda state: store.save_refinement(way, state.step, state._asdict()),
                save_every=SAVE_EVERY,
                note=partial(self.note, f"way {way}, end to end"),
            )
            if after < before:
                weights = trained
            else:  # united experts that were that good already are left as they were
                after = before
            by_file = ()
            if num_files > 1:
                given = weights, self.corpus, num_files, key, config
                by_file = held_out_by_file(cfg, frozen, *given)
        store.save_refined(way, narrow(united | weights), (before, after, *by_file))
        return RefineResult(way, before, after, by_file)


def _result(way: int, at: int, fit: Fit) -> LayerResult:
    return LayerResult(way, at, fit.error_before, fit.error_after, fit.steps)


@contextmanager
def _room_for(what: str, advice: str) -> Iterator[None]:
    """Raises DistillError, with advice, where devices run out of memory within it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DistillError(
            f"{what} does not fit the devices ({error}): {advice}, or use more devices. Finished "
            "layers are kept"
        ) from error


def _digests(directory: Path) -> dict[str, str]:
    """Returns digests of the model's weights, and of its configuration and tokenizer."""
    patterns = "*.json", "*.jinja", *TOKENIZER_FILES
    small = sorted({path for pattern in patterns for path in directory.glob(pattern)})
    names = [str(path.relative_to(directory)) for path in small]
    contents = names + file_digests(map(regular, small))
    return {
        "model": weights_digest(directory),
        "configuration or tokenizer": hashlib.sha256("\n".join(contents).encode()).hexdigest(),
    }
