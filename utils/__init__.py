"""What a reader should not have to read in a training loop: small modules, one job each."""
