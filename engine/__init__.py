"""The inference engine: token ids in, token ids out. Every step is one tree-masked pass of the target model."""
