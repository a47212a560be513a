"""Chats, and requests for as many tokens as fit, through the real admission and the real tick."""

import pytest
from counting import LIMITS, collect, model_with
from tokenizers_of_kinds import characters

from serving.errors import InvalidRequest
from serving.intake import admission
from serving.plan import Limits
from serving.request import Chat, SamplingParams

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tail or '' }}"
HI = [{"role": "user", "content": "hi"}]
FITTING = SamplingParams(max_new_tokens=None)


def chatting(start, template=TEMPLATE, **options):
    return start(model=model_with(characters(template)), **options)


async def test_a_chat_is_rendered_and_has_its_special_tokens_once(start):
    outputs = await collect(chatting(start), Chat(HI), 2)
    assert "".join(out.text for out in outputs) == "^_"  # behind "]"
    assert outputs[-1].usage.prompt_tokens == len("\x01[hi]")


async def test_a_text_gets_the_tokenizers_special_tokens(start):
    outputs = await collect(chatting(start), "[hi]", 2)
    assert outputs[-1].usage.prompt_tokens == len("\x01[hi]")


async def test_a_long_chat_gives_the_same_from_its_thread(start, monkeypatch):
    monkeypatch.setattr(admission, "LONG_TEXT", 10)
    engine = chatting(start)
    outputs = await collect(engine, Chat(HI, {"tail": "A"}), 2)
    assert "".join(out.text for out in outputs) == "BC"
    assert not engine.admission.num_tokenizing.total()


@pytest.mark.parametrize("long_text", [10, 10**6])
@pytest.mark.parametrize(
    ("template", "chat", "says"),
    [
        (None, Chat(HI), "this model has no chat template"),
        ("{{ raise_exception('no users') }}", Chat(HI), "no users"),
        (TEMPLATE, Chat(HI, {"messages": []}), "gets messages from the server"),
        (TEMPLATE, Chat([{"content": "x" * 500}]), "the prompt has 500 characters"),
        ("{{ 'y' * 500 }}", Chat(HI), "the prompt has 500 characters"),
        (TEMPLATE, Chat(HI * 200), "number of messages is 200"),
        ("{# says nothing #}", Chat(HI), "the prompt is empty"),
    ],
)
async def test_chats_that_cannot_be_served(start, monkeypatch, long_text, template, chat, says):
    monkeypatch.setattr(admission, "LONG_TEXT", long_text)
    engine = chatting(start, template)
    with pytest.raises(InvalidRequest, match=says):
        await collect(engine, chat, 2)
    assert engine.scheduler.idle


async def test_a_model_without_a_tokenizer_takes_no_chats(start):
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        await collect(start(), Chat(HI), 2)


@pytest.mark.parametrize("other", ["tiktoken.model", "tokenizer.model"])
async def test_a_tokenizer_of_another_kind_is_named_with_what_to_do(start, tmp_path, other):
    model = model_with(None)
    model.path = tmp_path
    engine = start(model=model)
    for prompt in (Chat(HI), "hi"):
        with pytest.raises(InvalidRequest, match="this model has no tokenizer; send token ids"):
            await collect(engine, prompt, 2)
    (tmp_path / other).touch()
    says = rf"has {other} and no tokenizer\.json \(.*save_pretrained\(DIR\) .*; send token ids"
    for prompt in (Chat(HI), "hi"):
        with pytest.raises(InvalidRequest, match=says):
            await collect(engine, prompt, 2)


async def test_as_many_tokens_as_fit_the_model(start):
    outputs = await collect(start(), [1] * 10, sampling=FITTING)
    assert len(outputs) == 190  # of 200 positions
    assert outputs[-1].finish_reason == "length"


async def test_as_many_tokens_as_fit_the_pages(start):
    few = Limits(
        num_slots=4,
        num_pages=8,
        page_size=LIMITS.page_size,
        max_prefill_tokens=16,
        max_prefill_seqs=4,
    )
    engine = start(limits=few)
    held = few.pages_per_rank * few.page_size
    outputs = await collect(engine, [1] * 10, sampling=FITTING)
    assert len(outputs) == held - 10


async def test_a_prompt_that_leaves_no_room_is_refused(start):
    with pytest.raises(InvalidRequest, match="context length is 200"):
        await collect(start(), [1] * 200, sampling=FITTING)
