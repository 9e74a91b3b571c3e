"""The guide, page.md: what it says can be done is."""

from tests.docs.pages import test_a_command_of_the_docs_works, test_the_code_of_the_docs_works

__all__ = ["test_a_command_of_the_docs_works", "test_the_code_of_the_docs_works"]
PAGES = ["docs/guide/page.md"]
