"""The room of the trained policy, which chooses expansions through engine.policy.ExpansionPolicy. The engine never imports it."""
