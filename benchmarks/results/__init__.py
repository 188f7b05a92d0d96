"""Results of benchmarks as data, and docs/benchmarks.md made from them."""
