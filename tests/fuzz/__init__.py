"""Hostile inputs of every parser. One module a family of them; each has its name."""

FAMILIES = (
    "adapters", "coded_layers", "extents", "ggufs", "manifests", "model_folders", "onnx_graphs", "settings"
)  # fmt: skip
THOROUGH = True  # left out of `make quick`, not even imported
