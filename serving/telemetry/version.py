"""The version of jmoe, and what it runs on. Does not import jax."""

import contextlib
import importlib.metadata
import json
import os
import subprocess
from pathlib import Path


def jmoe_version() -> str:
    """Returns the installed version; "source" if jmoe runs from a checkout without installation."""
    try:
        return importlib.metadata.version("jmoe")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """Returns the commit of jmoe's checkout, with "+" if files differ from it, or the commit that
    pip installed from git; None for any other installation.

    `root` is the folder that holds jmoe's packages. A repository further up is another project's.
    """
    if (root / ".git").exists():  # a folder; in a worktree, a file
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+"]
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.stdout.strip() or None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        text = importlib.metadata.distribution("jmoe").read_text("direct_url.json") or "{}"
        return json.loads(text).get("vcs_info", {}).get("commit_id")
    return None


def device(root: Path = Path("/")) -> str:
    """Returns what jax will run on, as far as can be told without asking CUDA, which takes seconds.

    `root` is the root of the file system.
    """
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms
    found = root.glob("proc/driver/nvidia/gpus/*/information")
    models = [
        line.partition(":")[2].strip()
        for path in sorted(found)
        for line in path.read_text().splitlines()
        if line.startswith("Model:")
    ]
    gpus = ", ".join(models) or "an NVIDIA GPU that no driver names"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if any("cuda" in plugin.name for plugin in plugins):
        return gpus
    return f"cpu (there is {gpus}: install jmoe[cuda] to use it)"
