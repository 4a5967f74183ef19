"""Checkpoint to portable bundle: needs torch, transformers and onnx."""
