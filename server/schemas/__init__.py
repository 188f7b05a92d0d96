"""The wire format: pydantic models of requests and answers."""
