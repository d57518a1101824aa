"""Exports models to files that run without this library: ONNX, torch.export, AOTInductor."""
