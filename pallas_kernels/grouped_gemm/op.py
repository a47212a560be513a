"""Public grouped-GEMM op."""

from jaxtyping import Array, Float

from pallas_kernels import native
from pallas_kernels.activation import SILU, Activation
from pallas_kernels.backend import KERNEL, NATIVE, batched, hopper, note
from pallas_kernels.grouped_gemm import batched as few_launches
from pallas_kernels.grouped_gemm import reference
from pallas_kernels.grouped_gemm.quantized import Weights, weight_bits, weight_sizes
from pallas_kernels.grouped_gemm.tiles import BLOCK_M, Tile, choose
from pallas_kernels.routing.op import Dispatch
from pallas_kernels.routing.tile_map import RowTiles

__all__ = ["BLOCK_M", "Biases", "block_rows", "moe_mlp", "row_tiles", "tile_for"]

Biases = tuple[Float[Array, "slots f2"], Float[Array, "slots d"]]
"""Of experts' `gate_up` and `down`."""


def tile_for(num_rows: int, top_k: int, num_experts: int, down: Weights) -> Tile:
    """Returns the kernels' tile for `num_rows` rows with `top_k` visits each over `num_experts`."""
    f, d = weight_sizes(down)
    return choose(num_rows, top_k, num_experts, d, f, weight_bits(down))


def block_rows(num_visits: int, max_active: int) -> int:
    """Returns the rows of a dispatch's blocks for `moe_mlp` of so many visits to `max_active`
    experts at most: `BLOCK_M` but where large products are batched.
    """
    if hopper() or not batched():
        return BLOCK_M
    return few_launches.block_rows(num_visits, max_active)


def row_tiles(num_rows: int, top_k: int, num_experts: int, down: Weights) -> RowTiles | None:
    """Returns the row tiles of `moe_mlp` for a plan of such sizes, for `routing.route` to map
    beforehand; None where references run, which need no map.
    """
    if not hopper():
        return None
    tile = tile_for(num_rows, top_k, num_experts, down)
    return RowTiles(tile.block_t, tile.group)


def moe_mlp(
    x: Float[Array, "T d"],
    gate_up: Weights,
    down: Weights,
    plan: Dispatch,
    activation: Activation = SILU,
    biases: Biases | None = None,
) -> Float[Array, "T d"]:
    """Computes the routed experts of one layer: `sum_k weight * act(x Wg, x Wu) Wd` in float32,
    each product with its bias where there are `biases`.

    `gate_up` is [slots, d, 2f], gate columns first, and `down` [slots, f, d]; or both are
    `QuantizedWeights` or `PackedWeights` of these. The whole pool is passed and only the slots in
    `plan` are read, so no slice of it is made per layer. Products accumulate in float32. Returns
    float32 rows; a row without visits is zero.
    """
    if hopper():
        from pallas_kernels.grouped_gemm import mosaic  # Pallas is not imported where it is unused

        if mosaic.supports(x, gate_up, down, plan, activation):
            note("grouped GEMM", KERNEL)
            return mosaic.moe_mlp(x, gate_up, down, plan, activation, biases)
    if native.mixes(x, gate_up, down, activation, biases):
        note("grouped GEMM", NATIVE)
        return native.moe_mlp(x, gate_up, down, plan)
    note("grouped GEMM")
    op = few_launches if batched() else reference
    return op.moe_mlp(x, gate_up, down, plan, activation, biases)
