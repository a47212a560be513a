"""Compile for NVIDIA GPUs on a machine that has none: memory, copies and HLO of a program.

    mesh = h200_mesh()
    exe = compile_for(mesh, step, *abstract_args, donate_argnums=3)
    exe.memory_analysis().temp_size_in_bytes, exe.as_text()

Needs the `aot` extra (the CUDA plugin of jax, no CUDA libraries) and `JAX_PLATFORMS=cpu` where
there is no GPU. What comes out is never run.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.backend import traced_for

# Without a driver's version XLA takes neither cuBLAS nor custom calls into CUDA graphs.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 62914560
  device_memory_size: 150121545728
  memory_bandwidth: 4814000000000
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  driver_version: "13.0.0"
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 12 }
"""

# There is no device to time candidates on, and the Triton GEMM needs that timing.
_COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def _like_h200(name: str, capability: str, **sizes: str) -> str:
    """Returns the description of another GPU: what it does not say is an H200's."""
    lines = H200.replace("NVIDIA H200", f"NVIDIA {name}").replace("major: 9", capability)
    for field, size in sizes.items():
        lines = re.sub(rf"\b{field}: .*", f"{field}: {size}", lines)
    return lines


H100 = _like_h200(
    "H100 80GB HBM3",
    "major: 9",
    l2_cache_size="52428800",
    device_memory_size="85899345920",
    memory_bandwidth="3352000000000",
)
OTHER_GPUS = {
    "sm_80": _like_h200(
        "A100",
        "major: 8",
        core_count="108",
        clock_rate_ghz="1.41",
        fpus_per_core="64",
        shared_memory_per_block_optin="166912",
        shared_memory_per_core="167936",
        l2_cache_size="41943040",
        device_memory_size="85899345920",
        memory_bandwidth="2039000000000",
    ),
    "sm_89": _like_h200(
        "L40S",
        "major: 8 minor: 9",
        core_count="142",
        clock_rate_ghz="2.52",
        threads_per_core_limit="1536",
        shared_memory_per_block_optin="101376",
        shared_memory_per_core="102400",
        l2_cache_size="100663296",
        device_memory_size="48318382080",
        memory_bandwidth="864000000000",
    ),
    "sm_100": _like_h200(
        "B200",
        "major: 10",
        core_count="148",
        l2_cache_size="132120576",
        device_memory_size="193273528320",
        memory_bandwidth="8000000000000",
    ),
}
"""GPUs without the Mosaic kernels, by generation; compile for them under `batched_only`."""


def gpu_mesh(generation: str) -> Mesh:
    """Returns a mesh of one of `OTHER_GPUS`, none of which has to be there; raises as
    `h200_mesh`.
    """
    return _mesh(generation, OTHER_GPUS[generation], 1, "ep")


def h200_mesh(num_gpus: int = 1, axis: str = "ep") -> Mesh:
    """Returns a mesh of H200s with NVLink, none of which has to be there: to compile for, not to
    run.

    Raises ImportError, with what to install, where jax's CUDA plugin is missing.
    """
    return _mesh("h200", H200, num_gpus, axis)


def h100_mesh() -> Mesh:
    """Returns a mesh of one H100 that does not have to be there; raises as `h200_mesh`."""
    return _mesh("h100", H100, 1, "ep")


def _mesh(name: str, target: str, num_gpus: int, axis: str) -> Mesh:
    try:
        import jax_plugins.xla_cuda13  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "compiling for a GPU that is not there needs jax's CUDA plugin: install jmoe[aot]"
        ) from error
    topology = topologies.get_topology_desc(
        name, "cuda", target_config=target, topology=f"1x1x{num_gpus}"
    )
    return topologies.make_mesh(topology, (num_gpus,), (axis,))


def compile_for(
    mesh: Mesh,
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles `fn(*args)` for the mesh's devices and returns the executable, to be read not run.

    `args` are pytrees of `jax.ShapeDtypeStruct` (or arrays); a leaf without a named sharding on
    the mesh is replicated. References are traced as on a GPU. `options` are XLA's.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        placed = sharding if isinstance(sharding, NamedSharding) else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    def fresh(*args: Any) -> Any:
        return fn(*args)  # a new function object: what jit traced for a CPU is not taken

    with traced_for("cuda"), _no_persistent_cache():
        lowered = jax.jit(fresh, donate_argnums=donate_argnums).lower(*jax.tree.map(place, args))
        return lowered.compile(compiler_options={**_COMPILER_OPTIONS, **(options or {})})


@contextmanager
def _no_persistent_cache() -> Iterator[None]:
    """Turns the persistent cache off: entries compiled without a GPU cannot be read back.

    jax looks at the switch once a process; `reset_cache` makes it look again.
    """
    key = "jax_enable_compilation_cache"
    enabled = getattr(jax.config, key)
    jax.config.update(key, False)
    reset_cache()
    try:
        yield
    finally:
        jax.config.update(key, enabled)
        reset_cache()
