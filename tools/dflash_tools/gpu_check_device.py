"""What the stages of a GPU check share: is there a GPU, is there ONNX Runtime for it, weights made on it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_runtime.bundle import Bundle
from dflash_tools.gpu_check_pieces import FOLDER, LARGE, TINY
from dflash_tools.gpu_check_stage import Skipped
from dflash_tools.machine_probe import Machine

FOLDER_VARIABLE = "DFLASH_GPU_CHECK_PIECES"
_BLOCK_ELEMENTS = 1 << 24


def pieces_folder() -> Path:
    """Where what was taken along lies."""
    return Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)


def require_gpu() -> str:
    """The GPU's name.

    Raises:
        Skipped: there is none.
    """
    from dflash_tools.doctor_gpu import gpus_of

    gpus, error = gpus_of(Machine())
    if not gpus:
        raise Skipped(f"no NVIDIA GPU here ({error or 'nvidia-smi is not installed'})")
    return gpus[0].name


def require_modules(*names: str) -> None:
    """Refuses where a module is not installed.

    Raises:
        Skipped: naming the modules.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"not installed here: {', '.join(missing)}")


def require_torch_cuda() -> Any:
    """PyTorch, with a GPU it can use.

    Raises:
        Skipped: there is none.
    """
    require_gpu()
    require_modules("torch")
    import torch

    if not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no GPU")
    return torch


def require_ort_cuda() -> None:
    """ONNX Runtime with its CUDA provider.

    Raises:
        Skipped: there is none.
    """
    require_gpu()
    require_modules("onnxruntime")
    if importlib.util.find_spec("torch") is not None:
        import torch  # noqa: F401 - it loads CUDA's libraries from its own packages
    import onnxruntime as ort

    found = ort.get_available_providers()
    if "CUDAExecutionProvider" not in found:
        raise Skipped(f"onnxruntime {ort.__version__} here has {', '.join(found)} alone; take onnxruntime-gpu along: "
                      "python -m dflash_tools.gpu_check_pieces")


def tiny_bundle() -> Bundle:
    """The tiny pair that was taken along.

    Raises:
        Skipped: it was not.
    """
    return _bundle(TINY, check_files=True)


def large_bundle() -> Bundle:
    """Qwen2-7B's shape that was taken along; it has no weights.

    Raises:
        Skipped: it was not.
    """
    return _bundle(LARGE, check_files=False)


def _bundle(name: str, *, check_files: bool) -> Bundle:
    root = pieces_folder() / name
    if not (root / "bundle.json").is_file():
        raise Skipped(f"{root} was not taken along; make it with: python -m dflash_tools.gpu_check_pieces")
    return Bundle.open(root, check_files=check_files)


class RandomWeights:
    """Weights of a bundle's shapes, made in device memory: by PyTorch there, else a block of numbers repeated."""

    def __init__(self, bundle: Bundle) -> None:
        self._entries = bundle.manifest.weights
        self._made: dict[tuple[str, str], Any] = {}
        self.made_by, self._make = self._maker()

    def __call__(self, name: str, dtype: str) -> Any:
        """A tensor in device memory, the same one whenever it is asked for."""
        if (name, dtype) not in self._made:
            self._made[name, dtype] = self._make(name, tuple(self._entries[name].shape), dtype)
        return self._made[name, dtype]

    @property
    def bytes_made(self) -> int:
        """Of all tensors so far."""
        sizes = {"F32": 4, "F16": 2, "BF16": 2}
        return sum(int(np.prod(value.shape())) * sizes[dtype] for (_, dtype), value in self._made.items())

    def _maker(self) -> tuple[str, Callable[[str, tuple[int, ...], str], Any]]:
        if importlib.util.find_spec("torch") is not None:
            import torch

            if torch.cuda.is_available():
                return "torch on the GPU", _TorchMaker(torch)
        return "a repeated block from the host", _HostMaker()


class _TorchMaker:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        torch.manual_seed(0)

    def __call__(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        from dflash_tools.random_bundle_weights import spread_of

        kind = {"F32": self._torch.float32, "F16": self._torch.float16, "BF16": self._torch.bfloat16}[dtype]
        middle, deviation = spread_of(name, shape)
        tensor = self._torch.empty(shape, dtype=kind, device="cuda").normal_(middle, deviation)
        self._torch.cuda.synchronize()  # ONNX Runtime has a stream of its own
        return TorchTensor(tensor)


class TorchTensor:
    """A tensor of PyTorch as ONNX Runtime's bindings take it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def data_ptr(self) -> int:
        """Its address."""
        return int(self.tensor.data_ptr())

    def shape(self) -> Sequence[int]:
        """Its shape."""
        return list(self.tensor.shape)


class _HostMaker:
    def __init__(self) -> None:
        self._block = np.random.default_rng(0).standard_normal(_BLOCK_ELEMENTS, dtype=np.float32)

    def __call__(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        from dflash_runtime.ort_fixed_graph import CUDA
        from dflash_runtime.weights import narrowed
        from dflash_tools.random_bundle_weights import spread_of

        middle, deviation = spread_of(name, shape)
        block = narrowed(self._block * np.float32(deviation) + np.float32(middle), dtype, name)
        return CUDA.put(np.resize(block, shape))
