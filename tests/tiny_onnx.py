"""Tiny decoders as ONNX graphs with random weights, in the folder form of onnxruntime-genai."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.tiny_tokenizer import VOCABULARY, byte_backend

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, INNER = 3, 4, 2, 16, 64, 48
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def write_onnx(
    folder: Path, *, seed: int = 0, context: int = 512, attention: str = "shared", dtype: str = "float32"
) -> Path:
    """Write a llama. `attention`: `shared` appends to the buffer that it reads; `packed` concatenates."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = _Graph(seed, context, attention, dtype)
    save(graph.model(), folder)
    write_beside(folder, context)
    return folder


def save(model: Any, folder: Path) -> None:
    """Write a graph, its weights as external data."""
    onnx.save_model(
        model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=256
    )


def write_beside(folder: Path, context: int = 512) -> None:
    """Write configuration, tokenizer and template."""
    decoder = {
        "filename": "model.onnx",
        "head_size": DIM,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
    }
    about = {"context_length": context, "eos_token_id": [256, 258], "vocab_size": VOCABULARY, "decoder": decoder}
    (folder / "genai_config.json").write_text(json.dumps({"model": about}))
    byte_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )


class _Graph:
    """Builds the graph, node by node."""

    def __init__(self, seed: int, context: int, attention: str, dtype: str) -> None:
        self._random = np.random.default_rng(seed)
        self._dtype, self._type = np.dtype(dtype), TYPES[dtype]
        self._attention = attention
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        angles = np.arange(context)[:, None] / 10000.0 ** (np.arange(DIM // 2) / (DIM // 2))
        self._constant("cos", np.cos(angles))
        self._constant("sin", np.sin(angles))

    def model(self) -> Any:
        hidden = self._add("Gather", [self._weight("embed", VOCABULARY, HIDDEN), "input_ids"], "hidden")
        if self._attention == "shared":
            self._lengths()
        else:
            self._positions()
        for layer in range(LAYERS):
            hidden = self._layer(layer, hidden)
        normed = self._norm("final", hidden)
        self._add("MatMul", [normed, self._weight("head", HIDDEN, VOCABULARY)], "logits")
        tokens = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"])]
        tokens.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]))
        if self._attention != "shared":
            tokens.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch", "new"]))
        past = [self._kv(f"past_key_values.{i}.{half}", "past") for i in range(LAYERS) for half in ("key", "value")]
        present = [self._kv(f"present.{i}.{half}", "total") for i in range(LAYERS) for half in ("key", "value")]
        logits = helper.make_tensor_value_info("logits", self._type, ["batch", "new", VOCABULARY])
        graph = helper.make_graph(self._nodes, "tiny", [*tokens, *past], [logits, *present], self._weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def _kv(self, name: str, tokens: str) -> Any:
        return helper.make_tensor_value_info(name, self._type, ["batch", KV_HEADS, tokens, DIM])

    def _lengths(self) -> None:
        """What GroupQueryAttention asks: the last position of each sequence, and the longest of all."""
        self._constant("axis", np.array([1]), np.int64)
        self._constant("one", np.array([1]), np.int64)
        total = self._add("ReduceSum", ["attention_mask", "axis"], "lengths", keepdims=0)
        last = self._add("Sub", [total, "one"], "last")
        self._add("Cast", [last], "seqlens_k", to=TensorProto.INT32)
        shape = self._add("Shape", ["attention_mask"], "mask_shape")
        longest = self._add("Gather", [shape, "one"], "longest")
        self._add("Cast", [longest], "total_length", to=TensorProto.INT32)

    def _positions(self) -> None:
        """A bias that hides what comes later: -10000 where a key's position is beyond the query's."""
        self._constant("zero", np.array(0), np.int64)
        self._constant("step", np.array(1), np.int64)
        self._constant("second", np.array(1), np.int64)
        shape = self._add("Shape", ["attention_mask"], "mask_shape")
        total = self._add("Gather", [shape, "second"], "total")
        keys = self._add("Range", ["zero", total, "step"], "key_positions")
        self._constant("last_axis", np.array([-1]), np.int64)
        queries = self._add("Unsqueeze", ["position_ids", "last_axis"], "query_positions")  # [batch, new, 1]
        later = self._add("Greater", [keys, queries], "later")  # [batch, new, total]
        self._constant("hide", np.array(-10000.0))
        self._constant("show", np.array(0.0))
        self._constant("heads_axis", np.array([1]), np.int64)
        bias = self._add("Where", [later, "hide", "show"], "bias")
        self._add("Unsqueeze", [bias, "heads_axis"], "head_bias")  # [batch, 1, new, total]

    def _layer(self, layer: int, hidden: str) -> str:
        normed = self._norm(f"{layer}.attention", hidden)
        sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        heads = [
            self._add("MatMul", [normed, self._weight(f"{layer}.{name}", HIDDEN, size)], f"{layer}.{name}.out")
            for name, size in sizes.items()
        ]
        attend = self._shared if self._attention == "shared" else self._packed
        mixed = attend(layer, *heads)
        out = self._add("MatMul", [mixed, self._weight(f"{layer}.o", HEADS * DIM, HIDDEN)], f"{layer}.o.out")
        hidden = self._add("Add", [hidden, out], f"{layer}.attended")
        normed = self._norm(f"{layer}.mlp", hidden)
        up = self._add("MatMul", [normed, self._weight(f"{layer}.up", HIDDEN, INNER)], f"{layer}.up.out")
        up = self._add("Tanh", [up], f"{layer}.tanh")
        down = self._add("MatMul", [up, self._weight(f"{layer}.down", INNER, HIDDEN)], f"{layer}.down.out")
        return self._add("Add", [hidden, down], f"{layer}.hidden")

    def _shared(self, layer: int, queries: str, keys: str, values: str) -> str:
        outputs = [f"{layer}.mixed", f"present.{layer}.key", f"present.{layer}.value"]
        past = [f"past_key_values.{layer}.{half}" for half in ("key", "value")]
        inputs = [queries, keys, values, *past, "seqlens_k", "total_length", "cos", "sin"]
        options = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1}
        self._nodes.append(
            helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **options)  # type: ignore[arg-type]
        )
        return outputs[0]

    def _packed(self, layer: int, queries: str, keys: str, values: str) -> str:
        turned = []
        for name, tensor, count in (("q", queries, HEADS), ("k", keys, KV_HEADS), ("v", values, KV_HEADS)):
            self._constant(f"{layer}.{name}.shape", np.array([0, 0, count, DIM]), np.int64)
            split = self._add("Reshape", [tensor, f"{layer}.{name}.shape"], f"{layer}.{name}.split")
            split = self._add("Transpose", [split], f"{layer}.{name}.heads", perm=[0, 2, 1, 3])
            if name != "v":
                inputs = [split, "position_ids", "cos", "sin"]
                split = self._add("RotaryEmbedding", inputs, f"{layer}.{name}.turned", domain="com.microsoft")
            turned.append(split)
        wide = []
        for half, new in (("key", turned[1]), ("value", turned[2])):
            past, name = f"past_key_values.{layer}.{half}", f"present.{layer}.{half}"
            present = self._add("Concat", [past, new], name, axis=2)
            order = np.repeat(np.arange(KV_HEADS), HEADS // KV_HEADS)
            self._constant(f"{layer}.{half}.order", order, np.int64)
            wide.append(self._add("Gather", [present, f"{layer}.{half}.order"], f"{layer}.{half}.wide", axis=1))
        columns = self._add("Transpose", [wide[0]], f"{layer}.columns", perm=[0, 1, 3, 2])
        self._constant(f"{layer}.scale", np.array(DIM**-0.5))
        scores = self._add("MatMul", [turned[0], columns], f"{layer}.products")
        scores = self._add("Mul", [scores, f"{layer}.scale"], f"{layer}.scores")
        scores = self._add("Add", [scores, "head_bias"], f"{layer}.hidden_scores")
        weights = self._add("Softmax", [scores], f"{layer}.softmax", axis=-1)
        mixed = self._add("MatMul", [weights, wide[1]], f"{layer}.by_head")
        mixed = self._add("Transpose", [mixed], f"{layer}.by_token", perm=[0, 2, 1, 3])
        self._constant(f"{layer}.flat", np.array([0, 0, HEADS * DIM]), np.int64)
        return self._add("Reshape", [mixed, f"{layer}.flat"], f"{layer}.mixed")

    def _norm(self, name: str, hidden: str) -> str:
        self._constant(f"{name}.norm", np.ones(HIDDEN))
        return self._add("SimplifiedLayerNormalization", [hidden, f"{name}.norm"], f"{name}.normed", epsilon=1e-6)

    def _weight(self, name: str, rows: int, columns: int) -> str:
        return self._constant(name, self._random.normal(0.0, 0.2, (rows, columns)))

    def _constant(self, name: str, values: np.ndarray, dtype: Any = None) -> str:
        self._weights.append(numpy_helper.from_array(values.astype(dtype or self._dtype), name))
        return name

    def _add(self, operator: str, inputs: list[str], output: str, **options: Any) -> str:
        self._nodes.append(helper.make_node(operator, inputs, [output], **options))
        return output
