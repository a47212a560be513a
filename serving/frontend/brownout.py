"""Changes brownout settings on behalf of any front end. Does not import jax."""

import asyncio
import time
from typing import TYPE_CHECKING

from serving.frontend import status
from serving.request import BrownoutChange, BrownoutState

if TYPE_CHECKING:
    from serving.engine import Engine


async def set_brownout(engine: "Engine", change: BrownoutChange, peer: str) -> BrownoutState:
    """Changes settings and logs that `peer` did so; if the way changes, waits until it is loaded.

    If cancelled while a way is loading, the engine goes on loading it, and the other changes are
    dropped. Raises what `Engine.set_brownout` raises.
    """
    before, began_at = engine.get_brownout(), time.monotonic()
    setting = asyncio.ensure_future(engine.set_brownout(change))
    try:
        await asyncio.sleep(0)
        if not setting.done():  # otherwise it was refused, or needed no loading
            status.log_way_begun(change, before, peer)
        after = await setting
    except asyncio.CancelledError:
        setting.cancel()
        status.log_way_left(change, before, peer)
        raise
    status.log_brownout_change(change, before, after, time.monotonic() - began_at, peer)
    return after
