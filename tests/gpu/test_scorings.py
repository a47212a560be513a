"""The routing kernel on the GPU routes as its reference does: every scoring, brownout, keeping."""

import pytest
from routing_contract import MORE, Static, check_route, compiled, draw

from pallas_kernels import routing
from pallas_kernels.backend import KERNEL, noting

PAIRS = routing.Grouping(8, 4, 2)
STATICS = {
    "Qwen1.5-MoE": Static(experts=60, united=30, top_k=4, normalize=False),
    "Qwen3": Static(experts=128, united=16, top_k=8),
    "DeepSeek-V3": Static(
        experts=256, united=0, top_k=8, scoring="sigmoid", bias=True, grouping=PAIRS, scale=2.5
    ),
    "GLM-4.5-Air": Static(experts=128, united=16, top_k=8, scoring="sigmoid", bias=True),
    "Phi-3.5-MoE": Static(
        experts=16, united=4, top_k=2, normalize=False, scoring="sparsemixer", jitter=0.01
    ),
}
STRATEGIES = [*range(3), routing.FULL + routing.BY_WEIGHT, routing.PARTIAL + routing.BY_WEIGHT]


@pytest.mark.parametrize("rows", [8, 64, 500])
@pytest.mark.parametrize("model", STATICS)
def test_a_route_equals_that_of_its_parts(model, rows):
    static = STATICS[model]._replace(rows=rows, tiles=MORE, padding=-STATICS[model].experts % 64)
    with noting() as noted:
        compiled("public", static)
    assert noted["routing"] == KERNEL
    # Seeds that 3 divides draw ties, which rounding decides where experts are chosen by score.
    seeds = [seed for seed in range(1, 8) if seed % 3 or not static.bias]
    cases = [draw(seed, static, strategy) for seed in seeds for strategy in STRATEGIES]
    check_route("public", static, cases, rtol=1e-5)
