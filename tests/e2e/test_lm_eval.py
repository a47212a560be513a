"""lm-evaluation-harness as it is, in an environment of its own, against the real server."""

import csv
import json
import subprocess
import sys
from collections import defaultdict
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


GREEDY = "generation_kwargs: {until: ['|'], max_gen_toks: 96}\nmetric_list: [{metric: exact_match}]"
"""Of whole answers, which end by themselves."""


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


def chosen(count):
    """Returns so many of the bundled model's tasks, each with another's answer to choose from."""
    items = [json.loads(line) for line in (DIRECTORY / "tasks.jsonl").read_text().splitlines()]
    items = items[:: len(items) // count][:count]
    for item, other in zip(items, [*items[1:], items[0]], strict=True):
        item["choices"] = [item["answer"], other["answer"]]
    return items


def evaluated(python, folder, address, items, arguments, kinds=KINDS):
    """Returns the samples of each kind of task, as the harness logs them."""
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    for kind, more in kinds.items():
        told = TASK.format(name=f"our_{kind}", file=folder / "items.jsonl", kind=kind, more=more)
        told = told.replace("{{prompt}}", "") if kind.endswith("rolling") else told
        (folder / f"{kind}.yaml").write_text(told)
    given = f"model=bundled,base_url={address},tokenizer={DIRECTORY},{arguments}"
    command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--batch_size", "4"]
    command += ["--model_args", given, "--include_path", folder, "--log_samples"]
    command += ["--tasks", ",".join(f"our_{kind}" for kind in kinds), "--output_path", folder / "o"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=OWN | offline)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {}
    for kind in kinds:
        (file,) = folder.glob(f"o/*/samples_our_{kind}_2*.jsonl")
        found[kind] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arguments", ["max_length=512", "tokenized_requests=False"])
def test_the_harness_gets_what_others_say(python, tmp_path, address, model, arguments):
    """Log-probabilities are those of transformers, answers the notebook's."""
    found = evaluated(python, tmp_path, address, chosen(12), f"num_concurrent=4,{arguments}")
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


@pytest.mark.timeout(1200)
def test_what_brownout_costs_is_what_jmoe_evaluate_says(python, tmp_path):
    """Of 256 tasks, where visits beyond 40 % are dropped: a mean over families, as there. Company
    decides who is degraded, so that answers are not the same, and shares are within three standard
    errors.
    """
    items, port, rows = chosen(256), free_port(), 32
    fixed = ("strategy=full", "prefill_threshold_percent=40", "decode_threshold_percent=40")
    settings = [f"engine.brownout.{one}" for one in (*fixed, "salc=false")]
    settings += ["engine.dtype=float32", f"engine.max_num_seqs={rows}", "engine.audit.share=0"]
    with serving(*settings, f"http_port={port}", preset="default"):
        found = evaluated(
            *(python, tmp_path, f"http://127.0.0.1:{port}/v1/completions", items),
            f"num_concurrent={rows},max_length=512",
            {"generate_until": GREEDY},
        )
    right = defaultdict(list)
    for sample in found["generate_until"]:
        ((text,),) = sample["resps"]
        right[sample["doc"]["family"]].append(text.strip() == sample["doc"]["answer"].strip())
    command = [sys.executable, "-m", "serving.cli", "evaluate", "--data", tmp_path / "items.jsonl"]
    command += ["--only", "full:40", "--keep", "weight", "--dtype", "float32", "--error-steps", "1"]
    command += ["--batch", str(rows), "--out", tmp_path / "evaluated"]
    subprocess.run(command, check=True, capture_output=True, timeout=400)
    with (tmp_path / "evaluated" / "evaluate.csv").open() as file:
        zero, full = (float(row["accuracy_percent"]) / 100 for row in csv.DictReader(file))
    ours = np.mean([np.mean(of_family) for of_family in right.values()])
    error = 3 * (2 * full * (1 - full) / len(items)) ** 0.5
    print(f"exact {zero:.3f}; full:40 {full:.3f} by jmoe evaluate, {ours:.3f} by the harness")
    assert zero - full > 2 * error  # there is something to see
    assert abs(ours - full) < error
