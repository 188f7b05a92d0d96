"""The inference engine: token ids in, token ids out, every step one tree-masked pass of the target model."""
