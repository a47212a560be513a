"""What a newcomer waits for: the README's own commands, from `git clone` to its `curl`'s answer.

`python -m benchmarks.first_answer [--out benchmarks/results/first_answer.json]`: each round has
an empty folder and an empty home, so that the first start compiles every program, and the second
one finds them on disk. The round before the others downloads the packages, and those find them in
pip's cache: they tell what is waited for after the download. CPU figures, about this CPU; where
others use it, too, processor seconds (`_cpu`) change less than seconds.
"""

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import store


def commands(readme: str) -> tuple[str, str, str]:
    """Returns the README's install commands, its first `curl`, and the text of the answer."""
    install, ask = re.findall(r"^```sh\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)[:2]
    return install, ask, re.findall(r"answer's `text` is `\"(.*?)\"`", readme)[0]


def measure(readme: str, folder: Path, env: Mapping[str, str]) -> dict[str, float]:
    """Follows the README's install and quick start in an empty folder.

    Returns seconds: `install` (clone, environment, packages), then for the `first` and the `second`
    start the time from the command to the answer; and processor seconds of each, the server's stop
    included. Raises RuntimeError if the answer is not the README's.
    """
    install, ask, expected = commands(readme)
    home = folder / "home"
    home.mkdir()
    env = {**env, "HOME": str(home), "PATH": f"{folder}/venv/bin:{env['PATH']}"}
    begun, begun_cpu = time.monotonic(), cpu_s()
    script = install.replace("REPOSITORY", str(store.ROOT))
    subprocess.run(["bash", "-ec", script], cwd=folder, env=env, check=True)
    seconds = {"install": time.monotonic() - begun, "install_cpu": cpu_s() - begun_cpu}
    for start in ("first", "second"):
        begun, begun_cpu = time.monotonic(), cpu_s()
        server = subprocess.Popen(
            ["jmoe", "serve", "--port", "0"], cwd=folder, env=env, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            printed = ""
            for line in server.stdout:
                printed += line
                if line.startswith("jmoe ready"):
                    break
            address = re.findall(r"^jmoe http on (\S+)", printed, re.MULTILINE)
            if not address or server.poll() is not None:
                raise RuntimeError(f"the server did not get ready: {printed}")
            asking = ask.replace("http://127.0.0.1:8000", address[0])
            answer = subprocess.run(["bash", "-ec", asking], capture_output=True, text=True)
            if f'"text":"{expected}"' not in answer.stdout:
                raise RuntimeError(f"{expected!r} was expected, not {answer.stdout}{answer.stderr}")
            seconds[start] = time.monotonic() - begun
        finally:
            server.terminate()
            server.wait()
        seconds[f"{start}_cpu"] = cpu_s() - begun_cpu
    return seconds


def cpu_s() -> float:
    """Returns the processor seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Writes the rounds as JSON and prints their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="only print what would be run")
    args = parser.parse_args()
    readme = (store.ROOT / "README.md").read_text(encoding="utf-8")
    if args.dry_run:
        print(*commands(readme), sep="\n")
        return
    rounds = []
    with TemporaryDirectory() as name:
        path = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        env = {**kept, "PATH": path, "PIP_CACHE_DIR": f"{name}/wheels", "PIP_QUIET": "1"}
        for number in range(args.rounds + 1):
            folder = Path(name) / str(number)
            folder.mkdir()
            rounds.append(measure(readme, folder, env))
            print({key: round(value, 1) for key, value in rounds[-1].items()}, flush=True)
            shutil.rmtree(folder)
    medians = {key: statistics.median(one[key] for one in rounds[1:]) for key in rounds[0]}
    told = {
        **store.origin(f"python -m benchmarks.first_answer --rounds {args.rounds}"),
        "with_download_s": rounds[0],
        "rounds_s": rounds[1:],
        "medians_s": medians,
    }
    print(medians)
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
