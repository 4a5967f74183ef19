"""What the stages of a GPU check share: is there a GPU, is there ONNX Runtime for it, weights made on it."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_runtime.bundle import Bundle
from dflash_runtime.device import Buffer, Device
from dflash_runtime.device_backend import DeviceBackend
from dflash_runtime.device_engine import BoundWeight
from dflash_runtime.device_weights import WeightPlaces, narrowed
from dflash_runtime.weights import STORED, widened
from dflash_tools.device_probe import taps_dtype
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


def read_taps(backend: DeviceBackend, rows: int) -> npt.NDArray[Any]:
    """Taps [rows, K*H] of the backend's last target call in float32."""
    manifest, dtype = backend.bundle.manifest, taps_dtype(backend)
    (width,) = (int(output.shape[-1]) for output in manifest.target.graph.outputs if output.name == "taps")
    host = backend.device.host_memory(rows * width * np.dtype(STORED[dtype]).itemsize)
    backend.device.download(host, backend.buffers["target"]["taps"].address)
    backend.device.mark()
    backend.device.wait()
    return widened(host.view(STORED[dtype]), dtype).reshape(rows, width)


class RandomWeights:
    """Weights of a bundle's shapes, made on the device: by PyTorch there, else a block of numbers repeated."""

    def __init__(self) -> None:
        self.made_by, self.bytes_made = "a repeated block from the host", 0
        self._torch: Any = None
        if importlib.util.find_spec("torch") is not None:
            import torch

            if torch.cuda.is_available():
                self.made_by, self._torch = "torch on the GPU", torch
                torch.manual_seed(0)
        self._tensors: list[Any] = []
        self._block = np.random.default_rng(0).standard_normal(_BLOCK_ELEMENTS, dtype=np.float32)

    def __call__(self, device: Device, bundle: Bundle, wanted: Iterable[BoundWeight]) -> WeightPlaces:
        """Memory for every weight in every type it is wanted in; see `device_weights.upload_weights`."""
        made: WeightPlaces = {}
        for name, dtype in sorted({(bound.weight, bound.dtype) for bound in wanted}):
            shape = tuple(bundle.manifest.weights[name].shape)
            size = math.prod(shape) * np.dtype(STORED[dtype]).itemsize
            place = self._on_the_gpu(name, shape, dtype) if self._torch else self._from_here(device, name, shape, dtype)
            made[name, dtype] = Buffer(place, size)
            self.bytes_made += size
        if self._torch:
            self._torch.cuda.synchronize()  # the backend has a stream of its own
        return made

    def _on_the_gpu(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        from dflash_tools.random_bundle_weights import spread_of

        kind = {"F32": self._torch.float32, "F16": self._torch.float16, "BF16": self._torch.bfloat16}[dtype]
        middle, deviation = spread_of(name, shape)
        self._tensors.append(self._torch.empty(shape, dtype=kind, device="cuda").normal_(middle, deviation))
        return int(self._tensors[-1].data_ptr())

    def _from_here(self, device: Device, name: str, shape: tuple[int, ...], dtype: str) -> int:
        from dflash_tools.random_bundle_weights import spread_of

        middle, deviation = spread_of(name, shape)
        block = narrowed(self._block * np.float32(deviation) + np.float32(middle), dtype, name)
        staging = device.host_memory(block.nbytes)
        staging[:] = block.view(np.uint8)
        size = math.prod(shape) * block.itemsize
        start = device.allocate(size).address
        for offset in range(0, size, staging.nbytes):
            device.upload(start + offset, staging[: min(staging.nbytes, size - offset)])
        device.mark()
        device.wait()
        return start
