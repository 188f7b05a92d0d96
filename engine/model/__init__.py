"""The target model: loading and checking a transformers model, its passes, hidden states and linear layers."""
