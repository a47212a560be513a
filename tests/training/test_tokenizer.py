import itertools
import string

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training.tasks import tasks
from training.tokenizer import EOS, IM_END, IM_START

keep_fixture = settings(
    max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@keep_fixture
@given(text=st.text(max_size=60))
def test_any_text_round_trips(tokenizer, text):
    for special in (EOS, IM_START, IM_END):
        text = text.replace(special, "")
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_byte_has_an_entry(tokenizer):
    text = "".join(map(chr, range(0x250))) + "€😀漢"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_letters_of_lists_and_digits_are_single_tokens(tokenizer):
    for letter in string.ascii_lowercase:
        assert len(tokenizer.encode(f" {letter}").ids) == 1
    assert len(tokenizer.encode("9075").ids) == 4


def test_size_and_special_tokens(tokenizer):
    assert tokenizer.get_vocab_size() <= 512
    assert [tokenizer.token_to_id(t) for t in (EOS, IM_START, IM_END)] == [0, 1, 2]
    assert tokenizer.encode(f"{IM_START}hi{IM_END}").ids[0] == 1


def test_prompt_and_answer_tokenize_apart_as_together(tokenizer):
    for task in itertools.islice(tasks("eval", 2), 300):
        apart = tokenizer.encode(task.prompt).ids + tokenizer.encode(task.answer).ids
        assert tokenizer.encode(task.prompt + task.answer).ids == apart
