"""The wire format: pydantic models of what is accepted and what is answered."""
