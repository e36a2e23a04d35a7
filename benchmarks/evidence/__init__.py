"""What all benchmarks share: results as data, the page that tells them, what they stand on."""
