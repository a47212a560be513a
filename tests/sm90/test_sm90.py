"""The emulator of kernels' PTX finds what is wrong with one."""

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_gemm.kernel import Gemm
from pallas_kernels.grouped_gemm.tiles import GemmTile, Tile

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra: jmoe[aot]")

import sm90
from sm90 import host, machine, memory, program, ptxas
from sm90.execute import Code
from sm90.host import TensorMap
from sm90.machine import Fault, Policy

pytestmark = pytest.mark.deep

F32 = jnp.dtype(jnp.float32)
GEMM = GemmTile(block_k=64, parts=2, consumers=1, stages=2)
TILE = Tile(widths=(8, 24), cluster=1, group=1, gate_up=GEMM, down=GEMM, visit_dtype=F32)
K, COLUMNS = 256, 256
# slot, first row, end, first tile of the group, tiles of the group, tiles
WORK = np.array([[1, 0, 24, 0, 1, 2], [0, 24, 27, 1, 1, 2]], np.int32)
EVERY_TIME = pytest.mark.parametrize("when", ["early", "late", "any"])


def spec(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


class Kernel:
    """A product of 27 rows by two experts, compiled once: 24 of one, three of the other."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.rows = np.asarray(jnp.asarray(rng.normal(size=(48, K)), jnp.bfloat16))
        self.weights = np.asarray(jnp.asarray(rng.normal(size=(2, K, COLUMNS)), jnp.bfloat16))
        arrays = map(spec, (self.rows, self.weights, WORK))
        gemm = Gemm(TILE, GEMM, None, num_blocks=2)
        self.ptx, self.log = sm90.compiled(partial(gemm, out_dtype=F32), *arrays)

    def run(self, policy, edit=lambda ptx: ptx, log=None):
        """Runs the kernel; returns its result in rows that are an expert's, and what it should
        be.
        """
        out = np.full((48, COLUMNS), np.nan, np.float32)
        code = Code(program.parse(edit(self.ptx)), host.read(log or self.log))
        machine.run(code, [WORK, self.rows, self.weights, out], policy)
        rows, weights = self.rows.astype(np.float64), self.weights.astype(np.float64)
        return out[:27], np.concatenate([rows[:24] @ weights[1], rows[24:27] @ weights[0]])


@pytest.fixture(scope="module")
def kernel():
    return Kernel()


@EVERY_TIME
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_things_changes_nothing(kernel, when, seed):
    got, want = kernel.run(Policy(when, seed))
    np.testing.assert_allclose(got, want, atol=1e-4)


def without(pattern):
    """Returns an edit of PTX that drops what matches, which must occur."""

    def edit(ptx):
        edited, count = re.subn(pattern, "", ptx)
        assert count, pattern
        return edited

    return edit


@EVERY_TIME
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"fence\.proxy\.async\S*;", "no fence between"),
        (r"wgmma\.wait_group\S* \d;", "not waited for"),
        (r"mbarrier\.arrive\.release[^;]*;", "nothing can go on"),
        (r"mbarrier\.init[^;]*;", "no barrier at"),
        (r"@%p\d+ (?=cp\.async\.bulk\.tensor)", "32 lanes of a warp start a copy"),
    ],
)
def test_what_is_left_out_is_found(kernel, pattern, message, when):
    with pytest.raises(Fault, match=message):
        kernel.run(Policy(when), without(pattern))


def test_a_block_has_to_wait_for_its_stores(kernel):
    with pytest.raises(Fault, match="a block that is over"):
        kernel.run(Policy("late"), without(r"cp\.async\.bulk\.wait_group\s+0;"))


@pytest.mark.parametrize(
    ("when", "pattern"),
    [
        ("late", r"mbarrier\.try_wait[^;]*;"),  # reads what has not come
        ("late", r"cp\.async\.bulk\.wait_group\.read[^;]*;"),  # writes what is still to be read
        ("late", r"bar\.sync %r\d+, 128;"),
    ],
)
def test_a_wait_that_is_missed_is_seen_in_the_result(kernel, when, pattern):
    """In at least one order of events, if no check finds it before."""
    kept = r"@P1 bra\.uni DONE;\s*bra\.uni\s+LAB_WAIT;"  # of the loop that waits

    def edit(ptx):
        ptx = without(pattern)(ptx)
        return without(kept)(ptx) if "try_wait" in pattern else ptx

    def is_wrong(seed):
        try:
            got, want = kernel.run(Policy(when, seed), edit)
        except Fault:
            return True
        return not np.allclose(got, want, atol=1e-4)

    assert any(is_wrong(seed) for seed in range(5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swizzle": 64}, "no wider than the swizzle"),
        ({"box": (512, 64)}, "boxes up to 256"),
        ({"box": (8, 60)}, "rows of a box in 16 bytes"),
        ({"strides": (100, 1)}, "strides in 16 bytes"),
        ({"strides": (128, 2)}, "side by side"),
        ({"strides": (1 << 40, 1)}, "strides under"),
    ],
    ids=str,
)
def test_tensor_maps_are_those_that_a_driver_takes(changes, message):
    good = TensorMap(0, 0, 2, sizes=(100, 128), strides=(128, 1), swizzle=128, box=(8, 64))
    good.check()
    with pytest.raises(ValueError, match=message):
        good._replace(**changes).check()


def copies(count):
    """Returns a kernel that stores 64 integers at once where there is room for `count`."""

    def body(given, out, smem, full):
        plgpu.copy_gmem_to_smem(given, smem, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(smem, out.at[pl.ds(given[0], 64)])  # which Mosaic cuts
        plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count,), jnp.int32),
        scratch_types=[plgpu.SMEM((64,), jnp.int32), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    given, out = np.arange(64, dtype=np.int32), np.full(count, -1, np.int32)
    ptx, log = sm90.compiled(call, spec(given))
    machine.run(Code(program.parse(ptx), host.read(log)), [given, out], Policy())
    return out


def test_a_bulk_copy_takes_whole_sixteens_of_bytes():
    assert copies(20).tolist() == list(range(20))
    with pytest.raises(Fault, match="72 bytes: it takes whole sixteens"):
        copies(18)


# A report of CUDA 13.0, of a kernel some of whose waits were taken out, and of another one.
REPORT = """\
ptxas info    : (C7517) warpgroup.wait is injected in around line 484 by compiler to allow use of \
registers defined by GMMA in function 'one_mosaic_gpu_kernel'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function \
'one_mosaic_gpu_kernel'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for one_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for other_mosaic_gpu_kernel
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""


def test_a_report_of_ptxas_is_read():
    assert ptxas.parse(REPORT) == [
        ptxas.Kernel("one_mosaic_gpu_kernel", 168, 0, serialized=True),
        ptxas.Kernel("other_mosaic_gpu_kernel", 255, 36, serialized=False),
    ]


def exchange(by_multicast):
    """Returns a kernel in which two blocks of a cluster each write four rows and then have all of
    them: by a multicast of what each wrote itself; or they meet at an mbarrier, and read what the
    other wrote.
    """
    shape = (2, 4, 32)

    def body(given, out, shared, mine, both, full, met):
        rank = lax.axis_index("rank")
        plgpu.copy_gmem_to_smem(given.at[rank], mine, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(mine, shared.at[rank])
        plgpu.wait_smem_to_gmem(0)
        if not by_multicast:
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
        axes = "rank" if by_multicast else None
        plgpu.copy_gmem_to_smem(shared, both, full, collective_axes=axes)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(both, out.at[rank])
        plgpu.wait_smem_to_gmem(0)

    i32 = jnp.int32
    call = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((2, *shape), i32), jax.ShapeDtypeStruct(shape, i32)],
        cluster=(2,),
        cluster_names=("rank",),
        scratch_types=[
            plgpu.SMEM(shape[1:], i32),
            plgpu.SMEM(shape, i32),
            plgpu.Barrier(),
            plgpu.ClusterBarrier(collective_axes=("rank",)),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    given = np.arange(256, dtype=np.int32).reshape(shape)
    ptx, log = sm90.compiled(call, spec(given))
    code = Code(program.parse(ptx), host.read(log))

    def run(policy):
        out = np.full((2, *shape), -1, np.int32)
        machine.run(code, [given, out, np.full(shape, -1, np.int32)], policy)
        return out, np.stack([given, given])

    return run


def test_what_another_block_wrote_is_not_to_be_touched():
    """An mbarrier's arrivals are ordered within a block; a copy's own arrival is for all."""
    multicast, met = exchange(True), exchange(False)
    for when in ("early", "late", "any"):
        np.testing.assert_array_equal(*multicast(Policy(when)))
        with pytest.raises(Fault, match="another block wrote"):
            met(Policy(when))


@pytest.mark.parametrize(("start", "takes"), [(4, True), (2, False)])
def test_a_box_begins_at_whole_sixteens_of_bytes_in_a_row(start, takes):
    """An H100 calls any other an illegal instruction."""
    tensor = TensorMap(0, 0, 4, sizes=(100,), strides=(1,), swizzle=16, box=(64,))
    with contextlib.nullcontext() if takes else pytest.raises(ValueError, match="whole sixteens"):
        memory.Box(tensor, (start,), 0)
