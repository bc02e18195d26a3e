"""The embedded engine: serves a Qwen3 policy from the trainer's own parameters, on CPU, without server or weight copy.

One worker thread runs a continuous-batching loop: new requests join between steps, prompts are computed in chunks
beside the decoding of the others, and prefixes are kept for later calls of the same weight version.

Invariant: parameters belong to the trainer; they may change only while nothing is in flight, and ``update_weights``
must follow a change before the next call. A request's result does not depend on what else is in the batch, rounding
excepted.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from clawgym_env.engines.base import EngineRequest
from clawgym_env.errors import ConfigError, ContextOverflow, EngineError
from clawgym_env.types import FinishReason, Generation, Sampling, TokenArray
from torchrl_ext.decoding import Segment, SlotDecoder
from torchrl_ext.prefix_cache import Placement, PrefixCache
from torchrl_ext.sampling import draw

PREFILL_TOKENS = 512
"""Prompt tokens computed in one step: large enough for full matrix products, small enough not to stall decoding."""
WIDE_STEP_FLOPS = 1e8
"""Steps with less work run on one thread: more gain nothing there, and stall when other processes want the cores."""
DRAIN_POLL_S = 0.002


@dataclass(slots=True, eq=False)
class _Job:
    """One request in the worker's hands."""

    request: EngineRequest
    prompt: TokenArray
    future: Future[Generation]
    random: np.random.Generator
    placement: Placement | None = None
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def limit(self) -> int:
        return self.request.sampling.max_tokens


class TorchEngine:
    """An ``Engine`` on a Hugging Face Qwen3 model in this process.

    Args:
        model: Dense Qwen3 on CPU; its parameters are read in place.
        max_context: Prompt plus generated tokens of a call; the model's position limit by default.
        max_slots: Sequences held at once, running or kept for their prefixes.
        threads: Torch threads of the worker's larger steps; the calling thread's number by default. Other threads of
            the process keep theirs. Where harnesses share the cores, start the process with OMP_WAIT_POLICY=passive:
            OpenMP threads that spin for a descheduled partner cost several times the work itself.

    Raises:
        ConfigError: a model or size that the engine cannot serve.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_context: int | None = None,
        max_slots: int = 32,
        threads: int | None = None,
    ):
        if max_slots < 1 or (threads is not None and threads < 1):
            raise ConfigError(f"max_slots and threads must be at least 1, got {max_slots} and {threads}")
        self._max_context = max_context if max_context is not None else int(model.config.max_position_embeddings)
        self._decoder = SlotDecoder(model, max_slots, self._max_context)
        self._vocab = model.get_input_embeddings().weight.shape[0]
        self._cache = PrefixCache(max_slots, self._max_context)
        self._version = 0
        self._threads = threads if threads is not None else torch.get_num_threads()
        self._flops_per_token = 2 * sum(p.numel() for p in model.parameters())
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._wake = threading.Condition()
        self._closed = False
        self._failure: Exception | None = None
        self._worker = threading.Thread(target=self._work, name="clawgym-torch-engine", daemon=True)
        self._worker.start()

    @property
    def max_context(self) -> int:
        """Prompt plus generated tokens that one call may hold."""
        return self._max_context

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next call will be served with."""
        return self._version

    async def generate(self, request: EngineRequest) -> Generation:
        """Samples one response; cancelling the awaiting task frees its slot within a step.

        Raises:
            ContextOverflow: the prompt leaves no room for a token.
            ConfigError: token ids or sampling settings out of range.
            EngineError: the engine failed or was closed.
        """
        prompt = self._checked_prompt(request.prompt_ids)
        _check_sampling(request.sampling)
        seed = request.sampling.seed
        random = np.random.default_rng(None if seed is None else seed % 2**64)
        job = _Job(request, prompt, Future(), random)
        with self._wake:
            self._check_open()
            self._waiting.append(job)
            self._wake.notify()
        return await asyncio.wrap_future(job.future)

    async def drain(self) -> None:
        """Waits until nothing is queued or running.

        Raises:
            EngineError: the engine failed or was closed.
        """
        while True:
            with self._wake:
                self._check_open()
                if not (self._waiting or self._running):
                    return
            await asyncio.sleep(DRAIN_POLL_S)

    def update_weights(self, version: int) -> None:
        """Declares that the model's parameters are now those of ``version`` and forgets all stored prefixes.

        Raises:
            EngineError: calls are in flight (``drain`` first), or the engine failed or was closed.
        """
        with self._wake:
            self._check_open()
            if self._waiting or self._running:
                count = len(self._waiting) + len(self._running)
                raise EngineError(f"cannot update weights with {count} calls in flight: drain() first")
            self._cache.clear()
            self._version = version

    async def aclose(self) -> None:
        """Stops the worker; calls in flight get an ``EngineError``. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._worker.join)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the embedded engine failed: {self._failure!r}; make a new one") from self._failure
        if self._closed:
            raise EngineError("the embedded engine is closed")

    def _checked_prompt(self, prompt_ids: TokenArray) -> TokenArray:
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        if prompt.ndim != 1 or not len(prompt):
            raise ConfigError(f"a prompt is a non-empty one-dimensional array, got shape {prompt.shape}")
        if len(prompt) >= self._max_context:
            raise ContextOverflow(len(prompt), self._max_context)
        if prompt.min() < 0 or prompt.max() >= self._vocab:
            raise ConfigError(f"prompt ids must lie in 0..{self._vocab - 1}, got {prompt.min()}..{prompt.max()}")
        return prompt

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._step()
            self._abandon(EngineError("the embedded engine was closed while the call was running"))
        except Exception as error:  # the thread's last act: whatever broke, nobody may wait for ever
            with self._wake:
                self._failure = error
            failure = EngineError(f"the embedded engine failed: {error!r}")
            failure.__cause__ = error
            self._abandon(failure)

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._waiting or self._running)
            return not self._closed

    def _abandon(self, error: EngineError) -> None:
        with self._wake:
            jobs = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for job in jobs:
            _resolve(job.future, error)

    def _step(self) -> None:
        self._admit()
        segments, complete = self._next_segments()
        if not segments:
            return
        work = self._flops_per_token * sum(segment.count for segment in segments)
        torch.set_num_threads(self._threads if work >= WIDE_STEP_FLOPS else 1)  # this thread's only
        logits = self._decoder.forward(segments)
        for segment in segments:
            segment.slot.length += segment.count
        rows = [i for i, done in enumerate(complete) if done is not None]
        jobs = [job for job in complete if job is not None]
        if jobs:
            self._sample(logits[rows] if len(rows) < len(complete) else logits, jobs)
        finished = [job for job in jobs if job.finish_reason is not None]
        self._retire(finished)
        for job in finished:
            _resolve(job.future, self._generation(job))

    def _admit(self) -> None:
        """Drops cancelled calls and starts waiting ones, in order, as slots allow."""
        with self._wake:
            self._waiting = deque(job for job in self._waiting if not job.future.cancelled())
            cancelled = [job for job in self._running if job.future.cancelled()]
        self._retire(cancelled)
        with self._wake:
            while self._waiting:
                job = self._waiting[0]
                placement = self._cache.acquire(job.prompt)
                if placement is None:
                    break
                if placement.copy is not None:
                    source, start, stop = placement.copy
                    self._decoder.copy(source, placement.slot, start, stop)
                job.placement = placement
                self._running.append(self._waiting.popleft())

    def _retire(self, jobs: list[_Job]) -> None:
        """Frees the slots before anyone hears of it: who hears may at once update the weights."""
        if not jobs:
            return
        with self._wake:
            for job in jobs:
                if job.placement is not None:
                    self._cache.release(job.placement.slot)
            self._running = [job for job in self._running if job not in jobs]

    def _next_segments(self) -> tuple[list[Segment], list[_Job | None]]:
        """Tokens to compute next, and for each segment the job that samples after it (``None`` within a prompt)."""
        segments: list[Segment] = []
        samplers: list[_Job | None] = []
        budget = PREFILL_TOKENS
        for job in self._running:
            assert job.placement is not None
            slot = job.placement.slot
            missing = slot.known - slot.length
            count = missing if job.log_probs else min(missing, budget)
            if count <= 0:
                continue
            if not job.log_probs:
                budget -= count
            segments.append(Segment(slot, count))
            samplers.append(job if count == missing else None)
        return segments, samplers

    def _sample(self, logits: Tensor, jobs: list[_Job]) -> None:
        settings = [job.request.sampling for job in jobs]
        tokens, log_probs = draw(
            logits,
            torch.tensor([s.temperature for s in settings]),
            torch.tensor([s.top_k for s in settings]),
            torch.tensor([s.top_p for s in settings]),
            torch.tensor([job.random.random() for job in jobs], dtype=torch.float64),
        )
        for job, token, log_prob in zip(jobs, tokens.tolist(), log_probs.tolist(), strict=True):
            assert job.placement is not None
            slot = job.placement.slot
            slot.tokens[slot.known] = token
            slot.known += 1
            job.log_probs.append(log_prob)
            if token in job.request.stop_token_ids:
                job.finish_reason = "stop"
            elif len(job.log_probs) >= job.limit or slot.known >= self._max_context:
                job.finish_reason = "length"

    def _generation(self, job: _Job) -> Generation:
        assert job.placement is not None and job.finish_reason is not None
        count, first = len(job.log_probs), len(job.prompt)
        return Generation(
            token_ids=job.placement.slot.tokens[first : first + count].copy(),
            log_probs=np.array(job.log_probs, dtype=np.float32),
            versions=np.full(count, self._version, dtype=np.int64),
            finish_reason=job.finish_reason,
            cached_tokens=job.placement.cached,
        )


def _check_sampling(sampling: Sampling) -> None:
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0 or sampling.max_tokens < 1:
        raise ConfigError(
            f"sampling needs temperature >= 0, 0 < top_p <= 1, top_k >= 0 and max_tokens >= 1, got {sampling}"
        )


def _resolve(future: Future[Generation], result: Generation | Exception) -> None:
    """Sets a result unless the caller has gone."""
    try:
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
    except InvalidStateError:
        pass
