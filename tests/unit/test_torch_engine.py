"""The embedded engine against Hugging Face's own forward, alone and in company, through failure and update."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from clawgym_env.engines.base import Engine, EngineRequest
from clawgym_env.errors import ConfigError, ContextOverflow, EngineError
from clawgym_env.types import ChatRequest, Generation, Sampling, TokenArray
from torchrl_ext import decoding
from torchrl_ext.engine import TorchEngine
from torchrl_ext.models import PolicyConfig, create_policy
from torchrl_ext.sampling import filter_logits

VOCAB = 53
CONFIG = PolicyConfig(
    vocab_size=VOCAB,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ff_width=48,
    max_positions=2048,
    init_std=0.15,
)
MODEL = create_policy(CONFIG)
CHAT = ChatRequest(model="policy", messages=())
Result = TypeVar("Result")


def ids(n: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, VOCAB, n)


def request(
    prompt: TokenArray, *, stop: tuple[int, ...] = (), temperature: float = 1.0, max_tokens: int = 12, **sampling: float
) -> EngineRequest:
    return EngineRequest(prompt, Sampling(temperature, max_tokens=max_tokens, **sampling), stop, CHAT)  # type: ignore[arg-type]


def reference(model: Qwen3ForCausalLM, r: EngineRequest, g: Generation) -> TokenArray:
    """Log-probs of the generated tokens by one plain Hugging Face forward."""
    tokens = torch.from_numpy(np.concatenate([r.prompt_ids, g.token_ids]))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, len(r.prompt_ids) - 1 : -1]
    s = r.sampling
    if s.temperature:
        n = len(logits)
        logits = filter_logits(logits / s.temperature, torch.full((n,), s.top_k), torch.full((n,), s.top_p))
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(g.token_ids)[:, None])[:, 0].numpy()


def check(model: Qwen3ForCausalLM, r: EngineRequest, g: Generation) -> None:
    np.testing.assert_allclose(g.log_probs, reference(model, r, g), rtol=0, atol=1e-5)


@asynccontextmanager
async def engine_of(model: Qwen3ForCausalLM = MODEL, **settings: int) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(model, **settings)
    try:
        yield engine
    finally:
        await engine.aclose()


def serve(work: Callable[[TorchEngine], Awaitable[Result]], model: Qwen3ForCausalLM = MODEL, **settings: int) -> Result:
    async def main() -> Result:
        async with engine_of(model, **settings) as engine:
            return await asyncio.wait_for(work(engine), 60)

    return asyncio.run(main())


def test_is_an_engine() -> None:
    async def work(engine: TorchEngine) -> None:
        assert isinstance(engine, Engine)
        assert (engine.max_context, engine.policy_version) == (2048, 0)

    serve(work)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.8},
    ],
    ids=str,
)
def test_log_probs_are_those_of_the_sampled_distribution(sampling: dict[str, float]) -> None:
    r = request(ids(40), max_tokens=30, seed=5, **sampling)
    g = serve(lambda engine: engine.generate(r))
    assert len(g.token_ids) == 30 and g.finish_reason == "length"
    assert g.token_ids.dtype == np.int64 and g.log_probs.dtype == np.float32
    assert np.all(g.versions == 0)
    check(MODEL, r, g)


def test_greedy_takes_the_likeliest_token() -> None:
    r = request(ids(20, 3), temperature=0.0, max_tokens=8)
    g = serve(lambda engine: engine.generate(r))
    tokens = torch.from_numpy(np.concatenate([r.prompt_ids, g.token_ids]))
    with torch.no_grad():
        expected = MODEL(input_ids=tokens[None]).logits[0, 19:-1].argmax(-1)
    np.testing.assert_array_equal(g.token_ids, expected.numpy())


@pytest.mark.parametrize("rest", [1, 40, 512])
def test_company_changes_nothing_but_rounding(rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "GATHERED_REST", rest)
    system = ids(90, 7)
    prompts = [np.concatenate([system[: 90 - 3 * i], ids(3 + 11 * i, i)]) for i in range(5)]
    prompts += [ids(5, 50), prompts[1], ids(130, 51)]
    requests = [request(p, seed=i, max_tokens=5 + 4 * i, top_k=i % 3) for i, p in enumerate(prompts)]

    async def together(engine: TorchEngine) -> list[Generation]:
        async def late(i: int, r: EngineRequest) -> Generation:
            await asyncio.sleep(0.003 * i)
            return await engine.generate(r)

        return await asyncio.gather(*(late(i, r) for i, r in enumerate(requests)))

    for r, g in zip(requests, serve(together), strict=True):
        alone = serve(lambda engine, r=r: engine.generate(r))
        np.testing.assert_array_equal(g.token_ids, alone.token_ids)
        np.testing.assert_allclose(g.log_probs, alone.log_probs, rtol=0, atol=1e-5)
        check(MODEL, r, g)


def test_prefixes_are_reused_exactly_and_counted() -> None:
    async def work(engine: TorchEngine) -> None:
        first = request(np.concatenate([ids(70), ids(20, 1)]), seed=1)
        a = await engine.generate(first)
        check(MODEL, first, a)
        assert a.cached_tokens == 0
        sibling = request(np.concatenate([ids(70), ids(15, 2)]), seed=2)
        b = await engine.generate(sibling)
        check(MODEL, sibling, b)
        assert b.cached_tokens == 70 + np.argmax(ids(20, 1)[:15] != ids(15, 2))
        # the next turn: all but the last sampled token has been computed
        turn = request(np.concatenate([first.prompt_ids, a.token_ids, ids(9, 3)]), seed=3)
        c = await engine.generate(turn)
        check(MODEL, turn, c)
        assert c.cached_tokens == 90 + len(a.token_ids) - 1
        again = await engine.generate(sibling)
        assert again.cached_tokens == len(sibling.prompt_ids) - 1
        np.testing.assert_array_equal(again.token_ids, b.token_ids)

    serve(work)


def test_simultaneous_prompts_compute_their_prefix_once() -> None:
    system = ids(700, 9)
    requests = [request(np.concatenate([system, [i], ids(20, i)]), seed=i) for i in range(4)]

    async def work(engine: TorchEngine) -> list[Generation]:
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    results = serve(work)
    assert sorted(g.cached_tokens for g in results) == [0, 700, 700, 700]
    for r, g in zip(requests, results, strict=True):
        check(MODEL, r, g)


def test_a_prompt_longer_than_a_chunk() -> None:
    r = request(ids(1300), max_tokens=4)
    check(MODEL, r, serve(lambda engine: engine.generate(r)))


@settings(max_examples=12, deadline=None)
@given(data=st.data(), slots=st.integers(1, 4))
def test_any_traffic_gives_the_models_own_log_probs(data: st.DataObject, slots: int) -> None:
    system = ids(60, 4)
    requests = []
    for i in range(data.draw(st.integers(1, 9))):
        kept = data.draw(st.integers(0, 60))
        tail = ids(data.draw(st.integers(1, 50)), data.draw(st.integers(0, 3)))
        requests.append(request(np.concatenate([system[:kept], tail]), seed=i, max_tokens=data.draw(st.integers(1, 9))))
    waits = [data.draw(st.integers(0, 5)) / 1000 for _ in requests]

    async def one(engine: TorchEngine, r: EngineRequest, wait: float) -> Generation:
        await asyncio.sleep(wait)
        return await engine.generate(r)

    async def work(engine: TorchEngine) -> list[Generation]:
        return await asyncio.gather(*(one(engine, r, w) for r, w in zip(requests, waits, strict=True)))

    for r, g in zip(requests, serve(work, max_slots=slots), strict=True):
        check(MODEL, r, g)


def test_a_stop_token_ends_the_generation_and_is_part_of_it() -> None:
    async def work(engine: TorchEngine) -> None:
        free = await engine.generate(request(ids(10), seed=1, max_tokens=20))
        stop = int(free.token_ids[6])
        at = int(np.argmax(free.token_ids == stop))
        g = await engine.generate(request(ids(10), seed=1, max_tokens=20, stop=(stop, 999)))
        assert g.finish_reason == "stop"
        np.testing.assert_array_equal(g.token_ids, free.token_ids[: at + 1])

    serve(work)


def test_a_full_context_ends_the_generation() -> None:
    async def work(engine: TorchEngine) -> None:
        r = request(ids(58), max_tokens=100)
        g = await engine.generate(r)
        assert (len(g.token_ids), g.finish_reason) == (6, "length")
        check(MODEL, r, g)
        last = await engine.generate(request(ids(63), max_tokens=100))
        assert (len(last.token_ids), last.finish_reason) == (1, "length")
        with pytest.raises(ContextOverflow, match="64"):
            await engine.generate(request(ids(64)))

    serve(work, max_context=64)


def test_seeds_reproduce_and_differ() -> None:
    async def work(engine: TorchEngine) -> None:
        a, b, c, d, e = [await engine.generate(request(ids(8), seed=s)) for s in (1, 1, 2, None, None)]
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        assert not np.array_equal(a.token_ids, c.token_ids)
        assert not np.array_equal(d.token_ids, e.token_ids)

    serve(work)


def test_new_weights_serve_new_outputs_and_clear_the_prefixes() -> None:
    model = create_policy(CONFIG)

    async def work(engine: TorchEngine) -> None:
        r = request(ids(40), seed=1)
        old = await engine.generate(r)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1)
        engine.update_weights(7)
        new = await engine.generate(r)
        check(model, r, new)
        assert engine.policy_version == 7 and np.all(new.versions == 7)
        assert new.cached_tokens == 0
        assert np.abs(new.log_probs[0] - old.log_probs[0]) > 1e-4
        # a checkpoint loaded into new parameter objects is seen as well
        model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}, assign=True)
        model.tie_weights()
        engine.update_weights(8)
        check(model, r, await engine.generate(r))

    serve(work, model)


def test_weights_change_only_when_drained() -> None:
    async def work(engine: TorchEngine) -> None:
        running = asyncio.create_task(engine.generate(request(ids(8), max_tokens=60)))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="drain"):
            engine.update_weights(1)
        await engine.drain()
        assert len((await running).token_ids) == 60
        engine.update_weights(1)

    serve(work)


def test_cancelling_frees_the_slot() -> None:
    async def work(engine: TorchEngine) -> None:
        running = asyncio.create_task(engine.generate(request(ids(8), max_tokens=2000)))
        queued = asyncio.create_task(engine.generate(request(ids(9), max_tokens=2000)))
        await asyncio.sleep(0.05)
        running.cancel()
        queued.cancel()
        for task in (running, queued):
            with pytest.raises(asyncio.CancelledError):
                await task
        r = request(ids(8), seed=0)
        check(MODEL, r, await asyncio.wait_for(engine.generate(r), 5))
        await asyncio.wait_for(engine.drain(), 5)

    serve(work, max_slots=1)


def test_a_failure_reaches_every_waiting_call() -> None:
    async def main() -> None:
        model = create_policy(CONFIG)
        engine = TorchEngine(model, max_slots=1)
        calls = [asyncio.create_task(engine.generate(request(ids(8, i), max_tokens=2000))) for i in range(3)]
        await asyncio.sleep(0.05)
        model.model.layers[1].mlp.up_proj.weight.data = torch.zeros(1, 1)
        for call in calls:
            with pytest.raises(EngineError, match="failed"):
                await asyncio.wait_for(call, 5)
        for late in (engine.generate(request(ids(8))), engine.drain()):
            with pytest.raises(EngineError, match="failed"):
                await late
        with pytest.raises(EngineError, match="failed"):
            engine.update_weights(1)
        await engine.aclose()

    asyncio.run(main())


def test_closing_ends_what_runs_and_may_be_repeated() -> None:
    async def main() -> None:
        engine = TorchEngine(MODEL, max_slots=1)
        calls = [asyncio.create_task(engine.generate(request(ids(8), max_tokens=2000))) for _ in range(2)]
        await asyncio.sleep(0.02)
        await asyncio.gather(engine.aclose(), engine.aclose())
        await engine.aclose()
        for call in calls:
            with pytest.raises(EngineError, match="closed"):
                await call
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request(ids(8)))

    asyncio.run(main())


def test_calls_from_several_event_loops() -> None:
    engine = TorchEngine(MODEL)
    r = request(ids(30), seed=4)
    first, second = asyncio.run(engine.generate(r)), asyncio.run(engine.generate(r))
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    asyncio.run(engine.aclose())


def test_the_trainers_threads_are_left_alone() -> None:
    before = torch.get_num_threads()
    serve(lambda engine: engine.generate(request(ids(30))), threads=before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "bad",
    [
        request(np.array([], dtype=np.int64)),
        request(np.array([1, VOCAB])),
        request(np.array([-1])),
        request(ids(3), max_tokens=0),
        request(ids(3), temperature=-1.0),
        request(ids(3), top_p=0.0),
        request(ids(3), top_k=-1),
    ],
)
def test_requests_out_of_range_are_refused(bad: EngineRequest) -> None:
    with pytest.raises(ConfigError):
        serve(lambda engine: engine.generate(bad))


def qwen(**changes: object) -> Qwen3ForCausalLM:
    shape = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    return Qwen3ForCausalLM(Qwen3Config(**{**shape, **heads, **changes}))


def test_models_it_cannot_compute_are_refused() -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=20, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    )
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    for model in (llama, qwen(**sliding), qwen(rope_parameters=yarn), qwen(hidden_act="gelu"), qwen().bfloat16()):
        with pytest.raises(ConfigError, match="vLLM"):
            TorchEngine(model)


@pytest.mark.parametrize(
    "settings", [{"max_context": 65}, {"max_context": 1}, {"max_slots": 0}, {"threads": 0}, {"max_slots": 10**9}]
)
def test_sizes_out_of_range_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        TorchEngine(qwen(), **settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"tie_word_embeddings": False, "num_attention_heads": 6},
    ],
    ids=str,
)
def test_other_dense_qwen3_shapes(changes: dict[str, object]) -> None:
    model = qwen(**changes)
    for name, p in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    r = EngineRequest(np.arange(12), Sampling(max_tokens=9, seed=0), (), CHAT)
    check(model, r, serve(lambda engine: engine.generate(r), model))
