"""Make bundled_likelihoods.jsonl beside this file: what the bundled model says of texts.

As make_golden.py, in the environment that it names (transformers 5.24.0), with the directory that
``python -c "from jmoe.api import resolve; print(resolve('bundled'))"`` prints:

    OMP_NUM_THREADS=1 python tests/golden/make_likelihoods.py DIRECTORY

Of twelve tasks: the answer behind its prompt, another's answer there, and the answer alone, which
begins behind the end-of-sequence token. Each has its log-probability, and whether it is greedy.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

TO = Path(__file__).with_name("bundled_likelihoods.jsonl")
TASKS = 12


def main():
    """Make the file."""
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tasks = [json.loads(line) for line in (directory / "tasks.jsonl").read_text().splitlines()]
    tasks = tasks[:: len(tasks) // TASKS][:TASKS]
    told = []
    for task, other in zip(tasks, [*tasks[1:], tasks[0]], strict=True):
        for context, text in (
            (task["prompt"], task["answer"]),
            (task["prompt"], other["answer"]),
            ("", task["answer"]),
        ):
            tokens = tokenizer.encode(context + text, add_special_tokens=False).ids
            first = len(tokenizer.encode(context, add_special_tokens=False).ids)
            if not first:
                tokens, first = [model.config.eos_token_id, *tokens], 1
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, first - 1 : -1]
            wanted = torch.tensor(tokens[first:])
            logprobs = logits.double().log_softmax(-1)
            value = logprobs.gather(1, wanted[:, None]).sum().item()
            greedy = bool((logits.argmax(-1) == wanted).all())
            told.append({"context": context, "text": text, "logprob": value, "greedy": greedy})
    TO.write_text("".join(json.dumps(one) + "\n" for one in told))
    print(f"{len(told)} texts, {sum(one['greedy'] for one in told)} of them greedy")


if __name__ == "__main__":
    main()
