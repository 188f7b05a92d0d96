"""A worker of NVIDIA Dynamo: its frontend does HTTP, tokens and text; the engine here generates. docs/scaling.md describes it."""
