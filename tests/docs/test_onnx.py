"""The guide, onnx.md: what it says can be done is."""

import pytest

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime_genai", reason="the extra onnx-export is not installed")

from tests.docs.pages import test_a_command_of_the_docs_works, test_the_code_of_the_docs_works

__all__ = ["test_a_command_of_the_docs_works", "test_the_code_of_the_docs_works"]
PAGES = ["docs/guide/onnx.md"]
pytestmark = pytest.mark.long  # `make test-docs`
