"""Tests of the documents, deployment files and the test suite itself."""
