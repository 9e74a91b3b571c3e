"""The guide, python.md: what it says can be done is."""

import pytest

from tests.docs.pages import test_the_code_of_the_docs_works

__all__ = ["test_the_code_of_the_docs_works"]
PAGES = ["docs/guide/python.md"]
pytestmark = pytest.mark.long  # `make test-docs`: it loads the model for each example
