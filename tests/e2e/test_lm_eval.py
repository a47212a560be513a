"""lm-evaluation-harness as it is, in an environment of its own, against the real server."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import jmoe
from jmoe.api import resolve
from serving.bench.scrape import free_port
from tests.environments import OWN, interpreter_with

from .conftest import serving

pytestmark = pytest.mark.exhaustive

HARNESS = "lm_eval[api]==0.4.13", "transformers==5.24.0"
DIRECTORY = resolve("bundled")
LIKELIHOODS = Path(__file__).parents[1] / "golden" / "bundled_likelihoods.jsonl"
"""Of the same texts; tests/golden/make_likelihoods.py made it."""
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: '{{{{prompt}}}}'
doc_to_target: '{{{{answer}}}}'
target_delimiter: ''
{more}
"""
KINDS = {
    "loglikelihood": "metric_list: [{metric: acc}]",
    "loglikelihood_rolling": "metric_list: [{metric: byte_perplexity}]",
    "multiple_choice": "doc_to_choice: '{{choices}}'\nmetric_list: [{metric: acc}]",
    "generate_until": "generation_kwargs: {until: ['.'], max_gen_toks: 8}\n"
    "metric_list: [{metric: exact_match}]",
}


@pytest.fixture(scope="module")
def python():
    """Returns the environment's interpreter; the environment is made once."""
    return interpreter_with(*HARNESS)


@pytest.fixture(scope="module")
def address():
    """Yields the address of a server that computes as `jmoe.load(..., "float32")`."""
    port = free_port()
    settings = "engine.decode_buckets=64", "engine.prefill_buckets=512", "engine.dtype=float32"
    fixed = "engine.brownout.salc=false"
    with serving(*settings, fixed, f"http_port={port}", preset="default"):
        yield f"http://127.0.0.1:{port}/v1/completions"


@pytest.fixture(scope="module")
def model():
    return jmoe.load(DIRECTORY, "float32")


def evaluated(python, folder, address, arguments):
    """Returns the samples of each kind of task, as the harness logs them."""
    items = [json.loads(line) for line in (DIRECTORY / "tasks.jsonl").read_text().splitlines()]
    items = items[:: len(items) // 12][:12]
    for item, other in zip(items, [*items[1:], items[0]], strict=True):
        item["choices"] = [item["answer"], other["answer"]]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    for kind, more in KINDS.items():
        told = TASK.format(name=f"our_{kind}", file=folder / "items.jsonl", kind=kind, more=more)
        told = told.replace("{{prompt}}", "") if kind.endswith("rolling") else told
        (folder / f"{kind}.yaml").write_text(told)
    given = f"model=bundled,base_url={address},tokenizer={DIRECTORY},num_concurrent=4,{arguments}"
    command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--batch_size", "4"]
    command += ["--model_args", given, "--include_path", folder, "--log_samples"]
    command += ["--tasks", ",".join(f"our_{kind}" for kind in KINDS), "--output_path", folder / "o"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=OWN | offline)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {}
    for kind in KINDS:
        (file,) = folder.glob(f"o/*/samples_our_{kind}_2*.jsonl")
        found[kind] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arguments", ["max_length=512", "tokenized_requests=False"])
def test_the_harness_gets_what_others_say(python, tmp_path, address, model, arguments):
    """Log-probabilities are those of transformers, answers the notebook's."""
    found = evaluated(python, tmp_path, address, arguments)
    known = [json.loads(line) for line in LIKELIHOODS.open()]
    said = {(one["context"], one["text"]): (one["logprob"], one["greedy"]) for one in known}
    for kind in ("loglikelihood", "multiple_choice"):
        for sample in found[kind]:
            for asked, ((got, is_greedy),) in zip(
                sample["arguments"].values(), sample["resps"], strict=True
            ):
                wanted, greedy = said[asked["arg_0"], asked["arg_1"]]
                assert float(got) == pytest.approx(wanted, abs=1e-3)
                assert str(is_greedy) == str(greedy)
    for sample in found["loglikelihood_rolling"]:
        got = np.ravel(np.array(sample["resps"], object))[0]
        assert float(got) == pytest.approx(said["", sample["doc"]["answer"]][0], abs=1e-3)
    for sample in found["generate_until"]:
        ((text,),) = sample["resps"]
        (wanted,) = jmoe.generate(model, [sample["doc"]["prompt"]], max_new_tokens=8).texts
        assert text == wanted.partition(".")[0]
