"""What a distillation has finished, on disk, so that a killed run goes on where it was.

Everything appears by a rename, so that a file that is there is whole. A run goes on only with the
model, data and settings it began with; but finished layers serve any ways and any end-to-end stage.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from jmoe.digests import sha256_of
from training.distill.config import ADDED_SETTINGS
from training.distill.fit import DistillError, Fit
from training.distill.parallel import is_first, wait_for_all

WORK = "distill-work"
RUN, FINISHED = "run.json", "finished.json"
DEVICES_THEN = ", then "


class Store:
    """Finished layers, the residual stream, and the newest state of each end-to-end stage.

    A state is written while training goes on, by Orbax, each device's part as it lies there.

    Args:
        out: directory of the run; the work is in a folder of it, made if absent.
        fingerprint: what the layers depend on.
        end_to_end: what the end-to-end stage depends on beside them; states of another are passed
            over.
        model_dir: the model's directory, for who reads what the run was of.

    Raises ValueError as `check_began`.
    """

    def __init__(
        self,
        out: Path,
        fingerprint: dict[str, Any],
        end_to_end: dict[str, Any],
        model_dir: Path,
    ) -> None:
        self.folder = (out / WORK).absolute()
        canonical = json.dumps(end_to_end, sort_keys=True).encode()
        self.stage = f"refine-{hashlib.sha256(canonical).hexdigest()[:12]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        began = check_began(out, fingerprint, model_dir)
        record = fingerprint | {"directory": str(Path(model_dir).absolute())}
        if began and "devices" in fingerprint:  # all that it ran on, in this order
            own, so_far = fingerprint["devices"], str(began["devices"])
            is_last = so_far.split(DEVICES_THEN)[-1] == own
            record["devices"] = so_far if is_last else so_far + DEVICES_THEN + own
        self.devices: str = record.get("devices", "")
        if began is None or self.devices not in ("", began["devices"]):
            content = json.dumps(record, indent=1).encode()
            self._write(self.folder / RUN, lambda file: file.write(content))
        self._being_written: Any = None  # an Orbax checkpointer

    # -- a run that is over -----------------------------------------------------------------------

    def save_finished(self, record: dict[str, Any], files: Sequence[str]) -> None:
        """Stores the results of a finished run, and stamps of its files in `out`."""
        out = self.folder.parent
        written = {name: _stamp(out / name) for name in files}
        content = json.dumps(record | {"files": written}, indent=1).encode()
        self._write(self.folder / FINISHED, lambda file: file.write(content))

    def _write(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Writes a file beside `path` and renames it; the first of several processes does."""
        if not is_first():
            return
        part = path.with_name(path.name + ".part")

        def whole() -> None:
            with part.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)

        _with_room(whole, path)

    # -- the residual stream ----------------------------------------------------------------------

    def save_stream(self, layer: int, x: np.ndarray) -> None:
        """Saves the rows that enter `layer` and removes those of the layer before."""
        self._write(self.folder / f"stream-{layer}.npy", lambda file: np.save(file, x))
        if is_first():
            (self.folder / f"stream-{layer - 1}.npy").unlink(missing_ok=True)

    def load_stream(self, layer: int) -> tuple[int, np.ndarray] | None:
        """Returns the newest saved rows that enter `layer` or one before it, and which; None
        without any.
        """
        found = [int(p.stem.split("-")[1]) for p in self.folder.glob("stream-*.npy")]
        newest = max((at for at in found if at <= layer), default=None)
        if newest is None:
            return None
        return newest, np.load(self.folder / f"stream-{newest}.npy")

    def close(self) -> None:
        """Removes the rows, which no rerun needs once the run is over."""
        for path in self.folder.glob("stream-*.npy") if is_first() else ():
            path.unlink()

    # -- finished layers --------------------------------------------------------------------------

    def layer(self, way: int, moe_layer: int) -> tuple[Fit, np.ndarray] | None:
        """Returns the united experts of a finished layer and their groups."""
        tree = self._restore(self.folder / f"way-{way}-layer-{moe_layer}")
        if tree is None:
            return None
        before, after = map(float, tree["errors"])
        fit = Fit(tree["params"], before, after, int(tree["steps"]))
        return fit, tree["groups"]

    def save_layer(self, way: int, moe_layer: int, fit: Fit, groups: np.ndarray) -> None:
        """Stores a finished layer."""
        tree = {
            "params": fit.params,
            "groups": np.asarray(groups),
            "errors": np.array([fit.error_before, fit.error_after]),
            "steps": np.array(fit.steps),
        }
        self._save(self.folder / f"way-{way}-layer-{moe_layer}", tree)

    # -- end-to-end stages ------------------------------------------------------------------------

    def refinement(self, way: int, like: Any) -> Any:
        """Returns the newest state of a way's end-to-end stage, shaped and spread over the devices
        as `like`; None before the first.
        """
        found = self._states(way)
        return self._restore(found[max(found)], like) if found else None

    def save_refinement(self, way: int, step: int, tree: Any) -> None:
        """Begins to store a state, when the one before it is stored, and removes those before
        that.
        """
        self._finish()
        found = self._states(way)
        for earlier, path in found.items() if is_first() else ():
            if earlier < max(found):
                shutil.rmtree(path)
        self._begin(self.folder / f"{self.stage}-{way}-{step}", tree)

    def _states(self, way: int) -> dict[int, Path]:
        """Returns the whole states of this end-to-end stage, by step."""
        found = self.folder.glob(f"{self.stage}-{way}-*")
        steps = {path.name.rpartition("-")[2]: path for path in found}
        return {int(step): path for step, path in steps.items() if step.isdigit()}

    def refined(self, way: int) -> tuple[dict[str, np.ndarray], list[float]] | None:
        """Returns united experts after a finished end-to-end stage, and its divergences at both
        ends and by data file.
        """
        tree = self._restore(self.folder / f"{self.stage}-{way}-done")
        if tree is None:
            return None
        return tree["united"], tree["divergences"].tolist()

    def save_refined(
        self, way: int, united: dict[str, np.ndarray], divergences: Sequence[float]
    ) -> None:
        """Stores a finished stage in place of the states that led to it."""
        self._finish()
        tree = {"united": united, "divergences": np.array(divergences)}
        self._save(self.folder / f"{self.stage}-{way}-done", tree)
        wait_for_all("a stage is stored")
        for path in self._states(way).values() if is_first() else ():
            shutil.rmtree(path)

    # -- Orbax ------------------------------------------------------------------------------------

    def _save(self, path: Path, tree: Any) -> None:
        self._begin(path, jax.tree.map(np.asarray, tree))
        self._finish()

    def _begin(self, path: Path, tree: Any) -> None:
        """Begins to write; the arrays may be donated as soon as it returns."""
        import orbax.checkpoint as ocp

        if jax.default_backend() == "cpu":  # where Orbax would read them later, and copies none
            tree = jax.tree.map(lambda leaf: leaf.copy() if hasattr(leaf, "copy") else leaf, tree)
        self._being_written = checkpointer = ocp.StandardCheckpointer()
        _with_room(lambda: checkpointer.save(path, tree, force=True), path)

    def _finish(self) -> None:
        """Waits until what was begun is written. Raises DistillError where it could not be."""
        if self._being_written is not None:
            checkpointer, self._being_written = self._being_written, None
            _with_room(checkpointer.wait_until_finished, self.folder)
            checkpointer.close()

    def _restore(self, path: Path, like: Any = None) -> Any:
        import orbax.checkpoint as ocp

        if not path.exists():
            return None
        with ocp.StandardCheckpointer() as checkpointer:
            if like is None:
                return jax.tree.map(np.asarray, checkpointer.restore(path))
            return checkpointer.restore(path, jax.tree.map(_shaped, like))


def _shaped(leaf: Any) -> Any:
    """Returns shape, dtype and place of an array that is to be restored."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def read_began(out: Path) -> dict[str, Any] | None:
    """Returns what a run in `out` was begun with; None without one. Raises ValueError for a record
    that is not readable.
    """
    path = (out / WORK / RUN).absolute()
    try:
        began = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(began, dict) or not isinstance(began.get("settings", {}), dict):
            raise TypeError(f"it holds {began!r:.80}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is not readable ({error}); name another --out, or remove {path.parent}"
        ) from None
    return began


def check_began(out: Path, fingerprint: dict[str, Any], model_dir: Path) -> dict[str, Any] | None:
    """Returns what `read_began` does. Another number of devices of the same kind may go on with it.

    Raises ValueError for one that had another fingerprint.
    """
    folder, began = (out / WORK).absolute(), read_began(out)
    if began is None:
        return None
    advice = f"finish it as it began, name another --out, or remove {folder}"
    if "devices" not in began:
        raise ValueError(
            f"{folder} holds a run of an older jmoe, which did not record of which weights, and on "
            f"which devices; name another --out, or remove {folder}. If you know that it was of "
            f"{model_dir} as it is now, on {fingerprint['devices']}, remove {folder / RUN} alone, "
            "and its layers are taken"
        )
    differing = sorted(k for k in fingerprint if began.get(k) != fingerprint[k])
    if "devices" in differing and _kind(began["devices"]) == _kind(fingerprint["devices"]):
        differing.remove("devices")
    if not differing:
        return began
    if "model" in differing:
        raise ValueError(
            f"{folder} holds a run of another model: of {began.get('directory')} with the weights "
            f"{str(began.get('model'))[:19]}, and {model_dir} has {fingerprint['model'][:19]}; "
            f"{advice}"
        )
    told = ", ".join(differing)
    if "settings" in differing:
        told = told.replace("settings", f"settings ({_changes(began, fingerprint)})")
    if "devices" in differing:
        told = f"kind of devices ({began['devices']}, and here are {fingerprint['devices']})"
    raise ValueError(f"{folder} holds a run with another {told}; {advice}")


def _changes(began: dict[str, Any], fingerprint: dict[str, Any]) -> str:
    """Returns the settings that differ, with both values."""
    both = began.get("settings", {}), fingerprint["settings"]
    before, now = (ADDED_SETTINGS | settings for settings in both)
    return "; ".join(
        f"{name} {before.get(name, 'none')}, and now {now.get(name, 'none')}"
        for name in sorted(before | now)
        if before.get(name) != now.get(name)
    )


def _kind(devices: str) -> str:
    return str(devices).rpartition(" ")[2]


def finished(out: Path, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the results of the newest finished run in `out` if it had this fingerprint.

    None where it had another, there is none, or one of its files is not as it was written.
    """
    try:
        record = json.loads((out / WORK / FINISHED).read_text(encoding="utf-8"))
        if any(record.get(key) != value for key, value in fingerprint.items()):
            return None
        for name, (size, changed, digest) in record["files"].items():
            now = (out / name).stat()
            if now.st_size != size:
                return None
            # Copied files have other times and the same content.
            if now.st_mtime_ns != changed and sha256_of(out / name) != digest:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return record


def _stamp(path: Path) -> list[Any]:
    """Returns size, time of change in ns, and a hash of the content."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, sha256_of(path)]


def _with_room(write: Callable[[], None], path: Path) -> None:
    """Runs `write`. Where the disk is full, the error says that nothing finished is lost."""
    try:
        write()
    except OSError as error:
        raise DistillError(
            f"cannot write {path}: {error}. What was finished is kept: free some space and run the "
            "same command again"
        ) from error
