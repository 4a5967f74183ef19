"""Peers of `bench` that run in a process of ours: Transformers, the authors' package, onnxruntime-genai."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import time
import warnings
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import DFlashError
from dflash_tools.bench_job import Answer, Job, Mode, Question
from dflash_tools.scripted_acceptance import AcceptanceScript


def load_target(job: Job) -> Any:
    """The target in PyTorch with Transformers' default attention, as the authors load theirs (sdpa)."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[job.precision]
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, attn_implementation="sdpa")
    return model.to(job.device).eval()


def versions_of(*names: str) -> dict[str, str]:
    """Versions of installed distributions."""
    return {name: importlib.metadata.version(name) for name in names}


class TransformersEngine:
    """`generate` of Transformers, greedy, with its own cache."""

    def __init__(self, job: Job) -> None:
        """Loads the checkpoint `job.model`."""
        import torch

        self._torch = torch
        self._model = load_target(job)
        self._device = job.device
        self.precision = job.precision
        self.versions = versions_of("torch", "transformers")

    def answer(self, mode: Mode, number: int, question: Question) -> Answer:
        """Runs one request; tokens are stamped as `generate` hands them to its streamer."""
        stamps: list[float] = []

        class Stamps:
            def put(self, value: object) -> None:
                stamps.append(time.perf_counter())

            def end(self) -> None: ...

        inputs = self._torch.tensor([question.ids], device=self._device)
        options: dict[str, Any] = {"eos_token_id": question.stop_token_ids} if question.stop_token_ids else {}
        started_s, began = time.monotonic(), time.perf_counter()
        with self._torch.inference_mode():
            output = self._model.generate(
                inputs, attention_mask=self._torch.ones_like(inputs), do_sample=False,
                max_new_tokens=question.max_new_tokens, pad_token_id=0, streamer=Stamps(), **options,
            )  # fmt: skip
        said = [int(token) for token in output[0, len(question.ids) :]]
        return stamped_answer(mode, number, said, began, stamps[1:], started_s)  # the first is the prompt's

    def close(self) -> None:
        """Frees the model."""
        del self._model


class AuthorsEngine:
    """`dflash_generate` of the authors' package: their loop, their drafter."""

    def __init__(self, job: Job) -> None:
        """Loads the checkpoints `job.model` and `job.drafter`."""
        import dflash.model as authors
        import torch
        from transformers import AutoConfig

        if job.device == "cpu":
            authors._cuda_time = time.perf_counter  # its clock asks for a GPU
        self._torch = torch
        self._generate: Any = authors.dflash_generate
        self._target = load_target(job)
        config = AutoConfig.from_pretrained(job.drafter)
        second = "DFlash2DraftModel" in (config.architectures or [])
        kind: Any = authors.DFlash2DraftModel if second else authors.DFlashDraftModel
        drafter = kind.from_pretrained(job.drafter, attn_implementation="sdpa", dtype=self._target.dtype)
        self._drafter = drafter.to(job.device).eval()
        self._device = job.device
        self._vocab_size = Bundle.open(job.bundle).manifest.target.vocab_size
        self.precision = job.precision
        self.versions = versions_of("dflash", "torch", "transformers")

    def answer(self, mode: Mode, number: int, question: Question) -> Answer:
        """Runs one request; rounds are stamped where the target's pass ends."""
        stamps: list[float] = []
        blocks: list[list[int]] = []

        def after(module: object, inputs: Any, output: object) -> None:
            stamps.append(time.perf_counter())
            blocks.append(inputs[0][0].tolist())

        hooks = [self._target.register_forward_hook(after), *self._scripted(mode, question)]
        ids = self._torch.tensor([question.ids], device=self._device)
        started_s = time.monotonic()
        try:
            found = self._generate(
                self._drafter, self._target, ids, question.max_new_tokens, question.stop_token_ids or None,
                block_size=mode.block_size, return_stats=True,
            )  # fmt: skip
        finally:
            for hook in hooks:
                hook.remove()
            self._drafter.__dict__.pop("compute_logits", None)
        return self._told(mode, number, found, blocks, stamps, started_s)

    def close(self) -> None:
        """Frees the models."""
        del self._target, self._drafter

    def _scripted(self, mode: Mode, question: Question) -> list[Any]:
        """Replaces what the drafter says by the script, after it has said it."""
        if mode.scripted_tokens is None or question.answer is None:
            return []
        script = AcceptanceScript(len(question.ids), question.answer, mode.scripted_tokens, self._vocab_size)
        compute, anchors = self._drafter.compute_logits, list[int]()

        def before(module: object, inputs: object, options: dict[str, Any]) -> None:
            block = options["noise_embedding"].shape[1]
            anchors[:] = [int(options["position_ids"][0, -block])]

        def compute_logits(hidden: Any, head: Any) -> Any:
            logits = compute(hidden, head)
            drafted = logits[0].argmax(-1).tolist()
            said = self._torch.tensor(script.proposals(drafted, anchors[0]), device=logits.device)
            return logits.scatter(-1, said[None, :, None], float("inf"))

        self._drafter.compute_logits = compute_logits
        return [self._drafter.register_forward_pre_hook(before, with_kwargs=True)]

    def _told(
        self, mode: Mode, number: int, found: Any, blocks: list[list[int]], stamps: list[float], started_s: float
    ) -> Answer:
        said = found.output_ids[0, found.num_input_tokens :].tolist()
        decode_ms = 1000 * found.time_per_output_token * found.num_output_tokens
        rounds = [1000 * (b - a) for a, b in itertools.pairwise(stamps)]
        if rounds:  # what follows the last pass, and what precedes the first, belongs to decoding too
            rounds[-1] += decode_ms - sum(rounds)
        return Answer(
            mode=mode,
            question=number,
            token_ids=said,
            time_to_first_token_ms=1000 * found.time_to_first_token,
            round_ms=rounds,
            round_tokens=found.acceptance_lengths,
            started_s=started_s,
            ended_s=time.monotonic(),
            proposed_ids=None if mode.block_size == 1 else [block[1:] for block in blocks[1:]],
        )


class GenaiEngine:
    """onnxruntime-genai on a model its own builder converted."""

    def __init__(self, job: Job) -> None:
        """Opens the converted folder `job.model`."""
        import onnxruntime_genai as genai

        path = Path(str(job.model)) / "genai_config.json"
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DFlashError(f"{path} is not there or no JSON ({error}): not a folder of its builder.") from error
        self._genai: Any = genai
        options = genai.Config(str(job.model))
        if job.threads is not None:
            session = {"intra_op_num_threads": job.threads}
            options.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = genai.Model(options)
        self._stops = settings["model"]["eos_token_id"]
        self.precision = job.precision
        self.versions = versions_of("onnxruntime-genai")

    def answer(self, mode: Mode, number: int, question: Question) -> Answer:
        """Runs one request."""
        longest = len(question.ids) + question.max_new_tokens
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=longest, do_sample=False)
        stamps: list[float] = []
        said: list[int] = []
        started_s, began = time.monotonic(), time.perf_counter()
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(question.ids)
        while len(said) < question.max_new_tokens and not generator.is_done():
            generator.generate_next_token()
            said.append(int(generator.get_next_tokens()[0]))
            stamps.append(time.perf_counter())
        return stamped_answer(mode, number, said, began, stamps, started_s)

    def close(self) -> None:
        """Frees the model."""
        del self._model


def stamped_answer(
    mode: Mode, number: int, said: list[int], began: float, stamps: list[float], started_s: float
) -> Answer:
    """The answer of an engine that gives one token at a time.

    Args:
        mode: How it was decoded.
        number: Of the question.
        said: The tokens.
        began: When the request began, on the clock of `stamps`.
        stamps: When each token arrived.
        started_s: When the request began on the clock `time.monotonic`.
    """
    return Answer(
        mode=mode,
        question=number,
        token_ids=said,
        time_to_first_token_ms=1000 * (stamps[0] - began),
        round_ms=[1000 * (b - a) for a, b in itertools.pairwise(stamps)],
        round_tokens=[1] * (len(stamps) - 1),
        started_s=started_s,
        ended_s=time.monotonic(),
    )
