"""The variants of a burst: no brownout, the server's own settings, or a controller by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.bench.loadgen import Steered
from serving.bench.results import Slo
from serving.proto.jmoe.v1 import jmoe_pb2 as pb


@dataclass(frozen=True)
class Variant:
    """One way to serve a burst."""

    label: str
    color: str
    with_brownout: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SetBrownoutRequest`; what is not there is as the server was started."""


VARIANTS = {
    "zero": Variant("without brownout", "#d95f02", with_brownout=False),
    "brownout": Variant("with brownout", "#1b7f5c"),
    "algorithm2_alone": Variant(
        "Algorithm 2, no company",
        "#7570b3",
        settings={"controller": "algorithm2", "prefill_company": False},
    ),
    "algorithm2": Variant(
        "Algorithm 2", "#a6761d", settings={"controller": "algorithm2", "prefill_company": True}
    ),
    "predictive": Variant(
        "predictive", "#1b7f5c", settings={"controller": "predictive", "prefill_company": True}
    ),
}
PAIR = ("zero", "brownout")
ALL = ("zero", "algorithm2_alone", "algorithm2", "predictive")


async def use_variant(
    client: Steered, variant: Variant, own: pb.BrownoutState, strategy: str, slo: Slo
) -> pb.BrownoutState:
    """Sets a server up for a run: thresholds at 100 %, then the controller on, where it has one.

    `own` is the state in which it was started.
    """
    state = await client.set_brownout(
        strategy=strategy if variant.with_brownout else "zero",
        prefill_threshold_percent=100,
        decode_threshold_percent=100,
        ttft_slo_s=slo.ttft_s,
        itl_slo_s=slo.itl_s,
        **{
            "controller": own.controller,
            "prefill_company": own.prefill_company,
            **variant.settings,
        },
    )
    return await client.set_brownout(salc_enabled=True) if variant.with_brownout else state
