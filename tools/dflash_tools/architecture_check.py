"""Takes one architecture through the whole export at toy size and compares the graph with PyTorch."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dflash_export.build import trace_and_store_target
from dflash_export.build_plan import BuildOptions, plan_target
from dflash_export.deviation import deviation
from dflash_export.graph_runner import Array, GraphRunner
from dflash_export.parity import EXACT_TOLERANCE
from dflash_export.reference_run import Step, TargetReference, quiet_transformers
from dflash_export.refusals import refuse_by_config
from dflash_runtime.bundle import TargetFacts
from dflash_runtime.errors import DFlashError
from dflash_tools.tiny_configs import tiny_config

# (rows kept, new tokens): prefill, steps on a filled cache, roll-backs, one token, across a window of 16.
STEPS = ((0, 24), (24, 4), (25, 4), (29, 1), (20, 8), (28, 16), (44, 1), (40, 24))
UNWRITTEN = 100.0
"""What cache rows hold before they are written: a mask that lets them through spoils the result."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one architecture ended."""

    config: str
    """Configuration class."""
    model: str
    """Causal-LM class."""
    model_type: str
    status: str
    """`exact`, `refused`, `WRONG` or `crashed`."""
    reason: str = ""
    worst: float = 0.0
    """Largest relative deviation over all outputs and steps."""
    seconds: float = 0.0


def config_classes() -> dict[str, type[PreTrainedConfig]]:
    """Every configuration class Transformers makes a causal language model for, by name."""
    return {config.__name__: config for config in AutoModelForCausalLM._model_mapping}


def check_architecture(config_class: type[PreTrainedConfig]) -> Verdict:
    """Exports a tiny random model of the class and compares logits, tokens, every layer and every cache row."""
    start = time.perf_counter()
    model_class = AutoModelForCausalLM._model_mapping[config_class]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    verdict = Verdict(config_class.__name__, model_class.__name__, config_class.model_type, "exact")
    try:
        with quiet_transformers(), tempfile.TemporaryDirectory() as folder:
            config = tiny_config(config_class)
            refuse_by_config(config)  # first, because PyTorch itself cannot make some of these models
            write_checkpoint(config, Path(folder) / "checkpoint")
            deviations = compare(Path(folder) / "checkpoint", Path(folder) / "bundle")
        worst = max(deviations, key=lambda name: deviations[name])
        verdict = dataclasses.replace(verdict, worst=deviations[worst])
        if deviations[worst] > EXACT_TOLERANCE:
            verdict = dataclasses.replace(verdict, status="WRONG", reason=f"{worst} deviates: {deviations}")
    except DFlashError as error:
        verdict = dataclasses.replace(verdict, status="refused", reason=str(error))
    except Exception as error:  # the verdict of a gate over all models is its report, a traceback of one is not
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        verdict = dataclasses.replace(verdict, status="crashed", reason=reason)
    return dataclasses.replace(verdict, seconds=round(time.perf_counter() - start, 1))


def write_checkpoint(config: PreTrainedConfig, folder: Path) -> None:
    """Saves a model whose every tensor is random: norms and biases too, which a fresh model has at 1 and 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            if tensor.dim() > 1 and "norm" not in name:
                tensor.copy_(0.2 * torch.randn(tensor.shape))
            else:  # around the value a fresh model has: 1 for a norm, 0 for a bias or a norm stored as 1 + w
                tensor.add_(0.3 * torch.randn(tensor.shape))
        for module in model.modules():  # as in trained models; some classes clear this row again when they load
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    model.save_pretrained(folder)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)  # a model may keep only a part of its config


def compare(checkpoint: Path, bundle: Path, steps: Sequence[tuple[int, int]] = STEPS) -> dict[str, float]:
    """Worst deviation by kind of output, over all steps.

    PyTorch computes every step from the whole text, without a filled cache, so it cannot share a fault of caching.

    Args:
        checkpoint: Folder of the target.
        bundle: Folder to make for its graph and weights.
        steps: (rows kept, new tokens) of each call.
    """
    bundle.mkdir()
    plan = plan_target(BuildOptions(target=str(checkpoint)))
    text = plan.config.get_text_config()
    layer_ids = list(range(int(text.num_hidden_layers)))
    facts, _, _ = trace_and_store_target(plan, bundle, layer_ids, lambda *_: None)
    reference = TargetReference.load(checkpoint, torch.float32)
    capacity = max(sum(step) for step in steps) + 16
    runner = GraphRunner((bundle / facts.graph.file).read_bytes(), bundle, facts.graph, capacity)
    for rows in runner.state.values():
        rows.fill(UNWRITTEN)
    random = np.random.default_rng(0)
    worst: dict[str, float] = {}
    written: list[int] = []
    for position, count in steps:
        written = [*written[:position], *random.integers(3, min(facts.vocab_size, 500), count).tolist()]
        for name, value in _step(reference, runner, facts, written, position).items():
            worst[name] = max(worst.get(name, 0.0), value)
    return worst


def _step(
    reference: TargetReference, runner: GraphRunner, facts: TargetFacts, written: list[int], position: int
) -> dict[str, float]:
    reference.reset()
    expected = reference.run(Step(0, written))
    count = len(written) - position
    outputs = runner.run(
        input_ids=np.array([written[position:]]), position=np.array([position]), logit_rows=np.arange(count)
    )
    found = {state.output: outputs[state.output][0, :, : len(written)] for state in facts.graph.state}
    names = [state.output for state in facts.graph.state]
    logits = expected.logits[position:]
    rows: list[tuple[str, Array, Array]] = [
        ("logits", outputs["logits"][0], logits),
        ("layers", outputs["taps"][0], np.concatenate(list(expected.hidden[:, position:]), axis=-1)),
    ]
    rows += [("keys", found[name], keys) for name, keys in zip(names[0::2], expected.keys, strict=True)]
    rows += [("values", found[name], values) for name, values in zip(names[1::2], expected.values, strict=True)]
    result: dict[str, float] = {}
    for kind, one, two in rows:
        result[kind] = max(result.get(kind, 0.0), deviation(one, two))
    result["token_ids"] = float((outputs["token_ids"][0] != logits.argmax(-1)).sum())
    return result
