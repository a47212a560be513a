import itertools

import numpy as np

from training.packing import encode_task, pack, task_batch, training_batch
from training.tasks import tasks


def test_items_come_back_from_their_rows(tokenizer):
    items = [encode_task(tokenizer, t) for t in itertools.islice(tasks("train", 1), 40)]
    batch = pack(items, None, 128)
    found = []
    for row in range(len(batch.tokens)):
        for number in range(1, len(batch.families[row]) + 1):
            at = batch.items[row] == number
            ids = [*batch.tokens[row][at], batch.targets[row][at][-1]]
            found.append(tuple(int(i) for i in ids))
            np.testing.assert_array_equal(batch.positions[row][at], np.arange(at.sum()))
            np.testing.assert_array_equal(batch.targets[row][at][:-1], batch.tokens[row][at][1:])
    assert sorted(found) == sorted(tuple(item.ids) for item in items)


def test_answers_are_marked_to_the_end_token(tokenizer):
    (task,) = itertools.islice(tasks("eval", 7), 1)
    batch = task_batch(tokenizer, [task], 128)
    marked = batch.targets[batch.answer > 0]
    assert tokenizer.decode(marked.tolist()) == task.answer
    assert marked[-1] == 0


def test_padding_weighs_nothing(tokenizer):
    batch = training_batch(tokenizer, seed=1, step=0, num_rows=4, length=128)
    assert np.all(batch.weights[batch.items == 0] == 0)
    assert np.all(batch.weights[batch.items > 0] > 0)
    assert np.mean(batch.items > 0) > 0.75


def test_batches_follow_seed_and_step(tokenizer):
    def tokens(seed, step):
        return training_batch(tokenizer, seed, step, num_rows=2, length=128).tokens

    np.testing.assert_array_equal(tokens(1, 5), tokens(1, 5))
    assert not np.array_equal(tokens(1, 5), tokens(1, 6))
    assert not np.array_equal(tokens(1, 5), tokens(2, 5))


def test_items_longer_than_a_row_are_left_out(tokenizer):
    items = [encode_task(tokenizer, t) for t in itertools.islice(tasks("train", 1), 30)]
    batch = pack(items, None, 40)
    short = [item for item in items if len(item.ids) <= 41]
    assert 0 < sum(map(len, batch.families)) == len(short) < len(items)
