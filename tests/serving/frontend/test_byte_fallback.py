"""A model that writes any tokens, with Mixtral's kind of vocabulary, behind a real server."""

import asyncio

import pytest
from served import Setup, collect
from tokenizers_of_kinds import byte_fallback

from jmoe.config import from_hf
from jmoe.random_model import random_model
from serving.config import EngineConfig, ServerConfig
from serving.engine import Engine
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 267,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 256,
}


pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.mark.deep
async def test_no_text_of_a_model_ends_the_engine():
    """Broken characters by the hundred; every stream is answered whole, and the server lives."""
    model = random_model(from_hf(MIXTRAL))
    model.tokenizer = byte_fallback()
    config = EngineConfig(
        max_num_seqs=8,
        max_model_len=256,
        max_prefill_tokens=32,
        page_size=16,
        decode_buckets=(8,),
        prefill_buckets=(32,),
        threshold_buckets_percent=(100,),
        compilation_cache="",
    )
    async with Setup(ServerConfig(port=0, engine=config)) as s:
        engine = await Engine.start(config, model=model)
        await s.server.attach(engine)
        sampling = pb.SamplingParams(max_new_tokens=150, temperature=1.0, ignore_eos=True)

        async def one(seed):
            drawn = pb.SamplingParams()
            drawn.CopyFrom(sampling)
            drawn.seed = seed
            if not seed:
                drawn.temperature = 0.0
            got = await collect(s.stub.Generate(pb.GenerateRequest(text="the sun", sampling=drawn)))
            tokens = [token for message in got for token in message.token_ids]
            assert (len(tokens), got[-1].finish_reason) == (150, "length")
            return "".join(message.text for message in got)

        texts = await asyncio.gather(*map(one, range(16)))
        assert sum("\ufffd" in text for text in texts) > 12
        assert engine.status == "ready"
        assert engine.stats().requests_failed == 0
