"""Writes the tiny drafters of this folder, each with the library its format belongs to.

    python -m venv env && . env/bin/activate
    pip install transformers specforge==0.2.0 speculators==0.9.0 nvidia-modelopt==0.47.0
    HF_HUB_OFFLINE=1 python tests/cross/drafter_formats/write_checkpoints.py

They fit the target of `format_target.py`. Their weights are filled by the rule of `tiny_models.py`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from format_target import SIZES, TARGET  # noqa: E402
from tiny_models import fill  # noqa: E402

SLIDING, FULL = "sliding_attention", "full_attention"
BODY: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 2, "vocab_size": TARGET["vocab_size"], "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 512,
}  # fmt: skip
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": 12, "use_sliding_window": True}
MASK, BLOCK, LAYERS = 271, 8, [0, 2]


def filled(module: nn.Module, seed: int, skip: tuple[str, ...] = ()) -> None:
    """Gives every floating-point tensor but those skipped a value that shows when it is lost."""
    tensors = {n: t for n, t in module.state_dict().items() if t.is_floating_point() and not n.startswith(skip)}
    with torch.no_grad():
        fill(tensors, seed)


def write_specforge(out: Path) -> None:
    """SpecForge: its exporter, from a training state."""
    from specforge.export.to_hf import export_to_hf
    from specforge.modeling.draft.dflash import DFlashDraftModel

    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": BLOCK, "num_target_layers": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": LAYERS}, "attention_bias": True, **BODY, **MIXED,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = DFlashDraftModel(Qwen3Config(**config))
        filled(model, 11)
        torch.save({"draft_state_dict": model.state_dict()}, Path(folder) / "training_state.pt")
        export_to_hf(folder, str(Path(folder) / "config.json"), str(out))


def _speculators_facts(block_size: int, algorithm: str) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=block_size - 1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path="somebody/tiny-qwen3", architectures=["Qwen3ForCausalLM"]),
    )


def _save_speculators(model: Any, out: Path, seed: int) -> None:
    filled(model, seed)
    model.save_pretrained(out)
    for code in out.glob("*.py"):  # a copy of the library's own source
        code.unlink()


def write_speculators(out: Path) -> None:
    """Speculators: sliding layers causal, the whole vocabulary."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    body = Qwen3Config(**BODY, **MIXED, attn_implementation="eager")
    config = DFlashSpeculatorConfig(
        transformer_layer_config=body, draft_vocab_size=BODY["vocab_size"], block_size=BLOCK,
        aux_hidden_state_layer_ids=[i + 1 for i in LAYERS], mask_token_id=MASK,
        speculators_config=_speculators_facts(BLOCK, "dflash"),
    )  # fmt: skip
    _save_speculators(DFlashDraftModel(config), out, 12)


def write_speculators_reduced(out: Path) -> None:
    """Speculators: a head of its own over part of the vocabulary, sliding layers that see both ways."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    body = Qwen3Config(**BODY, **MIXED, attn_implementation="eager")
    count = 96
    config = DFlashSpeculatorConfig(
        transformer_layer_config=body, draft_vocab_size=count, block_size=BLOCK,
        aux_hidden_state_layer_ids=[i + 1 for i in LAYERS], mask_token_id=MASK, sliding_window_non_causal=True,
        speculators_config=_speculators_facts(BLOCK, "dflash"),
    )  # fmt: skip
    model = DFlashDraftModel(config)
    # The first tokens and some of the rest, so that most offsets are not zero.
    ids = torch.tensor([0, 1, 2, *range(5, 5 + 2 * (count - 3), 2)])
    t2d = torch.zeros(BODY["vocab_size"], dtype=torch.bool)
    t2d[ids] = True
    model.load_vocab_mappings(t2d, ids - torch.arange(count))
    _save_speculators(model, out, 13)


def write_speculators_dflash2(out: Path) -> None:
    """Speculators: DFlash 2, all layers sliding."""
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

    body = Qwen3Config(**BODY, layer_types=[SLIDING, SLIDING], sliding_window=12, use_sliding_window=True,
                       attn_implementation="eager")  # fmt: skip
    config = DFlash2SpeculatorConfig(
        transformer_layer_config=body, draft_vocab_size=BODY["vocab_size"], block_size=BLOCK,
        aux_hidden_state_layer_ids=[i + 1 for i in LAYERS], mask_token_id=MASK, conv_group_size=8,
        selector_rank=8, selector_top_k=6, speculators_config=_speculators_facts(BLOCK, "dflash2"),
    )  # fmt: skip
    _save_speculators(DFlash2DraftModel(config), out, 14)


def write_modelopt(out: Path) -> None:
    """Model Optimizer: a window on every layer, said beside layer types that are all full."""
    import modelopt.torch.speculative as mtsp
    from modelopt.torch.export.plugins.hf_spec_export import DFlashExporter

    target = Qwen3ForCausalLM(Qwen3Config(**TARGET))
    architecture = {**SIZES, "num_hidden_layers": 2}
    mtsp.convert(
        target,
        [("dflash", {"dflash_block_size": BLOCK, "dflash_architecture_config": architecture,
                     "dflash_mask_token_id": MASK, "dflash_swa_window_size": 12})],
    )  # fmt: skip
    filled(target.dflash_module, 15)
    DFlashExporter(target).export(out)


def write_assistant(out: Path) -> None:
    """Transformers: the layout of its assistant models."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    sizes = {k: v for k, v in BODY.items() if k != "vocab_size"}
    config = MuseGlimmerAssistantConfig(
        **sizes, layer_types=[SLIDING, FULL], sliding_window=12, block_size=BLOCK, mask_token_id=MASK,
        target_layer_ids=LAYERS,
    )  # fmt: skip
    model = MuseGlimmerAssistantModel(config)
    filled(model, 16)
    model.save_pretrained(out)


WRITERS = {
    "specforge": write_specforge,
    "speculators": write_speculators,
    "speculators-reduced": write_speculators_reduced,
    "speculators-dflash2": write_speculators_dflash2,
    "modelopt": write_modelopt,
    "assistant": write_assistant,
}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


if __name__ == "__main__":
    for name, write in WRITERS.items():
        shutil.rmtree(HERE / name, ignore_errors=True)
        write(HERE / name)
        print(name, {n: list(t.shape) for n, t in tensors_of(HERE / name).items()})
