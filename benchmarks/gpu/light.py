"""One case of first light, in a process of its own: `python -m benchmarks.gpu.light CASE`.

Says which phase it is in as it gets there, and at last a line of JSON with what it found. Whoever
started it (`light_part`) can so tell a hang from a crash, and where it was.
"""

import json
import sys
from dataclasses import replace
from typing import Any

from benchmarks.gpu.part import plant, planted

PHASES = ("import", "draw", "compile", "run", "compare")
TOO_FAR = 0.05
"""Of the largest value: elements further from the XLA reference are counted as wrong."""
TILE = 64
ROW_ERROR, FAR_ROW, FAR_ROWS = 0.03, 0.1, 0.1
"""Of a step's logits: the median row's relative error, and how many rows may be further off."""


def main() -> None:
    """Runs the case that the command line names."""
    name, dry = sys.argv[1], "--dry-run" in sys.argv
    _phase("import")
    import jax

    if dry:
        jax.config.update("jax_platforms", "cpu")
    run = {"smoke": _smoke, "step": _step}.get(name.partition("/")[0], _op)
    found = run(name, dry)
    print("result: " + json.dumps(found), flush=True)


def _phase(name: str, case: str = "") -> None:
    print(f"phase: {name}", flush=True)
    if name == "run":
        plant(f"light/{case}")


def _smoke(case: str, dry: bool) -> dict[str, Any]:
    """Runs the smallest kernel there is: a copy by TMA that adds one."""
    import jax
    import jax.experimental.pallas.mosaic_gpu as plgpu
    import jax.numpy as jnp

    def kernel(x: Any, out: Any, smem: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        plgpu.barrier_wait(barrier)
        smem[...] = smem[...] + 1.0
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out)
        plgpu.wait_smem_to_gmem(0)

    add_one: Any = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types={"smem": plgpu.SMEM((128,), jnp.float32), "barrier": plgpu.Barrier()},
    )
    x = jnp.arange(128, dtype=jnp.float32)
    _phase("compile")
    compiled = jax.jit((lambda x: x + 1) if dry else add_one).lower(x).compile()
    _phase("run", case)
    out = _spoiled(compiled(x), case)
    _phase("compare")
    return _difference([out], [x + 1])


STEPS = ("references", "eager", "graph", "graph/united", "graph/slots", "prefill")
"""Steps of two layers: `united` has slots for united experts, `slots` four times as many sequences'
pages, as a server has.
"""


def _step(case: str, dry: bool) -> dict[str, Any]:
    """Compares a step of two layers with the same step by XLA references: decode, but `prefill`."""
    import contextlib

    import jax.numpy as jnp
    import numpy as np

    from benchmarks.gpu import models, step_part
    from benchmarks.gpu.sizes import DRY, Sizes
    from jmoe.packed_rows import pack_row
    from jmoe.steps import decode_step, prefill_step, served
    from pallas_kernels.backend import references_only

    _, way, more = (*case.split("/"), "")[:3]
    batch = 4 if dry else 64
    sizes = replace(DRY if dry else Sizes(), batches=(batch,))
    _phase("draw")
    model = models.make(sizes, ways=sizes.ways[:1] if more == "united" else (), depth=2)
    cfg = model.config
    slots = (batch * 4,) if more == "slots" else (batch,)
    step: Any = decode_step
    arrays = step_part.decode_rows(range(batch), sizes.context)
    if way == "prefill":
        step = prefill_step
        each = sizes.context // 2
        rows = np.stack([pack_row(i, kv_len=each, q_len=each) for i in range(4)])
        drawn = np.random.default_rng(0).integers(cfg.vocab_size, size=4 * each)
        arrays = jnp.asarray(drawn, jnp.int32), jnp.asarray(rows), *arrays[1:]

    def tokens_and_logits(way: str) -> tuple[Any, Any]:
        params, options = served(model.params, eager=way == "eager")
        state = step_part.decode_state(sizes, model, slots)

        def call(state: Any, weights: Any, *arrays: Any) -> Any:
            state, out = step(cfg, weights, state, *arrays, max_active=cfg.num_experts)
            return state, out.logits

        weights = model.weights._replace(params=params)
        with references_only() if way == "references" else contextlib.nullcontext():
            compiled = step_part.compiled(call, state, weights, *arrays, options=options)
        if way != "references":
            _phase("run", case)
        return compiled(state, weights, *arrays)[1]

    _phase("compile")
    want = tokens_and_logits("references")
    out = _spoiled(tokens_and_logits(way), case)
    _phase("compare")
    return _rows_difference(out, want)


def _rows_difference(out: Any, want: Any) -> dict[str, Any]:
    """Returns how logits differ by row: where rounding chose another expert, a row is far off and
    the others are not.
    """
    import numpy as np

    out, want = np.asarray(out, np.float64), np.asarray(want, np.float64)
    errors = np.linalg.norm(out - want, axis=1) / np.linalg.norm(want, axis=1)
    far = ~(errors <= FAR_ROW)  # also NaN
    found = {"error": float(np.nanmedian(errors)), "far_rows": int(far.sum())}
    if np.isfinite(out).all() and found["error"] <= ROW_ERROR and far.mean() <= FAR_ROWS:
        return {"ok": True, **found}
    return {**_difference([out], [want]), "ok": False, **found}


def _op(name: str, dry: bool) -> dict[str, Any]:
    """Runs a case of the kernel benchmark; returns its judge's verdict and where results differ."""
    import secrets

    import jax

    from benchmarks.kernels import judge, problems
    from benchmarks.kernels.inputs import Pools
    from benchmarks.kernels.timing import JaxProgram
    from pallas_kernels.backend import references_only

    sizes = op_sizes(dry=dry)
    case = next(case for case in op_cases(dry=dry) if case.name == name)
    _phase("draw")
    problem = problems.build(case, sizes, secrets.randbits(31), Pools())

    def call(*args: Any) -> Any:
        return jax.tree.map(lambda leaf: _spoiled(leaf, name), problem.call(*args))

    _phase("compile")
    program = JaxProgram(call, problem.sets, problem.carry)
    _phase("run", name)
    seen = judge.check(program, problem.error, problem.tolerance)
    _phase("compare")
    found: dict[str, Any] = {
        **seen._asdict(),
        "ok": seen.passed,
        "runs_differ": not seen.deterministic,
        "mosaic": program.has_mosaic,
    }
    if not seen.passed and problem.carry is None:
        with references_only():
            want = jax.jit(problem.call)(*problem.sets[0])
        where = _difference(jax.tree.leaves(program(0)), jax.tree.leaves(want))
        found |= {key: where[key] for key in ("share", "nan", "first", "tiles") if key in where}
    return found


def _spoiled(out: Any, case: str) -> Any:
    """Returns a result, with a tile of NaN where that is planted, as of a kernel that skips one."""
    import jax.numpy as jnp

    if planted(f"light/{case}") != "wrong":
        return out
    bad = jnp.nan if jnp.issubdtype(out.dtype, jnp.floating) else 1
    return out.at[1:3].set(bad) if out.ndim else out


def _difference(out: list[Any], want: list[Any]) -> dict[str, Any]:
    """Returns how results differ from those of the reference: the first place, the share, the
    tiles.
    """
    import numpy as np

    for which, (a, b) in enumerate(zip(out, want, strict=True)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        limit = TOO_FAR * max(float(np.max(np.abs(b), initial=0.0)), 1e-30)
        wrong = ~(np.abs(a - b) <= limit)
        if wrong.any():
            places = np.argwhere(wrong)
            tiles = {tuple(int(i) // TILE for i in place[:2]) for place in places[:100_000]}
            return {
                "ok": False,
                "result": which,
                "share": float(wrong.mean()),
                "nan": int(np.isnan(a).sum()),
                "first": [int(i) for i in places[0]],
                "tiles": sorted(tiles)[:8],
            }
    return {"ok": True}


def op_sizes(*, dry: bool) -> Any:
    """Returns the sizes of the kernel cases."""
    from benchmarks.kernels import cases
    from benchmarks.kernels.shapes import MODELS

    if dry:
        return cases.DRY
    return cases.Sizes(
        models=MODELS[:3],
        quantized_models=MODELS[:1],
        decode_tokens=(8,),
        prefill_tokens=(512,),
        contexts=(1024,),
        rotated_bytes=0,
        kv_bytes=1 << 28,
    )


def op_cases(*, dry: bool) -> list[Any]:
    """Returns the kernel cases, those that move least first."""
    from benchmarks.kernels.cases import with_one_router

    found = with_one_router(op_sizes(dry=dry))
    return sorted(found, key=lambda c: (c.op.startswith("grouped_gemm"), c.tokens, c.name))


if __name__ == "__main__":
    main()
