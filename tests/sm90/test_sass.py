"""Machine code as nvdisasm prints it."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention.mosaic import paged_attention
from sm90 import sass

pytestmark = pytest.mark.deep

TEXT = """
.text.attention_mosaic_gpu_kernel:
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
   -:-:3:Y:01        /*0010*/               @!P1 BRA `(.L_x_0)
   1:-:-:Y:02        /*10020*/     HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0
                                                                           /* 0x000000ff */
.L_x_0:
"""


def test_instructions_are_read():
    assert sass.parse(TEXT) == [
        (0x0, "", "LDC", "R1, c[0x0][0x28]"),
        (0x10, "@!P1", "BRA", "`(.L_x_0)"),
        (0x10020, "", "HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR16], R24, gsb0"),
    ]


SHORT = """
   -:-:-:Y:01        /*0000*/                   UMOV UR7, URZ
   -:-:-:Y:01        /*0010*/                   ULEA UR6, UR6, UR8, 0x9
   -:2:-:Y:01        /*0020*/                   @UP0 UBLKCP.G.S [UR6], [UR12], UR13
   -:-:-:Y:01        /*0030*/                   UIADD3.64 UR6, UR4, UR6, URZ
   -:2:-:Y:01        /*0040*/                   @UP0 UBLKCP.G.S [UR6], [UR12], UR13
   -:-:-:Y:01        /*0050*/                   UIMAD.WIDE.U32 UR4, UR12, 0x300, UR8
   -:2:-:Y:01        /*0060*/                   UBLKCP.S.G [UR10], [UR4], UR13
"""


def test_an_address_without_an_upper_half_is_found():
    assert [i.address for i in sass.short_addresses(sass.parse(SHORT))] == [0x20]


def test_kernels_are_disassembled(monkeypatch, tmp_path):
    q = jax.ShapeDtypeStruct((8, 8, 128), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((1, 16, 1, 64, 128), jnp.bfloat16)
    ints = {s: jax.ShapeDtypeStruct(s, jnp.int32) for s in ((), (8, 2), (8,))}

    def fn(q, k, v, layer, table, kv_len):
        return paged_attention(q, k, v, layer=layer, block_table=table, kv_len=kv_len, scale=0.1)

    given = (q, pages, pages, ints[()], ints[(8, 2)], ints[(8,)])
    kernels = sass.disassemble(monkeypatch, tmp_path, fn, *given)
    opcodes = {i.opcode.split(".")[0] for i in kernels["paged_attention"]}
    assert {"HGMMA", "UTMALDG", "MUFU"} <= opcodes
