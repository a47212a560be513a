"""A change of brownout settings that somebody asked for, by whatever front end. No jax."""

import asyncio
import time
from typing import TYPE_CHECKING

from serving.frontend import status
from serving.request import BrownoutChange, BrownoutState

if TYPE_CHECKING:
    from serving.engine import Engine


async def set_brownout(engine: "Engine", change: BrownoutChange, peer: str) -> BrownoutState:
    """Changes settings and logs who did it, `peer`; another way is loaded before this returns.

    Cancelled, it leaves a way that is loading to the engine and drops what else was to be set.
    Raises what `Engine.set_brownout` raises.
    """
    before, began_at = engine.get_brownout(), time.monotonic()
    setting = asyncio.ensure_future(engine.set_brownout(change))
    try:
        await asyncio.sleep(0)
        if not setting.done():  # what is refused, or needs no loading, is done at once
            status.log_way_begun(change, before, peer)
        after = await setting
    except asyncio.CancelledError:
        setting.cancel()
        status.log_way_left(change, before, peer)
        raise
    status.log_brownout_change(change, before, after, time.monotonic() - began_at, peer)
    return after
