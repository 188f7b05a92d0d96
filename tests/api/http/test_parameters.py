"""docs/parameters.md describes the handling of each field of a request."""

from tests.model.parameters.matrix import DOCUMENT, TABLES, table_in


def test_document_describes_handling_of_each_field():
    """Where this fails and should not, `python -m tests.model.parameters.matrix` writes the tables anew."""
    assert table_in(DOCUMENT.read_text(), "wire") == TABLES["wire"]()


def test_document_lists_model_defaults():
    assert table_in(DOCUMENT.read_text(), "defaults") == TABLES["defaults"]()
